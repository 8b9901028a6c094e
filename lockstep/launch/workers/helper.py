"""The helper process: runs calls from the script's process, and dies with it.

A helper has its rank and one socket. It never imports the script's ``__main__``: objects of classes
and functions that are defined there are sent by value.
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
from lockstep.launch.health.failure import add_note, pack_failure
from lockstep.launch.workers.link import Link, Message

CALL, DATA, RETURN, FAIL, PING, READY = b"C", b"D", b"R", b"F", b"P", b"Y"

# Sent by the script's process when a wait takes too long; see ``Team.raise_timeout``.
STACKS_SIGNAL = signal.SIGUSR1

_COLLECT_AFTER_SECONDS = 0.2

_NO_TERMINAL = (
    "breakpoint() and pdb need the terminal, which only the script's own process has: train with "
    "SingleDeviceStrategy() while you debug."
)

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class HelperContext(ABC):
    """A helper's end of its link to rank 0: the first argument of what it runs.

    Args:
        rank: this helper's.
        link: to rank 0.

    Attributes:
        rank: this helper's.
        kept: objects that calls keep for later calls, by name.
    """

    def __init__(self, rank: int, link: Link) -> None:
        self.rank = rank
        self.kept: dict[str, Any] = {}
        self._link = link

    def send(self, payload: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send data to rank 0."""
        self._send(Message(DATA, payload, descriptors))

    def receive(self) -> tuple[bytes, tuple[int, ...]]:
        """Wait for data from rank 0, without a limit: rank 0 ends helpers after a failure."""
        message = self._receive(self.look_around)
        assert message.kind == DATA, message.kind
        return message.payload, message.descriptors

    @abstractmethod
    def look_around(self, waited_seconds: float) -> None:
        """Call it repeatedly in every wait: it stops the wait if rank 0 has ended."""

    def await_call(self) -> Message:
        """Report to rank 0 that this helper is ready, and wait for its next call."""
        self._send_ready()
        while (message := self._receive(Idleness(self.look_around), is_idle=True)).kind != CALL:
            self._handle(message)
        return message

    def run(self, call: Message) -> Any:
        """The result of a call's function, run in rank 0's working directory and search path."""
        target, path, directory, body = pickle.loads(call.payload)
        try:
            sys.path[:] = path
            importlib.invalidate_caches()  # the script may have written modules since the last call
            if directory is not None:
                os.chdir(directory)
            function = function_at(target)
        except BaseException:
            call.close()
            raise
        return function(self, body, call.descriptors)

    def _handle(self, message: Message) -> None:
        """Handle another message than a call, between calls."""
        if message.kind == PING:
            self._send_ready()
        # Other messages belong to a call that has failed here, as rank 0 will see.

    def _send_ready(self) -> None:
        self._send(Message(READY, str(os.getpid()).encode()))

    def _send(self, message: Message) -> None:
        self._link.send(message, self.look_around)

    def _receive(self, look_around: LookAround, *, is_idle: bool = False) -> Message:
        return self._link.receive(look_around, is_idle=is_idle)


class _ForkedHelper(HelperContext):
    """A helper that dies with its parent, the script's process or a fork server."""

    def __init__(self, rank: int, link: Link, parent: int) -> None:
        super().__init__(rank, link)
        self._parent = parent

    def look_around(self, waited_seconds: float) -> None:
        """End this process if its parent has ended, on systems whose kernel does not do it."""
        if os.getppid() != self._parent:
            leave()

    def answer_call(self) -> None:
        """Serve rank 0's next call."""
        call = self.await_call()
        try:
            self.run(call)
            answer = Message(RETURN)
        except BaseException as error:  # also SystemExit: a model that exits has failed
            if type(error).__module__ == "bdb":  # it read from an input that is empty
                add_note(error, _NO_TERMINAL)
            answer = Message(FAIL, pack_failure(error))
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # none is there, or a broken pipe
                stream.flush()
        self._send(answer)


def serve_calls(rank: int, link: Link, diagnostics_descriptor: int, parent: int) -> None:
    """Serve calls until the link closes.

    Args:
        rank: this helper's.
        link: to rank 0.
        diagnostics_descriptor: a file for stacks, on request and when this process crashes.
        parent: the id of the process with which this one dies.
    """
    leave_signals_to_script()
    name_process(f"lockstep:{rank}")
    faulthandler.enable(file=diagnostics_descriptor)
    faulthandler.register(STACKS_SIGNAL, file=diagnostics_descriptor, all_threads=True, chain=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a killed helper does not flush
    helper = _ForkedHelper(rank, link, parent)
    try:
        while True:
            helper.answer_call()
    except (EOFError, OSError):  # rank 0 has closed the link
        link.close()


class Idleness:
    """Looks around for an idle helper, and collects garbage once.

    A call's objects must not outlive it: every rank's reference keeps its shared memory alive.
    """

    def __init__(self, look_around: LookAround) -> None:
        self._look_around = look_around
        self._has_collected = False

    def __call__(self, waited_seconds: float) -> None:
        self._look_around(waited_seconds)
        if waited_seconds > _COLLECT_AFTER_SECONDS and not self._has_collected:
            gc.collect()
            self._has_collected = True


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even if it is stopped or runs C."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        leave()


def leave_signals_to_script() -> None:
    """Ignore Ctrl-C, and SIGTERM to all processes of a job: the script ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _ignore)
    os.register_at_fork(after_in_child=_end_on_sigterm)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which programs started by this process would inherit."""


def _end_on_sigterm() -> None:
    """In a fork, whose maker may end it by SIGTERM: restore the default."""
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


def function_at(reference: str) -> Callable[[HelperContext, bytes, tuple[int, ...]], Any]:
    """The function of such a reference, imported."""
    module, _, name = reference.partition(":")
    function: Callable[[HelperContext, bytes, tuple[int, ...]], Any]
    function = getattr(importlib.import_module(module), name)
    return function
