"""Keras models whose samples are not first, in ``strategy.scope(batch_dim=...)``.

They are held to the same model with its dims permuted around it, which plain Keras trains on data
with samples first.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers

import lockstep
from lockstep.errors import DataError, ModelError, OptionError
from tests import keras_zoo as zoo
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

TIME, SAMPLES = 5, 22
KINDS = ("arrays", "tensors", "split", "stream")
X = zoo.vectors(SAMPLES * TIME, 6).reshape(SAMPLES, TIME, 6)
SIDE = zoo.vectors(SAMPLES, 3, seed=3)
LABELS = zoo.classes(SAMPLES * TIME).reshape(SAMPLES, TIME)
WEIGHTS = np.linspace(0.1, 2, SAMPLES)[:, None]
STRATEGIES: dict[str, Callable[[], Any]] = {
    "mirrored": lambda: lockstep.MirroredStrategy(devices=2),
    "mirrored 3": lambda: lockstep.MirroredStrategy(devices=3),
    "pipeline": lambda: lockstep.PipelineStrategy(stages=2, microbatches=2),
    "hybrid": lambda: lockstep.HybridStrategy(data=2, pipe=2, microbatches=2),
}


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with zoo.true_float64():
        yield


class TimeFirst(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """Takes (time, samples, 6), and mixes times along the first dim."""

    def __init__(self, *, flipped: bool) -> None:
        super().__init__()
        self.flipped = flipped
        self.hidden = layers.Dense(9, activation="tanh")
        self.middle = layers.Dense(8, activation="relu")
        self.head = layers.Dense(zoo.NUM_CLASSES)

    def call(self, inputs: Any) -> Any:
        x = keras.ops.swapaxes(inputs, 0, 1) if self.flipped else inputs
        hidden = self.hidden(x)
        hidden = hidden + 0.5 * keras.ops.mean(hidden, axis=0, keepdims=True)
        hidden = self.middle(hidden) + keras.ops.flip(hidden[..., :8], axis=0)
        out = self.head(hidden)
        return keras.ops.swapaxes(out, 0, 1) if self.flipped else out


class Pair(keras.Model):  # type: ignore[misc]  # as above
    """Takes times first and, beside them, one vector for each sample; returns one for each."""

    def __init__(self, *, flipped: bool) -> None:
        super().__init__()
        self.flipped = flipped
        self.hidden, self.beside = layers.Dense(9, activation="tanh"), layers.Dense(9)
        self.head = layers.Dense(zoo.NUM_CLASSES)

    def call(self, inputs: Any) -> Any:
        x = inputs["x"]
        x = keras.ops.swapaxes(x, 0, 1) if self.flipped else x
        return self.head(keras.ops.mean(self.hidden(x), axis=0) + self.beside(inputs["side"]))


def compiled(model: Any, inputs: Any) -> Any:
    """A model with weights of its own, once it has seen inputs."""
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    if inputs is not None:
        model(inputs)
        zoo.set_weights(model)
    return model


def in_scope(strategy: str, kind: Any, inputs: Any, batch_dim: Any) -> Any:
    with STRATEGIES[strategy]().scope(batch_dim=batch_dim):
        return compiled(kind(flipped=False), inputs)


def swapped(array: Any) -> Any:
    return np.swapaxes(array, 0, 1)


def assert_equal(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert np.shape(one) == np.shape(other)
        largest = 1e-12 * max(float(np.linalg.norm(other)), 1.0)
        assert float(np.linalg.norm(np.subtract(one, other))) <= largest


def assert_same(model: Any, reference: Any, found: Any, wanted: Any) -> None:
    assert_equal(model.get_weights(), reference.get_weights())
    assert found.history.keys() == wanted.history.keys()
    assert_equal([*found.history.values()], [*wanted.history.values()])


def batches(*arrays: Any) -> list[tuple[Any, ...]]:
    """Of 8, 8 and 6 samples."""
    return list(zip(*(np.split(one, [8, 16]) for one in arrays), strict=True))


def generator(time_first: bool) -> Callable[[], Iterator[Any]]:
    def begin() -> Iterator[Any]:
        while True:
            for x, y, weights in batches(X, LABELS, WEIGHTS):
                yield (swapped(x), swapped(y), weights) if time_first else (x, y, weights)

    return begin


class Sequence8(keras.utils.PyDataset):  # type: ignore[misc]  # as above
    """The batches of ``generator``."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        x, y, weights = batches(X, LABELS, WEIGHTS)[index]
        return swapped(x), swapped(y), weights


@pytest.mark.parametrize(
    ("strategy", "kind"),
    core_of(
        [(strategy, kind) for strategy in STRATEGIES for kind in KINDS],
        [("mirrored", "arrays"), ("mirrored", "split"), ("pipeline", "stream")],
        [("pipeline", "tensors")],
    ),
)
def test_fit_evaluate_and_predict(strategy: str, kind: str) -> None:
    model = in_scope(strategy, TimeFirst, swapped(X[:2]), 1)
    reference = compiled(TimeFirst(flipped=True), X[:2])
    common: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}
    if kind == "stream":
        common["steps_per_epoch"] = 3
        validation = {"validation_steps": 3}
        found = model.fit(
            generator(True)(), **common, validation_data=generator(True)(), **validation
        )
        wanted = reference.fit(
            generator(False)(), **common, validation_data=generator(False)(), **validation
        )
    else:
        take: Any = torch.as_tensor if kind == "tensors" else np.asarray
        common |= {"batch_size": 8, "sample_weight": WEIGHTS}
        held: list[dict[str, Any]] = [{}, {}]
        if kind == "split":
            held = [{"validation_split": 0.3}] * 2
        else:
            held = [
                {"validation_data": (take(swapped(X[:9])), take(swapped(LABELS[:9])), WEIGHTS[:9])},
                {"validation_data": (X[:9], LABELS[:9], WEIGHTS[:9])},
            ]
        found = model.fit(take(swapped(X)), take(swapped(LABELS)), **common, **held[0])
        wanted = reference.fit(X, LABELS, **common, **held[1])
    assert_same(model, reference, found, wanted)
    seen = {"batch_size": 8, "verbose": 0}
    assert_equal(
        model.evaluate(swapped(X), swapped(LABELS), sample_weight=WEIGHTS, **seen),
        reference.evaluate(X, LABELS, sample_weight=WEIGHTS, **seen),
    )
    assert_equal([model.predict(swapped(X), **seen)], [swapped(reference.predict(X, **seen))])


@pytest.mark.parametrize("strategy", core_of(STRATEGIES, ("mirrored",)))
def test_inputs_that_differ_and_weights_by_class(strategy: str) -> None:
    dims = {"inputs": {"x": 1, "side": 0}}
    inputs, labels = {"x": swapped(X), "side": SIDE}, LABELS[:, 0]
    few = {"x": X[:2], "side": SIDE[:2]}
    model = in_scope(strategy, Pair, {**few, "x": swapped(X[:2])}, dims)
    reference = compiled(Pair(flipped=True), few)
    options: dict[str, Any] = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
    options["class_weight"] = {number: number + 0.5 for number in range(zoo.NUM_CLASSES)}
    found = model.fit(inputs, labels, **options)
    wanted = reference.fit({"x": X, "side": SIDE}, labels, **options)
    assert_same(model, reference, found, wanted)
    seen = {"batch_size": 7, "verbose": 0}
    assert_equal(
        [model.predict(inputs, **seen)], [reference.predict({"x": X, "side": SIDE}, **seen)]
    )


def masked(shape: Any) -> Any:
    """Layers that treat every time by itself, so the order of dims is all that differs."""
    inputs = layers.Input(batch_shape=shape)
    hidden = layers.Dense(9, activation="tanh")(layers.Masking()(inputs))
    return keras.Model(inputs, layers.Dense(zoo.NUM_CLASSES)(hidden))


@pytest.mark.parametrize("strategy", core_of(STRATEGIES, ("mirrored", "pipeline")))
def test_masks_and_functional_models(strategy: str) -> None:
    x = X.copy()
    x[3:7, 2:], x[15, 1:] = 0.0, 0.0
    with STRATEGIES[strategy]().scope(batch_dim=1):
        model = compiled(masked((TIME, None, 6)), swapped(x[:2]))
    reference = compiled(masked((None, TIME, 6)), x[:2])
    options: dict[str, Any] = {"batch_size": SAMPLES, "epochs": 3, "shuffle": False, "verbose": 0}
    found = model.fit(swapped(x), swapped(LABELS), **options)
    wanted = reference.fit(x, LABELS, **options)
    assert_same(model, reference, found, wanted)


def test_batches_one_by_one() -> None:
    model = in_scope("mirrored", TimeFirst, swapped(X[:2]), 1)
    reference = compiled(TimeFirst(flipped=True), X[:2])
    for x, y, weights in batches(X, LABELS, WEIGHTS):
        assert_equal(
            model.train_on_batch(swapped(x), swapped(y), sample_weight=weights),
            reference.train_on_batch(x, y, sample_weight=weights),
        )
    assert_equal(model.test_on_batch(swapped(x), swapped(y)), reference.test_on_batch(x, y))
    assert_equal([model.predict_on_batch(swapped(x))], [swapped(reference.predict_on_batch(x))])


class Outputs(keras.callbacks.Callback):  # type: ignore[misc]  # as above
    """Notes what it is told of predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.shapes.append(logs["outputs"].shape)


def test_a_model_that_is_built_by_its_data() -> None:
    model = in_scope("mirrored", TimeFirst, None, 1)
    model.fit(swapped(X), swapped(LABELS), batch_size=8, verbose=0)
    seen = Outputs()
    assert model.predict(swapped(X), batch_size=8, verbose=0, callbacks=[seen]).shape == (5, 22, 4)
    assert seen.shapes == [(5, 8, 4), (5, 8, 4), (5, 6, 4)]
    with STRATEGIES["mirrored"]().scope(batch_dim=1):
        fresh = compiled(TimeFirst(flipped=False), None)
    fresh.fit(Sequence8(), verbose=0)
    assert fresh.hidden.kernel.shape == model.hidden.kernel.shape == (6, 9)


TIMES: list[int] = []


class Timed(TimeFirst):
    """Notes how many times it is called with."""

    def call(self, inputs: Any) -> Any:
        TIMES.append(len(inputs))
        return super().call(inputs)


@pytest.mark.exhaustive
def test_a_plan_of_a_model_with_time_first() -> None:
    model = compiled(Timed(flipped=False), swapped(X[:2]))
    TIMES.clear()
    sample = swapped(X), swapped(LABELS)
    plan = lockstep.PipelineStrategy(stages=2, microbatches=2).plan(
        model, batch_size=8, sample=sample, batch_dim=1
    )
    assert len(plan.pipeline.stages if plan.pipeline else ()) == 2
    assert {*TIMES} == {TIME}


class OwnStep(TimeFirst):
    """Its step would see samples first."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def test_what_cannot_be() -> None:
    strategy = STRATEGIES["mirrored"]()
    for batch_dim in (None, "1", {"inputs": {"x": 1, "mask": None}}):
        with pytest.raises(OptionError, match="batch_dim"), strategy.scope(batch_dim=batch_dim):
            compiled(TimeFirst(flipped=False), swapped(X[:2]))
    with strategy.scope(batch_dim=1), pytest.raises(OptionError, match="for Keras models"):
        lockstep.Trainer(torch.nn.Linear(1, 1), loss=torch.nn.MSELoss(), optimizer=torch.optim.SGD)
    model = in_scope("mirrored", TimeFirst, swapped(X[:2]), {"inputs": 1, "targets": 1})
    with pytest.raises(ModelError, match=r"where `batch_dim` says"):
        model.fit(swapped(X), swapped(LABELS), batch_size=8, verbose=0)
    model = in_scope("mirrored", TimeFirst, swapped(X[:2]), {"inputs": [1, 0]})
    with pytest.raises(DataError, match="of every part"):
        model.predict(swapped(X), verbose=0)
    model = in_scope("mirrored", TimeFirst, swapped(X[:2]), 1)
    with pytest.raises(OptionError, match="class weights need arrays"):
        model.fit(Sequence8(), class_weight={0: 2.0}, verbose=0)
    own = in_scope("mirrored", OwnStep, swapped(X[:2]), 1)
    with pytest.raises(ModelError, match="Keras's own steps and losses"):
        own.fit(swapped(X), swapped(LABELS), batch_size=8, verbose=0)
