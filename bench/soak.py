"""Faults survived: processes are killed and stopped at random moments, for as long as is asked.

A small net with dropout and Adam trains under each strategy, with ``restarts``; a thread kills or
stops a random helper a random time after the last fault was survived. With ``single`` the script
itself is killed, and started again with checkpoints. In the end weights, optimizer, history and the
bits of every step's loss must be those of a run without faults. The run's record says in which
phases of a step the faults have fired. Whole hosts are in ``host_faults``.

Run: ``python bench/soak.py [--minutes 30] [--strategies mirrored pipeline ...] [--faults N]``
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import host_faults
import torch
from torch import nn

import lockstep
from lockstep.launch import peer
from lockstep.train.run_record import read_record
from lockstep.train.training_state import TrainingState

STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: None,
    "mirrored": lambda: lockstep.MirroredStrategy(2),
    "pipeline": lambda: lockstep.PipelineStrategy(2, cuts=["3"], microbatches=2),
    "hybrid": lambda: lockstep.HybridStrategy(data=2, pipe=2, cuts=["3"], microbatches=2),
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
EPOCHS, STEPS_PER_EPOCH, BATCH = 30, 10, 12
MOST_DELAY_SECONDS = 0.4
STOPPED_SECONDS = 2.0  # in place of 30, so that more of them fit into the time


class Faults(lockstep.Callback):
    """Notes every loss, and has a thread that does harm.

    Args:
        number: of the signal; None for no harm.
        most: faults at the most.
        chance: of the moments.
    """

    is_observer = True
    trainer: Any

    def __init__(self, number: int | None, most: int, chance: random.Random) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []  # from a fault to the first new step
        self._number, self._most, self._chance = number, most, chance
        self._hit_at = 0.0
        self._num_ended = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])
        ended = self.trainer._session.num_ended
        if ended > self._num_ended:
            self.seconds.append(time.monotonic() - self._hit_at)
        if ended > self._num_ended or len(self.losses) == 1:
            self._num_ended = ended
            self._plan_next()

    def _plan_next(self) -> None:
        if self._number is not None and self._num_ended < self._most:
            delay = self._chance.uniform(0, MOST_DELAY_SECONDS)
            timer = threading.Timer(delay, self._hit, [self.trainer._session._team])
            timer.daemon = True
            timer.start()

    def _hit(self, helpers: Any) -> None:
        if helpers.num_helpers:  # else the fit has ended meanwhile
            self._hit_at = time.monotonic()
            os.kill(self._chance.choice(helpers.pids()), self._number or 0)


Phases = Counter[str]


def trained(
    strategy: str, fault: str | None, most: int, chance: random.Random, folder: Path | None = None
) -> tuple[object, list[float], Phases]:
    """What must be the same, the seconds that each fault has cost, and the phases that were hit."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as record:
        found = _trained(strategy, fault, most, chance, folder, record)
        return *found, _phases(Path(record)) if folder is None else Phases()


def _phases(record: Path) -> Phases:
    """In which phase the rank at fault was, of each fault that the record knows."""
    faults = [event.fault for event in read_record(record) if event.fault is not None]
    ranks = [rank for fault in faults for rank in fault.ranks if rank.rank == fault.rank]
    return Counter(rank.phase or "between steps" for rank in ranks)


def _trained(
    strategy: str,
    fault: str | None,
    most: int,
    chance: random.Random,
    folder: Path | None,
    record: str,
) -> tuple[object, list[float]]:
    x = torch.randn(STEPS_PER_EPOCH * BATCH, 16)
    trainer = lockstep.Trainer(
        nn.Sequential(
            *(nn.Linear(16, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 3))
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        strategy=STRATEGIES[strategy](),
        callbacks=[faults := Faults(None if fault is None else SIGNALS[fault], most, chance)],
    )
    history = trainer.fit(
        (x, (x[:, 0] > 0).long()),
        epochs=EPOCHS,
        batch_size=BATCH,
        verbose=0,
        restarts=most,
        record=None if folder is not None else record,
        checkpoint=None if folder is None else lockstep.Checkpoint(folder, every="5 steps"),
    )
    digest = TrainingState.of(trainer.state_dict()).digest()
    trainer.close()
    losses = faults.losses if folder is None else []  # those of one process are not all
    return [digest, history.history, losses], faults.seconds


def script_killed(most: int, chance: random.Random) -> tuple[object, list[float], Phases]:
    """The same of a script that is killed and started again; seconds: to its first checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        seconds, phases = [], Phases()
        for _ in range(most):
            before = _written(name)
            process, began = _started(name), time.monotonic()
            while _written(name) == before and process.poll() is None:
                time.sleep(0.01)
            if process.poll() is not None:
                break
            seconds.append(time.monotonic() - began)
            time.sleep(chance.uniform(0, MOST_DELAY_SECONDS))
            process.kill()
            process.communicate()
            phases["write" if [*Path(name).glob(".generation-*")] else "step"] += 1
        out, _ = _started(name).communicate()
        return json.loads(out), seconds, phases


def _written(folder: str) -> list[str]:
    return sorted(one.name for one in Path(folder).glob("*") if one.is_dir())


def _started(folder: str) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--script", folder]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def soak(strategy: str, fault: str, faults: int, until: float) -> str:
    """A row of the table."""
    chance = random.Random(f"{strategy} {fault}")
    folder = Path(tempfile.mkdtemp()) if strategy == "single" else None
    expected, _, phases = trained(strategy, None, 0, chance, folder)
    seconds: list[float] = []
    same = rounds = 0
    while len(seconds) < faults and time.monotonic() < until:
        most = min(10, faults - len(seconds))
        if strategy == "single":
            found, own, hit = script_killed(most, chance)
        else:
            found, own, hit = trained(strategy, fault, most, chance)
        phases += hit
        seconds, rounds, same = [*seconds, *own], rounds + 1, same + (found == expected)
    told = [f"{strategy} {fault}", len(seconds), f"{same} of {rounds}"]
    if len(seconds) > 1:
        p95 = statistics.quantiles(seconds, n=20, method="inclusive")[-1]
        told += [f"{one:.2f} s" for one in (statistics.median(seconds), p95, max(seconds))]
        told.append(", ".join(f"{phase} {count}" for phase, count in sorted(phases.items())))
    return "| " + " | ".join(map(str, told)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    every = [*STRATEGIES, *host_faults.STRATEGIES]
    parser.add_argument("--strategies", nargs="+", choices=every, default=every)
    parser.add_argument("--faults", type=int, default=10**6, help="of each kind, at the most")
    parser.add_argument("--script", type=Path, help="be the script that is killed")
    asked = parser.parse_args()
    if asked.script:
        print(json.dumps(trained("single", None, 0, random.Random(), asked.script)[0]))
        return
    peer.STOPPED_SECONDS = STOPPED_SECONDS
    kinds = [
        (strategy, fault)
        for strategy in asked.strategies
        if strategy in STRATEGIES
        for fault in (["kill"] if strategy == "single" else SIGNALS)
    ]
    of_hosts = [
        (strategy, fault)
        for strategy in asked.strategies
        if strategy in host_faults.STRATEGIES
        for fault in host_faults.faults_of(strategy)
    ]
    share = 60 * asked.minutes / len([*kinds, *of_hosts])
    titles = ["strategy, fault", "survived", "same bits", "median until a new step", "95 %", "most"]
    print("| " + " | ".join([*titles, "phases hit"]) + " |")
    print("|---|---|---|---|---|---|---|")
    for strategy, fault in kinds:
        print(soak(strategy, fault, asked.faults, time.monotonic() + share), flush=True)
    print(f"\n{host_faults.HEADER}", flush=True)
    for strategy, fault in of_hosts:
        row = host_faults.soak(strategy, fault, asked.faults, time.monotonic() + share)
        print(row, flush=True)


if __name__ == "__main__":
    main()
