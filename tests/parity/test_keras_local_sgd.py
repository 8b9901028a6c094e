"""Keras models whose replicas train apart: averaged at an epoch's end; other ways are refused."""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import pytest

import lockstep
from lockstep.errors import OptionError


def keras_model() -> Any:
    keras.utils.set_random_seed(1)
    layers: Iterable[Any] = [
        keras.layers.Input((8,), dtype="float64"),
        keras.layers.Dense(16, "tanh", use_bias=False, dtype="float64"),
        keras.layers.BatchNormalization(dtype="float64"),
        keras.layers.Dense(3, dtype="float64"),
    ]
    model = keras.Sequential(layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_a_keras_model_averages_at_the_end_of_an_epoch() -> None:
    random = np.random.default_rng(0)
    inputs, targets = random.normal(size=(40, 8)), random.integers(0, 3, 40)
    with lockstep.LocalSGDStrategy("epoch", 2).scope():
        model = keras_model()
    model.fit(inputs, targets, batch_size=10, verbose=0, shuffle=False)
    halves = np.arange(40).reshape(4, 2, 5)
    replicas = [keras_model() for _ in range(2)]
    for number, replica in enumerate(replicas):
        rows = halves[:, number].ravel()
        replica.fit(inputs[rows], targets[rows], batch_size=5, verbose=0, shuffle=False)
    pairs = zip(*(replica.get_weights() for replica in replicas), strict=True)
    for found, (one, other) in zip(model.get_weights(), pairs, strict=True):
        np.testing.assert_allclose(found, (one + other) / 2, rtol=1e-12, atol=1e-12)
    with lockstep.LocalSGDStrategy(2, 2, outer=lockstep.Nesterov()).scope():
        refused = keras_model()
    with pytest.raises(OptionError, match="PyTorch model"):
        refused.fit(inputs, targets, verbose=0)


def test_pipelines_are_refused() -> None:
    with lockstep.LocalSGDStrategy("epoch", 4, stages=2, microbatches=2).scope():
        model = keras_model()
    with pytest.raises(OptionError, match="needs a PyTorch model"):
        model.fit(np.zeros((40, 8)), np.zeros(40, int), batch_size=10, verbose=0)
