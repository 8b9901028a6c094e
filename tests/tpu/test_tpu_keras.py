"""Keras models on TPUs, in fp64, against the same model trained by Lockstep on a CPU."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import lockstep
from lockstep.strategies.base import Strategy
from tests import keras_zoo as zoo
from tests.launching import clean_environment
from tests.tpu.limits import LIMIT_SECONDS

TOLERANCE = 1e-12

EXAMPLE = Path(__file__).parents[2] / "examples" / "keras" / "tpu.py"

INPUTS = np.random.default_rng(0).normal(size=(24, 8))
TARGETS = np.arange(24) % 3


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with zoo.true_float64():
        yield


def make_model(strategy: Strategy) -> Any:
    """A functional one, with a branch and batch statistics."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        given = keras.Input((8,))
        hidden = keras.layers.Dense(16, activation="tanh")(given)
        hidden = keras.layers.BatchNormalization()(hidden)
        hidden = keras.layers.Concatenate()([hidden, given])
        model = keras.Model(given, keras.layers.Dense(3)(hidden))
        model.compile(
            optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return model


def trained(strategy: Strategy) -> list[Any]:
    """Weights, predictions, and the loss of an evaluation."""
    model = make_model(strategy)
    model.fit(INPUTS, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0)
    loss = model.evaluate(INPUTS, TARGETS, batch_size=8, verbose=0)
    return [*model.get_weights(), model.predict(INPUTS, batch_size=8, verbose=0), np.array(loss)]


@pytest.mark.parametrize("count", [1, 2])
def test_training_equals_a_cpu(count: int) -> None:
    found = trained(lockstep.TPUStrategy(count))
    expected = trained(lockstep.SingleDeviceStrategy("cpu"))
    for one, other in zip(found, expected, strict=True):
        assert np.linalg.norm(one - other) <= TOLERANCE * np.linalg.norm(other)


def test_the_example_runs(tmp_path: Path) -> None:
    """With Adam, which has a kernel of its own on CPUs."""
    done = subprocess.run(
        [sys.executable, EXAMPLE],
        env=clean_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("2 TPUs")
    assert "test loss" in done.stdout
