"""Templates that start in an instant, in a script that is a fork itself (``warm``).

Helpers come from a template, an interpreter of its own (``lockstep.launch.workers.fork_server``),
which takes as long to import torch as the script took. A script that is a fork of a warm
interpreter has seeds: forks that have run nothing either, each of which waits to be told what a
template is told on its command line. They are the script's children, as a template is: they die
with it. Later templates of a script, and those whose libraries need other variables, start as they
do for users. A launcher that is a fork has others, which become the scripts that it starts.
"""

import fcntl
import importlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from lockstep.launch.health.diagnostics import DiagnosticsFile
from lockstep.launch.script import Script
from lockstep.launch.workers import fork_server, interpreter
from lockstep.launch.workers.helper import die_with
from lockstep.pickling import search_path

_MOST_BYTES = 1 << 18
_MOST_DESCRIPTORS = 8

# A script that looks for a batch size starts a template more for each search.
_NUM_SEEDS = 3
# No test has torchrun start more scripts on a host.
_NUM_SCRIPTS = 3
_OF_TORCHRUN = "torch.distributed.elastic.multiprocessing.subprocess_handler"

# Its process id, and the descriptor of the link to it: a socket that nobody closed would be warned
# of when the script ends.
_Seed = tuple[int, int]


def plant() -> None:
    """Fork seeds of this process, which must have run nothing, and use them for templates."""
    script = os.getpid()
    seeds: list[_Seed] = []
    for _ in range(_NUM_SEEDS):
        seeds.append(_fork(script, [link for _, link in seeds]))
    loaded_with = fork_server._variables_of_libraries()
    start_fresh = interpreter.start_interpreter

    def start(
        code: str, descriptors: tuple[int, ...], diagnostics: DiagnosticsFile, threads: int | None
    ) -> "subprocess.Popen[bytes]":
        variables = interpreter.environment(threads)
        fits = all(variables.get(name) == value for name, value in loaded_with.items())
        if os.getpid() != script or not seeds or not fits:
            return start_fresh(code, descriptors, diagnostics, threads)
        return _template(*seeds.pop(), code, descriptors, diagnostics, variables)

    vars(fork_server)["start_interpreter"] = start


def plant_in_scripts() -> None:
    """In ``lockstep run --restarts``, plant seeds in every script that it forks."""
    command = vars(importlib.import_module("lockstep.cli.run"))
    supervise = command["supervise"]

    def supervise_and_plant(restarts: int) -> int | None:
        status: int | None = supervise(restarts)
        if status is None:
            plant()
        return status

    command["supervise"] = supervise_and_plant


def plant_in_torchrun() -> Script | None:
    """Fork what torch's launcher is going to start, in place of new interpreters.

    Returns:
        In a fork that has been told what to be: its script. None in the launcher.
    """
    launcher = os.getpid()
    waiting: list[_Seed] = []
    for _ in range(_NUM_SCRIPTS):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = _fork_quietly()
        if pid == 0:
            for each in (ours.detach(), *(link for _, link in waiting)):
                os.close(each)
            return _told_what_to_be(theirs, launcher)
        theirs.close()
        waiting.append((pid, ours.detach()))

    def start(_: Any, words: Sequence[str], variables: Mapping[str, str]) -> Any:
        return _Sprout(*waiting.pop(), pickle.dumps((words, dict(variables))), ())

    handler = importlib.import_module(f"{_OF_TORCHRUN}.subprocess_handler")
    vars(handler)["SubprocessHandler"]._popen = start
    return None


def _told_what_to_be(link: socket.socket, launcher: int) -> Script:
    die_with(launcher)
    with link:
        order = link.recv(_MOST_BYTES)
    if not order:
        os._exit(0)
    words, variables = pickle.loads(order)
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    options = list(itertools.takewhile(lambda word: word in ("-u", "-m"), words[1:]))
    target, *arguments = words[1 + len(options) :]
    return Script(target=target, is_module="-m" in options, arguments=tuple(arguments))


def _fork(script: int, others: Sequence[int]) -> _Seed:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = _fork_quietly()
    if pid == 0:
        for each in (ours.detach(), *others):
            os.close(each)
        _wait(theirs, script)
    theirs.close()
    return pid, ours.detach()


def _fork_quietly() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # OpenBLAS has threads, and stops them
        return os.fork()


def _template(
    pid: int,
    link: int,
    code: str,
    descriptors: tuple[int, ...],
    diagnostics: DiagnosticsFile,
    variables: Mapping[str, str],
) -> "_Sprout":
    out = [] if sys.__stdout__ is None else [1]
    targets = [2, *out, *descriptors]
    path, directory = search_path(), os.getcwd()
    order = pickle.dumps((code, path, targets, directory, dict(variables)))
    return _Sprout(pid, link, order, (diagnostics.descriptor, *out, *descriptors))


class _Sprout(subprocess.Popen[bytes]):
    """A fork that waits, as if it was started now, with a command line."""

    def __init__(self, pid: int, link: int, order: bytes, given: tuple[int, ...]) -> None:
        self._seed, self._link, self._order, self._given = pid, link, order, given
        super().__init__(["python"])

    def _execute_child(self, *_: Any) -> None:
        """Tell the seed, in place of starting a program."""
        with socket.socket(fileno=self._link) as link:
            socket.send_fds(link, [self._order], self._given)
        self.pid = self._seed
        self._child_created = True


# --- in the seed ----------------------------------------------------------------------------------


def _wait(link: socket.socket, script: int) -> NoReturn:
    """Become a template when the script wants one; ends with the script."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.setpgid(0, 0)  # Ctrl-C in the terminal is for the script
        die_with(script)
        with link:
            order, received, *_ = socket.recv_fds(link, _MOST_BYTES, _MOST_DESCRIPTORS)
        if order:
            _become(received, *pickle.loads(order))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # it must never go on with the script's work


def _become(
    received: list[int],
    code: str,
    path: list[str],
    targets: list[int],
    directory: str,
    variables: Mapping[str, str],
) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1):
        os.dup2(nothing, target)
    os.close(nothing)
    _move(received, targets)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    sys.path[:] = path
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(code, vars(main))


def _move(descriptors: list[int], targets: list[int]) -> None:
    """Give open files other numbers, none of which may be in the way of another."""
    beyond = max([*descriptors, *targets]) + 1
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, beyond) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, target in zip(high, targets, strict=True):
        os.dup2(each, target)
        os.close(each)
