"""Keras models with steps of their own end with the weights that plain Keras gives them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import ops

import lockstep
import lockstep.keras
from tests import keras_zoo as zoo
from tests.keras_own_steps import MODELS, STAGED, data_for, made
from tests.thorough import core_of

STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "one device": lambda: lockstep.SingleDeviceStrategy(),
    "mirrored 2": lambda: lockstep.MirroredStrategy(2),
    "mirrored 3": lambda: lockstep.MirroredStrategy(3),
    "gloo 2": lambda: lockstep.MirroredStrategy(2, engine="gloo"),
}
BATCH = 21  # the last batch is one of two samples: with three devices one has none


IN_STAGES: dict[str, Callable[[], lockstep.Strategy]] = {
    "pipeline 2": lambda: lockstep.PipelineStrategy(2),
    "pipeline 3": lambda: lockstep.PipelineStrategy(3, microbatches=2, schedule="gpipe"),
    "hybrid 2 x 2": lambda: lockstep.HybridStrategy(2, 2),
}
ALL = {**STRATEGIES, **IN_STAGES}

CELLS = core_of(
    [
        *((name, strategy) for name in MODELS for strategy in STRATEGIES),
        *((name, strategy) for name in STAGED for strategy in IN_STAGES),
        ("VAE in one call", "mirrored 2"),
    ],
    lambda name, strategy: (
        strategy in ("mirrored 3", "pipeline 2")
        or (name, strategy) in (("GAN", "gloo 2"), ("classifier", "hybrid 2 x 2"))
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
    with ALL[strategy]().scope():
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


def test_weights_and_batches_in_stages() -> None:
    x, y = data_for("classifier")
    weights = np.linspace(0.1, 2.0, len(y))
    plain = made("classifier")
    with IN_STAGES["pipeline 2"]().scope():
        model = made("classifier")
    for one in (plain, model):
        one.fit(x, y, sample_weight=weights, batch_size=BATCH, shuffle=False, verbose=0)
    told = [one.train_on_batch(x[:9], y[:9], return_dict=True) for one in (plain, model)]
    assert told[1] == pytest.approx(told[0])
    tested = [one.test_on_batch(x, y, return_dict=True) for one in (plain, model)]
    assert tested[1] == pytest.approx(tested[0])
    assert zoo.distance(plain, model) < 1e-12
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0))


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
        return {"loss": loss}

    def predict_step(self, data: Any) -> Any:
        return 2 * self(data)


def plainly(model: Small, gradients: list[Any]) -> None:
    model.optimizer.apply(gradients, model.trainable_weights)


def by_torch(model: Small, gradients: list[Any]) -> None:
    torch.optim.SGD([one.value for one in model.trainable_weights], lr=0.1).step()


def twice(model: Small, gradients: list[Any]) -> None:
    model.optimizer.apply(gradients, model.trainable_weights)
    model.other.apply(gradients, model.trainable_weights)


def clipped(model: Small, gradients: list[Any]) -> None:
    torch.nn.utils.clip_grad_norm_([one.value for one in model.trainable_weights], 1.0)
    plainly(model, gradients)


def doubled(model: Small, gradients: list[Any]) -> None:
    plainly(model, [2 * one for one in gradients])


def in_turns(model: Small, gradients: list[Any]) -> None:
    model.third.apply(gradients[:1], model.trainable_weights[:1])
    model.other.apply(gradients[1:], model.trainable_weights[1:])


def only_biases(model: Small, gradients: list[Any]) -> None:
    model.optimizer.apply(gradients[1:], model.trainable_weights[1:])


def counting(model: Small, gradients: list[Any]) -> None:
    plainly(model, gradients)
    model.count = len(gradients)


def averaging(model: Small, gradients: list[Any]) -> None:
    plainly(model, gradients)
    model.dense.kernel.assign(ops.ones((8, 4)))


def never(model: Small, gradients: list[Any]) -> None:
    """Waits for more batches."""


def small(reduce: Callable[[Any], Any], apply: Callable[[Any, Any], None] = plainly) -> Small:
    model = Small(reduce, apply)
    zoo.set_weights(model)
    model.other, model.third = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
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


def with_step(loss_of: Callable[[Any, Any], Any]) -> Any:
    """A model whose step goes backward from what it is given."""

    class Model(Small):
        def train_step(self, data: Any) -> dict[str, Any]:
            loss = loss_of(self, data[0])
            loss.backward()
            plainly(self, [one.value.grad for one in self.trainable_weights])
            return {"loss": loss}

    model = Model(ops.mean, plainly)
    model.compile("sgd")
    return model


def cleared(model: Any) -> Any:
    model.zero_grad()
    return model


def refused(model: Any, said: str, name: str = "distillation") -> None:
    before = model.get_weights()
    with pytest.raises(lockstep.LockstepError, match=f"(?s)In a pipeline.*{said}"):
        model.fit(*data_for(name), verbose=0)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("loss_of", "said"),
    [
        (lambda model, x: ops.mean(cleared(model)(x + 1)), "else than the batch's inputs"),
        (lambda model, x: ops.mean(cleared(model)(x) + model(x)), "calls the model twice"),
        (lambda model, x: ops.mean(cleared(model).dense(x)), "uses .*kernel directly"),
        (lambda model, x: ops.sum(cleared(model).dense.kernel) + ops.mean(model(x)), "directly"),
    ],
)
def test_steps_that_stages_cannot_run(loss_of: Callable[[Any, Any], Any], said: str) -> None:
    with PIPELINE.scope():
        model = with_step(loss_of)
    refused(model, said)


@pytest.mark.parametrize("strategy", ["one device", "mirrored 2", "pipeline 2"])
def test_gradients_that_are_not_cleared(strategy: str) -> None:
    with ALL[strategy]().scope():
        model = with_step(lambda model, x: ops.mean(model(x)))
    with pytest.raises(lockstep.LockstepError, match="must clear the gradients of the step before"):
        model.fit(*data_for("distillation"), verbose=0)


def test_a_model_without_a_call_has_no_stages() -> None:
    with PIPELINE.scope():
        model = made("GAN")
    refused(model, "a model without a `call`", "GAN")


PIPELINE = lockstep.PipelineStrategy(2)


@pytest.mark.parametrize(
    ("apply", "said"),
    [
        (clipped, "computes with gradients"),
        (doubled, "computes with gradients"),
        (only_biases, "something else than the gradients of all"),
        (in_turns, "several optimizers"),
        (counting, "sets self.count"),
        (averaging, "assigns .*kernel"),
        (never, "applied no optimizer"),
    ],
)
def test_updates_that_stages_cannot_make(apply: Callable[[Any, Any], None], said: str) -> None:
    with PIPELINE.scope():
        model = small(ops.mean, apply)
    refused(model, said)


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
