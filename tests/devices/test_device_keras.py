"""Keras models on accelerators, also of kinds that Keras does not look for."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest

import lockstep
from lockstep.strategies.base import Strategy
from tests.devices.found import ranks_on_devices

INPUTS = np.random.default_rng(0).normal(size=(24, 8)).astype("float32")
TARGETS = np.arange(24) % 3


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),  # on CPUs it has a kernel of its own
}


def trained(strategy: Strategy | None, optimizer: str) -> list[Any]:
    """The weights, the predictions and the loss of an evaluation; without a strategy, of Keras."""
    keras.utils.set_random_seed(1)
    with nullcontext() if strategy is None else strategy.scope():
        given = keras.Input((8,))
        hidden = keras.layers.Dense(16, activation="tanh")(given)
        hidden = keras.layers.BatchNormalization()(hidden)
        hidden = keras.layers.Concatenate()([hidden, given])
        model = keras.Model(given, keras.layers.Dense(3)(hidden))
        model.compile(
            optimizer=OPTIMIZERS[optimizer](),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    model.fit(INPUTS, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0)
    loss = model.evaluate(INPUTS, TARGETS, batch_size=8, verbose=0)
    return [*model.get_weights(), model.predict(INPUTS, batch_size=8, verbose=0), np.array(loss)]


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "one": lambda: lockstep.MirroredStrategy(ranks_on_devices(1)),
    "two": lambda: lockstep.MirroredStrategy(ranks_on_devices(2), engine="gloo"),
    "sharded": lambda: lockstep.FullyShardedStrategy(ranks_on_devices(2), engine="gloo"),
}


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [("one", "sgd"), ("two", "sgd"), ("two", "adam"), ("sharded", "adam")],
)
def test_a_model_trains_as_in_plain_keras(strategy: str, optimizer: str) -> None:
    found = trained(STRATEGIES[strategy](), optimizer)
    expected = trained(None, optimizer)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
