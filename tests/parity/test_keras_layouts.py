"""Keras's ModelParallel and DataParallel, read as strategies."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import distribution, layers

import lockstep
from lockstep.errors import DeviceError, LockstepError, OptionError
from tests import keras_zoo as zoo
from tests.thorough import core_of

Axes = tuple[str | None, ...]

# By the ends of variables' paths.
LAYOUTS: dict[str, Axes] = {
    "tokens/embeddings": (None, "model"),
    "places/kernel": (None, None, "model"),
    "places/bias": ("model",),
    "(query|key)/kernel": (None, "model", None),
    "(query|key)/bias": ("model", None),
    "value/kernel": (None, None, "model"),
    "attention_output/kernel": ("model", None, None),
    "wide/kernel": (None, "model"),
    "wide/bias": ("model",),
    "narrow/kernel": ("model", None),
    "hidden/kernel": ("model", None),
    "hidden/output": ("batch", None),
}
TOKENS = np.random.default_rng(2).integers(0, 11, size=(17, 6))


def make() -> Any:
    """Attention, a convolution, and dense layers, each with its name."""
    inputs = layers.Input((6,), dtype="int32")
    x = layers.Embedding(11, 15, name="tokens")(inputs)
    x = layers.Conv1D(15, 3, padding="same", activation="relu", name="places")(x)
    x = x + layers.MultiHeadAttention(3, 5, name="attention")(x, x)
    wide = layers.EinsumDense("btw,wh->bth", (None, 23), bias_axes="h", name="wide")(x)
    x = x + layers.Dense(15, name="narrow")(keras.ops.gelu(wide))
    x = layers.BatchNormalization(name="norm")(layers.GlobalAveragePooling1D()(x))
    x = layers.Dense(21, activation="tanh", name="hidden")(x)
    return keras.Model(inputs, layers.Dense(zoo.NUM_CLASSES, name="head")(x))


def model_parallel(shape: tuple[int, ...], layouts: dict[str, Axes], *axes: str) -> Any:
    devices = [f"cpu:{number}" for number in range(int(np.prod(shape)))]
    mesh = distribution.DeviceMesh(shape, axes or ("batch", "model"), devices)
    layout_map = distribution.LayoutMap(mesh)
    for path, layout in layouts.items():
        layout_map[f"(.*/)?{path}"] = layout
    return distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


@pytest.mark.thorough
@pytest.mark.parametrize("data", core_of([1, 2], [2], []))
def test_training_equals_one_device(data: int) -> None:
    given = model_parallel((data, 2), LAYOUTS)
    with zoo.true_float64():
        plain = zoo.compiled(make, TOKENS, optimizer="sgd")
        distribution.set_distribution(given)
        with lockstep.keras.strategy_of().scope():
            model = zoo.compiled(make, TOKENS, optimizer="sgd")
        assert distribution.distribution() is None
        options: dict[str, Any] = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
        for one in (plain, model):
            one.fit(TOKENS, zoo.classes(17), **options)
        assert zoo.distance(plain, model) < 1e-12
    wanted = {
        one.path.replace("/", "."): layout.axes.index("model")
        for one in model.weights
        if (layout := given._layout_map[one.path]) is not None
    }
    tensor = model._lockstep.plan.tensor
    assert {one.name: one.split.dim for one in tensor.parameters} == wanted
    assert len(wanted) == 13


def test_replicas_are_mirrored() -> None:
    replicas = distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    for one in (replicas, model_parallel((2, 1), {"wide/kernel": (None, "model")})):
        assert repr(lockstep.keras.strategy_of(one)) == "MirroredStrategy(devices=['cpu', 'cpu'])"
    both = model_parallel((2, 3), LAYOUTS)
    assert repr(lockstep.keras.strategy_of(both, num_tensor_shards=6)) == (
        f"HybridStrategy(data=2, tensor=3, num_tensor_shards=6, devices={['cpu'] * 6})"
    )


@pytest.mark.parametrize(
    ("given", "kind", "what"),
    [
        (lambda: None, OptionError, "call keras.distribution.set_distribution before"),
        (
            lambda: model_parallel((2, 2), {"kernel": ("model", "batch")}),
            OptionError,
            r"kernel'\] = \('model', 'batch'\), with a mesh of batch 2 x model 2.*place of 'batch'",
        ),
        (
            lambda: model_parallel((1, 2, 2), LAYOUTS, "batch", "model", "more"),
            OptionError,
            "batch 1 x model 2 x more 2",
        ),
        (lambda: distribution.DataParallel(devices=["gpu:7"]), DeviceError, "cuda:7"),
    ],
)
def test_what_is_no_strategy_is_refused(
    given: Callable[[], Any], kind: type[LockstepError], what: str
) -> None:
    with pytest.raises(kind, match=what):
        lockstep.keras.strategy_of(given())


@pytest.mark.parametrize(
    ("path", "layout", "what"),
    [
        ("norm/gamma", ("model",), r"norm\.gamma along dim 0 \(used by .*, into 2 shards"),
        ("norm/moving_mean", ("model",), "norm/moving_mean' .*no gradient changes"),
        ("hidden/bias", (None, "model"), r"hidden/bias' of shape \(21,\)"),
        ("narrow/bias", ("model",), r"narrow\.bias along dim 0 \(used by add\)"),
    ],
)
def test_what_cannot_be_divided_is_refused(path: str, layout: Axes, what: str) -> None:
    strategy = lockstep.keras.strategy_of(model_parallel((1, 2), {**LAYOUTS, path: layout}))
    with pytest.raises(OptionError, match=what):
        strategy.plan(zoo.compiled(make, TOKENS), batch_size=7, sample=TOKENS)


def test_layouts_are_of_keras_models() -> None:
    strategy = lockstep.keras.strategy_of(model_parallel((1, 2), LAYOUTS))
    with pytest.raises(OptionError, match="A LayoutMap names variables of Keras models"):
        strategy.plan(torch.nn.Linear(3, 4), batch_size=2, sample=torch.zeros(2, 3))
