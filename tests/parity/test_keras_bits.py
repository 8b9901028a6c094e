"""Keras: the same shares give the same bits on any number of replicas, also sharded ones."""

from typing import Any

import keras
import pytest

import lockstep
from tests.parity.test_bits import metric_data


def histories(strategy: lockstep.Strategy) -> Any:
    """With metrics that are sums of floating point numbers."""
    x, y = (part.numpy() for part in metric_data())
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae", keras.metrics.AUC(name="auc")])
    held_out = x[150:], y[150:]
    history = model.fit(
        x[:150], y[:150], batch_size=22, validation_data=held_out, epochs=2, verbose=0
    ).history
    return history, [weight.tobytes() for weight in model.get_weights()]


@pytest.mark.thorough
def test_metrics_and_weights_have_the_same_bits_on_any_number_of_replicas() -> None:
    alone = histories(lockstep.MirroredStrategy(1, num_shares=4))
    assert alone == histories(lockstep.MirroredStrategy(3, num_shares=4))
    assert alone == histories(lockstep.FullyShardedStrategy(2, num_shares=4))
    assert {"mae", "val_mae", "auc"} <= alone[0].keys()
