"""A ``fit`` that goes on from a checkpoint of a script that was another then.

Whatever changes the result is named; what is taken new is as in a plain loop that takes it at that
step; more epochs are those of a run that was asked for them from the beginning.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim import lr_scheduler

import lockstep
from lockstep.errors import CheckpointError
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.resume.fit_record import FitRecord
from tests.states import first_difference

pytestmark = pytest.mark.thorough

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(40, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(3, (40,), generator=GENERATOR)
BATCH, STEPS = 8, 5
FACTOR = 1.0


class Focal(nn.Module):
    def __init__(self, gamma: float = 1.0) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (functional.cross_entropy(output, target, reduction="none") ** self.gamma).mean()


def scaled(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: factor * functional.cross_entropy(output, target)


def looking(output: Tensor, target: Tensor) -> Tensor:
    return FACTOR * functional.cross_entropy(output, target)


class Ending(lockstep.Callback):
    """Ends a training with an error after so many steps; changes options on the way."""

    def __init__(self, step: int) -> None:
        self.left = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trainer.optimizer.param_groups[0]["eps"] = 1e-6
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError


def make(rate: float = 1e-2, dropout: float = 0.0, **options: Any) -> lockstep.Trainer:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)
    made = {name: options.pop(name) for name in ("weight_decay", "betas") if name in options}
    kind = options.pop("kind", optim.Adam)
    options = {"loss": nn.CrossEntropyLoss(), "precision": "fp64", **options}
    optimizer = partial(kind, lr=rate, **made)
    return lockstep.Trainer(nn.Sequential(*layers).double(), optimizer=optimizer, **options)


def fit(
    trainer: lockstep.Trainer, folder: Path | None, on: Any = "error", **options: Any
) -> dict[str, Any]:
    every, keep = options.pop("every", "1 step"), options.pop("keep", 3)
    checkpoint = None if folder is None else lockstep.Checkpoint(folder, every, keep, on)
    options = {"epochs": 3, "batch_size": BATCH, "verbose": 0, "shuffle": False, **options}
    found: dict[str, Any] = trainer.fit(
        options.pop("data", (X, Y)), checkpoint=checkpoint, **options
    ).history
    return found


def fit_until(step: int, folder: Path, *, every: str = "1 step", **options: Any) -> None:
    trainer = make(**options)
    trainer.callbacks = [Ending(step)]
    with pytest.raises(ZeroDivisionError):
        fit(trainer, folder, every=every)


STEP_LR = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)

# What the first script gives, what the second does, and what names it.
CHANGES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"rate": 5e-3}, "optimizer.lr: 0.01 in the checkpoint, 0.005 now"),
    ({}, {"weight_decay": 0.1, "betas": (0.8, 0.9)}, r"optimizer.betas: \[0.9, 0.999\].*_decay"),
    ({}, {"kind": optim.AdamW}, "optimizer: Adam of 4 tensors"),
    ({}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "label_smoothing': 0.1} now"),
    ({}, {"loss": nn.CrossEntropyLoss(torch.ones(3).double())}, "loss.tensors"),
    ({"loss": Focal()}, {"loss": Focal(2.0)}, "loss.values: {'gamma': 1.0}.*{'gamma': 2.0}"),
    ({"loss": scaled(1.0)}, {"loss": scaled(2.0)}, "loss.values: {'factor': 1.0}"),
    ({"loss": scaled(1.0)}, {"loss": lambda o, t: functional.cross_entropy(o, t)}, "loss"),
    ({}, {"clip_norm": 1.0, "accumulate": 2}, "clip_norm: None .*accumulate: 1 "),
    ({}, {"seed": 3}, "seed: 0"),
    ({}, {"dropout": 0.5}, r"layer '2': Dropout {'p': 0.0"),
    ({}, {"schedule": STEP_LR}, "schedule: None"),
    ({"schedule": STEP_LR}, {"schedule": partial(STEP_LR, gamma=0.1)}, "schedule.gamma: 0.5"),
    (
        {"schedule": partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: epoch / 9)},
        {"rate": 1e-3, "schedule": partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: epoch)},
        r"optimizer.lr: 0.01 .*lr_lambdas\[0\]: its code has changed",
    ),
]


def test_what_has_changed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    firsts: list[dict[str, Any]] = []
    for first, second, match in CHANGES:
        if first not in firsts:
            firsts.append(first)
            fit_until(7, tmp_path / str(len(firsts) - 1), **first)
        folder = tmp_path / str(firsts.index(first))
        with pytest.raises(CheckpointError, match=match):
            fit(make(**{**first, **second}), folder)
    fits: list[tuple[dict[str, Any], str]] = [
        ({"batch_size": 10}, "batch_size: 8"),
        ({"shuffle": True}, "shuffle: False"),
        ({"data": (X + 1, Y)}, "data: arrays of 40 samples"),
        ({"validation_data": (X, Y)}, "validation_data: None"),
    ]
    for options, match in fits:
        with pytest.raises(CheckpointError, match=match):
            fit(make(), tmp_path / "0", **options)
        with pytest.raises(CheckpointError, match=f"can keep only the optimizer.*{match}"):
            fit(make(), tmp_path / "0", "keep", **options)
    with pytest.raises(CheckpointError, match=r"within an epoch, and the change.*seed: 0"):
        fit(make(seed=3), tmp_path / "0", "take new")
    with pytest.raises(CheckpointError, match=r"cannot use the slots.*AdamW"):
        fit(make(kind=optim.AdamW), tmp_path / "0", "take new")
    fit_until(7, tmp_path / "looking", loss=looking)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    with pytest.raises(CheckpointError, match=r"loss.values: {'FACTOR': 1.0}"):
        fit(make(loss=looking), tmp_path / "looking")


def assert_same(one: lockstep.Trainer, other: lockstep.Trainer) -> None:
    states = [TrainingState.of(each.state_dict()) for each in (one, other)]
    assert first_difference(states[0], states[1]) is None


def plain_loop(steps: int, change: Callable[[optim.Optimizer], None]) -> dict[str, Tensor]:
    """The weights of a loop of 15 steps in which options are changed after some."""
    model = make().model
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    for step in range(3 * STEPS):
        if step == 1:
            optimizer.param_groups[0]["eps"] = 1e-6  # as the callback has
        if step == steps:
            change(optimizer)
        rows = slice(step % STEPS * BATCH, (step % STEPS + 1) * BATCH)
        optimizer.zero_grad()
        functional.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("on", ["take new", "keep"])
def test_an_option_is_taken_or_kept(on: str, tmp_path: Path) -> None:
    def change(optimizer: optim.Optimizer) -> None:
        if on == "take new":
            optimizer.param_groups[0].update(lr=5e-3, weight_decay=0.1)

    fit_until(8, tmp_path)
    new: dict[str, Any] = {"rate": 5e-3, "weight_decay": 0.1}
    strategy = lockstep.MirroredStrategy(2)
    trainer = make(**new, strategy=strategy)
    fit(trainer, tmp_path, on)
    for name, value in plain_loop(7, change).items():  # the eighth step was not written
        found = trainer.model.get_parameter(name)
        assert torch.allclose(found, value, rtol=0, atol=1e-12), name
    # What was decided goes on: with what was taken there is no difference left, else there is.
    again = make(**new)
    if on == "take new":
        fit(again, tmp_path)
        assert_same(trainer, again)
    else:
        with pytest.raises(CheckpointError, match=r"0\.01 in the checkpoint"):
            fit(again, tmp_path)


def rates_of(schedule: Any, rate: float, epochs: int = 3) -> list[float]:
    optimizer = optim.Adam(nn.Linear(1, 1).parameters(), lr=rate)
    scheduler = schedule(optimizer)
    found = []
    for _ in range(epochs):
        moves = STEPS if isinstance(scheduler, lr_scheduler.OneCycleLR) else 1
        for move in range(moves):
            found += [optimizer.param_groups[0]["lr"]] if move == moves - 1 else []
            optimizer.step()
            scheduler.step()
    return found


ONE_CYCLE = partial(lr_scheduler.OneCycleLR, max_lr=0.1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (STEP_LR, partial(STEP_LR, gamma=0.1)),
        (STEP_LR, partial(lr_scheduler.CosineAnnealingLR, T_max=4)),
        (None, STEP_LR),
        (partial(ONE_CYCLE, total_steps=15), partial(ONE_CYCLE, total_steps=20)),
    ],
)
def test_a_new_schedule_is_as_if_it_had_been_there_from_the_beginning(
    first: Any, second: Any, tmp_path: Path
) -> None:
    fit_until(8, tmp_path, schedule=first)
    trainer = make(2e-2, schedule=second)
    expected = rates_of(second, 2e-2)
    assert fit(trainer, tmp_path, "take new")["lr"][-2:] == pytest.approx(expected[1:], rel=1e-12)
    assert trainer.optimizer.param_groups[0]["eps"] == 1e-6


def test_a_schedule_that_is_left_out_leaves_the_rate_of_the_script(tmp_path: Path) -> None:
    fit_until(13, tmp_path, schedule=STEP_LR)
    trainer = make(3e-2)
    fit(trainer, tmp_path, "take new")
    assert trainer.optimizer.param_groups[0]["lr"] == 3e-2
    plateau = partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=9.0)
    fit_until(13, tmp_path / "plateau", schedule=plateau)
    trainer = make(schedule=partial(plateau, factor=0.1))
    fit(trainer, tmp_path / "plateau", "take new")  # twice by the old factor, once by the new
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5**2 * 0.1)


def test_another_batch_size_between_epochs(tmp_path: Path) -> None:
    fit_until(8, tmp_path, every="epoch")
    trainer = make(seed=4)
    fit(trainer, tmp_path, "take new", batch_size=10)
    assert trainer.state_dict()["position"]["steps"] == 5 + 4 + 4
    assert trainer.seed == 4


# --- more epochs, or fewer -----------------------------------------------------------------------


def test_more_epochs_are_those_of_a_longer_run(tmp_path: Path) -> None:
    def made(*callbacks: lockstep.Callback) -> lockstep.Trainer:
        return make(schedule=STEP_LR, dropout=0.2, callbacks=[*callbacks])

    whole = made()
    expected = fit(whole, None, epochs=4)
    best = partial(lockstep.callbacks.BestWeights, "loss", mode="max", restore=True)
    for name, keep, callbacks in (("a", 3, ()), ("b", 1, ()), ("c", 3, (best,))):
        # From the end itself, and from before a callback has put other weights there.
        options: dict[str, Any] = {"keep": keep, "every": "epoch"}
        fit(made(*(one() for one in callbacks)), tmp_path / name, epochs=2, **options)
        last = made(*(one() for one in callbacks))
        assert fit(last, tmp_path / name, epochs=4, **options) == expected
        if not callbacks:
            assert_same(whole, last)
    with pytest.raises(CheckpointError, match=r"has reached epoch 4.*Received: epochs=3"):
        fit(made(), tmp_path / "a", epochs=3)
    fit(made(best()), tmp_path / "d", epochs=2, keep=1)
    with pytest.raises(CheckpointError, match="on_train_end"):
        fit(made(best()), tmp_path / "d", epochs=4, keep=1)


def test_a_run_is_cut_short_or_stays_ended(tmp_path: Path) -> None:
    whole, short = make(callbacks=[Ending(99)]), make()
    fit(whole, None, epochs=2)
    fit_until(8, tmp_path / "short", every="epoch")
    fit(short, tmp_path / "short", epochs=2)
    assert_same(whole, short)
    early = partial(lockstep.callbacks.EarlyStopping, "loss", patience=0, min_delta=9.0)
    for epochs in (2, 3, 5):  # it stops after the second, which is the last at first
        history = fit(make(callbacks=[early()]), tmp_path / "early", epochs=epochs)
        assert len(history["loss"]) == 2


def test_a_schedule_that_depends_on_the_epochs_is_named(tmp_path: Path) -> None:
    fit(make(schedule=partial(ONE_CYCLE, total_steps=15)), tmp_path)
    match = "from epochs=3 to epochs=4, on which its schedule depends.*schedule.total_steps: 15 "
    with pytest.raises(CheckpointError, match=match):
        fit(make(schedule=partial(ONE_CYCLE, total_steps=20)), tmp_path, epochs=4)
    with pytest.raises(lockstep.errors.OptionError, match=r"OneCycleLR .*0 of 15 are left|of 15"):
        fit(make(schedule=partial(ONE_CYCLE, total_steps=15)), tmp_path, epochs=4)


# --- what is said, and older checkpoints ---------------------------------------------------------


def test_where_it_goes_on_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    fit_until(8, run)
    fit(make(strategy=lockstep.MirroredStrategy(2)), run, verbose=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Resuming from {run}/generation-000006: epoch 2, step 8"
    assert any(line.startswith("The checkpoint has num_shares=1") for line in lines)
    fit(make(), run, verbose=1)
    fit(make(1e-3), run, "take new", verbose=1, epochs=4)
    told = capsys.readouterr().out
    assert f"{run} is complete (3 epochs): nothing to do\n" in told
    assert "step 16, with what is new: optimizer.lr: 0.01 in the checkpoint, 0.001 now\n" in told
    last = next(line for line in told.splitlines() if line.startswith("Epoch 3/4"))
    assert "samples/s" not in last, "no step of it was left to be made"
    fit(make(1e-3), run, epochs=4)
    assert capsys.readouterr().out == ""


def test_a_checkpoint_of_an_older_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tree(record: FitRecord) -> dict[str, Any]:
        names = "epochs batch_size steps_per_epoch shuffle seed data validation_data loss optimizer"
        asked = {name: record.asked[name] for name in names.split()}
        told = ("epochs", "steps", "history", "epoch", "is_finished")
        return {**{name: getattr(record, name) for name in told}, "asked": asked}

    with monkeypatch.context() as patched:
        patched.setattr(FitRecord, "tree", tree)
        fit_until(8, tmp_path)
    trainer = make(5e-3)  # nobody knows what it was
    fit(trainer, tmp_path)
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-2
