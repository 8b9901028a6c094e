"""Finding processes by what they inherit, and running scripts the way a user would."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.launching import STRICT

MARK = "LOCKSTEP_TEST_MARK"
TIMEOUT_SECONDS = 180.0

# A job of some steps, as short as may be. It has no ``if __name__`` guard.
JOB = """
import os, sys, time
import torch
from torch import nn
import lockstep

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
    def forward(self, x):
        in_forward(self)
        return self.layer(x)

def in_forward(net):
    pass

def train(trainer, epochs=1):
    trainer.fit((torch.ones(16, 8), torch.zeros(16, dtype=torch.long)), epochs=epochs,
                batch_size=8, verbose=0)

def make_trainer(devices=2, **options):
    return lockstep.Trainer(
        Net(), loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        strategy=lockstep.MirroredStrategy(devices=devices, **options))

def pids(trainer):
    return trainer._runner.session._team.pids()
"""


@dataclass
class Script:
    """A running script, and all processes that come from it."""

    process: "subprocess.Popen[str]"
    mark: str
    _lines: list[str] = field(default_factory=list)

    def wait_for_line(self, start: str, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
        """The rest of the next line on its output that starts so."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        for line in self.process.stdout:
            self._lines.append(line)
            if line.startswith(start):
                return line[len(start) :].strip()
            assert time.monotonic() < deadline, f"no {start!r} in {self._lines}"
        raise AssertionError(f"the script ended without {start!r}: {self._lines}")

    def finish(self, timeout_seconds: float = TIMEOUT_SECONDS) -> tuple[int, str, str]:
        """Its exit status, all it has written, and its errors."""
        out, err = self.process.communicate(timeout=timeout_seconds)
        return self.process.returncode, "".join(self._lines) + out, err

    def others(self) -> list[int]:
        """The processes that it started and that live."""
        return [pid for pid in marked(self.mark) if pid != self.process.pid]


@contextmanager
def running(
    source: str,
    *,
    directory: Path,
    command: list[str] | None = None,
    stdin: str | None = None,
    options: tuple[str, ...] = STRICT,
    terminal: int | None = None,
) -> Iterator[Script]:
    """Run a script; whatever becomes of it, nothing of it is left after the block.

    Args:
        source: of the script; written to ``script.py`` in the directory.
        directory: where it runs.
        command: the arguments of the interpreter; the script's path by default.
        stdin: what it reads on its standard input.
        options: of the interpreter.
        terminal: a terminal that becomes its standard input, in a session of its own.
    """
    path = directory / "script.py"
    path.write_text(source)
    mark = uuid.uuid4().hex
    environment = os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONUNBUFFERED", None)
    process = subprocess.Popen(
        [sys.executable, *options, *(command or [str(path)])],
        cwd=directory,
        env=environment,
        stdin=subprocess.PIPE if terminal is None else terminal,
        start_new_session=terminal is not None,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if process.stdin is not None:
        process.stdin.write(stdin or "")
        process.stdin.close()
        process.stdin = None
    try:
        yield Script(process, mark)
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait(TIMEOUT_SECONDS)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def num_kills(few: int) -> int:
    """How often to kill something at a random moment: ``few`` times, or ``LOCKSTEP_KILLS``."""
    return int(os.environ.get("LOCKSTEP_KILLS", few))


def run(source: str, *, directory: Path, **options: object) -> str:
    """Run a script to its good end; returns what it wrote. It must leave nothing behind."""
    with running(source, directory=directory, **options) as script:  # type: ignore[arg-type]
        status, out, err = script.finish()
        assert (status, err) == (0, ""), (status, out, err)
        wait_until(lambda: not script.others(), 15, lambda: f"left: {script.others()}")
    return out


def descendants(pid: int) -> list[int]:
    """A process's children, theirs, and so on."""
    found, parents = [pid], {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2]
            parents[int(entry)] = int(stat.split()[1])
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def marked(mark: str) -> list[int]:
    """Living processes whose environment has the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                if wanted in environment and is_alive(int(entry)):
                    found.append(int(entry))
    return found


def is_alive(pid: int) -> bool:
    """Whether a process exists and is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """Direct children, zombies included."""
    children = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == pid:
                    children.append(int(entry))
    return children


def wait_until(
    is_so: Callable[[], bool], seconds: float, complaint: Callable[[], str] = lambda: ""
) -> float:
    """Wait for something; returns the seconds it took."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {complaint()}"
        time.sleep(0.005)
    return time.monotonic() - began
