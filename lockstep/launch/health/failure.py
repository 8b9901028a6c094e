"""Failures: how an exception, or the death of a process, is told to rank 0.

An exception is the user's own object: its ``__str__`` and ``__reduce__`` may raise, its class may
exist in one process only, its message may be endless. Text can always be sent. So a rank that waits
for another one gets a WorkerError with that, and the exception beside it if that could be sent; at
the end of the call it is raised as itself (``as_raised``), whichever rank it comes from.

A host that fails tells the others a text and the name of a known type: a report. Nothing from
another host is unpickled. But exceptions of Python's own types, and of Lockstep's, can be made anew
from their names and plain arguments: so ``except ValueError`` catches on every host what was raised
on one. Of another class the nearest such base counts. What has none but ``Exception`` is a
HostError elsewhere, and so is what ends a process (SystemExit, Ctrl-C).
"""

import builtins
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import cloudpickle
import msgspec

from lockstep import errors, tracebacks
from lockstep.cluster.memory_limits import Kills
from lockstep.errors import HostError, LockstepError, WorkerError
from lockstep.launch.untrusted import decode_untrusted

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
    tracebacks.shorten(error)
    text = shorten("".join(_format(error)).rstrip())
    return pickle.dumps((summary, text, [_pickled(one) for one in causes_of(error)]))


def _format(error: BaseException) -> list[str]:
    """Its traceback; where that is shortened, only of those causes that have frames left."""
    causes = causes_of(error)
    if tracebacks.is_full() or not any(one.__traceback__ for one in causes):
        return traceback.format_exception(error)
    shown = [one for one in reversed(causes) if one.__traceback__]
    return [line for one in shown for line in traceback.format_exception(one, chain=False)]


def unpack_failure(payload: bytes) -> Failure:
    """The other process's exception."""
    summary, text, pickled = pickle.loads(payload)
    errors = [_unpickled(one) for one in pickled]
    for error, cause in pairwise(errors):
        if error is None or cause is None:
            break
        _set(error, "__cause__", cause)  # which pickling an exception leaves out
    return Failure(summary, text, errors[0])


def failure_error(
    rank: str, failure: Failure, where: str = "", number: int | None = None
) -> WorkerError:
    """The error for who waits for a rank that has failed.

    Args:
        rank: which one it is: "rank 1".
        failure: of that rank.
        where: in the training.
        number: the rank's, for ``WorkerError.rank``.
    """
    error = WorkerError(
        f"{rank.capitalize()} failed{where and f' ({where})'}: {failure.summary}\n"
        f"--- traceback of {rank} ---\n{failure.text}"
    )
    error.raised = error.__cause__ = failure.error
    error.rank = number
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
    known = getattr(raised, "__notes__", ())  # which the text of its traceback repeats
    told = "\n".join(line for line in str(error).split("\n") if line not in known)
    for note in (told, *getattr(error, "__notes__", ())):
        add_note(raised, note)
    if isinstance(error, WorkerError):  # without the traceback, which the note has
        rank, error = error.rank, WorkerError(str(error).partition("\n")[0])
        error.rank = rank
    _set(causes_of(raised)[-1], "__cause__", error)
    return as_raised(raised)


def add_note(error: BaseException, note: str) -> None:
    """As ``BaseException.add_note``, also of an exception that lets no attribute be set."""
    _set(error, "__notes__", [*getattr(error, "__notes__", ()), note])


@contextmanager
def noting_on(error: BaseException) -> Iterator[None]:
    """Within the block, which tidies up after ``error``, another failure is a note of that."""
    try:
        yield
    except Exception as second:
        add_note(error, f"After this error Lockstep could not tidy up: {summary_of(second)}")


@contextmanager
def ending_with(end: Callable[[], object]) -> Iterator[None]:
    """Call ``end`` after the block, as ``finally`` does, but never hide the block's own error."""
    try:
        yield
    except BaseException as error:
        with noting_on(error):
            end()
        raise
    end()


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


_KINDS = {
    name: kind
    for name, kind in {**vars(builtins), **vars(errors)}.items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and kind not in (Exception, LockstepError, WorkerError, HostError)
}

_Argument = str | int | float | bool | None
_MOST_NAMED_BYTES = 1 << 14


# In place of a type, of a host that has lost a process or another host.
_LOST = b"lost"


def _is_loss(error: BaseException | None) -> bool:
    return isinstance(error, HostError | WorkerError) and error.is_loss


def encode_report(text: str, error: BaseException | None, most_bytes: int) -> bytes:
    """The report of a failure.

    Args:
        text: what has failed.
        error: the exception, if there is one.
        most_bytes: of the result; more of the text is cut off.
    """
    named = _LOST if _is_loss(error) else b"" if error is None else _named(error)
    return (named + b"\n" + text.encode(errors="replace"))[:most_bytes]


def decode_report(payload: bytes) -> HostError:
    """The error to raise here; with an exception of the type that was named, if one was."""
    named, _, text = payload.partition(b"\n")
    error = HostError(text.decode(errors="replace"))
    error.is_loss = named == _LOST
    if named and not error.is_loss:
        try:
            kind, arguments = decode_untrusted(named, tuple[str, tuple[_Argument, ...]])
        except HostError:
            return error
        error.raised = _exception(kind, arguments)
    return error


def _named(error: BaseException) -> bytes:
    """A type that the others have and arguments of such an exception, as JSON; else nothing."""
    if isinstance(error, HostError | WorkerError):
        return b""
    for kind in type(error).__mro__:
        if _KINDS.get(kind.__name__) is not kind:
            continue
        is_it = kind is type(error)
        message = message_of(error) if is_it else summary_of(error)
        arguments: tuple[object, ...] = (_encodable(message),)
        if is_it and all(map(_is_plain, error.args)):
            made = _exception(kind.__name__, error.args)
            arguments = error.args if str(made) == message else arguments
        named = msgspec.json.encode((kind.__name__, arguments))
        if len(named) <= _MOST_NAMED_BYTES and _exception(kind.__name__, arguments):
            return named
    return b""


def _is_plain(argument: object) -> bool:
    if isinstance(argument, str):
        return argument == _encodable(argument)
    return isinstance(argument, _Argument)


def _encodable(text: str) -> str:
    """Without halves of surrogates."""
    return text.encode(errors="replace").decode()


def _exception(kind: str, arguments: Sequence[object]) -> Exception | None:
    try:
        return _KINDS[kind](*arguments)
    except Exception:  # it takes other arguments, or is none that this Python has
        return None
