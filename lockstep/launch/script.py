"""What is started on every host: a script or module, and its arguments."""

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
        is_module: which of the two.
        arguments: what follows on its command line.
    """

    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The arguments of an interpreter that runs it."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    def run(self) -> int:
        """Run it in this process, as the interpreter would; returns the exit status.

        An error is shown as Python shows it, from the script's own lines on. SystemExit is raised:
        the interpreter knows what to do with it.
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
    """Not by runpy, which puts the path for ``sys.argv[0]``, and takes ``__main__`` away after."""
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
    """Without the frames that lead to the script's."""
    while traceback and traceback.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        traceback = traceback.tb_next
    return traceback
