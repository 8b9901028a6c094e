"""The script or module that every host runs, and its arguments."""

import builtins
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

import msgspec


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """A script, or a module that is run as one.

    Attributes:
        target: the script's path, or the module's name.
        is_module: True if ``target`` is a module.
        arguments: the rest of its command line.
    """

    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The interpreter's arguments that run it."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    def run(self) -> int:
        """Run it in this process, as the interpreter would; returns the exit status.

        An error is shown as Python shows it, without Lockstep's frames. SystemExit is raised for
        the interpreter.
        """
        sys.argv = [self.target, *self.arguments]
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd() if self.is_module else _directory_of(self.target)
        try:
            if self.is_module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            elif os.path.isfile(self.target):
                _run_file(os.path.abspath(self.target))
            else:
                runpy.run_path(self.target, run_name="__main__")
        except (Exception, KeyboardInterrupt) as error:
            error.__traceback__ = _own_frames(error.__traceback__)
            sys.excepthook(type(error), error, error.__traceback__)
            return 130 if isinstance(error, KeyboardInterrupt) else 1
        return 0


def _run_file(path: str) -> None:
    """Run a file. runpy would change ``sys.argv[0]``, and remove ``__main__`` afterwards."""
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    vars(module).update(__builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(module))


def _directory_of(path: str) -> str:
    return os.path.dirname(os.path.realpath(path))


def _own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames before the script's."""
    while traceback and traceback.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        traceback = traceback.tb_next
    return traceback
