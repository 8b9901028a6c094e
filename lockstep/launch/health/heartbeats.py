"""Heartbeats: distinguish a stopped host from one that computes for long.

A small process, the monitor, runs beside the process that leads a host. Every second it sends a
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
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from lockstep.channel.keys import Keys
from lockstep.channel.polling import Stopwatch
from lockstep.channel.records import TamperedError
from lockstep.channel.sealed_channel import Channel, lost
from lockstep.errors import HostError
from lockstep.launch.forks import give_up_in_forks
from lockstep.launch.health.diagnostics import DiagnosticsFile, show
from lockstep.launch.workers import process_state
from lockstep.launch.workers.helper import die_with, leave_signals_to_script, name_process
from lockstep.launch.workers.interpreter import start_interpreter

_BEAT = b"."
_PERIOD_SECONDS = 1.0
_MOST_BYTES = 1 << 12
_KEY_BYTES = 32
_END_TIMEOUT_SECONDS = 5.0


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
        self._diagnostics = DiagnosticsFile()
        try:
            self._monitor = _start_monitor([*channels.values()], self._diagnostics)
        except BaseException:
            self._close_channels()
            raise
        self._finalizer = weakref.finalize(self, _end, self._monitor)
        give_up_in_forks(self, "abandon")

    def check(self, name_of: Callable[[int], str]) -> None:
        """Read beats. Call it repeatedly while this process waits; it does not wait itself.

        Args:
            name_of: returns a host's name, for messages.

        Raises:
            HostError: one is stopped.
        """
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
                raise _stopped_error(name_of(host))

    def close(self) -> None:
        """End the monitor, and with it the beats of this host."""
        if self._finalizer.alive:
            self._finalizer()
            show(self._diagnostics.read_new())  # its error, if it ended by itself
            self._close_channels()

    def abandon(self) -> None:
        """In a fork of the script, whose parent owns the monitor: close this end's files."""
        if self._finalizer.detach():
            self._monitor.returncode = 0  # Popen then neither waits for it nor warns
            self._close_channels()

    def _close_channels(self) -> None:
        self._diagnostics.close()
        while self._channels:
            self._channels.popitem()[1].close()


def _has_received_beat(channel: Channel) -> bool:
    """Read all beats that have arrived; True if there was one."""
    has_beaten = False
    with suppress(BlockingIOError):
        while channel.receive(_MOST_BYTES):
            has_beaten = True
    return has_beaten


def _stopped_error(name: str) -> HostError:
    return HostError.of_loss(
        f"{name} is stopped.",
        received=f"no heartbeat for {process_state.STOPPED_SECONDS:g} s",
        fix="Check whether its script was stopped (SIGSTOP, Ctrl-Z, a debugger), or its container "
        "or virtual machine paused.",
    )


def _end(monitor: "subprocess.Popen[bytes]") -> None:
    monitor.kill()
    with suppress(subprocess.TimeoutExpired):
        monitor.wait(_END_TIMEOUT_SECONDS)


# --- the monitor ----------------------------------------------------------------------------------


def _start_monitor(
    channels: Sequence[Channel], diagnostics: DiagnosticsFile
) -> "subprocess.Popen[bytes]":
    """Start it. The keys go through a pipe, because all users can read a command line."""
    reader, writer = os.pipe()
    sockets = [channel.fileno() for channel in channels]
    try:
        os.write(writer, b"".join(channel.keys.sending for channel in channels))
        call = f"beat({os.getpid()}, {reader}, {sockets})"
        code = f"from lockstep.launch.health.heartbeats import beat\n{call}"
        return start_interpreter(code, (reader, *sockets), diagnostics, threads=None)
    finally:
        os.close(reader)
        os.close(writer)


def beat(leader: int, keys: int, sockets: Sequence[int]) -> None:
    """Send beats until all connections are closed or the leading process has ended.

    Args:
        leader: the id of the process that leads the host, this one's parent.
        keys: a descriptor from which the connections' keys can be read, one after the other.
        sockets: the connections' descriptors.
    """
    die_with(leader)
    leave_signals_to_script()
    with os.fdopen(keys, "rb") as file:
        channels = [_sending_channel(number, file.read(_KEY_BYTES)) for number in sockets]
    while channels and os.getppid() == leader:
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
    """Send a beat if there is room for one; False if the connection is closed."""
    if not channel.has_unsent:
        channel.put(_BEAT)
    try:
        channel.flush()
    except OSError:
        return False
    return True
