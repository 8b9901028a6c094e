"""The ledger: every sample is used exactly once per epoch, whatever was killed in whichever phase.

The model is the ledger. It has a weight for each sample and one for the steps, and its loss is such
that a step takes 1 from the weights of its samples, and from its own: exactly, in whole numbers.
"""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.parallel.worker import Worker
from lockstep.plan.program.rank_program import Backward, BackwardInput, Reduce, Step, Sync
from lockstep.train.fault_tolerance.run_record import read_record
from tests.launchers import finished
from tests.launching import STRICT
from tests.thorough import core_of

SAMPLES, BATCH, EPOCHS = 32, 8, 6
STEPS_PER_EPOCH = SAMPLES // BATCH
STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: None,
    "mirrored": lambda: lockstep.MirroredStrategy(2),
    "pipeline": lambda: lockstep.PipelineStrategy(2, cuts=["1"], microbatches=2),
    "hybrid": lambda: lockstep.HybridStrategy(data=2, pipe=2, cuts=["1"], microbatches=2),
}
KINDS: dict[str, Any] = {
    "backward": (Backward, BackwardInput),
    "exchange": Reduce,
    "update": Step,
    "sync": Sync,
}
PHASES = ["forward", *KINDS]
# Of a script that is killed: while a checkpoint is written, and when it gets its name.
OF_SCRIPTS = ["write", "commit"]


doomed: list[bool] = []  # in the process that is going to die


class Samples(nn.Module):
    """A weight for each."""

    def __init__(self) -> None:
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.uses[numbers]


class Steps(nn.Module):
    """A weight for all; and where rank 1 dies, once in each phase.

    Args:
        folder: knows the phases in which one has; None for no deaths.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(1))
        self.folder, self.calls = folder, 0

    def forward(self, uses: Tensor) -> Tensor:
        self.calls += 1
        if self.folder is not None and self.calls >= 3 and is_rank_1() and not doomed:
            doomed.append(True)  # not an attribute: trials of a model put those back
            die_in_next_phase(self.folder)
        return uses + self.count


def is_rank_1() -> bool:
    return Path("/proc/self/comm").read_text().strip() == "lockstep:1"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_next_phase(folder: Path) -> None:
    """In a helper."""
    phase = next((one for one in PHASES if is_first(folder / one)), None)
    if phase == "forward":
        die()
    if phase is None:
        return
    run = Worker._run

    def dying(self: Any, now: Any, call: Any) -> None:
        if isinstance(call.actions[0], KINDS[phase]):  # whatever is done first in this phase
            self._reduce = self._step = self.exchange.end_step = last
            call = call._replace(run=call.run and last)
        run(self, now, call)

    Worker._run = dying  # type: ignore[method-assign]


def is_first(once: Path) -> bool:
    """Whether nobody was here before."""
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def last(*arguments: object) -> None:
    die()


def uses(output: Tensor, target: Tensor) -> Tensor:
    return output


class Ledger(lockstep.Callback):
    """Looks after every epoch that each sample was used once more."""

    is_observer = True
    trainer: Any

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(epoch)
        samples, steps = self.trainer.model
        assert (-samples.uses == epoch + 1).all(), -samples.uses
        assert -steps.count == BATCH * STEPS_PER_EPOCH * (epoch + 1)


def make_trainer(strategy: str, folder: Path | None = None) -> lockstep.Trainer:
    return lockstep.Trainer(
        nn.Sequential(Samples(), Steps(folder)),
        loss=uses,  # a mean over the batch, so the rate makes it a sum
        optimizer=partial(torch.optim.SGD, lr=float(BATCH)),
        strategy=STRATEGIES[strategy](),
        callbacks=[Ledger()],
    )


def fit(trainer: lockstep.Trainer, **options: Any) -> lockstep.History:
    numbers = torch.arange(SAMPLES)
    return trainer.fit((numbers, numbers), epochs=EPOCHS, batch_size=BATCH, verbose=0, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", core_of(["mirrored", "pipeline", "hybrid"], ["hybrid"]))
def test_each_sample_once_after_a_death_in_each_phase(strategy: str, tmp_path: Path) -> None:
    trainer = make_trainer(strategy, tmp_path)
    history = fit(trainer, restarts=len(PHASES), record=tmp_path / "run")
    assert len(history.restarts) == len(PHASES)
    assert trainer.callbacks[0].epochs == [*range(EPOCHS)]  # type: ignore[attr-defined]
    trainer.close()
    faults = [event.fault for event in read_record(tmp_path / "run") if event.fault is not None]
    hit = [next(one for one in fault.ranks if one.rank == fault.rank) for fault in faults]
    assert [one.phase for one in hit] == PHASES
    assert {fault.kind for fault in faults} == {"dead"}


SCRIPT = """
import os, sys
from lockstep.checkpoint import generations
from tests.faults import test_ledger as ledger

folder = sys.argv[1]
for phase, module, name in (("write", generations, "_write_shard"), ("commit", os, "rename")):
    once = os.path.join(folder, phase)
    if not os.path.exists(once):
        def dying(*arguments, act=getattr(module, name), once=once):
            ledger.note_and_die(once)
        setattr(module, name, dying)
        break
trainer = ledger.make_trainer(sys.argv[2])
ledger.fit(trainer, checkpoint=ledger.lockstep.Checkpoint(folder + "/run", every="3 steps"))
print("used", trainer.callbacks[0].epochs, flush=True)
"""


def note_and_die(once: str) -> None:
    Path(once).touch()
    die()


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["single", "hybrid"])
def test_each_sample_once_after_the_script_has_died_in_a_commit(
    strategy: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for number in range(len(OF_SCRIPTS) + 1):
        words = [*STRICT, str(tmp_path / "script.py"), str(tmp_path), strategy]
        status, out, err = finished(words, tmp_path)
        assert status == (-signal.SIGKILL if number < len(OF_SCRIPTS) else 0), err
    assert "used [" in out
    assert all((tmp_path / phase).exists() for phase in OF_SCRIPTS)
    told = [event.what for event in read_record(tmp_path / "run")]
    assert told.count("begin") == len(OF_SCRIPTS) + 1
    assert told.count("end") == 1  # the dead have said nothing
