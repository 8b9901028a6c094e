"""Shortens tracebacks to the frames of users' own code, without those of Lockstep.

An error that leaves a public call (``public``) loses Lockstep's frames, so that scripts, notebooks,
pytest and ``logging.exception`` show it equally. Frames of torch, Keras and Python's own modules
are left out, too, except the one that has raised. Errors that leave Lockstep in another way are
shortened by ``sys.excepthook``. ``LOCKSTEP_TRACEBACK=full`` keeps all frames.

Ctrl-C in a public call ends a script with two lines: the exception, and the state that it leaves.
"""

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, TracebackType
from typing import Any, ParamSpec, TypeVar

from lockstep.errors import HostError, LockstepError, WorkerError, reason_of

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = ("torch", "keras")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_DELIBERATE = (LockstepError, OSError, KeyboardInterrupt, SystemExit)
_BEGINS = "Lockstep: "
_HINT = _BEGINS + "LOCKSTEP_TRACEBACK=full shows all frames."

# The traceback text of a DataLoader's worker, and torch's frames in it.
_ORIGINAL = "\nOriginal Traceback (most recent call last):"
_TORCH_FRAME = re.compile(r'^  File "[^"]*/torch/[^"]*", line .*\n(?:    .*\n)*', re.M)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Class = TypeVar("_Class", bound=type)


def is_full() -> bool:
    """True if the user wants all frames."""
    return os.environ.get("LOCKSTEP_TRACEBACK", "") == "full"


def note_last(error: BaseException, note: str) -> None:
    """Add a line that is shown below all other notes."""
    error.add_note(_BEGINS + note)


def shorten(error: BaseException) -> None:
    """Remove Lockstep's frames from the tracebacks of an error and its causes."""
    if is_full():
        return
    for one in _chain(error, set()):
        has_own_end = _has_own_end(one)
        if _adds_nothing(one):
            one.__suppress_context__ = True
        if _says_all(one):
            BaseException.__setattr__(one, "__cause__", None)
        BaseException.__setattr__(one, "__traceback__", _shortened(one, has_own_end))
        if one.args and isinstance(one.args[0], str) and _ORIGINAL in one.args[0]:
            one.args = (_TORCH_FRAME.sub("", one.args[0]).rstrip(), *one.args[1:])
        notes = [*getattr(one, "__notes__", ())]
        if has_own_end and _HINT not in notes:
            notes.append(_HINT)
        if notes:
            notes.sort(key=lambda note: str(note).startswith(_BEGINS))
            BaseException.__setattr__(one, "__notes__", notes)


def _chain(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """An error, its causes and contexts, and the members of groups."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for one in (error.__cause__, error.__context__, *members):
        yield from _chain(one, seen)


def _adds_nothing(error: BaseException) -> bool:
    """True if its context is the same error, or was raised and handled by Lockstep."""
    context = error.__context__
    if context is None:
        return False
    is_same = type(context) is type(error) and context.args == error.args
    return is_same or all(_is_own(frame) for frame in _frames(context))


def _says_all(error: BaseException) -> bool:
    """True if its message holds that of its cause, which no code of the user's has raised."""
    cause = error.__cause__
    if not isinstance(error, LockstepError) or cause is None or isinstance(cause, LockstepError):
        return False
    frames = [*_frames(cause)]
    inside = any(map(_is_own, frames)) and all(
        _is_own(one) or _is_of_library(one) for one in frames
    )
    words = reason_of(cause) if isinstance(cause, OSError) else str(cause)
    return inside and bool(words) and words in str(error)


def _shortened(error: BaseException, has_own_end: bool) -> TracebackType | None:
    frames = [*_frames(error)]
    kept = [one for one in frames if not (_is_own(one) or _is_of_library(one))]
    last = frames[-1:]
    is_told = isinstance(error, LockstepError) or (
        isinstance(error, OSError) and not is_of_user(error)
    )
    is_library = bool(last) and _is_of_library(last[0]) and not is_told
    if has_own_end or (is_library and last[0].tb_frame.f_code.co_filename != __file__):
        kept += last
    shown: TracebackType | None = None
    for one in reversed(kept):
        shown = TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return shown


def _frames(error: BaseException) -> Iterator[TracebackType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _has_own_end(error: BaseException) -> bool:
    """True if Lockstep itself has raised an error by mistake."""
    frames = [*_frames(error)]
    is_brought = isinstance(error.__cause__, WorkerError | HostError)  # raised by another process
    if isinstance(error, _DELIBERATE) or is_brought or not frames or not _is_own(frames[-1]):
        return False
    return not is_of_user(error)


def is_of_user(error: BaseException) -> bool:
    """True if it was raised outside of Lockstep, or by the user's code that Lockstep has called."""
    frames = [*_frames(error)]
    own = [number for number, one in enumerate(frames) if _is_own(one)]
    inside = frames[own[0] :] if own else []
    return not inside or not all(_is_own(one) or _is_of_library(one) for one in inside)


def _is_own(one: TracebackType) -> bool:
    file = one.tb_frame.f_code.co_filename
    if file == "<string>":  # what dataclasses write
        return str(one.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == "lockstep"
    return file.startswith(_PACKAGE) and file != __file__


def _is_of_library(one: TracebackType) -> bool:
    file = one.tb_frame.f_code.co_filename
    package = str(one.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    is_standard = file.startswith(_STANDARD_LIBRARY) and "-packages" + os.sep not in file
    return package in _LIBRARIES or is_standard or file == __file__ or file.startswith("<frozen ")


# --- where errors leave Lockstep ------------------------------------------------------------------


class _Leaving:
    """Shortens errors of its block, and leaves out the frame with the block."""

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        if error is not None:
            if isinstance(error, KeyboardInterrupt) and not getattr(error, "__notes__", ()):
                note_last(error, "stopped by Ctrl-C.")
            shorten(error)


leaving = _Leaving()


def public(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a function that users call: its errors have no frames of Lockstep."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with leaving:
            return function(*args, **kwargs)

    return call


def public_methods(cls: _Class) -> _Class:
    """Decorates a public class: the same for the methods that it defines."""
    for name, value in list(vars(cls).items()):
        if isinstance(value, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, public(value))
    return cls


def install() -> None:
    """Install a hook that shortens errors of Lockstep that end a script."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if is_full():
            before(kind, error, traceback)
            return
        is_ours = any(_is_own(one) for one in _frames(error))
        if is_ours:
            shorten(error)
        notes = [str(note) for note in getattr(error, "__notes__", ())]
        if kind is KeyboardInterrupt and (is_ours or any(map(_is_last, notes))):
            last = notes[-1] if notes else _BEGINS + "stopped by Ctrl-C."
            sys.stderr.write(f"KeyboardInterrupt\n{last}\n")
        else:
            before(kind, error, error.__traceback__)

    sys.excepthook = show


def _is_last(note: str) -> bool:
    return note.startswith(_BEGINS)
