"""A fleet: the script on several hosts, watched from here.

What runs on a host is a ``held_script.py``, reached over ssh or through a Ray actor: its output
comes here, signals go there, and it ends when it is no longer held. That happens to all when one
fails.

The first host's output is shown as it comes, so that a progress display works; lines of the others
come with the host's name. What a script writes reaches this terminal, but does not command it: of
the first host what displays need goes through (colours, and moving about to write anew), of the
others nothing does.

A ``HeldProcess``, on this machine, holds the script of a host, here or at the far end of ssh.
"""

import codecs
import os
import re
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TextIO

from lockstep.errors import printable
from lockstep.launch.launchers.launch_spec import Orders
from lockstep.launch.launchers.remote_agent import GRACE_SECONDS

HOLD_SCRIPT = ("-m", "lockstep.launch.launchers.remote_agent")

# What a script has written to its output and errors since it was last asked; and its exit status,
# once it has ended and all that it wrote was read.
Progress = tuple[tuple[bytes, bytes], int | None]

_MOST_BYTES = 1 << 20


class HeldProcess:
    """``held_script.py`` or what leads to it: takes orders on its input, and is read from.

    Args:
        command: to start it.
        orders: for the script.
    """

    def __init__(self, command: Sequence[str], orders: Orders) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,  # Ctrl-C in the terminal is for us, who pass it on
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._streams = (self._process.stdout, self._process.stderr)
        for stream in self._streams:
            os.set_blocking(stream.fileno(), False)
        self.tell(orders.line())

    def read(self) -> Progress:
        """How far it is. Does not wait."""
        status = self._process.poll()  # before reading: what it wrote last is read, too
        output, errors = (stream.read(_MOST_BYTES) or b"" for stream in self._streams)
        if status is None or output or errors:
            return (output, errors), None
        return (b"", b""), status if status >= 0 else 128 - status

    def tell(self, told: bytes) -> None:
        """Write to its input."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # nobody reads: the exit status says why
            self._process.stdin.write(told)

    def end(self) -> None:
        """Have the script ended."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        """Kill the process."""
        self.end()
        self._process.kill()
        self._process.wait()
        for stream in self._streams:
            stream.close()


_TICK_SECONDS = 0.05

# For far ends to end their script, and the connection to them.
_END_SECONDS = GRACE_SECONDS + 5.0


class Member(ABC):
    """The script on one host.

    Args:
        host: the host's name, for messages.
        prefix: of the lines that are shown; see ``Relay``.

    Attributes:
        status: the script's exit status; None until it has ended and all that it wrote is shown.
    """

    def __init__(self, host: str, prefix: str) -> None:
        self.host = host
        self.status: int | None = None
        self._relays = [Relay(prefix, sys.stdout), Relay(prefix, sys.stderr)]

    @abstractmethod
    def read(self) -> Progress | None:
        """How far the script is; None where that is not known yet. Does not wait."""

    def attend(self) -> None:
        """Show what has come, and see whether the script has ended; does not wait."""
        while self.status is None and (progress := self.read()):
            written, self.status = progress
            for relay, new in zip(self._relays, written, strict=True):
                relay.write(new, is_last=self.status is not None)
            if not any(written):
                break

    @abstractmethod
    def interrupt(self) -> None:
        """Pass Ctrl-C on to the script."""

    @abstractmethod
    def end(self) -> None:
        """Have the far end end the script; does not wait."""

    @abstractmethod
    def close(self) -> None:
        """Give up all that is here, whether the far end has obeyed or not."""


# Sequences that progress displays use (ECMA-48): colours and styles; moving the cursor, erasing;
# hiding the cursor, and showing it again.
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_OF_DISPLAYS = re.compile(r"\x1b\[[0-9;]*[A-HJKm]|\x1b\[\?25[hl]|[\r\b]")
_UNFINISHED = re.compile(r"\x1b(\[[?0-9;]{0,16})?\Z")


class Relay:
    """Shows what a host writes.

    Args:
        prefix: of each line; where it is empty, nothing waits for a line to be whole, and progress
            displays work.
        target: where.
    """

    def __init__(self, prefix: str, target: TextIO) -> None:
        self._prefix = prefix
        self._target = target
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def write(self, new: bytes, *, is_last: bool = False) -> None:
        """Show more; the last may be nothing."""
        text = self._rest + self._decoder.decode(new, is_last)
        self._target.write(
            self._lines(text, is_last) if self._prefix else self._piece(text, is_last)
        )
        self._target.flush()

    def _lines(self, text: str, is_last: bool) -> str:
        *lines, self._rest = text.split("\n")
        if is_last and self._rest:
            lines.append(self._rest)
        return "".join(f"{self._prefix}{_plain(line)}\n" for line in lines)

    def _piece(self, text: str, is_last: bool) -> str:
        unfinished = None if is_last else _UNFINISHED.search(text)
        end = len(text) if unfinished is None else unfinished.start()
        text, self._rest = text[:end], text[end:]
        kept = [*_OF_DISPLAYS.findall(text), ""]
        parts = map(printable, _OF_DISPLAYS.split(text))
        return "".join(chain.from_iterable(zip(parts, kept, strict=True)))


def _plain(line: str) -> str:
    """A line as it stands in the end, where parts of it were written over; without styles."""
    return printable(_STYLE.sub("", line.rstrip("\r")).rpartition("\r")[2])


def watch(members: Sequence[Member]) -> int:
    """Watch until all have ended; returns the exit status of the first that failed, or 0.

    Ctrl-C is passed on to the script on every host; the second one ends them all.
    """
    status, num_interrupts, deadline = 0, 0, float("inf")  # the last for what is being ended
    with _counted_interrupts() as interrupts:
        while any(member.status is None for member in members) and time.monotonic() < deadline:
            for member in members:
                member.attend()
                if member.status and not status:
                    status = member.status
                    _show_failure(member, members)
                    deadline = _end(members)
            while len(interrupts) > num_interrupts:
                num_interrupts += 1
                status = status or 130
                if num_interrupts > 1:
                    deadline = _end(members)
                for member in members:
                    member.interrupt()
            time.sleep(_TICK_SECONDS)
    return status


def _show_failure(failed: Member, members: Sequence[Member]) -> None:
    others = any(member.status is None for member in members)
    print(  # noqa: T201
        f"lockstep: {failed.host} failed with exit status {failed.status}"
        f"{', the others are ended' if others else ''}.",
        file=sys.stderr,
    )


def _end(members: Sequence[Member]) -> float:
    """Have all far ends end their script; returns until when they have time."""
    for member in members:
        member.end()
    return time.monotonic() + _END_SECONDS


@contextmanager
def _counted_interrupts() -> Iterator[list[int]]:
    """Ctrl-C is noted here: libraries that members use need not outlive a KeyboardInterrupt."""
    noted: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, previous)
