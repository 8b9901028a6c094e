"""Failures: how an exception, or the death of a process, is told to rank 0.

An exception is the user's own object: its ``__str__`` and ``__reduce__`` may raise, its class may
exist in one process only, its message may be endless. Text can always be sent. So a rank that
waits for another one gets a WorkerError with that, and the exception beside it if that could be
sent; at the end of the call it is raised as itself (``as_raised``), whichever rank it comes from.
"""

import pickle
import signal
import traceback
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import cloudpickle

from lockstep.cluster.memory_limits import Kills
from lockstep.errors import HostError, WorkerError

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
    summary = shorten(summary_of(error))
    text = shorten("".join(traceback.format_exception(error)))
    return pickle.dumps((summary, text, [_pickled(one) for one in causes_of(error)]))


def unpack_failure(payload: bytes) -> Failure:
    """The other process's exception."""
    summary, text, pickled = pickle.loads(payload)
    errors = [_unpickled(one) for one in pickled]
    for error, cause in pairwise(errors):
        if error is None or cause is None:
            break
        _set(error, "__cause__", cause)  # which pickling an exception leaves out
    return Failure(summary, text, errors[0])


def trouble_of(rank: str, failure: Failure, where: str = "") -> WorkerError:
    """The error for who waits for a rank that has failed.

    Args:
        rank: which one it is: "rank 1".
        failure: of that rank.
        where: in the training.
    """
    error = WorkerError(
        f"{rank.capitalize()} failed{where and f' ({where})'}: {failure.summary}\n"
        f"--- traceback of {rank} ---\n{failure.text}"
    )
    error.raised = error.__cause__ = failure.error
    return error


def as_raised(error: BaseException) -> BaseException:
    """What another rank's, or host's, user code has raised: as itself, where it is here.

    It has a note of all that is known of it, and an error that names the rank or host at the end of
    its causes.
    """
    if not isinstance(error, WorkerError | HostError) or error.raised is None:
        return error
    raised, error.raised = error.raised, None
    if error.__cause__ is raised:
        error.__cause__ = None
    for note in (str(error), *getattr(error, "__notes__", ())):
        add_note(raised, note)
    if isinstance(error, WorkerError):  # without the traceback, which the note has
        error = WorkerError(str(error).partition("\n")[0])
    _set(causes_of(raised)[-1], "__cause__", error)
    return as_raised(raised)


def add_note(error: BaseException, note: str) -> None:
    """As ``BaseException.add_note``, also of an exception that lets no attribute be set."""
    _set(error, "__notes__", [*getattr(error, "__notes__", ()), note])


def _set(error: BaseException, name: str, value: object) -> None:
    BaseException.__setattr__(error, name, value)  # a frozen dataclass has one of its own


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


def summary_of(error: BaseException) -> str:
    """Its class and message."""
    return f"{type(error).__name__}: {message_of(error)}"


def message_of(error: BaseException) -> str:
    """Its message, whatever its class does."""
    try:
        return str(error)
    except BaseException as second:  # user code: sys.exit() in a __str__ must not end the helper
        return f"<its __str__ raised {type(second).__name__}>"


def causes_of(error: BaseException) -> list[BaseException]:
    """An exception, its cause, the cause's cause, and so on."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and len(chain) < _MOST_CAUSES:
        chain.append(one)
        one = one.__cause__
    return chain


def _pickled(error: BaseException) -> tuple[bytes, bytes]:
    """The exception by itself, so that rank 0 has the text even if this cannot be read.

    As it pickles itself; and bare, for a class whose ``__init__`` asks for more than the message,
    as many do. Each is b"" where it cannot be.
    """
    return _dumped(error), _dumped((type(error), error.args, vars(error)))


def _dumped(value: object) -> bytes:
    try:
        # What __main__ defines goes by value, and comes home as the very class it was.
        pickled: bytes = cloudpickle.dumps(value)
    except BaseException:  # user code again
        return b""
    return pickled if len(pickled) <= _LARGEST_EXCEPTION_BYTES else b""


def _unpickled(pickled: tuple[bytes, bytes]) -> BaseException | None:
    whole, bare = pickled
    error = _loaded(whole)
    if not isinstance(error, BaseException) and isinstance(parts := _loaded(bare), tuple):
        try:
            error = _made(*parts)
        except Exception:  # its __new__ asks for more, too
            return None
    return error if isinstance(error, BaseException) else None


def _made(kind: type[BaseException], arguments: tuple[Any, ...], attributes: Any) -> BaseException:
    error = kind.__new__(kind, *arguments)
    vars(error).update(attributes)
    return error


def _loaded(pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled) if pickled else None
    except (Exception, SystemExit):  # user code once more
        return None
