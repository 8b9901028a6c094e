"""Keras models on parameter servers: the losses of one device, and an optimizer that counts on."""

import keras
import numpy as np
import pytest

import lockstep


def keras_losses(strategy: lockstep.Strategy) -> list[float]:
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((96, 8)).astype("float32")
    targets = inputs[:, :1] * 2 - 1
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    losses: list[float] = model.fit(
        inputs, targets, batch_size=16, epochs=3, shuffle=False, verbose=0
    ).history["loss"]
    return losses


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_keras_optimizer_counts_its_steps(staleness: int) -> None:
    """Servers have made them: without the count a second ``fit`` would be another Adam."""
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((96, 8)).astype("float32")
    with lockstep.ParameterServerStrategy(1, 2, staleness).scope():
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    for epochs in (1, 2):
        model.fit(inputs, inputs[:, :1], batch_size=16, epochs=2, verbose=0)
        assert int(model.optimizer.iterations) == 12 * epochs


def test_a_keras_model_trains_in_the_scope() -> None:
    alone = keras_losses(lockstep.SingleDeviceStrategy())
    np.testing.assert_allclose(
        keras_losses(lockstep.ParameterServerStrategy(1, 2)), alone, rtol=1e-5
    )
    apart = keras_losses(lockstep.ParameterServerStrategy(1, 2, 2))
    np.testing.assert_allclose(apart, alone, rtol=0.1)
