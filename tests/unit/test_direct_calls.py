"""Keras graphs that are run without ceremony: the same outputs; and which models are not."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import lockstep  # noqa: F401  # before Keras: it chooses Keras's PyTorch backend
from lockstep.frontends.keras.layers.fast_forward import DirectCalls
from tests import keras_zoo as zoo

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def two_heads() -> Any:
    one, other = keras.Input((8,)), keras.Input((3,))
    joined = layers.Concatenate()([layers.Dense(4)(one), other])
    return keras.Model([one, other], {"a": layers.Dense(2)(joined), "b": ops.tanh(joined)})


def normalizations() -> Any:
    inputs = keras.Input((8,))
    hidden = layers.LayerNormalization()(layers.BatchNormalization()(inputs))
    return keras.Model(inputs, layers.RMSNormalization()(hidden))


def embedding() -> Any:
    inputs = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(20, 5)(inputs)
    return keras.Model(inputs, layers.GlobalMaxPooling1D()(layers.Conv1D(4, 2)(hidden)))


GRAPHS: dict[str, tuple[Callable[[], Any], Any]] = {
    "sequential": (zoo.sequential, X),
    "with skips": (zoo.with_skips, X),
    "shared and nested": (zoo.shared_layers, X),
    "images": (zoo.images, X),
    "normalizations": (normalizations, X),
    "two heads": (two_heads, [X, X[:, :3]]),
    "embedding": (embedding, torch.randint(20, (5, 6), dtype=torch.int32)),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_outputs_are_those_of_a_call(name: str, training: bool) -> None:
    make, inputs = GRAPHS[name]
    model = make()
    direct = DirectCalls.of(model)
    assert direct is not None
    assert direct.takes(inputs)
    found, wanted = direct.run(inputs, training=training), model(inputs, training=training)
    keras.tree.assert_same_structure(found, wanted)
    for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(wanted), strict=True):
        torch.testing.assert_close(one, other)


def test_training_reaches_the_layers() -> None:
    model = keras.Sequential([keras.Input((8,)), layers.Dropout(0.5)])
    direct = DirectCalls.of(model)
    assert direct is not None
    assert torch.equal(direct.run(X, training=False), X)
    assert not torch.equal(direct.run(X, training=True), X)


class Own(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    def call(self, inputs: Any) -> Any:
        return inputs * 2


class OwnDense(layers.Dense):  # type: ignore[misc]  # Keras is untyped
    """A subclass may do anything."""


def stacked(*stack: Any, **options: Any) -> Any:
    return keras.Sequential([keras.Input((8,)), *stack], **options)


def hooked() -> Any:
    model = zoo.sequential()
    model.layers[0].register_forward_hook(lambda *_: None)
    return model


OTHERS: dict[str, Callable[[], Any]] = {
    "a subclass of Model": zoo.Subclassed,
    "an own layer": lambda: stacked(Own()),
    "a subclass of a layer": lambda: stacked(OwnDense(3)),
    "an activity regularizer": lambda: stacked(layers.Dense(3, activity_regularizer="l2")),
    "masks": lambda: stacked(layers.Reshape((8, 1)), layers.Masking()),
    "a mask of an embedding": lambda: keras.Sequential(
        [keras.Input((4,), dtype="int32"), layers.Embedding(9, 3, mask_zero=True)]
    ),
    "two dtypes": lambda: stacked(layers.Dense(3, dtype="mixed_bfloat16")),
    "a layer as an activation": lambda: stacked(layers.Dense(3, activation=layers.Dropout(0.5))),
    "a hook": hooked,
    "a nested one": lambda: stacked(stacked(Own())),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_may_do_more_is_called_as_keras_calls_it(name: str) -> None:
    model = OTHERS[name]()
    if not model.built:
        model(X)
    assert DirectCalls.of(model) is None


def test_inputs_of_another_kind_are_not_taken() -> None:
    direct = DirectCalls.of(zoo.sequential())
    assert direct is not None
    assert not direct.takes(X.double())
    assert not direct.takes(X[:, :7])
    assert not direct.takes([X, X])
    assert not direct.takes({"x": X})
    assert not direct.takes(np.zeros((5, 8), "float32"))


def test_an_error_names_the_layer() -> None:
    model = keras.Sequential([keras.Input((None, 8)), layers.Reshape((16,), name="pairs")])
    direct = DirectCalls.of(model)
    assert direct is not None
    with pytest.raises(ValueError, match="total size") as raised:
        direct.run(torch.zeros(2, 3, 8), training=False)
    assert "pairs" in str(getattr(raised.value, "__notes__", ""))
