"""Channels between threads of one process, whose ends have agreed on keys without a handshake."""

import select
import socket

from lockstep.channel.keys import Keys
from lockstep.channel.sealed_channel import Channel

SECONDS = 30.0  # for what should take none
CALLER, ANSWERER = (Keys.agreed(bytes(32), is_caller=is_caller) for is_caller in (True, False))


def sealed(left: socket.socket, right: socket.socket) -> tuple[Channel, Channel]:
    """The two ends of a connection, as channels."""
    for sock in (left, right):
        sock.setblocking(False)
    return Channel(left, CALLER), Channel(right, ANSWERER)


def channel_pair() -> tuple[Channel, Channel]:
    """Two ends in this process, of no network."""
    return sealed(*socket.socketpair())


def send(channel: Channel, data: bytes) -> None:
    """Send what there is room for."""
    channel.put(data)
    assert channel.flush()


def receive(channel: Channel) -> bytes:
    """What comes next."""
    while True:
        try:
            return bytes(channel.receive(100))
        except BlockingIOError:
            assert select.select([channel], [], [], SECONDS)[0]
