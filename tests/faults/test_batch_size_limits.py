"""The search for a batch size survives what a batch that is too large does to a process.

The limits are real ones: a control group's, which kills, and the process's own (``ulimit -d``),
which lets allocations fail. The scripts have no ``if __name__`` guard, and their model's class is
known to ``__main__`` only.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.processes import run, running, wait_until

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 1_500_000_000

SCRIPT = """
import os, resource, signal, sys
from pathlib import Path
import torch
from torch import nn
import lockstep

{limit}
torch.set_num_threads(1)

class Hungry(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        if len(x) > {most}:
            torch.ones({ballast} // 4)
        return self.layer(x)

trainer = lockstep.Trainer(
    Hungry(), loss=nn.CrossEntropyLoss(), optimizer=torch.optim.Adam,
    strategy=lockstep.MirroredStrategy(1))
search = lockstep.BatchSizeSearch({search})
trainer.fit((torch.randn(200, 4), torch.arange(200) % 3), batch_size=search)
print("took", trainer.batch_size)
"""

JOIN = 'Path("{group}/cgroup.procs").write_text(str(os.getpid()))'
RESTRICT = "resource.setrlimit(resource.RLIMIT_DATA, ({0}, {0}))"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit."""
    path = GROUPS / f"lockstep-batch-size-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"control groups for memory cannot be made here: {error}")
    try:
        (path / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        yield path
    finally:
        path.rmdir()


def script(limit: str, *, most: int, ballast: int, search: str) -> str:
    return SCRIPT.format(limit=limit, most=most, ballast=ballast, search=search)


def kills(group: Path) -> int:
    """How often the kernel has killed for the group's limit."""
    lines = (line.split() for line in (group / "memory.oom_control").read_text().splitlines())
    return int(dict(lines)["oom_kill"])


@pytest.mark.exhaustive
def test_a_trial_that_the_kernel_kills_is_too_large(group: Path, tmp_path: Path) -> None:
    limit = JOIN.format(group=group)
    source = script(limit, most=6, ballast=2 * LIMIT_BYTES, search="largest=8")
    printed = run(source, directory=tmp_path)
    assert kills(group) > 0
    assert "killed by SIGKILL: memory ran out, and the kernel has killed" in printed
    assert [line.split()[0] for line in printed.splitlines()[1:4]] == ["8", "4", "6"]
    assert printed.split()[-1] in ("4", "6")


@pytest.mark.exhaustive
def test_a_trial_whose_allocations_fail_is_too_large(tmp_path: Path) -> None:
    limit = 3 << 30
    search = 'objective="memory", smallest=64, largest=128'
    source = script(RESTRICT.format(limit), most=100, ballast=2 * limit, search=search)
    printed = run(source, directory=tmp_path, command=["-"], stdin=source)
    assert "allocate memory" in printed
    assert "took 96" in printed


@pytest.mark.exhaustive
def test_control_c_ends_the_trials_and_leaves_nothing(tmp_path: Path) -> None:
    source = script("", most=8, ballast=8, search="smallest=8").replace(
        "torch.ones(8 // 4)", "(print('hangs', flush=True), __import__('time').sleep(60))"
    )
    with running(source, directory=tmp_path) as job:
        job.wait_for_line("hangs")
        job.process.send_signal(signal.SIGINT)
        status, _, err = job.finish(20)
        assert (status, "KeyboardInterrupt" in err) == (-signal.SIGINT, True), err
        wait_until(lambda: not job.others(), 15, lambda: str(job.others()))
