"""Runs the script on several hosts, and watches it from this machine.

On each host runs an agent (``remote_agent``), reached over ssh or through a Ray actor. It sends the
script's output here, gets signals from here, and ends when its input is closed. When the script of
one host fails, all agents are ended.

The first host's output is shown unchanged, so that a progress display works; the other hosts' lines
are shown with the host's name. A script's output must not control this terminal: of the first
host's escape sequences, those of progress displays are kept (colours, cursor movement, erasing); of
the others' none are.

An ``AgentProcess`` is a process of this machine: an agent, or the ssh client of one.
"""

import codecs
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Protocol, TextIO

from lockstep.errors import printable
from lockstep.launch.launchers.launch_spec import INTERRUPT, LaunchSpec
from lockstep.launch.launchers.remote_agent import GRACE_SECONDS

AGENT_ARGUMENTS = ("-m", "lockstep.launch.launchers.remote_agent")

# A script's new output and errors; and its exit status, when it has ended and all output was read.
Progress = tuple[tuple[bytes, bytes], int | None]

_MOST_BYTES = 1 << 20


class Agent(Protocol):
    """Runs the script on one host."""

    def read(self) -> Progress | None:
        """New output, and the exit status; None if there is no answer yet. Does not wait."""

    def write(self, data: bytes) -> None:
        """Write to its input."""

    def end(self) -> None:
        """Request the script's end; does not wait."""

    def close(self) -> None:
        """Close all local resources, even if the script has not ended."""


class AgentProcess:
    """An agent, or the ssh client of one.

    Args:
        command: starts it.
        spec: sent to the agent.
    """

    def __init__(self, command: Sequence[str], spec: LaunchSpec) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,  # Ctrl-C in the terminal reaches this process, which passes it on
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._streams = (self._process.stdout, self._process.stderr)
        for stream in self._streams:
            os.set_blocking(stream.fileno(), False)
        self.write(spec.line())

    def read(self) -> Progress:
        """New output, and the exit status. Does not wait."""
        status = self._process.poll()  # before the read, which then gets the last output, too
        output, errors = (stream.read(_MOST_BYTES) or b"" for stream in self._streams)
        if status is None or output or errors:
            return (output, errors), None
        return (b"", b""), status if status >= 0 else 128 - status

    def write(self, data: bytes) -> None:
        """Write to its input."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended: the exit status says why
            self._process.stdin.write(data)

    def end(self) -> None:
        """Close the agent's input, which ends the script."""
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

# The time for agents to end their scripts, and for their connections to close.
_END_SECONDS = GRACE_SECONDS + 5.0


class Member:
    """The script on one host.

    Args:
        host: the host's name, for messages.
        prefix: of the shown lines; see ``Relay``.
        agent: runs the script there.

    Attributes:
        status: the script's exit status; None until it has ended and all output is shown.
    """

    def __init__(self, host: str, prefix: str, agent: Agent) -> None:
        self.host = host
        self.agent = agent
        self.status: int | None = None
        self._relays = [Relay(prefix, sys.stdout), Relay(prefix, sys.stderr)]

    def show_output(self) -> None:
        """Show new output, and set ``status`` if the script has ended; does not wait."""
        while self.status is None and (progress := self.agent.read()):
            written, self.status = progress
            for relay, new in zip(self._relays, written, strict=True):
                relay.write(new, is_last=self.status is not None)
            if not any(written):
                break


# Sequences of progress displays (ECMA-48): styles; cursor movement and erasing; hiding and showing
# the cursor.
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_DISPLAY_SEQUENCE = re.compile(r"\x1b\[[0-9;]*[A-HJKm]|\x1b\[\?25[hl]|[\r\b]")
_UNFINISHED = re.compile(r"\x1b(\[[?0-9;]{0,16})?\Z")


class Relay:
    """Shows a host's output.

    Args:
        prefix: of each line. If it is empty, incomplete lines are shown at once, and progress
            displays work.
        target: the stream to write to.
    """

    def __init__(self, prefix: str, target: TextIO) -> None:
        self._prefix = prefix
        self._target = target
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def write(self, new: bytes, *, is_last: bool = False) -> None:
        """Show more output; the last piece may be empty."""
        text = self._rest + self._decoder.decode(new, is_last)
        self._target.write(
            self._lines(text, is_last) if self._prefix else self._piece(text, is_last)
        )
        self._target.flush()

    def _lines(self, text: str, is_last: bool) -> str:
        *lines, self._rest = text.split("\n")
        if is_last and self._rest:
            lines.append(self._rest)
        return "".join(f"{self._prefix}{_final_text(line)}\n" for line in lines)

    def _piece(self, text: str, is_last: bool) -> str:
        unfinished = None if is_last else _UNFINISHED.search(text)
        end = len(text) if unfinished is None else unfinished.start()
        text, self._rest = text[:end], text[end:]
        kept = [*_DISPLAY_SEQUENCE.findall(text), ""]
        parts = map(printable, _DISPLAY_SEQUENCE.split(text))
        return "".join(chain.from_iterable(zip(parts, kept, strict=True)))


def _final_text(line: str) -> str:
    """The final text of a line that was overwritten after carriage returns; without styles."""
    return printable(_STYLE.sub("", line.rstrip("\r")).rpartition("\r")[2])


def run_members(starts: Iterable[tuple[str, Callable[[], Agent]]]) -> int:
    """Run the script on all hosts; returns the exit status of the first that failed, or 0.

    Args:
        starts: each host's name, and a function that starts its agent.
    """
    members: list[Member] = []
    try:
        for number, (host, start) in enumerate(starts):
            members.append(Member(host, f"[{host}] " if number else "", start()))
        return _watch(members)
    finally:
        for member in members:
            member.agent.close()


def _watch(members: Sequence[Member]) -> int:
    """Watch until all have ended; returns the exit status of the first that failed, or 0.

    Ctrl-C is passed on to the script on every host; the second one ends them all.
    """
    status, num_interrupts, deadline = 0, 0, float("inf")
    with _counted_interrupts() as interrupts:
        while any(member.status is None for member in members) and time.monotonic() < deadline:
            for member in members:
                member.show_output()
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
                    member.agent.write(INTERRUPT)
            time.sleep(_TICK_SECONDS)
    return status


def _show_failure(failed: Member, members: Sequence[Member]) -> None:
    others = any(member.status is None for member in members)
    print(  # noqa: T201
        f"lockstep: {failed.host} failed with exit status {failed.status}"
        f"{'; ending the others' if others else ''}.",
        file=sys.stderr,
    )


def _end(members: Sequence[Member]) -> float:
    """Request the end of all scripts; returns the deadline for it."""
    for member in members:
        member.agent.end()
    return time.monotonic() + _END_SECONDS


@contextmanager
def _counted_interrupts() -> Iterator[list[int]]:
    """Within the block, count Ctrl-C: libraries may not survive a KeyboardInterrupt."""
    noted: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, previous)
