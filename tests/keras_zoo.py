"""Keras models for tests, each with data and with what it is compiled with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from keras.src.backend.common import dtypes

NUM_CLASSES = 4


@contextmanager
def true_float64() -> Iterator[None]:
    """Within the block, Keras computes in float64 where it says so."""
    before, policy = dtypes.BIT64_TO_BIT32_DTYPE["float64"], keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    try:
        yield
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(policy)
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = before


def vectors(samples: int, length: int = 8, seed: int = 0) -> Any:
    """Random vectors."""
    return np.random.default_rng(seed).normal(size=(samples, length))


def classes(samples: int, seed: int = 1) -> Any:
    """Random classes."""
    return np.random.default_rng(seed).integers(0, NUM_CLASSES, size=samples)


def set_weights(model: Any, seed: int = 0) -> None:
    """Give a model weights that depend on the seed and their shapes alone, frozen or not."""
    rng = np.random.default_rng(seed)
    for variable in model.weights:
        if "moving" in variable.name:
            continue
        fan_in = int(np.prod(variable.shape[:-1])) or 1
        variable.assign(rng.normal(size=variable.shape) / np.sqrt(fan_in))


def sequential() -> Any:
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(11, activation="relu"),
            layers.Dense(9, activation="tanh"),
            layers.Dense(NUM_CLASSES),
        ]
    )


def with_skips() -> Any:
    inputs = layers.Input((8,))
    hidden = layers.Dense(8, activation="relu")(inputs)
    joined = layers.Add()([hidden, inputs])
    wide = layers.Dense(12, activation="relu")(joined)
    both = layers.Concatenate()([wide, ops.relu(hidden)])
    return keras.Model(inputs, layers.Dense(NUM_CLASSES)(both))


class Subclassed(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """Layers in a list and a dict, and operations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [layers.Dense(8, activation="relu") for _ in range(3)]
        self.heads = {"classes": layers.Dense(NUM_CLASSES)}

    def call(self, inputs: Any) -> Any:
        hidden = inputs
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.heads["classes"](ops.tanh(hidden))


def shared_layers() -> Any:
    inputs = layers.Input((8,))
    shared = layers.Dense(8, activation="tanh")
    inner = keras.Sequential([layers.Input((8,)), layers.Dense(8), layers.Activation("relu")])
    hidden = shared(inner(shared(inputs)))
    return keras.Model(inputs, layers.Dense(NUM_CLASSES)(inner(hidden)))


def wide() -> Any:
    """Large enough in the middle for gradients to be multiplied in shared memory."""
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(300, activation="tanh"),
            layers.Dense(300, activation="tanh"),
            layers.Dense(NUM_CLASSES),
        ]
    )


def normalized() -> Any:
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(10),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.Dense(NUM_CLASSES),
        ]
    )


def images() -> Any:
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.Reshape((4, 2, 1)),
            layers.Conv2D(5, 3, padding="same", activation="relu"),
            layers.MaxPooling2D((2, 1)),
            layers.Conv2D(6, 2, padding="same"),
            layers.Flatten(),
            layers.Dense(NUM_CLASSES),
        ]
    )


MODELS: dict[str, Callable[[], Any]] = {
    "sequential": sequential,
    "with skips": with_skips,
    "subclassed": Subclassed,
    "shared layers": shared_layers,
    "images": images,
    "wide": wide,
}


class Meddler(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Changes weights, learning rate and what is trained."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            self.model.set_weights([0.9 * weight for weight in self.model.get_weights()])
            self.model.optimizer.learning_rate = 0.005

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.layers[1].trainable = epoch > 0
        if epoch == 2:
            self.model.stop_training = True


def compiled(make: Callable[[], Any], example: Any = None, **options: Any) -> Any:
    """A model with weights of its own, compiled; built for an example where need be."""
    model = make()
    if not model.built:
        model(vectors(2) if example is None else example[:2])
    set_weights(model)
    options.setdefault("optimizer", keras.optimizers.Adam(1e-2))
    options.setdefault("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.compile(**options)
    return model


def distance(one: Any, other: Any) -> Any:
    """How far apart two models' weights are, by the design's measure."""
    pairs = list(zip(one.get_weights(), other.get_weights(), strict=True))
    whole = np.sqrt(sum(float((ours**2).sum()) for ours, _ in pairs))
    return max(
        float(np.linalg.norm(ours - theirs)) / max(float(np.linalg.norm(ours)), whole)
        for ours, theirs in pairs
    )
