"""Keras models out of layers of every kind."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.keras_zoo import set_weights

Make = Callable[[], Any]
WIDTH, LENGTH, SIDE, CLASSES = 6, 5, 4, 4
ENTRIES = {"vector": (5,), "sequence": (LENGTH, 5), "image": (SIDE, SIDE, 2), "tokens": (LENGTH,)}

SMALL = keras.regularizers.L2(0.01)


class Scaled(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """A layer of the user's own, which adds a loss."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.01 * ops.mean(ops.square(inputs)))
        return inputs * self.scale


class Counting(layers.Layer):  # type: ignore[misc]
    """A sub-layer, and `training` as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(WIDTH)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return ops.tanh(self.inner(inputs)) + (0.3 if training else 0.1) * inputs


class Attending(layers.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.MultiHeadAttention(2, 3)

    def call(self, inputs: Any) -> Any:
        return inputs + self.inner(inputs, inputs, use_causal_mask=True)


def _frozen() -> Any:
    layer = layers.Dense(WIDTH)
    layer.trainable = False
    return layer


_EVERYWHERE: dict[str, Make] = {
    "dense": partial(layers.Dense, WIDTH, activation="tanh"),
    "batch norm": layers.BatchNormalization,
    "layer norm": layers.LayerNormalization,
    "rms norm": layers.RMSNormalization,
    "group norm": partial(layers.GroupNormalization, 2),
    "unit norm": layers.UnitNormalization,
    "relu": layers.ReLU,
    "prelu": layers.PReLU,
    "gelu": partial(layers.Activation, "gelu"),
    "activity": partial(layers.ActivityRegularization, l2=0.01),
    "scaled": Scaled,
}
LAYERS: dict[str, dict[str, Make]] = {
    "vector": {
        **_EVERYWHERE,
        "regularized": partial(layers.Dense, WIDTH, kernel_regularizer=SMALL),
        "regularized output": partial(layers.Dense, WIDTH, activity_regularizer=SMALL),
        "constrained": partial(layers.Dense, WIDTH, kernel_constraint=keras.constraints.MaxNorm(1)),
        "spectral norm": lambda: layers.SpectralNormalization(layers.Dense(WIDTH)),
        "einsum": partial(layers.EinsumDense, "ab,bc->ac", WIDTH, bias_axes="c"),
        "frozen": _frozen,
        "counting": Counting,
        "reshaped": lambda: keras.Sequential(
            [layers.Reshape((3, 2)), layers.Permute((2, 1)), layers.Flatten()]
        ),
    },
    "sequence": {
        **_EVERYWHERE,
        "lstm": partial(layers.LSTM, WIDTH, return_sequences=True),
        "gru": partial(layers.GRU, WIDTH, return_sequences=True, reset_after=False),
        "rnn": partial(layers.SimpleRNN, WIDTH, return_sequences=True, go_backwards=True),
        "bidirectional": lambda: layers.Bidirectional(layers.GRU(3, return_sequences=True)),
        "distributed": lambda: layers.TimeDistributed(layers.Dense(WIDTH)),
        "convolution": partial(layers.Conv1D, WIDTH, 3, padding="causal"),
        "separable": partial(layers.SeparableConv1D, WIDTH, 3, padding="same"),
        "attention": Attending,
        "pool": partial(layers.MaxPooling1D, 3, 1, padding="same"),
    },
    "image": {
        **_EVERYWHERE,
        "convolution": partial(layers.Conv2D, WIDTH, 3, padding="same", activation="relu"),
        "depthwise": partial(layers.DepthwiseConv2D, 3, padding="same"),
        "separable": partial(layers.SeparableConv2D, WIDTH, 3, padding="same"),
        "transposed": partial(layers.Conv2DTranspose, WIDTH, 3, padding="same"),
        "pool": partial(layers.AveragePooling2D, 2, 1, padding="same"),
        "up and down": lambda: keras.Sequential([layers.UpSampling2D(2), layers.MaxPooling2D(2)]),
    },
}
LAYERS["tokens"] = {name: LAYERS["sequence"][name] for name in ("lstm", "gru", "dense")}


def entry_of(kind: str) -> list[Any]:
    if kind == "tokens":
        return [layers.Embedding(9, WIDTH, mask_zero=True)]
    return [layers.Dense(WIDTH)]


def parts_of(case: Any) -> list[Any]:
    """The layers, to the last hidden one."""
    own = [*entry_of(case.entry), *(LAYERS[case.entry][name]() for name in case.body)]
    pool = {"image": layers.GlobalAveragePooling2D, "sequence": layers.GlobalMaxPooling1D}
    if case.entry == "tokens":
        own.append(layers.GlobalAveragePooling1D())  # of what is not masked
    elif case.entry in pool:
        own.append(pool[case.entry]())
    return own + [LAYERS["vector"][name]() for name in case.tail]


class Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self, case: Any) -> None:
        super().__init__()
        self.parts = parts_of(case)
        self.head = layers.Dense(CLASSES)

    def call(self, inputs: Any) -> Any:
        hidden = inputs
        for part in self.parts:
            hidden = part(hidden)
        return self.head(hidden)


def make_model(case: Any) -> Any:
    """The model, with weights that depend on the seed alone."""
    shape = ENTRIES[case.entry]
    keras.utils.set_random_seed(case.seed)
    match case.style:
        case "subclassed":
            model: Any = Subclassed(case)
            model(np.ones((2, *shape)))
        case "sequential":
            parts = [layers.Input(shape), *parts_of(case), layers.Dense(CLASSES)]
            model = keras.Sequential(parts)
        case _:
            first = layers.Input(shape, name="first")
            hidden = first
            for part in parts_of(case):
                hidden = part(hidden)
            inputs, outputs = first, layers.Dense(CLASSES, name="main")(hidden)
            if case.style == "two":
                second = layers.Input((3,), name="second")
                hidden = layers.Add()([hidden, layers.Dense(WIDTH)(second)])
                inputs = {"first": first, "second": second}
                outputs = {
                    "main": layers.Dense(CLASSES, name="main")(hidden),
                    "other": layers.Dense(2, name="other")(hidden),
                }
            model = keras.Model(inputs, outputs)
    set_weights(model, case.seed)
    return model
