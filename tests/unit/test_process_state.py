"""When a process that others wait for counts as lost."""

import os
import signal
import subprocess

import pytest

from lockstep.launch.workers import process_state
from lockstep.launch.workers.process_state import StoppedProcessTimer


class _Calls:
    """A stopwatch that counts calls in place of seconds."""

    def __init__(self) -> None:
        self._count = 0

    def tick(self) -> int:
        self._count += 1
        return self._count


def test_stops_that_end_are_not_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a debugger or a tracer stops a process, for moments, in a long step."""
    monkeypatch.setattr(process_state, "Stopwatch", _Calls)
    monkeypatch.setattr(process_state, "STOPPED_SECONDS", 3)
    with subprocess.Popen(["sleep", "600"]) as process:
        timer = StoppedProcessTimer()

        def is_lost(times: int) -> list[bool]:
            return [timer.is_over_limit(process.pid, 60.0) for _ in range(times)]

        try:
            for _ in range(3):
                _send(process.pid, signal.SIGSTOP)
                assert is_lost(2) == [False, False]
                _send(process.pid, signal.SIGCONT)
                assert is_lost(1) == [False]
            _send(process.pid, signal.SIGSTOP)
            assert is_lost(3) == [False, False, True]
        finally:
            process.kill()


def _send(pid: int, number: signal.Signals) -> None:
    """Stop or continue a child, and wait until it has."""
    os.kill(pid, number)
    os.waitpid(pid, os.WUNTRACED if number == signal.SIGSTOP else os.WCONTINUED)
