"""Failures: how an exception, or the death of a process, is told to rank 0.

An exception is the user's own object: its ``__str__`` and ``__reduce__`` may raise, its class may
exist in one process only, its message may be endless. What can always be sent is text.
"""

import pickle
import signal
import traceback
from dataclasses import dataclass
from itertools import pairwise

import cloudpickle

from lockstep.cluster.memory_limits import Kills

_LONGEST_TEXT = 100_000
_LARGEST_EXCEPTION_BYTES = 1 << 24
_MOST_CAUSES = 5


@dataclass(frozen=True)
class Failure:
    """An exception of another process.

    Attributes:
        summary: its class and message.
        text: its traceback.
        error: the exception itself, with its causes; None where it cannot be sent.
    """

    summary: str
    text: str
    error: BaseException | None


def pack_failure(error: BaseException) -> bytes:
    """An exception, for ``unpack_failure`` in another process."""
    summary = shorten(f"{type(error).__name__}: {_message_of(error)}")
    text = shorten("".join(traceback.format_exception(error)))
    return pickle.dumps((summary, text, [_pickled(one) for one in _chain(error)]))


def unpack_failure(payload: bytes) -> Failure:
    """The other process's exception."""
    summary, text, pickled = pickle.loads(payload)
    errors = [_unpickled(one) for one in pickled]
    for error, cause in pairwise(errors):
        if error is None or cause is None:
            break
        error.__cause__ = cause  # which pickling an exception leaves out
    return Failure(summary, text, errors[0])


def describe_exit(status: int, before: Kills | None = None, now: Kills | None = None) -> str:
    """What the exit status of a process says.

    Args:
        status: negative for a signal, as in ``subprocess``.
        before: what the kernel had killed for want of memory when the process started, and
        now: what it has killed after its end; None where it does not tell.
    """
    if status >= 0:
        return f"it left with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # real-time signals have no name
        name = f"signal {-status}"
    return f"killed by {name}{_reason_to_kill(before, now) if name == 'SIGKILL' else ''}"


# How a description of an end says that memory may be the reason.
MEMORY_RAN_OUT = "memory ran out"


def _reason_to_kill(before: Kills | None, now: Kills | None) -> str:
    if before is None or now is None or before.among != now.among:
        return f" (by kill -9; or by the kernel, if {MEMORY_RAN_OUT})"
    count = now.count - before.count
    if not count:
        return " (by kill -9, or what does the same: memory did not run out, says the kernel)"
    some = "a process" if count == 1 else f"{count} processes"
    return f": {MEMORY_RAN_OUT}, for which the kernel has killed {some} of {now.among} meanwhile"


def shorten(text: str) -> str:
    """Cut the middle out of a text of unreasonable length."""
    half = _LONGEST_TEXT // 2
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as second:  # user code: sys.exit() in a __str__ must not end the helper
        return f"<its __str__ raised {type(second).__name__}>"


def _chain(error: BaseException) -> list[BaseException]:
    """The exception, its cause, the cause's cause, and so on."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and len(chain) < _MOST_CAUSES:
        chain.append(one)
        one = one.__cause__
    return chain


def _pickled(error: BaseException) -> bytes:
    """The exception by itself, so that rank 0 has the text even if this cannot be read; or b""."""
    try:
        # What __main__ defines goes by value, and comes home as the very class it was.
        pickled: bytes = cloudpickle.dumps(error)
    except BaseException:  # user code again
        return b""
    return pickled if len(pickled) <= _LARGEST_EXCEPTION_BYTES else b""


def _unpickled(pickled: bytes) -> BaseException | None:
    if not pickled:
        return None
    try:
        error = pickle.loads(pickled)
    except (Exception, SystemExit):
        # Typically a class whose __init__ asks for more than the message.
        return None
    return error if isinstance(error, BaseException) else None
