"""Sockets between hosts, and between processes of a host that did not start each other.

None blocks, none outlives an exec, and none stays open in a fork: a DataLoader's worker that held a
copy would keep a connection alive after its owner has died.

A host that vanishes is noticed by the kernel. An idle connection is probed (keepalive). On one that
has data on its way there are no such probes, so a process that waits asks how long nothing has come
back (``is_unanswered``). TCP_USER_TIMEOUT would do both, but it also ends the connection to a host
that is there and does not read for a while, because it writes a checkpoint.
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
    """The socket addresses that a name stands for. Waits for the name service, uninterrupted.

    Raises:
        OSError: the name is not known (now).
    """
    found = socket.getaddrinfo(address.name, address.port, type=socket.SOCK_STREAM)
    return [(family, where) for family, _, _, _, where in found]


def listen(family: int, where: SocketAddress) -> socket.socket:
    """Listen at one address.

    Raises:
        OSError: it is taken, or not one of this host.
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
    """Connect, waiting at most so long.

    Raises:
        OSError: nobody listens there, or does not answer.
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
            # Who calls a free port of his own host again and again gets it as his own port one day.
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
    """Set what all of these sockets have in common."""
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
    """Whether what was sent is repeated in vain for as long as an idle connection would be probed.

    A host that is busy still answers: its kernel does. Known on Linux only.
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    retransmits, probes, silent_milliseconds = _TCP_INFO.unpack(info)
    is_silent: bool = silent_milliseconds >= 1000 * VANISHED_SECONDS
    return is_silent and max(retransmits, probes) >= 2
