"""The helper process: waits for calls from the script's process, and dies with it.

A helper knows its rank and one socket. It never imports the script's ``__main__``: what is defined
there arrives by value.
"""

import ctypes
import faulthandler
import gc
import importlib
import io
import os
import pickle
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from lockstep.channel.polling import LookAround
from lockstep.launch.health.failure import pack_failure
from lockstep.launch.workers.link import Link, Message

CALL, DATA, RETURN, FAIL, PING, READY, FORGET = b"C", b"D", b"R", b"F", b"P", b"Y", b"G"

# Sent by the script's process when a wait takes too long; see ``Team.raise_timeout``.
STACKS_SIGNAL = signal.SIGUSR1

_TIDY_AFTER_SECONDS = 0.2

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class Leader(ABC):
    """Rank 0 of this host, as a helper sees it: the link, and what becomes of a helper without."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send all of a message."""

    @abstractmethod
    def receive(self) -> Message:
        """Wait for a message, however long."""

    @abstractmethod
    def look_around(self, waited_seconds: float) -> None:
        """Do not wait on if rank 0 has ended."""


class HelperContext:
    """What a called function gets: who it is, and the way to rank 0.

    Attributes:
        rank: this helper's.
        kept: what calls leave for later ones, by name.
    """

    def __init__(self, rank: int, leader: Leader) -> None:
        self.rank = rank
        self.kept: dict[str, Any] = {}
        self._leader = leader

    def send(self, payload: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send data to rank 0."""
        self._leader.send(Message(DATA, payload, descriptors))

    def receive(self) -> tuple[bytes, tuple[int, ...]]:
        """Wait for data from rank 0, however long: rank 0 ends helpers that need not wait on."""
        message = self._leader.receive()
        assert message.kind == DATA, message.kind
        return message.payload, message.descriptors

    def look_around(self, waited_seconds: float) -> None:
        """To be called now and then in any wait: there is nothing to wait for without rank 0."""
        self._leader.look_around(waited_seconds)


class _Parent(Leader):
    """The script's process, or the template in its place: this process dies with it."""

    def __init__(self, link: Link, parent: int) -> None:
        self._link = link
        self._parent = parent

    def send(self, message: Message) -> None:
        self._link.send(message, self.look_around)

    def receive(self) -> Message:
        return self._link.receive(self.look_around)

    def look_around(self, waited_seconds: float) -> None:
        """End this process if its parent has ended: where the kernel does not see to it."""
        if os.getppid() != self._parent:
            leave()


def serve_calls(rank: int, link: Link, diagnostics_descriptor: int, parent: int) -> None:
    """Serve calls until the link closes.

    Args:
        rank: this helper's.
        link: to rank 0.
        diagnostics_descriptor: a file for stacks, when asked for and when this process crashes.
        parent: the process that this one dies with.
    """
    leave_signals_to_script()
    name_process(f"lockstep:{rank}")
    faulthandler.enable(file=diagnostics_descriptor)
    faulthandler.register(STACKS_SIGNAL, file=diagnostics_descriptor, all_threads=True, chain=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # helpers are killed: they flush nothing then
    leader = _Parent(link, parent)
    context = HelperContext(rank, leader)
    ready = Message(READY, str(os.getpid()).encode())
    try:
        link.send(ready)
        while True:
            message = link.receive(Idleness(leader.look_around), is_idle=True)
            if message.kind == PING:
                link.send(ready)
            elif message.kind == CALL:
                link.send(_answer(context, message))
            elif message.kind == FORGET:
                context.kept.clear()
            # Anything else is for a call that has failed here, as rank 0 will see.
    except (EOFError, OSError):  # rank 0 has closed the link: there is nothing left to do
        link.close()


class Idleness:
    """What an idle helper does while it waits: look around, and once tidy up.

    What a call made must not outlive it: its shared memory counts on all ranks.
    """

    def __init__(self, look_around: LookAround) -> None:
        self._look_around = look_around
        self._is_tidy = False

    def __call__(self, waited_seconds: float) -> None:
        self._look_around(waited_seconds)
        if waited_seconds > _TIDY_AFTER_SECONDS and not self._is_tidy:
            gc.collect()
            self._is_tidy = True


def _answer(context: HelperContext, call: Message) -> Message:
    try:
        answer = Message(RETURN, _run(context, call))
    except BaseException as error:  # SystemExit as well: a model that exits has failed
        answer = Message(FAIL, pack_failure(error))
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there may be none, or a broken pipe
            stream.flush()
    return answer


def _run(context: HelperContext, call: Message) -> bytes:
    target, path, directory, body = pickle.loads(call.payload)
    sys.path[:] = path
    importlib.invalidate_caches()  # the script may have written modules since the last call
    if directory is not None:
        os.chdir(directory)
    return function_at(target)(context, body, call.descriptors)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, also when stopped or deep in C."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        leave()


def leave_signals_to_script() -> None:
    """Go on after Ctrl-C, and after SIGTERM to all processes of a job: the script ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _ignore)
    os.register_at_fork(after_in_child=_end_on_sigterm)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which programs that are started here would inherit."""


def _end_on_sigterm() -> None:
    """In a fork: whoever made it may end it by that."""
    if signal.getsignal(signal.SIGTERM) is _ignore:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def name_process(name: str) -> None:
    """The name that ``ps`` and ``top`` show, at most 15 characters."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def leave() -> NoReturn:
    """End this process at once."""
    os._exit(1)


def reference_of(function: Callable[..., Any]) -> str:
    """``module:name`` of a function that a helper can import."""
    return f"{function.__module__}:{function.__qualname__}"


def function_at(reference: str) -> Callable[[HelperContext, bytes, tuple[int, ...]], bytes]:
    """The function of such a reference, imported."""
    module, _, name = reference.partition(":")
    function: Callable[[HelperContext, bytes, tuple[int, ...]], bytes]
    function = getattr(importlib.import_module(module), name)
    return function
