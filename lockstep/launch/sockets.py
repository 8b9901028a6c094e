"""Sockets between hosts, and between processes of a host that did not start each other.

They do not block, and are closed in an exec and in a fork: a copy in a DataLoader's worker would
keep a connection alive after its owner has died.

The kernel notices that a host has vanished. It probes an idle connection (keepalive). It does not
probe a connection with unacknowledged data, so a process that waits checks how long nothing has
come back (``is_unanswered``). TCP_USER_TIMEOUT would do both, but it would also end the connection
to a host that does not read for a while, because it writes a checkpoint.
"""

import errno
import os
import select
import socket
import struct
from typing import Any

from lockstep.channel.polling import LOOK_AROUND_SECONDS, LookAround, Stopwatch
from lockstep.cluster.place import Address
from lockstep.launch.forks import give_up_in_forks

# As Python's sockets take them: (address, port), and two more for IPv6; bytes for a Unix socket.
SocketAddress = Any

_IDLE_SECONDS = 5
_PROBE_SECONDS = 5
_NUM_PROBES = 3
VANISHED_SECONDS = _IDLE_SECONDS + _NUM_PROBES * _PROBE_SECONDS

_BACKLOG = 512

# struct tcp_info of linux/tcp.h: the third and fourth byte, and the thirteenth word of 32 bits.
_TCP_INFO = struct.Struct("=2xBB52xI")  # retransmits, probes, milliseconds since the last answer


def resolve(address: Address) -> list[tuple[socket.AddressFamily, SocketAddress]]:
    """The socket addresses of a name. Waits for the name service without interruption.

    Raises:
        OSError: the name is unknown, maybe only now.
    """
    found = socket.getaddrinfo(address.name, address.port, type=socket.SOCK_STREAM)
    return [(family, where) for family, _, _, _, where in found]


def listen(family: int, where: SocketAddress) -> socket.socket:
    """Listen at one address.

    Raises:
        OSError: it is in use, or another host's.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return tune(sock)


def connect(
    family: int, where: SocketAddress, seconds: float, look_around: LookAround
) -> socket.socket:
    """Connect, within so many seconds.

    Raises:
        OSError: no process listens there, or it does not answer.
    """
    sock = tune(socket.socket(family, socket.SOCK_STREAM))
    try:
        code = sock.connect_ex(where)
        if code == errno.EINPROGRESS:
            _wait_to_connect(sock, seconds, look_around)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        if sock.getsockname() == sock.getpeername():
            # A process that often calls a free port of its own host finally gets it as its own.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except BaseException:
        sock.close()
        raise
    return sock


def _wait_to_connect(sock: socket.socket, seconds: float, look_around: LookAround) -> None:
    watch, poller = Stopwatch(), select.poll()
    poller.register(sock, select.POLLOUT)
    while not poller.poll(LOOK_AROUND_SECONDS * 1000):
        look_around(watch.tick())
        if watch.seconds > seconds:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


def tune(sock: socket.socket) -> socket.socket:
    """Set the options that all of these sockets have."""
    sock.setblocking(False)
    give_up_in_forks(sock, "close")
    if sock.family == socket.AF_UNIX:
        return sock
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _IDLE_SECONDS),  # TCP_KEEPALIVE on macOS
        ("TCP_KEEPALIVE", _IDLE_SECONDS),
        ("TCP_KEEPINTVL", _PROBE_SECONDS),
        ("TCP_KEEPCNT", _NUM_PROBES),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock


def is_unanswered(sock: socket.socket) -> bool:
    """True if sent data was not acknowledged for as long as an idle connection is probed.

    The kernel of a busy host still acknowledges. Linux only; False elsewhere.
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    retransmits, probes, silent_milliseconds = _TCP_INFO.unpack(info)
    is_silent: bool = silent_milliseconds >= 1000 * VANISHED_SECONDS
    return is_silent and max(retransmits, probes) >= 2
