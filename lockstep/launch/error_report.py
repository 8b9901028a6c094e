"""Error reports: what a host that fails tells the others, a text and the name of a known type.

Nothing from another host is unpickled. But exceptions of Python's own types, and of Lockstep's, can
be made anew from their names and plain arguments: so ``except ValueError`` catches on every host
what was raised on one. Of another class the nearest such base counts. What has none but
``Exception`` is a HostError elsewhere, and so is what ends a process (SystemExit, Ctrl-C).
"""

import builtins
from collections.abc import Sequence

import msgspec

from lockstep import errors
from lockstep.errors import HostError, LockstepError, WorkerError
from lockstep.launch.failure import message_of, summary_of
from lockstep.launch.untrusted import decode_untrusted

_KINDS = {
    name: kind
    for name, kind in {**vars(builtins), **vars(errors)}.items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and kind not in (Exception, LockstepError, WorkerError, HostError)
}

_Argument = str | int | float | bool | None
_MOST_NAMED_BYTES = 1 << 14


def encode_report(text: str, error: BaseException | None, most_bytes: int) -> bytes:
    """The report of a failure.

    Args:
        text: what has failed.
        error: the exception, if there is one.
        most_bytes: of the result; more of the text is cut off.
    """
    named = b"" if error is None else _named(error)
    return (named + b"\n" + text.encode(errors="replace"))[:most_bytes]


def decode_report(payload: bytes) -> HostError:
    """The error to raise here; with an exception of the type that was named, if one was."""
    named, _, text = payload.partition(b"\n")
    error = HostError(text.decode(errors="replace"))
    if named:
        try:
            kind, arguments = decode_untrusted(named, tuple[str, tuple[_Argument, ...]])
        except HostError:
            return error
        error.raised = _made(kind, arguments)
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
            made = _made(kind.__name__, error.args)
            arguments = error.args if str(made) == message else arguments
        named = msgspec.json.encode((kind.__name__, arguments))
        if len(named) <= _MOST_NAMED_BYTES and _made(kind.__name__, arguments):
            return named
    return b""


def _is_plain(argument: object) -> bool:
    if isinstance(argument, str):
        return argument == _encodable(argument)
    return isinstance(argument, _Argument)


def _encodable(text: str) -> str:
    """Without halves of surrogates."""
    return text.encode(errors="replace").decode()


def _made(kind: str, arguments: Sequence[object]) -> Exception | None:
    try:
        return _KINDS[kind](*arguments)
    except Exception:  # it takes other arguments, or is none that this Python has
        return None
