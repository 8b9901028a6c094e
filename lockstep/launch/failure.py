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


def describe_exit(status: int) -> str:
    """What the exit status of a process says, negative for a signal as in ``subprocess``."""
    if status >= 0:
        return f"it left with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # real-time signals have no name
        name = f"signal {-status}"
    hint = "; the kernel does this when memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


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
