"""A fit with restarts outlives what kills its helpers: same bits, and callbacks are called once."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.comm.shared_memory.status_board import StatusBoard
from lockstep.errors import OptionError, WorkerError
from lockstep.launch.workers import process_state
from lockstep.parallel.worker import Worker
from lockstep.plan.program.rank_program import Backward, Reduce, Step, Sync
from lockstep.train.callbacks.rank_sync import RankSync
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.fault_tolerance import overhead_budget
from lockstep.train.fault_tolerance.run_record import read_record
from lockstep.train.optim.updaters import TorchUpdater
from tests.faults.jobs import Net, warm_up
from tests.faults.jobs import make_trainer as make_acting
from tests.faults.processes import is_alive
from tests.thorough import core_of

SAMPLES, BATCH, EPOCHS = 48, 12, 3
STEPS_PER_EPOCH = 4
X = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(2))
Y = (X[:, 0] > 0).long()
STRATEGIES: dict[str, Callable[[], Any]] = {
    "mirrored": lambda: lockstep.MirroredStrategy(2),
    "gloo": lambda: lockstep.MirroredStrategy(2, engine="gloo"),
    "sharded": lambda: lockstep.FullyShardedStrategy(2, engine="gloo"),
    "sharded, one copy": lambda: lockstep.FullyShardedStrategy(2),
    "sharded replicas": lambda: lockstep.HybridStrategy(2, shard=2),
    "servers": lambda: lockstep.ParameterServerStrategy(1, 2),  # the last rank serves
    "pipeline": lambda: lockstep.PipelineStrategy(2, cuts=["2"], microbatches=2),
    "hybrid": lambda: lockstep.HybridStrategy(data=2, pipe=2, cuts=["2"], microbatches=2),
    "tensor": lambda: lockstep.HybridStrategy(2, tensor=2),
    "tensor, pipeline": lambda: lockstep.HybridStrategy(
        pipe=2, tensor=2, cuts=["2"], microbatches=2
    ),
    "tensor gloo": lambda: lockstep.TensorParallelStrategy(2, engine="gloo"),
    "local": lambda: lockstep.LocalSGDStrategy(3, devices=2, outer=lockstep.Nesterov()),
    "local-pipelines": lambda: lockstep.LocalSGDStrategy(
        3, 4, stages=2, cuts=["2"], microbatches=2
    ),
}


class Seen(lockstep.Callback):
    """Notes all that it is told, and kills a helper after some steps, which are counted from 1."""

    is_observer = True
    trainer: Any

    def __init__(self, *kills: int, number: int = signal.SIGKILL) -> None:
        self.kills, self.number = kills, number
        self.told: list[Any] = []
        self.num_steps = 0
        self.killed: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.told.append(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_steps += 1
        self.told.append((batch, logs))
        if self.num_steps in self.kills:
            self.killed.append(self.trainer._runner.session._team.pids()[-1])
            os.kill(self.killed[-1], self.number)

    def on_test_end(self, logs: Any = None) -> None:
        self.told.append(("validated", dict(logs or {})))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.told.append((epoch, dict(logs or {})))


class Meddler(lockstep.Callback):
    """Changes rates, weights and buffers, and ends the training."""

    model: Any

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trainer.optimizer.param_groups[0]["lr"] *= 0.9
        if batch == 2:
            self.model[0].weight.data.mul_(0.5)
        for buffer in self.model.buffers():
            buffer.data.add_(1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model[0].bias.data.zero_()
        self.trainer.stop_training = epoch == 1


@pytest.fixture(params=["from the beginning", "from the last step"])
def replays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy at the beginning only, or after every step."""
    often = request.param == "from the last step"
    monkeypatch.setattr(overhead_budget, "LEAST_SECONDS", 0.0 if often else 1e9)
    monkeypatch.setattr(overhead_budget, "PART", 1e9)


def trained(
    strategy: str, seen: Seen, *others: lockstep.Callback, data: Any = None, **options: Any
) -> tuple[object, ...]:
    """All that is to be the same."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 8), nn.Dropout(0.3), nn.Linear(8, 3)]
    batch_wide = ("mirrored", "gloo", "sharded", "sharded, one copy", "sharded replicas", "servers")
    if strategy in batch_wide:
        layers.insert(1, nn.BatchNorm1d(8))
    trainer = lockstep.Trainer(
        nn.Sequential(*layers),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        strategy=STRATEGIES[strategy](),
        callbacks=[*others, seen],
        schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
    )
    if data is None:
        options = {"batch_size": BATCH, "validation_data": (X[:20], Y[:20]), **options}
    history = trainer.fit(data or (X, Y), epochs=EPOCHS, verbose=0, **options)
    assert len(history.restarts) == len(seen.kills)
    state = TrainingState.of(trainer.state_dict())
    trainer.close()
    return state.digest(), history.history, seen.told


# Of others, that run less often, `sharded replicas`, `tensor, pipeline` and `local-pipelines` have
# all.
RARE = ("sharded", "sharded, one copy", "tensor", "tensor gloo", "local")
CASES = [
    *core_of(
        [name for name in STRATEGIES if name not in RARE],
        ["mirrored", "pipeline", "tensor, pipeline"],
    ),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in RARE),
]


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("strategy", CASES)
def test_helpers_are_killed(strategy: str) -> None:
    seen = Seen(2, 9)
    assert trained(strategy, seen, restarts=2) == trained(strategy, Seen())
    assert not any(is_alive(pid) for pid in seen.killed)


@pytest.mark.thorough
@pytest.mark.usefixtures("replays")
def test_what_callbacks_have_changed_is_changed_again() -> None:
    killed = trained("mirrored", Seen(3, 7), Meddler(), restarts=2)
    assert killed == trained("mirrored", Seen(), Meddler())


@pytest.mark.thorough
@pytest.mark.usefixtures("replays")
def test_a_stream_is_not_read_again() -> None:
    num_read = []

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for part in zip(X.split(BATCH), Y.split(BATCH), strict=True):
            num_read.append(1)
            yield part

    def run(seen: Seen, restarts: int) -> tuple[object, ...]:
        num_read.clear()
        found = trained("mirrored", seen, data=batches, validation_data=batches, restarts=restarts)
        assert len(num_read) == 2 * EPOCHS * STEPS_PER_EPOCH
        return found

    assert run(Seen(2, 7), 2) == run(Seen(), 0)


def test_checkpoints_go_on(tmp_path: Path) -> None:
    def run(seen: Seen, restarts: int) -> tuple[object, ...]:
        folder = tmp_path / str(restarts)
        checkpoint = lockstep.Checkpoint(folder, every="3 steps", keep=99)
        found = trained("mirrored", seen, checkpoint=checkpoint, restarts=restarts)
        return (*found, sorted(one.name for one in folder.iterdir() if one.is_dir()))

    assert run(Seen(7), 1) == run(Seen(), 0)


def test_the_copy_of_a_checkpoint_serves_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead_budget, "LEAST_SECONDS", 1e9)  # no other but the first
    trainer = make_acting(2, callbacks=(Seen(5),))
    checkpoint = lockstep.Checkpoint(tmp_path, every="3 steps")
    trainer.fit((X, Y), batch_size=BATCH, epochs=2, restarts=1, checkpoint=checkpoint)
    assert "Restart 1 of 1: resuming after step 2, to the same result." in capsys.readouterr().out


# --- at a moment within a step, by a helper itself ------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def act_in(phase: str, once: str) -> None:
    """On a helper, in forward: have it die in a phase of this step, if none has before."""
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    updaters: Any = TorchUpdater
    if phase == "forward":
        die()
    elif phase == "before its update":
        updaters.step = lambda updater: die()
    elif phase == "in its update":
        updaters.step = _spoil
    elif phase == "copy":
        RankSync.collect_buffers = lambda rank_sync: die()  # type: ignore[assignment,method-assign]
    else:
        kind = {"backward": Backward, "exchange": Reduce, "verdict": Step, "sync": Sync}[phase]
        run = Worker._run

        def dying(self: Worker, now: Any, call: Any) -> None:
            if isinstance(call.actions[0], kind):
                die()
            run(self, now, call)

        Worker._run = dying  # type: ignore[method-assign]


@torch.no_grad()
def _spoil(updater: TorchUpdater) -> None:
    for bound in updater._pieces:
        bound.tensor.add_(1)
    die()


TORN = ["before its update", "in its update"]  # the others have made theirs
PHASES = ["forward", "backward", "exchange", "verdict", *TORN, "sync"]


def losses_of(
    tmp_path: Path, phase: str | None, restarts: int, **options: Any
) -> tuple[lockstep.Trainer, list[Any]]:
    act = None if phase is None else partial(act_in, phase, str(tmp_path / "once"))
    seen = Seen()
    trainer = make_acting(2, act, step=3, callbacks=(seen,))
    trainer.fit((X, Y % 3), epochs=2, batch_size=BATCH, verbose=0, restarts=restarts, **options)
    trainer.close()
    return trainer, seen.told


@pytest.mark.parametrize("phase", core_of(PHASES, ["in its update"]))
def test_a_helper_dies_in_a_phase(phase: str, tmp_path: Path) -> None:
    trainer, told = losses_of(tmp_path, phase, restarts=1)
    assert (tmp_path / "once").exists()
    expected, expected_told = losses_of(tmp_path, None, restarts=0)
    assert told == expected_told
    assert digest_of(trainer) == digest_of(expected)


def act_while_gathering(phase: str, number: int, once: str) -> None:
    """On a helper, in forward: have it get a signal in the next gather of this phase."""
    gathering = StatusBoard.gathering

    @contextmanager
    def interrupted(board: StatusBoard) -> Iterator[None]:
        with gathering(board):
            if board.phase_of(board.rank) == phase and not os.path.exists(once):
                os.close(os.open(once, os.O_CREAT))
                os.kill(os.getpid(), number)
            yield

    if not os.path.exists(once):
        StatusBoard.gathering = interrupted  # type: ignore[assignment,method-assign]


class Deep(Net):
    """Has a unit that is away between forward and backward, which begins with the last two."""

    def __init__(self, act: Callable[[], None] | None = None, **options: Any) -> None:
        super().__init__(act, **options)
        self.second = nn.Sequential(nn.Linear(64, 64), self.second)  # type: ignore[assignment]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("gather in forward", signal.SIGSTOP),
        ("gather in backward", signal.SIGKILL),
        pytest.param("gather in forward", signal.SIGKILL, marks=pytest.mark.exhaustive),
        pytest.param("gather in backward", signal.SIGSTOP, marks=pytest.mark.exhaustive),
    ],
)
def test_a_helper_is_lost_while_it_gathers_a_unit(
    phase: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_state, "STOPPED_SECONDS", 0.5)
    results = []
    for act in (partial(act_while_gathering, phase, number, str(tmp_path / "once")), None):
        units = ["first", "second.0", "second.1"]
        strategy = lockstep.FullyShardedStrategy(2, units=units, engine="gloo")
        seen = Seen()
        trainer = make_acting(2, act, step=3, callbacks=(seen,), strategy=strategy, kind=Deep)
        options: dict[str, Any] = {"restarts": 1, "record": tmp_path} if act else {}
        history = trainer.fit((X, Y), epochs=2, batch_size=BATCH, verbose=0, **options)
        results.append((seen.told, digest_of(trainer)))
        trainer.close()
        assert len(history.restarts) == len(options) // 2
    assert results[0] == results[1]
    (fault,) = [event.fault for event in read_record(tmp_path) if event.fault is not None]
    assert (fault.rank, fault.ranks[1].phase) == (1, phase)


def test_a_helper_dies_while_a_copy_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, expected_told = losses_of(tmp_path, None, restarts=0)
    monkeypatch.setattr(overhead_budget, "LEAST_SECONDS", 1e9)  # no other but the first
    checkpoint = lockstep.Checkpoint(tmp_path / "run", every="2 steps")
    trainer, told = losses_of(tmp_path, "copy", restarts=1, checkpoint=checkpoint)
    assert (tmp_path / "once").exists()
    assert told == expected_told
    assert digest_of(trainer) == digest_of(expected)


@pytest.mark.parametrize("phase", TORN)
def test_without_restarts_weights_are_put_back(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead_budget, "LEAST_SECONDS", 1e9)
    act = partial(act_in, phase, str(tmp_path / "once"))
    trainer = make_acting(2, act, step=3)
    before = digest_of(trainer)
    with pytest.raises(WorkerError) as caught:
        trainer.fit((X, Y % 3), epochs=2, batch_size=BATCH, verbose=0)
    assert any("complete, as they were before fit" in note for note in caught.value.__notes__)
    assert digest_of(trainer) == before


def digest_of(trainer: lockstep.Trainer) -> str:
    return TrainingState.of(trainer.state_dict()).digest()


# --- what is no reason to go on -------------------------------------------------------------------


def test_restarts_are_used_up(tmp_path: Path) -> None:
    trainer = make_acting(2, die, step=2)
    with pytest.raises(WorkerError, match="SIGKILL") as caught:
        trainer.fit((X, Y), batch_size=BATCH, verbose=0, restarts=1)
    assert any("All 1 restarts" in note for note in caught.value.__notes__)


def test_an_error_of_the_model_is_raised() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_acting(2, fail, step=2).fit((X, Y), batch_size=BATCH, verbose=0, restarts=3)


@pytest.mark.parametrize("restarts", [-1, 1.5, True])
def test_restarts_are_a_number(restarts: Any) -> None:
    with pytest.raises(OptionError, match="restarts"):
        make_acting(1).fit((X, Y), restarts=restarts)


# --- what does not answer -------------------------------------------------------------------------


def test_a_stopped_helper_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed: if it was woken up it could change nothing."""
    monkeypatch.setattr(process_state, "STOPPED_SECONDS", 0.5)
    warm_up(2)
    seen = Seen(2, number=signal.SIGSTOP)
    assert trained("mirrored", seen, restarts=1) == trained("mirrored", Seen())
    assert not any(is_alive(pid) for pid in seen.killed)


def test_the_notice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead_budget, "LEAST_SECONDS", 1e9)
    trainer = make_acting(2, callbacks=(Seen(2),))
    trainer.fit((X, Y), batch_size=BATCH, epochs=2, restarts=3)
    shown = capsys.readouterr().out
    assert "killed by SIGKILL" in shown
    assert "Restart 1 of 3: resuming from the beginning, to the same result." in shown


class _Thaws(lockstep.Callback):
    """Has a frozen layer be trained, and the helper end before that has come to anything."""

    trainer: Any

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for parameter in self.trainer.model.parameters():
            parameter.requires_grad_(True)
        trainer: Any = self.trainer
        os.kill(trainer._runner.session._team.pids()[0], signal.SIGKILL)


class _Freezes(lockstep.Callback):
    """Freezes a layer and gives the other a rate of its own; a helper may end at that moment."""

    trainer: Any

    def __init__(self, hook: str, *, kills: bool) -> None:
        self._hook, self._kills = hook, kills

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if (epoch, self._hook) == (1, "begin"):
            self._freeze()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if (epoch, self._hook) == (0, "end"):
            self._freeze()

    def _freeze(self) -> None:
        self.trainer.model[0].requires_grad_(False)
        self.trainer.optimizer.param_groups[0]["lr"] *= 0.5
        if self._kills:
            os.kill(self.trainer._runner.session._team.pids()[0], signal.SIGKILL)


@pytest.mark.parametrize(
    ("hook", "kind"),
    core_of([("end", "arrays"), ("begin", "arrays"), ("end", "stream")], [("end", "arrays")]),
)
def test_a_helper_is_killed_where_a_callback_freezes_a_layer(hook: str, kind: str) -> None:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X.split(BATCH), Y.split(BATCH), strict=True)

    data = (X, Y) if kind == "arrays" else batches
    options: dict[str, Any] = {"batch_size": BATCH} if kind == "arrays" else {}
    found = []
    for kills in (True, False):
        seen = Seen()
        torch.manual_seed(0)
        trainer = lockstep.Trainer(
            nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.Adam, lr=1e-2),
            strategy=lockstep.MirroredStrategy(2),
            callbacks=[_Freezes(hook, kills=kills), seen],
        )
        history = trainer.fit(data, epochs=EPOCHS, verbose=0, restarts=1, **options)
        assert len(history.restarts) == kills
        digest = TrainingState.of(trainer.state_dict()).digest()
        found.append((digest, history.history, seen.told))
        trainer.close()
    assert found[0] == found[1]


def test_a_loss_after_a_callback_has_changed_what_is_trained_is_told_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters()),
        strategy=lockstep.MirroredStrategy(2),
        callbacks=[_Thaws()],
    )
    with pytest.raises(WorkerError, match="SIGKILL"):
        trainer.fit((X, Y), epochs=2, batch_size=BATCH, verbose=0)
    assert len(trainer.optimizer.state) == 2  # of the layer that was trained
