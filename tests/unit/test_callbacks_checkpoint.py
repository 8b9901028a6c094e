"""ModelCheckpoint: which files, with what in them, and no stop where none is needed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import errors
from lockstep.callbacks import BestWeights, EarlyStopping, ModelCheckpoint
from lockstep.train.callbacks.callback import Logs

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))


def make_trainer(callbacks: list[lockstep.Callback], strategy: Any = None) -> lockstep.Trainer:
    torch.manual_seed(2)
    return lockstep.Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=strategy,
        callbacks=callbacks,
    )


def fit(trainer: lockstep.Trainer, epochs: int = 3) -> lockstep.History:
    return trainer.fit((X, Y), epochs=epochs, batch_size=16, validation_data=(X, Y), verbose=0)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_files_are_named_after_epochs_steps_and_values(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "run" / "{epoch:02d}-{step}-{val_loss:.3f}.safetensors")
    losses = fit(make_trainer([checkpoint])).history["val_loss"]
    assert names(tmp_path) == [
        f"run/{epoch + 1:02d}-{3 * (epoch + 1)}-{loss:.3f}.safetensors"
        for epoch, loss in enumerate(losses)
    ]
    assert checkpoint.last_path == tmp_path / names(tmp_path)[-1]


@pytest.mark.parametrize(
    "strategy",
    [
        None,
        lockstep.MirroredStrategy(2),
        lockstep.MirroredStrategy(3),
        lockstep.PipelineStrategy(2, microbatches=2),
    ],
    ids=["single", "mirrored", "mirrored-3", "pipeline"],
)
def test_files_hold_the_weights_of_their_step(strategy: Any, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "{step}.safetensors", save_freq=2)
    trainer = make_trainer([checkpoint], strategy)
    fit(trainer, 2)
    assert names(tmp_path) == ["2.safetensors", "4.safetensors", "6.safetensors"]
    loaded = make_trainer([])
    loaded.load(tmp_path / "6.safetensors")
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name])
    loaded.load(tmp_path / "2.safetensors")
    alone = make_trainer([ModelCheckpoint(tmp_path / "alone", save_freq=2)])
    fit(alone, 1)
    alone.load(tmp_path / "alone")  # step 2 of 3
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(value, loaded.model.state_dict()[name])


class Worse(lockstep.Callback):
    """Makes the second epoch's loss a bad one."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        assert logs is not None
        logs["val_loss"] = [3.0, 9.0, 2.0][epoch]


def test_only_the_best_are_saved_when_asked(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}", save_best_only=True)
    fit(make_trainer([Worse(), checkpoint]))
    assert names(tmp_path) == ["1", "3"]
    fit(make_trainer([Worse(), ModelCheckpoint(tmp_path / "all-{epoch}")]))
    assert names(tmp_path) == ["1", "3", "all-1", "all-2", "all-3"]


def test_the_best_batches_may_be_saved_too(tmp_path: Path) -> None:
    losses: list[float] = []

    class Losses(lockstep.Callback):
        def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
            assert logs is not None
            losses.append(logs["loss"])

    options: dict[str, Any] = {"monitor": "loss", "save_best_only": True, "save_freq": 1}
    fit(make_trainer([Losses(), ModelCheckpoint(tmp_path / "{step:02d}", **options)]), 4)
    best = [f"{step + 1:02d}" for step in range(12) if losses[step] < min([9, *losses[:step]])]
    assert names(tmp_path) == best
    assert 1 < len(best) < 12


@pytest.mark.parametrize(
    ("name", "freq", "stops"),
    [("{epoch}", "epoch", False), ("{step}", "epoch", True), ("a", 5, True)],
)
def test_ranks_wait_at_each_step_only_where_they_must(
    name: str, freq: Any, stops: bool, tmp_path: Path
) -> None:
    assert ModelCheckpoint(tmp_path / name, save_freq=freq).acts_in("on_train_batch_end") is stops


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "path": ({"filepath": 3}, "`filepath` must be a path"),
    "braces": ({"filepath": "{epoch"}, "`filepath` must be a path with placeholders"),
    "number": ({"filepath": "{}"}, "placeholders of `filepath` must be names"),
    "attribute": ({"filepath": "{epoch.real}"}, "must be names.*'epoch.real'"),
    "monitor": ({"monitor": None}, "`monitor` must be a string"),
    "mode": ({"mode": "best"}, "`mode` must be one of"),
    "flag": ({"save_best_only": 1}, "`save_best_only` must be True or False"),
    "freq": ({"save_freq": 0}, "`save_freq` must be 'epoch' or a number of steps"),
    "freq's name": ({"save_freq": "batch"}, "`save_freq` must be 'epoch'"),
    "steps know no validation": (
        {"filepath": "{val_loss}", "save_freq": 5},
        r"only 'epoch'.*\['val_loss'\]",
    ),
    "steps monitor no validation": (
        {"save_best_only": True, "save_freq": 5},
        r"only 'epoch'.*\['val_loss'\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_told_at_once(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(errors.OptionError, match=message):
        ModelCheckpoint(**{"filepath": "a.safetensors", **options})


def test_a_name_that_nothing_logs_is_told_before_the_first_step() -> None:
    with pytest.raises(errors.OptionError, match=r"'acc'.*'loss', 'val_loss'"):
        fit(make_trainer([ModelCheckpoint("{acc}.safetensors")]))


def test_a_value_without_validation_or_a_wrong_format_is_told(tmp_path: Path) -> None:
    for name, message in (("{val_loss}", "val_loss.*validation_data"), ("{loss:d}", "format code")):
        with pytest.raises(errors.OptionError, match=message):
            make_trainer([ModelCheckpoint(tmp_path / name)]).fit((X, Y), verbose=0)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "make", [EarlyStopping, BestWeights, partial(ModelCheckpoint, "best", save_best_only=True)]
)
def test_a_monitor_without_validation_is_told_before_the_first_step(
    make: Callable[[], lockstep.Callback],
) -> None:
    trainer = make_trainer([make()])
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(errors.OptionError, match=r"'val_loss'.*validation_data"):
        trainer.fit((X, Y), verbose=0)
    assert all(map(torch.equal, trainer.model.parameters(), before))


@pytest.mark.parametrize("name", ["{epoch}.pt", "weights.h5"])
def test_a_name_must_not_promise_another_format(tmp_path: Path, name: str) -> None:
    with pytest.raises(lockstep.LockstepError, match="Weights are written as safetensors"):
        ModelCheckpoint(tmp_path / name)
