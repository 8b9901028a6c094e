"""What keeping a training costs: checkpoints every 10 steps, copies for restarts, the run's record.

The wide MLP 784-4096-4096-10 with Adam, on two replicas: 240 MB of weights and slots. Every round
makes a ``fit`` with each of them and one without, on the same helpers, in turns; a ratio is that
of the seconds of a step within such a pair, of the steps after the first copy, and the table shows
the median over the rounds. Beside it, on rank 0:

- what a step waits: seconds in which training stands still for a copy;
- the processor time of the threads that write, which two busy cores have to give as well.

Before that the floors of this machine: copying so many bytes on one core, into memory that was
used before and into new memory; hashing; writing, without and with a sync to the disk.

Run: ``python bench/checkpoint_cost.py [--rounds 8] [--parts checkpoint restarts record]``
"""

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from nets import NETS

import lockstep
from lockstep.checkpoint import generations
from lockstep.train.checkpointing import checkpoint_files
from lockstep.train.fault_tolerance.copies import Copies
from lockstep.train.resume.fit_checkpoints import FitCheckpoints

NET = NETS["wide"]
STATE_BYTES = 3 * 4 * sum(one.numel() for one in NET.make_model().parameters())

Fit = Callable[..., Any]


@contextmanager
def without_copies() -> Iterator[None]:
    """Within the block no ``fit`` keeps copies in memory, as each does where there is room."""
    own = FitCheckpoints._needs_local
    FitCheckpoints._needs_local = lambda *arguments: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        FitCheckpoints._needs_local = own  # type: ignore[method-assign]


@dataclass(frozen=True)
class Part:
    """Something that keeps a training.

    Attributes:
        options: of ``fit``, for a folder.
        waits: the class and method in which training waits for it; None where there is none.
        without: around the ``fit`` that it is compared with.
        num_steps: of a ``fit``.
    """

    options: Callable[[str], dict[str, Any]]
    waits: tuple[Any, str] | None = None
    without: Callable[[], AbstractContextManager[None]] = nullcontext
    num_steps: int = 42


PARTS = {
    "checkpoint": Part(
        lambda folder: {"checkpoint": lockstep.Checkpoint(folder, "10 steps", 1)},
        waits=(Copies, "take"),
    ),
    "restarts": Part(
        lambda folder: {"restarts": 3},
        waits=(Copies, "take"),
        without=without_copies,
        num_steps=84,  # copies come seldom
    ),
    "record": Part(lambda folder: {"record": folder}),
}
# The first copy takes new memory, and is told apart from the others.
FIRST_STEP = 18


class StepClock(lockstep.Callback):
    """Notes when steps end."""

    is_observer = True

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.times.clear()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.times.append(time.perf_counter())

    def seconds_of_step(self) -> float:
        """Of the steps after the first ones; the last ones are left for what is still written."""
        last = len(self.times) - 2
        return (self.times[last] - self.times[FIRST_STEP]) / (last - FIRST_STEP)


@contextmanager
def timed(place: Any, name: str, clock: Callable[[], float]) -> Iterator[list[float]]:
    """Within the block a function is timed; gives the seconds of each call."""
    own, seconds = getattr(place, name), []

    @wraps(own)
    def act(*arguments: Any, **options: Any) -> Any:
        began = clock()
        try:
            return own(*arguments, **options)
        finally:
            seconds.append(clock() - began)

    setattr(place, name, act)
    try:
        yield seconds
    finally:
        setattr(place, name, own)


def floors() -> dict[str, float]:
    """Seconds of this machine for as many bytes as a copy has, each the best of five."""
    source = torch.rand(STATE_BYTES // 4)
    target = source.clone()
    data = source.numpy().data
    with tempfile.TemporaryFile(dir=".") as file:
        acts: dict[str, Callable[[], object]] = {
            "copy": lambda: target.copy_(source),
            "copy into new memory": lambda: source.clone(),
            "hash": lambda: hashlib.sha256(data).digest(),
            "write": lambda: (file.seek(0), os.write(file.fileno(), data)),
            "write and sync": partial(_written, file.fileno(), data),
        }
        return {name: min(_seconds(act) for _ in range(5)) for name, act in acts.items()}


def _written(file: int, data: memoryview) -> None:
    os.lseek(file, 0, os.SEEK_SET)
    os.write(file, data)
    os.fsync(file)


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


@dataclass(frozen=True)
class Pair:
    """A ``fit`` without a part, and one with it.

    Attributes:
        without: seconds of a step.
        kept: likewise, with it.
        waits: seconds of each copy that training has waited for.
        writes: processor time of a checkpoint's files.
    """

    without: float
    kept: float
    waits: list[float]
    writes: list[float]


def pair(part: Part, fit: Fit, clock: StepClock, number: int) -> Pair:
    """One round; every other one begins with what the part adds."""
    steps: dict[bool, float] = {}
    waits: list[float] = []
    writes: list[float] = []
    for is_kept in (True, False) if number % 2 else (False, True):
        with nullcontext() if is_kept else part.without():
            steps[is_kept] = fit_once(part, fit, clock, waits, writes, is_kept=is_kept)
    return Pair(without=steps[False], kept=steps[True], waits=waits, writes=writes)


def fit_once(
    part: Part,
    fit: Fit,
    clock: StepClock,
    waits: list[float],
    writes: list[float],
    *,
    is_kept: bool,
) -> float:
    """Seconds of a step; what is waited for and written where it is kept goes into the lists."""
    data = NET.make_data(part.num_steps * NET.batch_size)
    waiting: AbstractContextManager[list[float]]
    waiting = nullcontext([]) if part.waits is None else timed(*part.waits, time.perf_counter)
    with (
        tempfile.TemporaryDirectory(dir=".") as folder,
        waiting as waited,
        timed(checkpoint_files, "write_generation", time.perf_counter) as written,
        timed(generations, "_write_shard", time.thread_time) as files,
    ):
        fit(data, batch_size=NET.batch_size, verbose=0, **part.options(folder) if is_kept else {})
    if is_kept:
        waits += waited
        writes += [sum(files) / len(written)] if written else []
    return clock.seconds_of_step()


def row(name: str, rounds: int) -> list[str]:
    part, clock = PARTS[name], StepClock()
    trainer = lockstep.Trainer(
        NET.make_model(),
        loss=NET.loss,
        optimizer=partial(torch.optim.Adam, lr=1e-3, fused=True),
        strategy=lockstep.MirroredStrategy(2),
        callbacks=[clock],
    )
    pairs = [pair(part, trainer.fit, clock, number) for number in range(rounds)]
    trainer.close()
    ratios = [each.kept / each.without for each in pairs]
    shares = [sum(each.waits[1:]) / (part.num_steps * each.without) for each in pairs]
    columns = (
        [each.waits[0] for each in pairs if each.waits],
        [one for each in pairs for one in each.waits[1:]],
        [one for each in pairs for one in each.writes],
    )
    return [
        name,
        f"{1e3 * statistics.median(each.without for each in pairs):.0f}",
        f"{statistics.median(ratios):.3f}",
        f"{min(ratios):.3f} to {max(ratios):.3f}",
        f"{100 * statistics.median(shares):.2f} %",
        *(f"{1e3 * statistics.median(each):.0f}" if each else "" for each in columns),
    ]


HEAD = [
    "what",
    "step, ms",
    "with / without",
    "least to most",
    "waits, of the time",
    "first wait, ms",
    "others, ms",
    "writers' processor time, ms",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{STATE_BYTES / 1e6:.0f} MB:", flush=True)
    for name, seconds in floors().items():
        print(f"- {name} {1e3 * seconds:.0f} ms, {STATE_BYTES / seconds / 1e9:.1f} GB/s")
    print("\n| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    for name in asked.parts:
        print("| " + " | ".join(row(name, asked.rounds)) + " |", flush=True)


if __name__ == "__main__":
    main()
