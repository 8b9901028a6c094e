"""What Keras users write: names in place of objects, and arguments that are nearly right."""

from collections.abc import Callable
from typing import Any

import keras
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.errors import DataError, OptionError
from lockstep.train.by_name import loss_named, metrics_named, optimizer_named

X, CLASSES = torch.randn(20, 4), torch.randint(0, 3, (20,))
SIDES = CLASSES[:, None].clamp(max=1).float()


def make_trainer(outputs: int = 3, **options: Any) -> Any:  # wrong calls are meant
    torch.manual_seed(0)
    strategy = lockstep.MirroredStrategy(2)
    return lockstep.Trainer(nn.Sequential(nn.Linear(4, outputs)), strategy=strategy, **options)


def weight_of(trainer: lockstep.Trainer) -> torch.Tensor:
    return next(trainer.model.parameters()).detach()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cross_entropy", F.cross_entropy),
        ("Cross_Entropy_Loss", F.cross_entropy),
        ("nll_loss", F.nll_loss),
        ("mse", F.mse_loss),
        ("l1_loss", F.l1_loss),
        ("smooth_l1_loss", F.smooth_l1_loss),
        ("huber_loss", F.huber_loss),
        ("binary_cross_entropy", F.binary_cross_entropy),
        ("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits),
    ],
)
def test_losses_of_torch(name: str, expected: Callable[..., torch.Tensor]) -> None:
    by_class = name.lower().removesuffix("_loss") == "cross_entropy" or name == "nll_loss"
    outputs = torch.rand(20, 3)
    targets = CLASSES if by_class else torch.rand(20, 3)
    assert torch.equal(loss_named(name)(outputs, targets), expected(outputs, targets))


@pytest.mark.parametrize(
    "name",
    ["mse", "mae", "mean_squared_error", "mean_absolute_error", "huber", "binary_crossentropy"],
)
def test_losses_of_keras_that_mean_the_same(name: str) -> None:
    outputs, targets = torch.rand(20, 3), torch.rand(20, 3)
    theirs = keras.ops.mean(keras.losses.get(name)(targets, outputs))
    assert float(loss_named(name)(outputs, targets)) == pytest.approx(float(theirs), rel=1e-6)


def test_names_are_replaced_wherever_they_stand() -> None:
    assert optimizer_named("AdamW") is torch.optim.AdamW
    assert optimizer_named({"a": "sgd"}) == {"a": torch.optim.SGD}
    several = loss_named({"a": "mse", "b": nn.L1Loss()})
    assert [type(one) for one in several.values()] == [nn.MSELoss, nn.L1Loss]
    assert type(loss_named(["mse"])[0]) is nn.MSELoss
    assert optimizer_named(torch.optim.SGD) is torch.optim.SGD


def test_accuracy_is_what_the_loss_says() -> None:
    ignoring = CLASSES.clone()
    ignoring[:5] = -100
    for targets in (CLASSES, ignoring):
        trainer = make_trainer(loss="cross_entropy", optimizer="sgd", metrics=["accuracy"])
        found = trainer.evaluate(X, targets, batch_size=6)["accuracy"]
        counted = targets != -100
        right = (trainer.predict(X).argmax(1) == targets)[counted]
        assert found == pytest.approx(right.double().mean().item())


def test_accuracy_of_logits_that_look_like_probabilities() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    trainer = lockstep.Trainer(model, loss="bce_with_logits", metrics=["accuracy", "mse"])
    logits = torch.tensor([[0.2], [0.3], [0.4], [0.1]])
    assert trainer.evaluate(logits, torch.ones(4, 1), batch_size=2)["accuracy"] == 1.0
    of_probabilities = lockstep.Trainer(model, loss="bce", metrics={"hits": "acc"})
    assert of_probabilities.evaluate(logits, torch.ones(4, 1))["hits"] == 0.0
    with pytest.raises(DataError, match="targets that are 0 or 1"):
        trainer.evaluate(logits, torch.full((4, 1), 0.5))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: loss_named("crossentropy"), "Did you mean 'cross_entropy'"),
        (lambda: loss_named("sparse_categorical_crossentropy"), "'cross_entropy', on a model w"),
        (lambda: optimizer_named("adamw2"), "Did you mean 'adamw'"),
        (lambda: metrics_named(["accuracy"], nn.MSELoss()), "MulticlassAccuracy"),
        (lambda: metrics_named(["accuracy"], None), "loss=None"),
        (lambda: metrics_named(["f1"], nn.MSELoss()), "Names are"),
        (lambda: make_trainer(losses="mse"), "Trainer has no argument.*Did you mean 'loss'"),
        (lambda: make_trainer().fit(X, CLASSES, epoch=3), "Did you mean 'epochs'"),
        (lambda: make_trainer().fit(x=X, y=CLASSES), "Data is the first argument"),
        (lambda: make_trainer().fit(X, CLASSES, lr=0.1), "The optimizer has it"),
        (lambda: make_trainer().evaluate(X, CLASSES, batch=3), "Did you mean 'batch_size'"),
        (lambda: make_trainer().predict(X, batch=3), "Did you mean 'batch_size'"),
        (lambda: lockstep.MirroredStrategy(device=2), "Did you mean 'devices'"),  # type: ignore[call-arg]
    ],
)
def test_near_misses_are_told_in_one_line(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_inputs_targets_and_weights_are_given_one_by_one() -> None:
    results = []
    weights = torch.rand(20)
    for given in ((X, CLASSES), ((X, CLASSES, weights),), (X, CLASSES, weights), ((X, CLASSES),)):
        trainer = make_trainer(loss="cross_entropy", optimizer="sgd")
        options: dict[str, Any] = {"sample_weight": given[2]} if len(given) == 3 else {}
        trainer.fit(*given[:2], batch_size=6, verbose=0, **options)
        results.append((trainer.evaluate(*given[:2], **options), weight_of(trainer)))
    plain, weighted, by_name, as_one = results
    assert plain[0] == as_one[0]
    assert weighted[0] == by_name[0] != plain[0]
    assert torch.equal(plain[1], as_one[1])
    assert torch.equal(weighted[1], by_name[1])
    with pytest.raises(DataError, match="needs `y`"):
        trainer.fit(X, sample_weight=weights)


def test_the_last_samples_are_evaluated_and_not_trained_on() -> None:
    split, whole = (make_trainer(loss="cross_entropy", optimizer="sgd") for _ in range(2))
    weights = torch.rand(20)
    data = (X, CLASSES, weights)
    ours = split.fit(data, epochs=2, batch_size=6, validation_split=0.3, verbose=0)
    train, rest = (tuple(part[cut] for part in data) for cut in (slice(14), slice(14, None)))
    theirs = whole.fit(train, epochs=2, batch_size=6, validation_data=rest, verbose=0)
    assert ours == theirs
    assert torch.equal(weight_of(split), weight_of(whole))


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ((X, CLASSES), {"validation_split": 1.5}),
        ((X, CLASSES), {"validation_split": -0.5}),
        ((X, CLASSES), {"validation_split": 0.99}),
        ((X, CLASSES), {"validation_split": "a third"}),
        ((X, CLASSES), {"validation_split": 0.5, "validation_data": (X, CLASSES)}),
        (torch.utils.data.TensorDataset(X, CLASSES), {"validation_split": 0.5}),
        (lambda: iter([(X, CLASSES)]), {"validation_split": 0.5}),
    ],
)
def test_what_cannot_be_split(data: Any, options: dict[str, Any]) -> None:
    trainer = make_trainer(loss="cross_entropy", optimizer="sgd")
    with pytest.raises(OptionError, match="`validation_split` is the part"):
        trainer.fit(data, verbose=0, **options)
