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
    strategy=lockstep.{strategy})
search = lockstep.BatchSizeSearch(objective="memory", smallest={smallest})
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


def script(
    limit: str, *, most: int, ballast: int, smallest: int = 8, strategy: str = "MirroredStrategy(1)"
) -> str:
    return SCRIPT.format(
        limit=limit, most=most, ballast=ballast, smallest=smallest, strategy=strategy
    )


def kills(group: Path) -> int:
    """How often the kernel has killed for the group's limit."""
    lines = (line.split() for line in (group / "memory.oom_control").read_text().splitlines())
    return int(dict(lines)["oom_kill"])


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 2])
def test_a_trial_that_the_kernel_kills_is_too_large(
    group: Path, tmp_path: Path, devices: int
) -> None:
    source = script(
        JOIN.format(group=group),
        most=40,  # of each replica
        ballast=2 * LIMIT_BYTES,
        smallest=32,
        strategy=f"MirroredStrategy({devices})",
    )
    printed = run(source, directory=tmp_path)
    assert kills(group) > 0
    assert "killed by SIGKILL: memory ran out, and the kernel has killed" in printed
    taken = int(printed.split()[-1])
    assert 35 * devices <= taken <= 40 * devices, printed


@pytest.mark.thorough
def test_the_script_goes_down_from_a_first_size_that_is_killed(group: Path, tmp_path: Path) -> None:
    source = script(JOIN.format(group=group), most=6, ballast=2 * LIMIT_BYTES).replace(
        "smallest=8", "largest=8"
    )
    printed = run(source, directory=tmp_path)
    assert kills(group) > 0
    assert [line.split()[0] for line in printed.splitlines()[1:4]] == ["8", "4", "6"]
    assert "took 6" in printed


@pytest.mark.thorough
@pytest.mark.parametrize("as_script", [True, False], ids=["a script", "piped into python -"])
def test_a_trial_whose_allocations_fail_is_too_large(tmp_path: Path, as_script: bool) -> None:
    limit = 3 << 30
    source = script(RESTRICT.format(limit), most=100, ballast=2 * limit, smallest=64)
    printed = run(
        source,
        directory=tmp_path,
        command=None if as_script else ["-"],
        stdin=None if as_script else source,
    )
    assert "allocate memory" in printed
    assert "took 96" in printed


@pytest.mark.thorough
def test_no_size_that_fits_is_an_error(tmp_path: Path) -> None:
    limit = 3 << 30
    source = script(RESTRICT.format(limit), most=0, ballast=2 * limit)
    with running(source, directory=tmp_path) as job:
        status, _, err = job.finish()
    assert status == 1
    assert "DeviceError: There is not enough memory to train with batches of 8." in err


@pytest.mark.thorough
def test_control_c_ends_the_trials_and_leaves_nothing(tmp_path: Path) -> None:
    source = script("", most=8, ballast=8).replace(
        "torch.ones(8 // 4)", "(print('hangs', flush=True), __import__('time').sleep(60))"
    )
    with running(source, directory=tmp_path) as job:
        job.wait_for_line("hangs")
        job.process.send_signal(signal.SIGINT)
        status, _, err = job.finish(20)
        assert (status, "KeyboardInterrupt" in err) == (-signal.SIGINT, True), err
        wait_until(lambda: not job.others(), 15, lambda: str(job.others()))
