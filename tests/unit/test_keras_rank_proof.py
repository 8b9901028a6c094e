"""Ways in which a helper may differ from a script that uses Keras: carried, or named at once."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops
from torch.overrides import TorchFunctionMode

import lockstep
from lockstep.errors import ModelError
from lockstep.train.runtime.runner import Runner
from lockstep.train.validation.rank_consistency import samples_of
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

Patch = pytest.MonkeyPatch
X = np.sin(np.linspace(-2, 2, 48)).reshape(8, 6).astype("float32")
Y = np.arange(8) % 3
FACTOR = 1.0
REGISTRY: set[str] = set()
NUMBERS = random.Random(0)


class Own(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Computes with whatever a script can change."""

    slope = 1.0

    def __init__(self) -> None:
        super().__init__(name="own")
        self.cache: float | None = 1.0
        self.num_calls = 0
        self.seen: list[int] = []
        self.counts = keras.metrics.Mean(name="counts")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "cache": None}

    def call(self, x: Any) -> Any:
        self.num_calls += 1
        self.seen.append(self.num_calls)
        numbers = (
            FACTOR
            + len(REGISTRY)
            + float(os.environ.get("LOCKSTEP_TEST_FACTOR", "0"))
            + NUMBERS.getstate()[1][1] % 7 / 7
            + float(np.hypot(3, 4)) / 10
        )
        x = ops.sigmoid(torch.tanh(ops.relu(x) * numbers * self.slope))
        self.counts.update_state(ops.ones((ops.shape(x)[0],)))
        return scaled(x)


def scaled(x: Any) -> Any:
    return x / 2


class Counting(keras.losses.Loss):  # type: ignore[misc]
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__(name="counting")
        self.num_calls = 0

    def call(self, target: Any, output: Any) -> Any:
        self.num_calls += 1
        return ops.sparse_categorical_crossentropy(target, output, from_logits=True)


def made(*, owns: bool = True, loss: Any = None, strategy: Any = None) -> Any:
    keras.utils.set_random_seed(3)
    stack = [keras.Input((6,)), layers.Dense(8, name="first"), layers.BatchNormalization()]
    stack += [Own()] if owns else []
    stack += [layers.Dropout(0.3, name="drop"), layers.Dense(3, name="head")]
    with (strategy or lockstep.MirroredStrategy(2)).scope():
        model = keras.Sequential(stack)
        given = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), given)
    return model


def fit(model: Any) -> None:
    model.fit(X, Y, batch_size=4, verbose=0)


# --- named --------------------------------------------------------------------------------------


class Tripled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is torch.tanh else result


def doubled(self: Any, x: Any) -> Any:
    return x * 2


OWN, FIRST = r"output of layer '.*own' \(Own\)", r"output of layer '.*first' \(Dense\)"
HEAD = r"output of layer '.*drop' \(Dropout\)"
PATCHES: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "a function of Keras": (OWN, lambda to: to.setattr(ops, "relu", ops.gelu)),
    "a function of torch": (OWN, lambda to: to.setattr(torch, "tanh", torch.sin)),
    "a function of NumPy": (OWN, lambda to: to.setattr(np, "hypot", np.arctan2)),
    "a function of the user's": (OWN, lambda to: to.setitem(globals(), "scaled", lambda x: x / 3)),
    "the call of a layer of Keras": (
        HEAD,
        lambda to: to.setattr(layers.Dropout, "call", lambda self, x, training=False: x),
    ),
    "the call of a layer of the user's": (OWN, lambda to: to.setattr(Own, "call", doubled)),
    "a class's attribute": (OWN, lambda to: to.setattr(Own, "slope", 2.0)),
    "a module's global": (OWN, lambda to: to.setitem(globals(), "FACTOR", 2.0)),
    "a registry": (OWN, lambda to: to.setitem(globals(), "REGISTRY", {"Own"})),
    "a variable of the environment": (OWN, lambda to: to.setenv("LOCKSTEP_TEST_FACTOR", "2")),
    "random numbers of a module": (
        OWN,
        lambda to: to.setitem(globals(), "NUMBERS", random.Random(1)),
    ),
    "the loss's function": (
        "the loss",
        lambda to: to.setattr(Counting, "call", lambda self, target, output: output[:, 0] ** 2),
    ),
}


@pytest.mark.parametrize(
    "name", core_of(PATCHES, ["a function of Keras", "a registry", "the loss's function"])
)
def test_what_the_script_has_changed_is_named(name: str, monkeypatch: Patch) -> None:
    place, change = PATCHES[name]
    model = made(loss=Counting())
    fit(model)  # helpers have imported all that they need
    change(monkeypatch)
    weights = model.get_weights()
    with pytest.raises(ModelError, match=f"(?s)Rank 1 does not compute.*{place}"):
        fit(model)
    assert all(map(np.array_equal, model.get_weights(), weights))
    model._lockstep.trainer.runner.close()


@pytest.mark.parametrize("kind", ["of a model whose calls are known", "of any other"])
def test_a_patched_layer_of_keras_is_named(kind: str, monkeypatch: Patch) -> None:
    model = made(owns=kind == "of any other")
    fit(model)
    call = layers.Dense.call
    monkeypatch.setattr(layers.Dense, "call", lambda self, x, training=None: call(self, x) * 2)
    with pytest.raises(ModelError, match=f"(?s)Rank 1 does not compute.*{FIRST}"):
        fit(model)


def test_a_mode_around_the_script_is_named() -> None:
    with pytest.raises(ModelError, match=f"(?s)Rank 1 does not compute.*{OWN}"), Tripled():
        fit(made())


def test_what_a_copy_has_lost_is_named() -> None:
    class Lossy(layers.Layer):  # type: ignore[misc]
        """Has forgotten a number when it is made again."""

        def build(self, shape: Any) -> None:
            self.rate = Rate(2.0)

        def call(self, x: Any) -> Any:
            return x * self.rate.value

    with lockstep.MirroredStrategy(2).scope():
        model = keras.Sequential([keras.Input((6,)), Lossy(name="lossy"), layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(ModelError, match=r"output of layer '.*lossy' \(Lossy\)"):
        fit(model)


class Rate:
    def __init__(self, value: float) -> None:
        self.value = value

    def __getstate__(self) -> dict[str, Any]:
        return {"value": 1.0}


# --- carried ------------------------------------------------------------------------------------


@contextmanager
def changed(name: str, value: Any) -> Iterator[None]:
    """Within the block a setting of ``keras.config`` is another."""
    before = getattr(keras.config, name)()
    getattr(keras.config, f"set_{name}")(value)
    try:
        yield
    finally:
        getattr(keras.config, f"set_{name}")(before)


class Looking(layers.Layer):  # type: ignore[misc]
    """Computes with Keras's and torch's settings."""

    def call(self, x: Any) -> Any:
        settings = (
            keras.config.floatx(),
            keras.config.epsilon(),
            keras.config.image_data_format(),
            keras.config.dtype_policy().name,
            keras.config.is_flash_attention_enabled(),
            torch.get_float32_matmul_precision(),
        )
        return x * (sum(ord(each) for each in str(settings)) / 1000)


@contextmanager
def without_flash_attention() -> Iterator[None]:
    keras.config.disable_flash_attention()
    try:
        yield
    finally:
        keras.config.enable_flash_attention()


@contextmanager
def high_precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "the epsilon": partial(changed, "epsilon", 1e-3),
    "the float type": partial(changed, "floatx", "float64"),
    "the format of images": partial(changed, "image_data_format", "channels_first"),
    "the policy": partial(changed, "dtype_policy", "mixed_bfloat16"),
    "flash attention": without_flash_attention,
    "matmul precision": high_precision,
}


@pytest.mark.parametrize("name", core_of(SETTINGS, ["flash attention"]))
def test_settings_are_carried(name: str) -> None:
    with lockstep.MirroredStrategy(2).scope():
        model = keras.Sequential([keras.Input((6,)), Looking(), layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit(model)
    with SETTINGS[name]():
        fit(model)


def test_what_belongs_to_the_model_is_carried() -> None:
    model = made()
    model.get_layer("own").call = lambda x: x * 3
    fit(model)


# --- no trace, no second time -------------------------------------------------------------------


def test_it_leaves_no_trace(monkeypatch: Patch) -> None:
    found = []
    for proves in (True, False):
        with monkeypatch.context() as patched:
            if not proves:
                patched.setattr(Runner, "_prepare_proof", lambda *options: None)
            torch.manual_seed(1)
            loss = Counting()
            model = made(loss=loss)
            model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
        own = model.get_layer("own")
        counted = float(own.counts.count.value)
        counts = own.num_calls, list(own.seen), loss.num_calls, counted
        found.append((model.get_weights(), counts, torch.get_rng_state()))
    (weights, counts, stream), (others, other_counts, other_stream) = found
    assert all(map(np.array_equal, weights, others))
    assert counts == other_counts
    assert stream.equal(other_stream)


@pytest.mark.parametrize("owns", [True, False])
def test_it_is_remembered(owns: bool, monkeypatch: Patch) -> None:
    proofs = []

    def counted(*options: Any) -> Any:
        proofs.append(1)
        return samples_of(*options)

    monkeypatch.setattr("lockstep.train.runtime.runner.samples_of", counted)
    model = made(owns=owns)
    for _ in range(3):
        fit(model)
    assert len(proofs) == (3 if owns else 1)  # a layer of the user's has counted its calls
    model.get_layer("drop").rate = 0.2
    fit(model)
    assert len(proofs) == (4 if owns else 2)
