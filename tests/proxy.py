"""A proxy between hosts, which changes what passes: for tests of what hosts make of that.

Callers are led to it by ``detour``, and tell it where they wanted to go. What it does to a
connection it does after the handshake, and it says whether it has.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from lockstep.launch import sockets
from lockstep.launch.security import handshake

# What a caller and an answerer send in a handshake: greeting and proofs; greeting and proof.
HANDSHAKE_BYTES = (72 + 64, 72 + 32)
THERE, BACK = 0, 1

_TARGET = struct.Struct("!4sH")
_CHUNK_BYTES = 1 << 16
_SECONDS = 30.0


@dataclass
class Fault:
    """What happens at one place of one stream.

    Attributes:
        connection: counted in the order in which handshakes ended; one that broke off is none.
        direction: THERE is from the caller.
        offset: of the byte at which it happens, after the handshake.
        bit: of that byte, which is flipped; None flips none.
        injected: bytes that are put before it; ``b"replay"`` stands for what has passed so far.
        cuts: the connection ends there.
        has_fired: it has happened.
    """

    connection: int
    direction: int
    offset: int
    bit: int | None = None
    injected: bytes = b""
    cuts: bool = False
    has_fired: bool = False


@dataclass
class _Connection:
    """A connection through the proxy, and its number once its handshake has ended."""

    ends: tuple[socket.socket, socket.socket]
    number: int | None = None


class Proxy:
    """Listens on the loopback interface until it is closed.

    Attributes:
        counts: by connection and direction, the bytes that have passed after the handshake.
    """

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.counts: dict[tuple[int, int], int] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._num_connections = 0
        self._start(self._accept)

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        """End all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(_SECONDS)
        for sock in self._sockets:
            sock.close()

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # once it is closed
            while True:
                caller, _ = self._listener.accept()
                self._sockets.append(caller)
                self._connect(caller)

    def _connect(self, caller: socket.socket) -> None:
        try:
            host, port = _TARGET.unpack(caller.recv(_TARGET.size, socket.MSG_WAITALL))
            answerer = socket.create_connection((socket.inet_ntoa(host), port), _SECONDS)
        except (OSError, struct.error):  # nobody is there yet
            caller.close()
            return
        answerer.settimeout(None)
        self._sockets.append(answerer)
        for sock in (caller, answerer):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(ends=(caller, answerer))
        self._start(self._pass_on, caller, answerer, connection, THERE)
        self._start(self._pass_on, answerer, caller, connection, BACK)

    def _pass_on(
        self, source: socket.socket, sink: socket.socket, connection: "_Connection", direction: int
    ) -> None:
        passed = b""
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                if direction == BACK and len(passed) < HANDSHAKE_BYTES[BACK] <= len(passed + data):
                    connection.number = self._num_connections
                    self._num_connections += 1
                sink.sendall(self._treated(passed, data, connection, direction))
                passed += data
                if connection.number is not None:
                    num_bytes = len(passed) - HANDSHAKE_BYTES[direction]
                    self.counts[connection.number, direction] = num_bytes
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR if sock is sink else socket.SHUT_RD)

    def _treated(
        self, passed: bytes, data: bytes, connection: "_Connection", direction: int
    ) -> bytes:
        fault, found = self.fault, (connection.number, direction)
        if fault is None or (fault.connection, fault.direction) != found:
            return data
        place = HANDSHAKE_BYTES[direction] + fault.offset - len(passed)
        if not 0 <= place < len(data):
            return data
        fault.has_fired = True
        if fault.cuts:
            for sock in connection.ends:
                sock.shutdown(socket.SHUT_RDWR)
        replayed = (passed + data[:place])[HANDSHAKE_BYTES[direction] :]
        injected = replayed if fault.injected == b"replay" else fault.injected
        changed = bytes([data[place] ^ (0 if fault.bit is None else 1 << fault.bit)])
        return data[:place] + injected + changed + data[place + 1 :]


def detour(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Have all calls of this process go through a proxy of this machine."""

    def connect(family: int, where: Any, *arguments: Any) -> socket.socket:
        sock = sockets.connect(family, ("127.0.0.1", port), *arguments)
        sock.send(_TARGET.pack(socket.inet_aton(where[0]), where[1]))
        return sock

    monkeypatch.setattr(handshake, "connect", connect)
