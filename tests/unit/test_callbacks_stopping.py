"""EarlyStopping and BestWeights: when they act, and that the best weights are back, on any plan."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

import lockstep
from lockstep import errors
from lockstep.callbacks import BestWeights, EarlyStopping
from lockstep.train.callbacks.callback import Logs

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (48,), generator=torch.Generator().manual_seed(1))
VALIDATION = (X[:20].flip(0), Y[:20])

STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lockstep.SingleDeviceStrategy,
    "mirrored": lambda: lockstep.MirroredStrategy(2),
    "mirrored-3": lambda: lockstep.MirroredStrategy(3),
    "pipeline": lambda: lockstep.PipelineStrategy(2, microbatches=1),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))


def make_trainer(
    callbacks: list[lockstep.Callback], strategy: Any = None, **options: Any
) -> lockstep.Trainer:
    return lockstep.Trainer(
        make_model(),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=2.0, momentum=0.9),
        strategy=strategy,
        precision="fp64",
        callbacks=callbacks,
        **options,
    )


class States(lockstep.Callback):
    """Keeps what the model is after every epoch."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.states.append({name: value.clone() for name, value in self.model.state_dict().items()})


class Scripted(lockstep.Callback):
    """Has the losses be what a test wants them to be."""

    def __init__(self, *losses: float) -> None:
        self.losses = losses

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        assert logs is not None
        logs["loss"] = self.losses[epoch]


def epochs_trained(losses: list[float], **options: Any) -> int:
    stopping = EarlyStopping("loss", **options)
    trainer = make_trainer([Scripted(*losses), stopping])
    epochs = len(trainer.fit((X, Y), epochs=len(losses), batch_size=16, verbose=0).epoch)
    assert stopping.stopped_epoch == (epochs - 1 if epochs < len(losses) else None)
    return epochs


# --- when training stops ------------------------------------------------------------------------

NAN = float("nan")
STOPS: dict[str, tuple[list[float], dict[str, Any], int]] = {
    "at once": ([3, 2, 2, 1, 1], {}, 3),
    "patience 1 is as 0": ([3, 2, 2, 1, 1], {"patience": 1}, 3),
    "patience 2": ([3, 2, 2, 1, 1, 1, 1], {"patience": 2}, 6),
    "small steps do not count": ([3, 2.95, 2.9, 2.85], {"min_delta": 0.2, "patience": 2}, 3),
    "greater is better": ([1, 2, 2, 3], {"mode": "max"}, 3),
    "baseline not reached": ([5, 4, 3, 2, 1], {"baseline": 1.5, "patience": 3}, 3),
    "baseline reached": ([5, 4, 1, 2, 0.5, 2, 2, 2, 2], {"baseline": 1.5, "patience": 3}, 8),
    "later start": ([1, 5, 4, 4, 4], {"start_from_epoch": 1}, 4),
    "nan is no improvement": ([NAN, NAN, 1, 1], {"patience": 2}, 2),
    "better after nan": ([NAN, 2, 1, 0], {"patience": 2}, 4),
}


@pytest.mark.parametrize("name", STOPS)
def test_training_stops_when_the_value_has_not_improved(name: str) -> None:
    losses, options, expected = STOPS[name]
    assert epochs_trained(losses, **options) == expected


def test_a_second_fit_begins_anew() -> None:
    stopping = EarlyStopping("loss")
    trainer = make_trainer([Scripted(3, 4, 5), stopping])
    for _ in range(2):
        assert trainer.fit((X, Y), epochs=3, batch_size=16, verbose=0).epoch == [0, 1]
        assert (stopping.best, stopping.best_epoch) == (3, 0)


def test_the_metric_says_whether_greater_is_better() -> None:
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    error = torchmetrics.MeanMetric()
    stopping = EarlyStopping("val_accuracy", patience=1)
    trainer = make_trainer([stopping], metrics={"accuracy": accuracy})
    history = trainer.fit(
        (X, Y), epochs=8, batch_size=16, validation_data=VALIDATION, verbose=0
    ).history
    assert stopping.best == max(history["val_accuracy"])
    with pytest.raises(errors.OptionError, match=r"'error' does not say.*mode='min'"):
        make_trainer([EarlyStopping("error")], metrics={"error": error}).fit((X, Y), verbose=0)


# --- the best weights ---------------------------------------------------------------------------

KEEPERS: dict[str, Callable[[Path], Any]] = {
    "EarlyStopping": lambda path: EarlyStopping(patience=9, restore_best_weights=True),
    "BestWeights in memory": lambda path: BestWeights(restore=True),
    "BestWeights in a file": lambda path: BestWeights(filepath=path, restore=True),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("keeper", KEEPERS)
def test_the_best_weights_are_given_back(keeper: str, strategy: str, tmp_path: Path) -> None:
    """On all ranks: what is evaluated and trained next is those weights."""
    callback, states = KEEPERS[keeper](tmp_path / "best.safetensors"), States()
    trainer = make_trainer([states, callback], STRATEGIES[strategy]())
    history = trainer.fit(
        (X, Y), epochs=6, batch_size=16, validation_data=VALIDATION, verbose=0
    ).history["val_loss"]
    best = min(range(6), key=history.__getitem__)
    assert best < 5, "the learning rate is too small for this test"
    assert (callback.best_epoch, callback.best) == (best, history[best])
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, states.states[best][name]), name
    assert trainer.evaluate(VALIDATION, batch_size=16)["loss"] == history[best]


@pytest.mark.parametrize("strategy", ["mirrored", "pipeline"])
def test_training_goes_on_from_the_best_weights(strategy: str) -> None:
    outcomes = []
    for name in ("single", strategy):
        trainer = make_trainer([BestWeights("loss", restore=True)], STRATEGIES[name]())
        for _ in range(2):
            trainer.fit((X, Y), epochs=4, batch_size=16, verbose=0)
        outcomes.append(trainer.model.state_dict())
    for name, value in outcomes[0].items():
        torch.testing.assert_close(outcomes[1][name], value, rtol=1e-12, atol=1e-12)


def test_best_weights_are_given_back_when_asked() -> None:
    states, keeper = States(), BestWeights("loss")
    trainer = make_trainer([Scripted(2, 1, 3), states, keeper])
    with pytest.raises(errors.OptionError, match="no best weights"):
        keeper.give_back()
    trainer.fit((X, Y), epochs=3, batch_size=16, verbose=0)
    weights = dict(trainer.model.named_parameters())
    assert torch.equal(weights["0.weight"], states.states[2]["0.weight"])
    keeper.give_back()
    assert torch.equal(weights["0.weight"], states.states[1]["0.weight"])


# --- errors -------------------------------------------------------------------------------------

WRONG: dict[str, tuple[type[Any], dict[str, Any], str]] = {
    "monitor": (EarlyStopping, {"monitor": 3}, "`monitor` must be a string"),
    "mode": (EarlyStopping, {"mode": "lowest"}, "`mode` must be one of.*'lowest'"),
    "min_delta": (EarlyStopping, {"min_delta": "0"}, "`min_delta` must be a finite number"),
    "negative": (EarlyStopping, {"min_delta": -0.1}, "`min_delta` must not be negative"),
    "patience": (EarlyStopping, {"patience": -1}, "`patience` must be an integer of at least 0"),
    "start": (EarlyStopping, {"start_from_epoch": 1.5}, "`start_from_epoch` must be an integer"),
    "baseline": (EarlyStopping, {"baseline": NAN}, "`baseline` must be a finite number"),
    "flag": (EarlyStopping, {"restore_best_weights": 1}, "`restore_best_weights` must be True"),
    "all": (EarlyStopping, {"patience": -1, "mode": "x"}, "2 problems"),
    "best mode": (BestWeights, {"mode": None}, "`mode` must be one of"),
    "best delta": (BestWeights, {"min_delta": None}, "`min_delta` must be a finite"),
    "best monitor": (BestWeights, {"monitor": ""}, "`monitor` must be a string"),
    "best path": (BestWeights, {"filepath": 3}, "`filepath` must be a path"),
    "best flag": (BestWeights, {"restore": "yes"}, "`restore` must be True or False"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_told_at_once(name: str) -> None:
    kind, options, message = WRONG[name]
    with pytest.raises(errors.OptionError, match=message):
        kind(**options)


@pytest.mark.parametrize("kind", [EarlyStopping, BestWeights])
def test_an_unknown_monitor_is_told_before_the_first_step(kind: type[Any]) -> None:
    trainer = make_trainer([kind("val_acuracy")])
    before = trainer.model.state_dict()["0.weight"].clone()
    with pytest.raises(errors.OptionError, match=r"'val_acuracy'.*\['loss'\]"):
        trainer.fit((X, Y), verbose=0)
    assert torch.equal(trainer.model.state_dict()["0.weight"], before)


@pytest.mark.parametrize("kind", [EarlyStopping, BestWeights])
def test_a_monitor_of_validation_needs_validation_data(kind: type[Any]) -> None:
    with pytest.raises(errors.OptionError, match=r"'val_loss'.*\['loss'\].*validation_data"):
        make_trainer([kind()]).fit((X, Y), verbose=0)


def test_a_metric_with_several_values_cannot_be_monitored() -> None:
    per_class = torchmetrics.Accuracy(task="multiclass", num_classes=3, average=None)
    trainer = make_trainer([EarlyStopping("accuracy")], metrics={"accuracy": per_class})
    with pytest.raises(errors.OptionError, match="'accuracy' must be one number"):
        trainer.fit((X, Y), verbose=0)
