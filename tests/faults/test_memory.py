"""A model that no process has the memory for, but three have.

Every process of the training has a control group of its own, with a limit: what is more is killed
by the kernel. That needs the right to make control groups.
"""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 1_300_000_000
WIDTH, NUM_LAYERS = 3072, 12  # 0.45 GB of parameters, with gradients and Adam's slots 1.8 GB

SCRIPT = """
    import sys, threading, time
    from functools import partial
    from pathlib import Path
    import torch
    from torch import nn
    import lockstep

    def limited(folder: Path) -> None:
        '''Give each process a limit of its own, helpers as soon as they are there.'''
        import os
        seen = {}
        def watch() -> None:
            while True:
                pids = [os.getpid()]
                for pid in pids:
                    for task in Path(f"/proc/{pid}/task").glob("*/children"):
                        try:
                            pids += [int(child) for child in task.read_text().split()]
                        except OSError:
                            pass
                for pid in pids:
                    if pid not in seen:
                        own = folder / f"process-{len(seen)}"
                        own.mkdir()
                        (own / "memory.limit_in_bytes").write_text(LIMIT)
                        (own / "cgroup.procs").write_text(str(pid))
                        seen[pid] = own
                started.set()
                time.sleep(0.002)
        started = threading.Event()
        threading.Thread(target=watch, daemon=True).start()
        started.wait()

    def make() -> nn.Module:
        layers = []
        for _ in range(NUM_LAYERS):
            layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 3))

    strategy, folder, target, LIMIT = sys.argv[1:5]
    WIDTH, NUM_LAYERS = map(int, sys.argv[5:])
    torch.set_num_threads(1)
    limited(Path(folder))
    trainer = lockstep.Trainer(
        make,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-4, fused=True),
        strategy=eval(strategy),
    )
    data = torch.randn(24, WIDTH), torch.arange(24) % 3
    trainer.fit(data, epochs=2, batch_size=12, verbose=0)
    trainer.save(target)
    print("saved")
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A control group to make others in."""
    path = GROUPS / f"lockstep-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"control groups for memory cannot be made here: {error}")
    yield path
    for group in [*path.glob("process-*"), path]:
        group.rmdir()


def train(strategy: str, folder: Path, target: Path) -> "subprocess.CompletedProcess[str]":
    arguments = [strategy, folder, target, LIMIT_BYTES, WIDTH, NUM_LAYERS]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.exhaustive
def test_one_process_is_killed(folder: Path, tmp_path: Path) -> None:
    done = train("lockstep.SingleDeviceStrategy()", folder, tmp_path / "weights.safetensors")
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "weights.safetensors").exists()


@pytest.mark.exhaustive
def test_three_stages_train_and_save(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    done = train("lockstep.PipelineStrategy(stages=3, microbatches=2)", folder, target)
    assert done.returncode == 0, done.stderr
    with safe_open(target, "pt") as file:
        assert len(file.keys()) == 2 * (NUM_LAYERS + 1)
    peaks = [
        int((group / "memory.max_usage_in_bytes").read_text()) for group in folder.glob("process-*")
    ]
    assert len(peaks) == 4  # the script, the template of its helpers, two helpers
    assert max(peaks) <= LIMIT_BYTES
