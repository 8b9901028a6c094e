"""Keras models with attention, convolutions and products by einsum, whose layers are divided."""

from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests import keras_zoo as zoo
from tests.parity.test_divided_products import PRODUCTS
from tests.thorough import core_of


def attending() -> Any:
    """A functional model with attention, a convolution, and products by einsum."""
    inputs = layers.Input((6,), dtype="int32")
    x = layers.Embedding(11, 15)(inputs)
    x = layers.Conv1D(15, 3, padding="same", activation="relu")(x)
    x = layers.LayerNormalization()(x)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(3, 5)(x, x))
    hidden = layers.EinsumDense("btw,wh->bth", output_shape=(None, 23), bias_axes="h")(x)
    x = x + layers.EinsumDense("bth,hw->btw", output_shape=(None, 15), bias_axes="w")(hidden)
    hidden = layers.Dense(21, activation="gelu")(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, layers.Dense(zoo.NUM_CLASSES)(hidden))


@pytest.mark.parametrize("product", core_of(PRODUCTS, ["2"], []))
def test_a_keras_model_with_attention(product: str) -> None:
    tokens = np.random.default_rng(2).integers(0, 11, size=(17, 6))
    with zoo.true_float64():
        make = partial(zoo.compiled, attending, tokens, optimizer="sgd")
        plain = make()
        with PRODUCTS[product]().scope():
            model = make()
        options: dict[str, Any] = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
        for one in (plain, model):
            one.fit(tokens, zoo.classes(17), **options)
        assert zoo.distance(plain, model) < 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["full", "activations"])
def test_layers_that_are_computed_again(mode: str) -> None:
    def make() -> Any:
        with keras.RematScope(mode=mode):
            return zoo.compiled(zoo.sequential)

    with zoo.true_float64():
        plain = make()
        with PRODUCTS["2"]().scope():
            model = make()
        for one in (plain, model):
            one.fit(zoo.vectors(17), zoo.classes(17), batch_size=7, shuffle=False, verbose=0)
        assert zoo.distance(plain, model) < 1e-12


def test_layers_of_keras_are_divided() -> None:
    sample = np.zeros((7, 6), int), zoo.classes(7)
    model = zoo.compiled(attending, sample[0])
    plan = PRODUCTS["3"]().plan(model, batch_size=7, sample=sample)
    assert plan.tensor is not None
    kinds = {layer.name: layer.kind for layer in plan.layers}
    found = [
        (kinds[layer], one.by)
        for one in plan.tensor.parameters
        for layer, _, name in [one.name.rpartition(".")]
        if name != "bias"
    ]
    assert found == [
        *[("Embedding", "columns"), ("Conv1D", "columns")],
        *[("EinsumDense", "columns")] * 3,  # queries, keys, values
        ("EinsumDense", "rows"),
        *[(kind, way) for kind in ("EinsumDense", "Dense") for way in ("columns", "rows")],
    ]
    biases = [one.name.rpartition(".")[0] for one in plan.tensor.parameters if "bias" in one.name]
    assert [kinds[layer] for layer in biases] == ["Conv1D", "EinsumDense", "Dense"]
