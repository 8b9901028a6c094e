"""The helper process: waits for calls from the script's process, and dies with it.

A helper is a fresh interpreter that knows its rank and one socket. It never imports the script's
``__main__``: what is defined there arrives by value.
"""

import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

from lockstep.launch.link import Link, Message

CALL, DATA, RETURN, FAIL, READY = b"C", b"D", b"R", b"F", b"Y"

# Sent by the script's process when a wait takes too long; see ``Team.stacks``.
STACKS_SIGNAL = signal.SIGUSR1

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class HelperContext:
    """What a called function gets: who it is, and the link to rank 0."""

    def __init__(self, rank: int, link: Link) -> None:
        self.rank = rank
        self._link = link

    def send(self, payload: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send data to rank 0."""
        self._link.send(Message(DATA, payload, descriptors))

    def receive(self) -> tuple[bytes, tuple[int, ...]]:
        """Wait for data from rank 0. Needs no timeout: the helper dies with its parent."""
        message = self._link.receive()
        assert message.kind == DATA
        return message.payload, message.descriptors


def main(rank: int, socket_descriptor: int, stacks_descriptor: int, parent: int) -> None:
    """Serve calls until the link closes."""
    _die_with(parent)
    _name_process(rank)
    faulthandler.register(STACKS_SIGNAL, file=stacks_descriptor, all_threads=True, chain=False)
    link = Link(socket.socket(fileno=socket_descriptor))
    link.send(Message(READY, b""))
    while True:
        try:
            call = link.receive()
        except (EOFError, ConnectionError):
            return
        _serve(HelperContext(rank, link), link, call)


def _serve(context: HelperContext, link: Link, call: Message) -> None:
    try:
        target, sys.path[:], directory, body = pickle.loads(call.payload)
        os.chdir(directory)
        module, _, name = target.partition(":")
        function: Callable[..., bytes] = getattr(import_module(module), name)
        result = function(context, body, call.descriptors)
    except Exception as error:
        link.send(Message(FAIL, _failure(error)))
    else:
        link.send(Message(RETURN, result))


def _failure(error: Exception) -> bytes:
    """The traceback as text and, where it can be sent, the exception itself."""
    text = "".join(traceback.format_exception(error))
    try:
        return pickle.dumps((text, f"{type(error).__name__}: {error}", error))
    except Exception:
        # An exception of a class that cannot be pickled is told by its text alone.
        return pickle.dumps((text, f"{type(error).__name__}: {error}", None))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, also when stopped or deep in C."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        _leave()


def _name_process(rank: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"lockstep:{rank}".encode(), 0, 0, 0)


def _leave() -> NoReturn:
    os._exit(1)


def reference_of(function: Callable[..., Any]) -> str:
    """``module:name`` of a function that a helper can import."""
    return f"{function.__module__}:{function.__qualname__}"
