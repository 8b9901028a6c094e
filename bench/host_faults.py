"""Faults between hosts: whole hosts, their scripts and launchers are killed or stopped.

Two hosts on addresses of the loopback interface, each ``lockstep run --restarts``. A whole host is
its launcher, script and helpers; it is started again as a machine's service manager would. Each
step's loss goes to a ledger, by its number, with the moment: a step that is made again must have
the same bits, and all that of one host alone.

Run by ``python bench/soak.py``, or as the script of a host.
"""

import json
import os
import random
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

# And how many ranks each host has.
STRATEGIES = {
    "replicas on 2 hosts": 1,
    "stages on 2 hosts": 1,
    "sharded on 2 hosts": 1,
    "Keras on 2 hosts": 2,
}
FAULTS = ("host", "script", "launcher", "stop", "stop the script")
STOPS = FAULTS[3:]
HELPER = "helper"  # the fault where a host has one
STEPS_PER_EPOCH, BATCH = 10, 12
EVERY = "5 steps"  # a checkpoint is written
MOST_DELAY_SECONDS = 1.0
# On any number of hosts, which may become fewer after so many seconds, in place of 120.
SHARES = "4 shares"
HELPED = "4 shares, 2 ranks on a host"
MEETING_SECONDS = 5.0
# In place of 30: a host, or its script alone, that is stopped longer is lost. And how long it is.
MOST_STOPPED_SECONDS, STOPPED_SECONDS = 3.0, 6.0
WAIT_SECONDS = 120.0
# Between two steps of a host, so that faults meet a run that is under way; one host alone has none.
_PAUSE_SECONDS = 0.0
_NEW_STEP = re.compile(rb"^(\S+) (\d+) (\S+)$", re.MULTILINE)


# --- the script of a host ------------------------------------------------------------------------


def train(
    strategy: str,
    folder: Path,
    epochs: int,
    every: str = EVERY,
    steps: int = STEPS_PER_EPOCH,
    *,
    is_told: bool = False,
) -> object:
    """What must be the same, but for the losses, which go to the ledger in the folder."""
    if strategy.startswith("Keras"):
        return _train_keras(folder, epochs, every, steps, is_told=is_told)
    import torch
    from torch import nn

    import lockstep
    from lockstep.train.checkpointing.training_state import TrainingState

    class Ledger(lockstep.Callback):
        is_observer = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.num_steps += 1
            _note(folder, self.num_steps, logs["loss"])

        def state_dict(self) -> dict[str, Any]:
            return {"num_steps": self.num_steps}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.num_steps = state["num_steps"]

        num_steps = 0

    strategies: dict[str, Callable[..., Any]] = {
        "replicas on 2 hosts": partial(
            lockstep.MultiWorkerMirroredStrategy, devices_per_host=1, num_shares=2
        ),
        "stages on 2 hosts": partial(lockstep.PipelineStrategy, 2, cuts=["3"], microbatches=2),
        "sharded on 2 hosts": partial(
            lockstep.FullyShardedStrategy, 1, units=["0", "3", "4"], num_shares=2
        ),
        "averages on 2 hosts": partial(lockstep.LocalSGDStrategy, every=5),
        "compressed on 2 hosts": partial(lockstep.MultiWorkerMirroredStrategy, compression="bf16"),
        SHARES: partial(lockstep.MultiWorkerMirroredStrategy, devices_per_host=1, num_shares=4),
        HELPED: partial(lockstep.MultiWorkerMirroredStrategy, devices_per_host=2, num_shares=4),
    }
    torch.manual_seed(0)
    x = torch.randn(steps * BATCH, 16)
    trainer = lockstep.Trainer(
        nn.Sequential(
            *(nn.Linear(16, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 3))
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        strategy=strategies[strategy](),
        callbacks=[Ledger()],
    )
    history = trainer.fit(
        (x, (x[:, 0] > 0).long()),
        epochs=epochs,
        batch_size=BATCH,
        verbose=int(is_told),
        restarts=10**6,
        checkpoint=lockstep.Checkpoint(folder / "run", every=every),
    )
    digest = TrainingState.of(trainer.state_dict()).digest()
    trainer.close()
    return [digest, history.history]


def _train_keras(folder: Path, epochs: int, every: str, steps: int, *, is_told: bool) -> object:
    import keras
    import numpy as np

    import lockstep.keras

    class Ledger(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
        num_steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.num_steps += 1
            _note(folder, self.num_steps, float(logs["loss"]))

    keras.utils.clear_session()  # layers have their first names again
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(steps * BATCH, 16)).astype("float32")
    strategy = lockstep.MultiWorkerMirroredStrategy(num_shares=4)
    with strategy.scope():
        model = keras.Sequential(
            [
                *(keras.Input((16,)), keras.layers.Dense(64), keras.layers.Dropout(0.3)),
                *(keras.layers.ReLU(), keras.layers.Dense(3)),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    history = model.fit(
        *(x, (x[:, 0] > 0).astype("int64")),
        batch_size=BATCH,
        epochs=epochs,
        verbose=2 if is_told else 0,
        callbacks=[
            Ledger(),
            lockstep.keras.Checkpoint(folder / "run", every=every),
            lockstep.keras.Restarts(10**6),
        ],
    )
    trainer: Any = model._lockstep.trainer
    digest = trainer.state.take().digest()
    trainer.runner.close()
    return [digest, {name: [*map(float, each)] for name, each in history.history.items()}]


def _note(folder: Path, step: int, loss: float) -> None:
    with (folder / "ledger").open("ab", buffering=0) as file:
        file.write(f"{time.time()} {step} {loss.hex()}\n".encode())
    time.sleep(_PAUSE_SECONDS)


def losses(ledger: Path) -> list[str]:
    """Of every step, by its number.

    Raises:
        AssertionError: a step that was made again had another loss, or one was left out.
    """
    found: dict[int, str] = {}
    for line in _NEW_STEP.finditer(ledger.read_bytes()):
        number, loss = int(line[2]), line[3].decode()
        assert found.setdefault(number, loss) == loss, f"step {number}: {found[number]}, {loss}"
    assert sorted(found) == list(range(1, len(found) + 1))
    return [found[number] for number in sorted(found)]


def expected(
    strategy: str, epochs: int, every: str = EVERY, steps: int = STEPS_PER_EPOCH
) -> object:
    """What one host alone has come to."""
    with tempfile.TemporaryDirectory() as name:
        result = train(strategy, Path(name), epochs, every, steps)
        return [json.loads(json.dumps(result)), losses(Path(name) / "ledger")]


# --- who starts hosts, and harms them ------------------------------------------------------------


class Launcher(Protocol):
    """A process that may have been started in other ways than as a ``Popen``."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...


# Starts a command in a session of its own, which writes to this descriptor.
Start = Callable[[list[str], int], Launcher]


def start_fresh(command: list[str], out: int) -> Launcher:
    """As users start it."""
    return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)


class Host:
    """A host: its launcher, and what comes of it.

    Args:
        index: its number.
        folder: of the run.
        command: of its launcher.
        start: how that is started.
    """

    def __init__(self, index: int, folder: Path, command: list[str], start: Start) -> None:
        self.out = folder / f"out-{index}"
        self._command = command
        self._start = start
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        with self.out.open("ab") as out:
            self.launcher = self._start(self._command, out.fileno())

    def pids(self) -> list[int]:
        """Of all of its processes that live, the launcher first."""
        found = [self.launcher.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, task.read_text().split())
        return found

    def send(self, number: int, pids: list[int]) -> None:
        """Send a signal to some of them."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def named(self, name: str) -> list[int]:
        """Those of them whose name matches a pattern."""
        found = {pid: Path(f"/proc/{pid}/comm") for pid in self.pids()}
        return [
            pid
            for pid, file in found.items()
            if file.exists() and re.fullmatch(name, file.read_text().strip())
        ]

    def said(self, what: bytes) -> int:
        """How often it has said something."""
        return self.out.read_bytes().count(what)


class Run:
    """A training on several hosts.

    Args:
        strategy: its name.
        folder: for all that it writes.
        epochs: how many.
        every: a checkpoint is written.
        steps: of an epoch.
        script: which each host runs.
        start: how launchers are started.
        num_hosts: how many, too.
        min_hosts: so many go on without the others; None is all.
    """

    def __init__(
        self,
        strategy: str,
        folder: Path,
        epochs: int,
        every: str = EVERY,
        steps: int = STEPS_PER_EPOCH,
        script: str = __file__,
        start: Start = start_fresh,
        num_hosts: int = 2,
        min_hosts: int | None = None,
    ) -> None:
        folder.mkdir()
        self._ledger = folder / "ledger"
        self._ledger.touch()
        address = f"127.{1 + secrets.randbelow(255)}.{secrets.randbelow(256)}.1"
        with socket.socket() as sock:
            sock.bind((address, 0))
            port = sock.getsockname()[1]
        secret = folder / "secret"
        secret.write_text(secrets.token_hex())
        secret.chmod(0o600)
        fewer = [] if min_hosts is None else ["--min-hosts", str(min_hosts)]
        self.hosts = [
            Host(
                index,
                folder,
                [
                    *(sys.executable, "-m", "lockstep", "run", "--restarts", "1000000"),
                    *("--hosts", str(num_hosts), "--host-index", str(index), *fewer),
                    *("--devices", str({**STRATEGIES, HELPED: 2}.get(strategy, 1))),
                    *("--rendezvous", f"{address}:{port}", "--secret-file", str(secret)),
                    *(script, strategy, str(folder), str(epochs), every, str(steps)),
                ],
                start,
            )
            for index in range(num_hosts)
        ]

    def lose(self, index: int) -> Host:
        """Kill a whole host, which is none of the run's any more."""
        host = self.hosts.pop(index)
        host.send(signal.SIGKILL, host.pids())
        host.launcher.wait(WAIT_SECONDS)
        return host

    def moments(self) -> list[float]:
        """When steps were made."""
        return [float(line[1]) for line in _NEW_STEP.finditer(self._ledger.read_bytes())]

    def numbers(self) -> list[int]:
        """Of the steps that were made, in the order of these moments."""
        return [int(line[2]) for line in _NEW_STEP.finditer(self._ledger.read_bytes())]

    def is_over(self) -> bool:
        """Whether a host has ended."""
        return any(host.launcher.poll() is not None for host in self.hosts)

    def wait_for(self, is_true: Callable[[], object]) -> float:
        """Wait for something, or for a host's end; seconds until then."""
        began = time.monotonic()
        while not (is_true() or self.is_over()):
            assert time.monotonic() - began < WAIT_SECONDS, self._story()
            time.sleep(0.005)
        return time.monotonic() - began

    def result(self) -> object:
        """What all hosts have come to, once they have ended."""
        for host in self.hosts:
            assert host.launcher.wait(WAIT_SECONDS) == 0, self._story()
        told = {host.out.read_text().rpartition("RESULT ")[2].strip() for host in self.hosts}
        assert len(told) == 1, told
        return [json.loads(told.pop()), losses(self._ledger)]

    def end(self) -> None:
        """Leave nothing behind."""
        for host in self.hosts:
            host.send(signal.SIGKILL, host.pids())
            host.launcher.wait(WAIT_SECONDS)

    def _story(self) -> str:
        return "\n".join(host.out.read_text()[-3000:] for host in self.hosts)


def harm(run: Run, fault: str, victim: int, chance: random.Random) -> tuple[float, float] | None:
    """Do harm to a host, once a new step is made.

    Returns:
        Seconds until the other host said what it had lost, and until the next step was made; None
        where the run had ended before.
    """
    before = len(run.moments())
    run.wait_for(lambda: len(run.moments()) > before)
    time.sleep(chance.uniform(0, MOST_DELAY_SECONDS))
    host, other = run.hosts[victim], run.hosts[1 - victim]
    if fault in STOPS:  # of which one hears where beats have come before
        run.wait_for(lambda: host.named("lockstep:beats"))
    if run.is_over():
        return None
    losses = other.said(b" Restart ")
    pids, hit = host.pids(), time.time()
    if fault in STOPS:
        stopped = pids if fault == "stop" else pids[1:2]
        host.send(signal.SIGSTOP, stopped)
        time.sleep(STOPPED_SECONDS)
        host.send(signal.SIGCONT, stopped)
        hit = time.time()
    else:
        victims = {"host": pids, "launcher": pids[:1], "script": pids[1:2]}
        host.send(signal.SIGKILL, victims.get(fault) or host.named(r"lockstep:\d+")[:1])
    noticed = run.wait_for(lambda: other.said(b" Restart ") > losses)
    if fault in ("host", "launcher"):
        host.launcher.wait(WAIT_SECONDS)
        host.start()
    run.wait_for(lambda: run.moments()[-1:] > [hit + noticed])
    return None if run.is_over() else (noticed, run.moments()[-1] - hit)


def faults_of(strategy: str) -> tuple[str, ...]:
    """What may befall a host under a strategy."""
    return (*FAULTS, HELPER) if STRATEGIES[strategy] > 1 else FAULTS


def outlived(
    strategy: str,
    fault: str,
    victims: Sequence[int],
    chance: random.Random,
    start: Start = start_fresh,
) -> tuple[object, list[tuple[float, float]]]:
    """What a run has come to with a fault on each of these hosts, and what ``harm`` has counted."""
    with tempfile.TemporaryDirectory() as name:
        run = Run(strategy, Path(name) / "run", num_epochs(len(victims)), start=start)
        try:
            found = [harm(run, fault, victim, chance) for victim in victims]
            return run.result(), [one for one in found if one is not None]
        finally:
            run.end()


def num_epochs(most: int) -> int:
    """Enough for so many faults."""
    return 4 + 4 * most


HEADER = (
    "| strategy, fault | survived | same bits | noticed, most | median until a new step | 95 % | "
    "most |\n|---|---|---|---|---|---|---|"
)


def soak(strategy: str, fault: str, faults: int, until: float) -> str:
    """A row of the table."""
    chance = random.Random(f"{strategy} {fault}")
    most = min(10, faults)
    whole = expected(strategy, num_epochs(most))
    seconds: list[tuple[float, float]] = []
    same = rounds = 0
    while len(seconds) < faults and time.monotonic() < until:
        victims = chance.choices(range(2), k=most)
        found, own = outlived(strategy, fault, victims, chance)
        seconds, rounds, same = [*seconds, *own], rounds + 1, same + (found == whole)
    told = [f"{strategy}, {fault}", len(seconds), f"{same} of {rounds}"]
    if len(seconds) > 1:
        noticed, resumed = zip(*seconds, strict=True)
        p95 = statistics.quantiles(resumed, n=20, method="inclusive")[-1]
        figures = (max(noticed), statistics.median(resumed), p95, max(resumed))
        told += [f"{one:.2f} s" for one in figures]
    return "| " + " | ".join(map(str, told)) + " |"


def main(arguments: Sequence[str]) -> None:
    """Be a host."""
    global _PAUSE_SECONDS
    from lockstep.launch.workers import process_state
    from lockstep.train.fault_tolerance import lost_hosts

    _PAUSE_SECONDS = 0.01
    process_state.STOPPED_SECONDS = MOST_STOPPED_SECONDS
    lost_hosts._MEETING_SECONDS = MEETING_SECONDS
    strategy, folder, epochs, every, steps = arguments
    came_to = train(strategy, Path(folder), int(epochs), every, int(steps), is_told=True)
    print("RESULT", json.dumps(came_to), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
