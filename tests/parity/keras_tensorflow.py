"""``tf.keras`` and ``tf.data`` under strategies, with Keras on PyTorch; files for other backends.

Writes to a folder, for ``keras_loading.py``: models, inputs and predictions.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.path.insert(0, str(Path(__file__).parents[2]))

import lockstep  # isort: skip  # before Keras, whose backend it chooses

import numpy as np
import tensorflow as tf
import torch

from tests import keras_zoo as zoo

X = zoo.vectors(50).astype("float32")
Y = zoo.classes(50)
STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "mirrored": lambda: lockstep.MirroredStrategy(devices=2),
    "pipeline": lambda: lockstep.PipelineStrategy(stages=2, microbatches=3),
    "hybrid": lambda: lockstep.HybridStrategy(data=2, pipe=2, microbatches=4),
}
FEW = list(STRATEGIES.items())[:1]  # whatever batches come with, all read them alike


def make() -> Any:
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((8,)),
            tf.keras.layers.Dense(9, activation="relu"),
            tf.keras.layers.Dense(7, activation="tanh"),
            tf.keras.layers.Dense(zoo.NUM_CLASSES),
        ]
    )
    zoo.set_weights(model)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def make_data() -> "tf.data.Dataset":
    """The same orders whenever it is made, another in every epoch."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).cache()
    return data.shuffle(len(Y), seed=3).batch(12).prefetch(1)


def main(folder: Path) -> None:
    """One line for each strategy and kind of data."""
    torch.set_num_threads(1)
    np.savez(folder / "inputs.npz", x=X)
    data: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
        "once": lambda: (make_data(), {}),
        "repeated": lambda: (make_data().repeat(), {"steps_per_epoch": 3}),
        "weighted": lambda: (make_data(), {"class_weight": {0: 2.0, 1: 1.0, 2: 1.0, 3: 0.5}}),
    }
    for kind, begin in data.items():
        plain = make()
        batches, options = begin()
        plain.fit(batches, epochs=2, verbose=0, shuffle=False, **options)
        for name, strategy in STRATEGIES.items() if kind == "once" else FEW:
            with strategy().scope():
                model = make()
            batches, options = begin()
            model.fit(batches, epochs=2, verbose=0, shuffle=False, **options)
            assert zoo.distance(plain, model) < 1e-5, (kind, name)
            np.testing.assert_allclose(
                model.evaluate(make_data(), verbose=0),
                plain.evaluate(make_data(), verbose=0),
                rtol=1e-5,
            )
            sys.stdout.write(f"{kind} {name} same\n")
            model.save(folder / f"{name}.keras")
            np.savez(folder / f"{name}.npz", y=model.predict(X, verbose=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
