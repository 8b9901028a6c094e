"""A fleet: one process per host, started from here, whose output comes here.

The processes are clients (``ssh``) of far ends as in ``held_script.py``. They get their orders on
their standard input, which stays open: closing it ends what they started. That happens to all when
one fails, and by the kernel when this process ends, however it ends.

The first host's output is written by its client itself, so that a progress display works; lines of
the others come with the host's name.
"""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

import msgspec

from lockstep.launch.held_script import GRACE_SECONDS, Orders

# For far ends to end their script, and the connection to them.
_END_SECONDS = GRACE_SECONDS + 5.0
_TICK_SECONDS = 0.1


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """What starts the script on a host.

    Attributes:
        host: its name, for messages.
        command: run here; its standard input takes the orders.
        orders: for the far end.
    """

    host: str
    command: tuple[str, ...]
    orders: Orders


def run_fleet(clients: Sequence[Client]) -> int:
    """Run all until they end; returns the exit status of the first that failed, or 0.

    Ctrl-C is passed on to the script on every host; the second one ends them all.
    """
    fleet = _Fleet()
    try:
        for index, client in enumerate(clients):
            fleet.start(client, shows_itself=index == 0)
        while fleet.is_running:
            try:
                fleet.attend()
            except KeyboardInterrupt:
                fleet.interrupt()
    finally:
        fleet.close()
    return fleet.status


class _Member:
    """A running client."""

    def __init__(self, client: Client, *, shows_itself: bool) -> None:
        self.host = client.host
        output = None if shows_itself else subprocess.PIPE
        self.process = subprocess.Popen(
            client.command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            bufsize=0,
            process_group=0,  # Ctrl-C in the terminal is for us, who pass it on
        )
        self.tell(client.orders.line())

    def tell(self, told: bytes) -> None:
        """Write to the far end, if it is there to read."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # its exit status says more
            self.process.stdin.write(told)

    def end(self) -> None:
        """Have the far end end the script."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def close(self) -> None:
        """End the client as well."""
        self.end()
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class _Fleet:
    """All clients.

    Attributes:
        status: exit status of the first that failed.
    """

    def __init__(self) -> None:
        self.status = 0
        self._members: list[_Member] = []
        self._selector = selectors.DefaultSelector()
        self._is_interrupted = False
        self._deadline = float("inf")  # for what is being ended

    @property
    def is_running(self) -> bool:
        """Whether a client runs, or has left something to show."""
        if time.monotonic() > self._deadline:
            return False
        return bool(self._running or self._selector.get_map())

    def start(self, client: Client, *, shows_itself: bool) -> None:
        """Start one."""
        member = _Member(client, shows_itself=shows_itself)
        self._members.append(member)
        streams = (member.process.stdout, sys.stdout), (member.process.stderr, sys.stderr)
        for source, target in streams:
            if source is not None:
                relay = _Relay(source.fileno(), f"[{client.host}] ", target)
                self._selector.register(source, selectors.EVENT_READ, relay)

    def attend(self) -> None:
        """Show what has come, and see who has ended."""
        # Without anything to select from it would not wait on every system.
        if not self._selector.get_map():
            time.sleep(_TICK_SECONDS)
        for key, _ in self._selector.select(_TICK_SECONDS):
            if not key.data.pass_on():
                self._selector.unregister(key.fileobj)
        for member in self._members:
            status = member.process.poll()
            if status and not self._is_ending:
                self._fail(member, status if status > 0 else 128 - status)

    def interrupt(self) -> None:
        """Pass Ctrl-C on; the second time, end all."""
        self.status = self.status or 130
        if self._is_interrupted:
            self._end()
        self._is_interrupted = True
        for member in self._running:
            member.tell(bytes([signal.SIGINT]))

    def close(self) -> None:
        """End all clients, and what they have started."""
        for member in self._members:
            member.close()
        self._selector.close()

    @property
    def _running(self) -> list[_Member]:
        return [member for member in self._members if member.process.poll() is None]

    @property
    def _is_ending(self) -> bool:
        return self._is_interrupted or self._deadline < float("inf")

    def _fail(self, member: _Member, status: int) -> None:
        self.status = status
        others = ", the others are ended" if self._running else ""
        print(  # noqa: T201
            f"lockstep run: {member.host} failed with exit status {status}{others}.",
            file=sys.stderr,
        )
        self._end()

    def _end(self) -> None:
        for member in self._members:
            member.end()
        self._deadline = time.monotonic() + _END_SECONDS


class _Relay:
    """Copies whole lines, each with a prefix."""

    def __init__(self, source: int, prefix: str, target: TextIO) -> None:
        self._source = source
        self._prefix = prefix
        self._target = target
        self._rest = b""

    def pass_on(self) -> bool:
        """Copy what has come; False at the end."""
        new = os.read(self._source, 1 << 16)
        *lines, self._rest = (self._rest + new).split(b"\n")
        if not new and self._rest:
            lines.append(self._rest)
        for line in lines:
            self._target.write(f"{self._prefix}{line.decode(errors='replace')}\n")
        self._target.flush()
        return bool(new)
