"""Failures: how exceptions and deaths of processes are reported to rank 0 and to other hosts.

An exception is a user's object: its ``__str__`` and ``__reduce__`` may raise, its class may exist
in one process only, its message may be very long. Text can always be sent. So a rank that waits for
a failed rank raises a WorkerError with the text, and with the exception if that could be sent. At
the end of the call the exception itself is raised (``as_raised``), whichever rank it comes from.

A host that fails sends the others a report: a text and the name of a known type. Nothing from
another host is unpickled, but exceptions of Python's and Lockstep's own types can be made from
their names and plain arguments: ``except ValueError`` then catches on every host what one host
raised. For another class the nearest such base is used. An exception whose only such base is
``Exception`` is a HostError on other hosts, and so is one that ends a process (SystemExit, Ctrl-C).
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
    """Serialize an exception for ``unpack_failure`` in another process."""
    summary = shorten(summary_of(error))
    tracebacks.shorten(error)
    text = shorten("".join(_format(error)).rstrip())
    return pickle.dumps((summary, text, [_pickle(one) for one in causes_of(error)]))


def _format(error: BaseException) -> list[str]:
    """Its traceback; if tracebacks are shortened, only those of causes with frames left."""
    causes = causes_of(error)
    if tracebacks.is_full() or not any(one.__traceback__ for one in causes):
        return traceback.format_exception(error)
    shown = [one for one in reversed(causes) if one.__traceback__]
    return [line for one in shown for line in traceback.format_exception(one, chain=False)]


def unpack_failure(payload: bytes) -> Failure:
    """The other process's exception."""
    summary, text, pickled = pickle.loads(payload)
    errors = [_unpickle(one) for one in pickled]
    for error, cause in pairwise(errors):
        if error is None or cause is None:
            break
        _set(error, "__cause__", cause)  # pickle omits it
    return Failure(summary, text, errors[0])


def failure_error(
    rank: str, failure: Failure, where: str = "", number: int | None = None
) -> WorkerError:
    """The error for a process that waits for a failed rank.

    Args:
        rank: its name: "rank 1".
        failure: of that rank.
        where: its position in the training.
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
    """The exception of another rank's or host's user code, if it could be sent; else the error.

    The exception gets a note with the whole message of ``error``. Its last cause is an error that
    names the rank or host.
    """
    if not isinstance(error, WorkerError | HostError) or error.raised is None:
        return error
    raised, error.raised = error.raised, None
    if error.__cause__ is raised:
        error.__cause__ = None
    known = getattr(raised, "__notes__", ())  # the text of its traceback repeats them
    text = "\n".join(line for line in str(error).split("\n") if line not in known)
    for note in (text, *getattr(error, "__notes__", ())):
        add_note(raised, note)
    if isinstance(error, WorkerError):  # without the traceback, which is in the note
        rank, error = error.rank, WorkerError(str(error).partition("\n")[0])
        error.rank = rank
    _set(causes_of(raised)[-1], "__cause__", error)
    return as_raised(raised)


def add_note(error: BaseException, note: str) -> None:
    """Like ``BaseException.add_note``, also for an exception whose attributes cannot be set."""
    _set(error, "__notes__", [*getattr(error, "__notes__", ()), note])


@contextmanager
def noting_on(error: BaseException) -> Iterator[None]:
    """Within the block, which cleans up after ``error``, another failure becomes a note of it."""
    try:
        yield
    except Exception as second:
        add_note(error, f"After this error Lockstep could not clean up: {summary_of(second)}")


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
    BaseException.__setattr__(error, name, value)  # a frozen dataclass overrides __setattr__


def describe_exit(status: int, before: Kills | None = None, now: Kills | None = None) -> str:
    """How a process ended, by its exit status.

    Args:
        status: negative for a signal, as in ``subprocess``.
        before: the kernel's count of processes killed for lack of memory when it started.
        now: the same count after its end; None if the kernel does not say.
    """
    if status >= 0:
        return f"it exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # real-time signals have no name
        name = f"signal {-status}"
    return f"killed by {name}{_reason_to_kill(before, now) if name == 'SIGKILL' else ''}"


# These words in a description mean that memory may be the reason.
MEMORY_RAN_OUT = "memory ran out"


def _reason_to_kill(before: Kills | None, now: Kills | None) -> str:
    if before is None or now is None or before.among != now.among:
        return f" (by kill -9; or by the kernel, if {MEMORY_RAN_OUT})"
    count = now.count - before.count
    if not count:
        return " (by kill -9 or the like: the kernel says that memory did not run out)"
    processes = "a process" if count == 1 else f"{count} processes"
    return f": {MEMORY_RAN_OUT}, and the kernel has killed {processes} of {now.among} meanwhile"


def shorten(text: str) -> str:
    """Cut the middle out of a very long text."""
    half = _LONGEST_TEXT // 2
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def summary_of(error: BaseException) -> str:
    """Its class and message."""
    return f"{type(error).__name__}: {message_of(error)}"


def message_of(error: BaseException) -> str:
    """Its message, even if its ``__str__`` raises."""
    try:
        return str(error)
    except BaseException as second:  # sys.exit() in a user's __str__ must not end the helper
        return f"<its __str__ raised {type(second).__name__}>"


def causes_of(error: BaseException) -> list[BaseException]:
    """An exception, its cause, the cause's cause, and so on."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and len(chain) < _MOST_CAUSES:
        chain.append(one)
        one = one.__cause__
    return chain


def _pickle(error: BaseException) -> tuple[bytes, bytes]:
    """The exception pickled twice, apart from its text, which rank 0 can always read.

    First as it pickles itself; then as type, arguments and attributes, for the many classes whose
    ``__init__`` takes more than the message. Each is b"" if it cannot be pickled.
    """
    return _dump(error), _dump((type(error), error.args, vars(error)))


def _dump(value: object) -> bytes:
    try:
        # A class of __main__ is pickled by value, and becomes the original class in the script.
        pickled: bytes = cloudpickle.dumps(value)
    except BaseException:  # of user code
        return b""
    return pickled if len(pickled) <= _LARGEST_EXCEPTION_BYTES else b""


def _unpickle(pickled: tuple[bytes, bytes]) -> BaseException | None:
    whole, bare = pickled
    error = _load(whole)
    if not isinstance(error, BaseException) and isinstance(parts := _load(bare), tuple):
        try:
            error = _make(*parts)
        except Exception:  # its __new__ takes more than the message, too
            return None
    return error if isinstance(error, BaseException) else None


def _make(kind: type[BaseException], arguments: tuple[Any, ...], attributes: Any) -> BaseException:
    error = kind.__new__(kind, *arguments)
    vars(error).update(attributes)
    return error


def _load(pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled) if pickled else None
    except (Exception, SystemExit):  # of user code
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


# In place of a type: the host has lost a process or another host.
_LOST = b"lost"


def _is_loss(error: BaseException | None) -> bool:
    return isinstance(error, HostError | WorkerError) and error.is_loss


def encode_report(text: str, error: BaseException | None, most_bytes: int) -> bytes:
    """The report of a failure.

    Args:
        text: the description of the failure.
        error: the exception, if there is one.
        most_bytes: of the result; the rest of the text is cut off.
    """
    named = _LOST if _is_loss(error) else b"" if error is None else _encode_type(error)
    return (named + b"\n" + text.encode(errors="replace"))[:most_bytes]


def decode_report(payload: bytes) -> HostError:
    """The error to raise here, with an exception of the report's type if it names one."""
    named, _, text = payload.partition(b"\n")
    error = HostError(text.decode(errors="replace"))
    error.is_loss = named == _LOST
    if named and not error.is_loss:
        try:
            kind, arguments = decode_untrusted(named, tuple[str, tuple[_Argument, ...]])
        except HostError:
            return error
        error.raised = _make_exception(kind, arguments)
    return error


def _encode_type(error: BaseException) -> bytes:
    """A type that other hosts have, and the exception's arguments, as JSON; b"" if none is."""
    if isinstance(error, HostError | WorkerError):
        return b""
    for kind in type(error).__mro__:
        if _KINDS.get(kind.__name__) is not kind:
            continue
        is_exact = kind is type(error)
        message = message_of(error) if is_exact else summary_of(error)
        arguments: tuple[object, ...] = (_encodable(message),)
        if is_exact and all(map(_is_plain, error.args)):
            made = _make_exception(kind.__name__, error.args)
            arguments = error.args if str(made) == message else arguments
        named = msgspec.json.encode((kind.__name__, arguments))
        if len(named) <= _MOST_NAMED_BYTES and _make_exception(kind.__name__, arguments):
            return named
    return b""


def _is_plain(argument: object) -> bool:
    if isinstance(argument, str):
        return argument == _encodable(argument)
    return isinstance(argument, _Argument)


def _encodable(text: str) -> str:
    """The text without lone surrogates."""
    return text.encode(errors="replace").decode()


def _make_exception(kind: str, arguments: Sequence[object]) -> Exception | None:
    try:
        return _KINDS[kind](*arguments)
    except Exception:  # it takes other arguments, or this Python does not have it
        return None
