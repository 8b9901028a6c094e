"""Heartbeats: tell a host that is stopped from one that computes for long.

Beside the process that leads a host runs a small one, its monitor. Every second it sends a beat to
host 0, and that of host 0 to all others, unless the kernel says that the leading process is stopped
(SIGSTOP, Ctrl-Z, a debugger). Where all of the host is (a frozen cgroup, a paused container or
virtual machine), so is the monitor.

It is a process, and no thread of the leading one: a step may hold the interpreter's lock for
minutes in one call, and no thread would beat meanwhile. And the beats are its own and not the
kernel's answers on a connection, which come for a stopped process, too.

Beats are only read, and silence is only counted, by a process that waits. Before its first beat
nothing is known of a host, and the end of this connection says nothing, since the leading processes
have others: then the strategy's ``timeout_seconds`` is what limits a wait.
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
    """Those of this host, sent by its monitor, and those of the others, as they come.

    Args:
        channels: by the host at the other end; used for nothing else.

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

    def look(self, name_of: Callable[[int], str]) -> None:
        """To be called all the while that this process waits. Does not wait itself.

        Args:
            name_of: a host, for messages.

        Raises:
            HostError: one is stopped.
        """
        for host, channel in [*self._channels.items()]:
            try:
                has_beaten = _has_come(channel)
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
                raise _stopped(name_of(host))

    def close(self) -> None:
        """End the monitor, and with it the beats of this host."""
        if self._finalizer.alive:
            self._finalizer()
            show(self._diagnostics.read_new())  # what it ended of, if it was not this
            self._close_channels()

    def abandon(self) -> None:
        """In a fork of the script: the monitor is not ours."""
        if self._finalizer.detach():
            self._monitor.returncode = 0  # keeps it from being waited for, and from warning
            self._close_channels()

    def _close_channels(self) -> None:
        self._diagnostics.close()
        while self._channels:
            self._channels.popitem()[1].close()


def _has_come(channel: Channel) -> bool:
    """Whether a beat has, since the last look."""
    has_come = False
    with suppress(BlockingIOError):
        while channel.receive(_MOST_BYTES):
            has_come = True
    return has_come


def _stopped(name: str) -> HostError:
    return HostError.of_loss(
        f"{name} is stopped.",
        received=f"no sign that it runs for {process_state.STOPPED_SECONDS:g} s",
        fix="See whether its script was stopped (SIGSTOP, Ctrl-Z, a debugger), or its container "
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
    """Keys go through a pipe: everybody sees a command line."""
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
    """Send beats until nobody wants them any more.

    Args:
        leader: the process that leads the host, this one's parent.
        keys: where those of the connections can be read, one after the other.
        sockets: the connections.
    """
    die_with(leader)
    leave_signals_to_script()
    with os.fdopen(keys, "rb") as file:
        channels = [_sending(number, file.read(_KEY_BYTES)) for number in sockets]
    while channels and os.getppid() == leader:
        if not process_state.is_stopped(leader):
            channels = [channel for channel in channels if _has_beaten(channel)]
            name_process("lockstep:beats")  # from the first on
        time.sleep(_PERIOD_SECONDS)


def _sending(descriptor: int, key: bytes) -> Channel:
    """This process's end of a connection, at which the leading process alone receives."""
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    return Channel(sock, Keys(sending=key, receiving=key))


def _has_beaten(channel: Channel) -> bool:
    """Send a beat, if there is room for one; whether there is still a connection for it."""
    if not channel.has_unsent:
        channel.put(_BEAT)
    try:
        channel.flush()
    except OSError:
        return False
    return True
