"""Keras: the same shares give the same bits of metrics on any number of replicas."""

from typing import Any

import keras

import lockstep
from tests.parity.test_bits import metric_data


def histories(devices: int) -> Any:
    """With metrics that are sums of floating point numbers."""
    x, y = (part.numpy() for part in metric_data())
    keras.utils.set_random_seed(0)
    with lockstep.MirroredStrategy(devices, num_shares=4).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae", keras.metrics.AUC(name="auc")])
    held_out = x[150:], y[150:]
    return model.fit(
        x[:150], y[:150], batch_size=22, validation_data=held_out, epochs=2, verbose=0
    ).history


def test_metrics_have_the_same_bits_on_any_number_of_replicas() -> None:
    alone = histories(1)
    assert alone == histories(3)
    assert {"mae", "val_mae", "auc"} <= alone.keys()
