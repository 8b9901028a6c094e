"""Keras models end with the weights that plain Keras on one device gives them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import lockstep
from tests import keras_zoo as zoo
from tests.thorough import core_of

STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "one device": lambda: lockstep.SingleDeviceStrategy(),
    "auto": lambda: lockstep.AutoStrategy("memory", devices=2),
    "mirrored 2": lambda: lockstep.MirroredStrategy(devices=2),
    "mirrored 3": lambda: lockstep.MirroredStrategy(devices=3),
    "mirrored 2 of 4": lambda: lockstep.MirroredStrategy(devices=2, num_shares=4),
    "sharded 2": lambda: lockstep.FullyShardedStrategy(2),
    "data 2, shard 2": lambda: lockstep.HybridStrategy(2, shard=2),
    "tensor 2": lambda: lockstep.TensorParallelStrategy(2),
    "pipeline 2": lambda: lockstep.PipelineStrategy(stages=2, microbatches=3),
    "hybrid 2 x 2": lambda: lockstep.HybridStrategy(data=2, pipe=2, microbatches=4),
}
SAMPLES, BATCH = 50, 12  # the last batch is short


CELLS = core_of(
    [(name, strategy) for name in zoo.MODELS for strategy in STRATEGIES],
    lambda name, strategy: (
        strategy == "mirrored 2" or (name == "sequential" and strategy not in ("auto", "tensor 2"))
    ),
    [("sequential", "auto")],
)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with zoo.true_float64():
        yield


@pytest.mark.parametrize(("name", "strategy"), CELLS)
def test_same_weights(name: str, strategy: str) -> None:
    compare(zoo.MODELS[name], strategy)


@pytest.mark.parametrize("strategy", ["mirrored 2", "mirrored 3", "mirrored 2 of 4"])
def test_batch_normalization(strategy: str) -> None:
    compare(zoo.normalized, strategy, optimizer="sgd")


def test_weights_that_a_policy_casts_are_divided() -> None:
    import keras

    layers = keras.layers
    shape, policy = zoo.vectors(SAMPLES).shape[1:], "mixed_bfloat16"
    dense = layers.Dense(32, "relu", dtype=policy), layers.Dense(5, dtype=policy)
    model = keras.Sequential([layers.Input(shape), *dense])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    plan = STRATEGIES["tensor 2"]().plan(
        model, batch_size=BATCH, sample=(zoo.vectors(SAMPLES), zoo.classes(SAMPLES))
    )
    assert plan.tensor is not None
    # The weight and the bias of the first layer, and the weight of the second.
    assert [one.by for one in plan.tensor.parameters] == ["columns", "columns", "rows"]


def compare(make: Callable[[], Any], strategy: str, **compiled: Any) -> None:
    """Train plainly, and under a strategy."""
    x, y = zoo.vectors(SAMPLES), zoo.classes(SAMPLES)
    options: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    plain = zoo.compiled(make, metrics=["accuracy"], **compiled)
    with STRATEGIES[strategy]().scope():
        model = zoo.compiled(make, metrics=["accuracy"], **compiled)
    wanted = plain.fit(x, y, validation_data=(x[:17], y[:17]), **options)
    found = model.fit(x, y, validation_data=(x[:17], y[:17]), **options)
    assert zoo.distance(plain, model) < 1e-12
    assert found.history.keys() == wanted.history.keys()
    for key, values in wanted.history.items():
        np.testing.assert_allclose(found.history[key], values, rtol=1e-6, err_msg=key)
    np.testing.assert_allclose(
        model.evaluate(x, y, batch_size=BATCH, verbose=0),
        plain.evaluate(x, y, batch_size=BATCH, verbose=0),
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        model.predict(x, batch_size=BATCH, verbose=0), plain.predict(x, verbose=0), rtol=1e-9
    )
