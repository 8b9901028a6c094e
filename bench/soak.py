"""Faults survived: processes are killed and stopped at random moments, for as long as is asked.

A small net with dropout and Adam trains under each strategy, with ``restarts``; a thread kills or
stops a random helper a random time after the last fault was survived, once that is in a phase of a
step whose turn it is. With ``single`` the script itself is killed, at any moment, while it writes a
checkpoint and while one gets its name, and started again. In the end weights, optimizer, history
and the bits of every step's loss must be those of a run without faults. The run's record says in
which phases of a step the faults have fired, and when its rank was named; the folder, which
checkpoint was under way. Whole hosts are in ``host_faults``.

Run: ``python bench/soak.py [--minutes 30] [--strategies mirrored] [--signals kill] [--faults N]``
"""

import argparse
import json
import math
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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import host_faults
import torch
from torch import nn

import lockstep
from lockstep.comm.shared_memory.status_board import PHASES
from lockstep.launch.workers import process_state
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.fault_tolerance.run_record import Event, read_record

UNITS = ["0", "3", "4"]  # the net is small: without names all stays on every process
STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: None,
    "mirrored": lambda: lockstep.MirroredStrategy(2),
    "pipeline": lambda: lockstep.PipelineStrategy(2, cuts=["3"], microbatches=2),
    "hybrid": lambda: lockstep.HybridStrategy(data=2, pipe=2, cuts=["3"], microbatches=2),
    "sharded": lambda: lockstep.FullyShardedStrategy(2, units=UNITS, engine="gloo"),
    "sharded in 3": lambda: lockstep.FullyShardedStrategy(3, units=UNITS, engine="gloo"),
    "data x shard": lambda: lockstep.HybridStrategy(data=2, shard=2, units=UNITS, engine="gloo"),
    "sharded, one copy": lambda: lockstep.FullyShardedStrategy(2),
    "tensor": lambda: lockstep.TensorParallelStrategy(2),
    "tensor, gloo": lambda: lockstep.TensorParallelStrategy(2, engine="gloo"),
    "data x tensor": lambda: lockstep.HybridStrategy(data=2, tensor=2),
    "Keras": lambda: lockstep.MirroredStrategy(2),
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
EPOCHS, STEPS_PER_EPOCH, BATCH = 30, 10, 12
MOST_DELAY_SECONDS = 0.4
MOST_AIMING_SECONDS = 0.5  # for a phase in which the victim may never be
STOPPED_SECONDS = 2.0  # in place of 30, so that more of them fit into the time
EVERY, KEEP = "5 steps", 3  # checkpoints of a script that is killed

Phases = Counter[str]


class Faults:
    """Notes every loss, and has a thread that does harm.

    Args:
        number: of the signal; None for no harm.
        most: faults at the most.
        chance: of the moments.
    """

    def __init__(self, number: int | None, most: int, chance: random.Random) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []  # from a fault to the first new step
        self.hits: list[tuple[int, float]] = []  # ranks, and seconds since 1970
        self.last_step_at = 0.0  # since 1970
        self._number, self._most, self._chance = number, most, chance
        self._phases = cycle(PHASES[1:])
        self._hit_at = 0.0
        self._num_ended = 0

    def after_step(self, session: Any, loss: float) -> None:
        """A callback hears of it once for every step."""
        self.losses.append(loss)
        self.last_step_at = time.time()
        ended = session.num_ended
        if ended > self._num_ended:
            self.seconds.append(time.monotonic() - self._hit_at)
        if ended > self._num_ended or len(self.losses) == 1:
            self._num_ended = ended
            self._plan_next(session)

    def _plan_next(self, session: Any) -> None:
        if self._number is not None and self._num_ended < self._most:
            delay = self._chance.uniform(0, MOST_DELAY_SECONDS)
            timer = threading.Timer(delay, self._hit, [session._team, next(self._phases)])
            timer.daemon = True
            timer.start()

    def _hit(self, team: Any, phase: str) -> None:
        pids = [*team.known_pids().items()]
        if not pids:  # the fit has ended meanwhile
            return
        rank, pid = self._chance.choice(pids)
        board = getattr(team._position, "_board", None)
        until = time.monotonic() + MOST_AIMING_SECONDS
        while board is not None and board.phase_of(rank) != phase and time.monotonic() < until:
            os.sched_yield()
        self._hit_at = time.monotonic()
        if team.num_helpers:
            self.hits.append((rank, time.time()))
            os.kill(pid, self._number or 0)


class Told(lockstep.Callback):
    """Tells of each step."""

    is_observer = True
    trainer: Any

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._faults.after_step(self.trainer._runner.session, logs["loss"])


def trained(strategy: str, faults: Faults, most: int) -> tuple[object, Phases, list[float]]:
    """What must be the same, the phases that were hit, and seconds until errors named the ranks."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as record:
        fit = _fit_keras if strategy == "Keras" else partial(_fit, strategy)
        digest, history = fit([faults], restarts=most, record=record)
        events = [event for event in read_record(Path(record)) if event.fault is not None]
        named = until_named(faults.hits, events, faults.last_step_at)
        return [digest, history, faults.losses], _phases(events), named


def _phases(events: Iterable[Event]) -> Phases:
    """In which phase the rank at fault was, of each fault that the record knows."""
    faults = [event.fault for event in events if event.fault is not None]
    ranks = [rank for fault in faults for rank in fault.ranks if rank.rank == fault.rank]
    return Counter(rank.phase or "between steps" for rank in ranks)


def until_named(
    hits: Sequence[tuple[int, float]], events: Sequence[Event], last_step_at: float
) -> list[float]:
    """Seconds from each hit to the line of the record that names its rank; infinite without.

    A process that is hit after the last step may have given all that it had: no line names it then,
    and the hit is left out.
    """
    found = [
        next(
            (
                event.time - at
                for event in events
                if event.time >= at and event.fault is not None and event.fault.rank == rank
            ),
            math.inf,
        )
        for rank, at in hits
    ]
    is_late = [at > last_step_at for _, at in hits]
    return [one for one, late in zip(found, is_late, strict=True) if not late or one < math.inf]


def _fit(strategy: str, faults: Iterable[Faults], **options: Any) -> tuple[str, object]:
    x = torch.randn(STEPS_PER_EPOCH * BATCH, 16)
    trainer = lockstep.Trainer(
        nn.Sequential(
            *(nn.Linear(16, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 3))
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        strategy=STRATEGIES[strategy](),
        callbacks=[Told(one) for one in faults],
    )
    data = (x, (x[:, 0] > 0).long())
    history = trainer.fit(data, epochs=EPOCHS, batch_size=BATCH, verbose=0, **options)
    digest = TrainingState.of(trainer.state_dict()).digest()
    trainer.close()
    return digest, history.history


def _fit_keras(faults: Iterable[Faults], restarts: int, record: str) -> tuple[str, object]:
    import lockstep.keras  # noqa: I001  # it chooses Keras's backend
    import keras

    class ToldByKeras(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            for one in faults:
                one.after_step(self.model._lockstep.trainer.runner.session, float(logs["loss"]))

    keras.utils.clear_session()  # layers have their first names again
    keras.utils.set_random_seed(0)
    x = torch.randn(STEPS_PER_EPOCH * BATCH, 16).numpy()
    with STRATEGIES["Keras"]().scope():
        layers = keras.layers
        stack = [layers.Dense(64), layers.Dropout(0.3), layers.ReLU(), layers.Dense(3)]
        model = keras.Sequential([keras.Input((16,)), *stack])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-2), loss)
    kept = lockstep.keras.Checkpoint(record, every="epoch")  # has the record
    callbacks = [ToldByKeras(), kept, *([lockstep.keras.Restarts(restarts)] if restarts else [])]
    data = (x, (x[:, 0] > 0).astype("int64"))
    history = model.fit(*data, epochs=EPOCHS, batch_size=BATCH, verbose=0, callbacks=callbacks)
    trainer: Any = model._lockstep.trainer
    digest = trainer.state.take().digest()
    trainer.runner.close()
    return digest, {name: [*map(float, each)] for name, each in history.history.items()}


# --- a script that is killed ----------------------------------------------------------------------


def be_script(folder: str) -> object:
    """Train with checkpoints; what must be the same."""
    torch.manual_seed(0)
    return _fit("single", (), checkpoint=lockstep.Checkpoint(folder, every=EVERY, keep=KEEP))


def script_killed(most: int, chance: random.Random) -> tuple[object, list[float], Phases]:
    """What it comes to; seconds from each start to a new checkpoint, and what was under way."""
    with tempfile.TemporaryDirectory() as name:
        seconds, phases = [], Phases()
        for aim, _ in zip(cycle(["step", "write", "commit"]), range(most), strict=False):
            before = _written(name)
            process, began = _started(name), time.monotonic()
            while _written(name) == before and process.poll() is None:
                time.sleep(0.01)
            if process.poll() is not None:
                break
            seconds.append(time.monotonic() - began)
            time.sleep(chance.uniform(0, MOST_DELAY_SECONDS))
            until = time.monotonic() + MOST_AIMING_SECONDS
            while aim not in ("step", _under_way(name)) and time.monotonic() < until:
                os.sched_yield()
            process.kill()
            process.communicate()
            phases[_under_way(name)] += 1
        out, _ = _started(name).communicate()
        return json.loads(out), seconds, phases


def _written(folder: str) -> list[str]:
    return sorted(one.name for one in Path(folder).glob("generation-*"))


def _under_way(folder: str) -> str:
    """Of a checkpoint: whether one is being written, or gets its name and an old one goes."""
    if len(_written(folder)) > KEEP or [*Path(folder).glob(".generation-*/manifest.json")]:
        return "commit"
    return "write" if [*Path(folder).glob(".generation-*")] else "step"


def _started(folder: str) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--script", folder]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


# --- the table ------------------------------------------------------------------------------------


def soak(strategy: str, fault: str, faults: int, until: float) -> str:
    """A row of the table."""
    chance = random.Random(f"{strategy} {fault}")
    is_script = strategy == "single"
    with tempfile.TemporaryDirectory() as folder:
        whole: Any = (
            json.loads(json.dumps(be_script(folder)))
            if is_script
            else trained(strategy, Faults(None, 0, chance), 0)[0]
        )
    seconds: list[float] = []
    named: list[float] = []
    phases = Phases()
    same = rounds = 0
    while len(seconds) < faults and time.monotonic() < until:
        most = min(10, faults - len(seconds))
        if is_script:
            found, own, hit = script_killed(most, chance)
        else:
            harm = Faults(SIGNALS[fault], most, chance)
            (found, hit, until_named), own = trained(strategy, harm, most), harm.seconds
            named += until_named
        phases += hit
        seconds, rounds, same = [*seconds, *own], rounds + 1, same + (found == whole)
    told = [f"{strategy} {fault}", len(seconds), f"{same} of {rounds}"]
    if len(seconds) > 1:
        p95 = statistics.quantiles(seconds, n=20, method="inclusive")[-1]
        told += [f"{one:.2f} s" for one in (statistics.median(seconds), p95, max(seconds))]
        told.append(f"{statistics.median(named):.2f}, {max(named):.2f} s" if named else "")
        told.append(", ".join(f"{phase} {count}" for phase, count in sorted(phases.items())))
    return "| " + " | ".join(map(str, told)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    every = [*STRATEGIES, *host_faults.STRATEGIES]
    parser.add_argument("--strategies", nargs="+", choices=every, default=every)
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=[*SIGNALS])
    parser.add_argument("--faults", type=int, default=10**6, help="of each kind, at the most")
    parser.add_argument("--script", help="be the script that is killed")
    asked = parser.parse_args()
    if asked.script:
        print(json.dumps(be_script(asked.script)))
        return
    process_state.STOPPED_SECONDS = STOPPED_SECONDS
    kinds = [
        (strategy, fault)
        for strategy in asked.strategies
        if strategy in STRATEGIES
        for fault in (["kill"] if strategy == "single" else asked.signals)
    ]
    of_hosts = [
        (strategy, fault)
        for strategy in asked.strategies
        if strategy in host_faults.STRATEGIES
        for fault in host_faults.faults_of(strategy)
    ]
    share = 60 * asked.minutes / len([*kinds, *of_hosts])
    titles = ["strategy, fault", "survived", "same bits", "median until a new step", "95 %", "most"]
    print("| " + " | ".join([*titles, "named within (median, most)", "phases hit"]) + " |")
    print("|---|---|---|---|---|---|---|---|")
    for strategy, fault in kinds:
        print(soak(strategy, fault, asked.faults, time.monotonic() + share), flush=True)
    print(f"\n{host_faults.HEADER}", flush=True)
    for strategy, fault in of_hosts:
        row = host_faults.soak(strategy, fault, asked.faults, time.monotonic() + share)
        print(row, flush=True)


if __name__ == "__main__":
    main()
