"""Heartbeats: distinguish a stopped host from one that computes for long.

A helper process, the monitor, runs beside the process that leads a host. Every second it sends a
beat to host 0 (the monitor of host 0: to all others), unless the kernel says that the leading
process is stopped (SIGSTOP, Ctrl-Z, a debugger). If the whole host is stopped (a frozen cgroup, a
paused container or virtual machine), so is the monitor.

The monitor is a process, not a thread: a step may hold the interpreter's lock for minutes in one
call, and a thread could not send beats meanwhile. The kernel's keepalive answers would not do,
because it also answers for a stopped process.

Only a process that waits reads beats and counts silence. Before its first beat nothing is known of
a host. The end of this connection means nothing, since the leading processes have others. In both
cases the strategy's ``timeout_seconds`` limits a wait.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from lockstep.channel.keys import Keys
from lockstep.channel.polling import Stopwatch
from lockstep.channel.records import TamperedError
from lockstep.channel.sealed_channel import Channel, lost
from lockstep.errors import HostError
from lockstep.launch.workers import process_state
from lockstep.launch.workers.helper import HelperContext, name_process
from lockstep.launch.workers.pool import take_team

_BEAT = b"."
_PERIOD_SECONDS = 1.0
_MOST_BYTES = 1 << 12


class Heartbeats:
    """Starts this host's monitor, and reads the beats of the other hosts.

    Args:
        channels: by the host at the other end; only for beats.

    Raises:
        WorkerError: the monitor cannot be started.
    """

    def __init__(self, channels: Mapping[int, Channel]) -> None:
        self._channels = dict(channels)
        self._silences: dict[int, Stopwatch] = {}  # of the hosts that have beaten
        self._monitor = take_team(1, threads=1, first_rank=0)
        try:
            self._monitor.start_call(beat, str(os.getpid()).encode())
            for channel in channels.values():
                self._monitor.broadcast(channel.keys.sending, (channel.fileno(),))
            self._monitor.broadcast(b"")
        except BaseException:
            self.close()
            raise

    def check(self, name_of: Callable[[int], str]) -> None:
        """Read beats. Call it repeatedly while this process waits; it does not wait itself.

        Args:
            name_of: returns a host's name, for messages.

        Raises:
            HostError: one is stopped.
        """
        if not self._monitor.is_alive:
            self.close()  # the others would take its silence for that of a stopped host
        for host, channel in [*self._channels.items()]:
            try:
                has_beaten = _has_received_beat(channel)
            except TamperedError as error:
                raise lost(name_of(host), error) from error
            except OSError:
                self._channels.pop(host).close()
                self._silences.pop(host, None)
                continue
            if has_beaten:
                self._silences[host] = Stopwatch()
            elif (
                host in self._silences
                and self._silences[host].tick() >= process_state.STOPPED_SECONDS
            ):
                raise HostError.of_loss(
                    f"{name_of(host)} is stopped.",
                    received=f"no heartbeat for {process_state.STOPPED_SECONDS:g} s",
                    fix="Check whether its script was stopped (SIGSTOP, Ctrl-Z, a debugger), or "
                    "its container or virtual machine paused.",
                )

    def close(self) -> None:
        """End the monitor, and with it the beats of this host."""
        self._monitor.close()
        while self._channels:
            self._channels.popitem()[1].close()


def _has_received_beat(channel: Channel) -> bool:
    """Read all beats that have arrived; True if there was one."""
    has_beaten = False
    with suppress(BlockingIOError):
        while channel.receive(_MOST_BYTES):
            has_beaten = True
    return has_beaten


# --- the monitor ----------------------------------------------------------------------------------


def beat(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> None:
    """Send beats until all connections are closed.

    Each message has a connection's key and descriptor; the last one is empty.

    Args:
        context: to the process that leads the host.
        body: the id of that process.
        descriptors: none.
    """
    leader, channels = int(body), []
    while (received := context.receive())[0]:
        key, (number,) = received
        channels.append(_sending_channel(number, key))
    while channels:
        context.look_around(0.0)
        if not process_state.is_stopped(leader):
            channels = [channel for channel in channels if _send_beat(channel)]
            name_process("lockstep:beats")  # after the first beat
        time.sleep(_PERIOD_SECONDS)


def _sending_channel(descriptor: int, key: bytes) -> Channel:
    """A channel for sending: on this connection only the leading process receives."""
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    return Channel(sock, Keys(sending=key, receiving=key))


def _send_beat(channel: Channel) -> bool:
    """Send a beat if there is room for one; False if the other host has closed the connection."""
    if not channel.has_unsent:
        channel.put(_BEAT)
    try:
        channel.flush()
    except OSError:
        channel.close()
        return False
    return True
