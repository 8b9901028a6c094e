"""Time of a step with the optimizer's slots in a file, beside the slower of computing and the disk.

8 x Linear(3072), Adam, one device. Measured: a step with slots in memory, a step with slots in a
file, and the same traffic of the file without a step. Of each the median of the later ones. Run:
``python bench/offload.py --offload DIRECTORY``.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.comm.shared_memory.file_region import FileRegion, in_turn

WIDTH, LAYERS, STEPS = 3072, 8, 10
WINDOW_ELEMENTS = 1 << 19


class Clock(lockstep.Callback):
    """Notes when each step ends."""

    is_observer = True

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.times.append(time.perf_counter())


def step_seconds(batch_size: int, offload: str | None) -> float:
    """Of one device, once its slots exist."""
    clock = Clock()
    trainer = lockstep.Trainer(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-4),
        strategy=lockstep.FullyShardedStrategy(1, offload=offload),
        callbacks=[clock],
    )
    data = torch.randn(batch_size, WIDTH).repeat(STEPS, 1)
    trainer.fit((data, data), batch_size=batch_size, verbose=0, shuffle=False)
    return median_of(clock.times)


def median_of(times: list[float]) -> float:
    """The median time between two moments, of the later ones."""
    return statistics.median(after - before for before, after in pairwise(times[2:]))


def disk_seconds(directory: str) -> float:
    """Of reading and writing both slots of all parameters."""
    elements = LAYERS * (WIDTH * WIDTH + WIDTH)
    region = FileRegion.create_in(directory, 8 * elements)
    slots = [
        region.tensor(4 * number * elements, torch.float32, (elements,), (1,)) for number in (0, 1)
    ]
    windows = list(zip(*(slot.split(WINDOW_ELEMENTS) for slot in slots), strict=True))
    times = []
    for _ in range(STEPS // 2):
        for number in in_turn(windows):
            for part in windows[number]:
                part[::1024] += 1  # each page is changed
        times.append(time.perf_counter())
    return median_of(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--offload", default=tempfile.gettempdir(), help="a directory on a disk")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 512])
    options = parser.parse_args()
    torch.set_num_threads(1)
    disk = disk_seconds(options.offload)
    print(f"the file alone: {disk:.2f} s", flush=True)
    for batch_size in options.batch_sizes:
        computing, both = (step_seconds(batch_size, one) for one in (None, options.offload))
        part = max(computing, disk) / both
        times = f"{computing:.2f} s in memory, {both:.2f} s with the file"
        print(f"batch {batch_size}: {times}, {part:.0%} of the slower part's speed")


if __name__ == "__main__":
    main()
