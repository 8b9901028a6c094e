"""Keras models with steps of their own end with the weights that plain Keras gives them."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import ops

import lockstep
import lockstep.keras
from lockstep import errors
from tests import keras_zoo as zoo
from tests.keras_own_steps import MODELS, data_for, made
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "one device": lambda: lockstep.SingleDeviceStrategy(),
    "mirrored 2": lambda: lockstep.MirroredStrategy(2),
    "mirrored 3": lambda: lockstep.MirroredStrategy(3),
    "gloo 2": lambda: lockstep.MirroredStrategy(2, engine="gloo"),
    "sharded 2": lambda: lockstep.FullyShardedStrategy(2),
    "chosen of 2": lambda: lockstep.AutoStrategy("memory", devices=2),
}
WITHOUT_CALL = ("VAE", "GAN")  # nothing that a planner could time
BATCH = 21  # the last batch is one of two samples: with three devices one has none

CELLS = core_of(
    [
        (name, strategy)
        for name in MODELS
        for strategy in STRATEGIES
        if strategy != "chosen of 2" or name not in WITHOUT_CALL
    ],
    lambda name, strategy: (
        # Of "average" the choice of a planner takes the place of a row.
        (strategy == ("chosen of 2" if name == "average" else "mirrored 3"))
        or (name, strategy) == ("GAN", "sharded 2")  # a step that updates twice
    ),
)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of what steps make with torch.ones
    try:
        with zoo.true_float64():
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("name", "strategy"), CELLS)
def test_same_weights(name: str, strategy: str) -> None:
    x, y = data_for(name)
    options: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    if name != "GAN":
        options["validation_data"] = (x, y)
    plain = made(name)
    with STRATEGIES[strategy]().scope():
        model = made(name)
    for _ in range(2):
        wanted = plain.fit(x, y, **options).history
        found = model.fit(x, y, **options).history
        assert zoo.distance(plain, model) < 1e-12
        assert found.keys() == wanted.keys()
        for key, values in wanted.items():
            np.testing.assert_allclose(found[key], values, rtol=1e-6, err_msg=key)
    if name != "GAN":
        values = [
            one.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
            for one in (plain, model)
        ]
        assert values[1] == pytest.approx(values[0], rel=1e-6)


class Small(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """One layer, and a step that can be told what to do."""

    def __init__(self, reduce: Callable[[Any], Any], apply: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(4)
        self.dense.build((None, 8))
        self.reduce, self.apply, self.built = reduce, apply, True

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self.zero_grad()
        loss = self.reduce(ops.square(self(x) - ops.one_hot(y, 4)))
        loss.backward()
        with torch.no_grad():
            self.apply(self, [one.value.grad for one in self.trainable_weights])
        return {"loss": loss, "number": 1e-3 * loss.item()}

    def predict_step(self, data: Any) -> Any:
        return 2 * self(data)


def plainly(model: Small, gradients: list[Any]) -> None:
    model.optimizer.apply(gradients, model.trainable_weights)


def by_torch(model: Small, gradients: list[Any]) -> None:
    torch.optim.SGD([one.value for one in model.trainable_weights], lr=0.1).step()


def twice(model: Small, gradients: list[Any]) -> None:
    model.optimizer.apply(gradients, model.trainable_weights)
    model.other.apply(gradients, model.trainable_weights)


def small(reduce: Callable[[Any], Any], apply: Callable[[Any, Any], None] = plainly) -> Small:
    model = Small(reduce, apply)
    zoo.set_weights(model)
    model.other = keras.optimizers.SGD(0.1)
    model.compile("sgd")
    return model


def test_sums_and_predictions() -> None:
    x, y = data_for("distillation")
    plain = small(ops.sum)
    with STRATEGIES["mirrored 2"]().scope():
        model = small(ops.sum)
    for one in (plain, model):
        one.fit(x, y, batch_size=7, shuffle=False, verbose=0)
    assert zoo.distance(plain, model) < 1e-12
    assert model.history.history["loss"] == pytest.approx(plain.history.history["loss"])
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0))


def test_numbers_of_a_step_keep_their_digits() -> None:
    x, y = data_for("distillation")
    told = []
    for scope in (nullcontext(), STRATEGIES["mirrored 2"]().scope()):
        with scope:
            model = small(ops.mean)
        model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
        told.append(model.history.history["number"])
    assert told[1] == pytest.approx(told[0], rel=1e-12)


@pytest.mark.parametrize(
    ("reduce", "apply", "strategy", "said"),
    [
        (ops.max, plainly, STRATEGIES["mirrored 2"], "must be a mean, or a sum.*'sgd.*is neither"),
        (ops.mean, by_torch, STRATEGIES["mirrored 2"], "dense.*kernel.*changed otherwise"),
        (ops.mean, twice, STRATEGIES["mirrored 2"], "several for .*dense.*kernel"),
        (ops.mean, plainly, lambda: lockstep.MirroredStrategy(2, num_shares=4), "4 shares on 2"),
        (
            ops.mean,
            plainly,
            lambda: lockstep.LocalSGDStrategy(2, devices=2),
            "replicas of LocalSGDStrategy",
        ),
        (
            ops.mean,
            plainly,
            lambda: lockstep.FullyShardedStrategy(2, engine="gloo"),
            "parts of them only",
        ),
    ],
)
def test_steps_that_cannot_be_divided(
    reduce: Callable[[Any], Any],
    apply: Callable[[Any, Any], None],
    strategy: Callable[[], lockstep.Strategy],
    said: str,
) -> None:
    with strategy().scope():
        model = small(reduce, apply)
    before = model.get_weights()
    with pytest.raises(lockstep.LockstepError, match=f"(?s){said}"):
        model.fit(*data_for("distillation"), verbose=0)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


class Adding(Small):
    """Adds to the gradients of the step before."""

    def train_step(self, data: Any) -> dict[str, Any]:
        loss = ops.mean(self(data[0]))
        loss.backward()
        plainly(self, [one.value.grad for one in self.trainable_weights])
        return {"loss": loss}


@pytest.mark.parametrize("strategy", ["one device", "mirrored 2"])
def test_gradients_that_are_not_cleared(strategy: str) -> None:
    with STRATEGIES[strategy]().scope():
        model = Adding(ops.mean, plainly)
        model.compile("sgd")
    with pytest.raises(lockstep.LockstepError, match="must clear the gradients of the step before"):
        model.fit(*data_for("distillation"), verbose=0)


def test_stages_run_no_steps_of_a_model() -> None:
    with lockstep.PipelineStrategy(2).scope():
        model = made("average")
    said = (
        "(?s)In a pipeline.*each device has a part of it.*"
        "Averaged with train_step and test_step.*MirroredStrategy"
    )
    for method in (model.fit, model.evaluate):
        with pytest.raises(errors.ModelError, match=said):
            method(*data_for("average"), verbose=0)


def test_a_planner_needs_a_call_that_takes_the_data() -> None:
    with lockstep.AutoStrategy().scope():
        model = made("VAE")
    with pytest.raises(errors.ModelError, match=r"NotImplementedError.*Mirrored"):
        model.fit(*data_for("VAE"), verbose=0)


class ByItself(Small):
    """Applies its optimizer where its part of the batch says so: parts may come to differ."""

    def train_step(self, data: Any) -> dict[str, Any]:
        told = super().train_step(data) if self.optimizer.iterations < 1 else {"loss": 0.0}
        if float(data[0][0, 0]) > 0 and self.optimizer.iterations >= 1:
            super().train_step(data)
        return told


def test_parts_of_a_batch_that_go_apart() -> None:
    x, y = data_for("distillation")
    x = np.abs(x)
    x[15:20, 0] = -1.0  # of the second batch, the second part
    with STRATEGIES["mirrored 2"]().scope():
        model = ByItself(ops.mean, plainly)
        model.compile("sgd")
    with pytest.raises(lockstep.LockstepError, match=r"in the same order.*in step 1"):
        model.fit(x, y, batch_size=10, shuffle=False, verbose=0)


def test_no_checkpoint_of_own_steps(tmp_path: Path) -> None:
    with STRATEGIES["one device"]().scope():
        model = small(ops.mean)
    checkpoint = lockstep.keras.Checkpoint(tmp_path / "run")
    with pytest.raises(lockstep.LockstepError, match="ModelCheckpoint"):
        model.fit(*data_for("distillation"), callbacks=[checkpoint], verbose=0)


@pytest.mark.parametrize(
    "strategy",
    [
        lockstep.MirroredStrategy(2),
        lockstep.PipelineStrategy(2),
        lockstep.HybridStrategy(2, 2),
    ],
    ids=["mirrored", "pipeline", "hybrid"],
)
def test_nothing_to_train(strategy: lockstep.Strategy) -> None:
    def activation() -> Any:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Activation("relu")])
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    x, _ = data_for("distillation")
    plain = activation()
    with strategy.scope():
        model = activation()
    options: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "verbose": 0}
    histories = []
    for one in (plain, model):
        with pytest.warns(UserWarning, match="does not have any trainable weights"):
            histories.append(one.fit(x, x, **options).history)
    assert histories[1] == {key: pytest.approx(value) for key, value in histories[0].items()}
    np.testing.assert_array_equal(model.predict(x, verbose=0), plain.predict(x, verbose=0))
