"""Models that look across samples are refused where batches are divided; losses may do so."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import lockstep
from lockstep.errors import ModelError

pytestmark = pytest.mark.thorough

SAMPLES = 24
X = np.random.default_rng(0).normal(size=(SAMPLES, 6)).astype("float32")
Y = np.arange(SAMPLES) % 3
DIVIDED: dict[str, Callable[[], lockstep.Strategy]] = {
    "mirrored": lambda: lockstep.MirroredStrategy(2),
    "pipeline": lambda: lockstep.PipelineStrategy(2, microbatches=2),
}
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Centered(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Takes the mean of the batch away."""

    def call(self, inputs: Any) -> Any:
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


class Rolled(layers.Layer):  # type: ignore[misc]
    """Mixes every sample with the next, in training only."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        return inputs + 0.1 * ops.roll(inputs, 1, axis=0) if training else inputs


class Noisy(layers.Layer):  # type: ignore[misc]
    """Adds noise, always."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(1)

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal(ops.shape(inputs), seed=self.generator)


class Similar(layers.Layer):  # type: ignore[misc]
    """A similarity for each pair of samples."""

    def call(self, inputs: Any) -> Any:
        return ops.matmul(inputs, ops.transpose(inputs))


def contrastive(target: Any, output: Any) -> Any:
    """How much nearer a sample is to itself than to the others."""
    similarity = ops.matmul(output, ops.transpose(output))
    return ops.logsumexp(similarity, axis=1) - ops.diagonal(similarity)


def balanced(target: Any, output: Any) -> Any:
    """Weighs samples by what the batch is on average."""
    values = ops.mean(ops.square(output), axis=-1)
    return values * values / ops.mean(values)


def by_sample(target: Any, output: Any) -> Any:
    return ops.mean(ops.square(output), axis=-1) - ops.mean(output, axis=-1)


def by_class(target: Any, output: Any) -> Any:
    """One value for each output, which Keras takes the mean of."""
    return ops.mean(ops.square(output), axis=0)


def in_fours(target: Any, output: Any) -> Any:
    """Of four samples at a time, a value for each."""
    return ops.reshape(ops.square(ops.reshape(output, (-1, 4, 1))), (-1,))


def cancelling(target: Any, output: Any) -> Any:
    """Signed values that come to nothing."""
    return ops.reshape(output - ops.stop_gradient(output), (-1,)) + 1e-9


class Annealed(keras.losses.Loss):  # type: ignore[misc]
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen = keras.Variable(0.0, trainable=False)

    def call(self, target: Any, output: Any) -> Any:
        self.calls += 1
        self.seen.assign_add(1.0)
        return ops.mean(ops.square(output), axis=-1)


def made(*stack: Any, loss: Any = CROSS_ENTROPY, compiles: bool = True) -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(6, "tanh"), layers.Dense(5), *stack])
    if compiles:
        model.compile(keras.optimizers.SGD(0.01), loss)
    return model


@pytest.mark.parametrize("strategy", DIVIDED)
@pytest.mark.parametrize(
    ("layer", "mode"),
    [
        (Centered, "evaluation"),
        (lambda: layers.Softmax(axis=0), "evaluation"),
        (Rolled, "training"),
        (Similar, "evaluation"),
    ],
    ids=["centered", "softmax", "rolled", "similar"],
)
def test_models_that_look_across_samples(
    layer: Callable[[], Any], mode: str, strategy: str
) -> None:
    with DIVIDED[strategy]().scope():
        model = made(layer())
    before = model.get_weights()
    # While a model trains it is tried in training mode, which shows what evaluation does, too.
    with pytest.raises(
        ModelError, match=r"must not depend on the other samples.*samples in training "
    ):
        model.fit(X, Y, verbose=0)
    if mode == "training":
        model.evaluate(X, Y, verbose=0)  # which can be divided
        with pytest.raises(ModelError, match="in training"):
            model.train_on_batch(X, Y)
    else:
        with pytest.raises(ModelError, match="must not depend on the other samples"):
            model.evaluate(X, Y, verbose=0)
        with pytest.raises(ModelError, match="must not depend on the other samples"):
            model.predict(X, verbose=0)
    assert all(map(np.array_equal, model.get_weights(), before))


@pytest.mark.parametrize("strategy", DIVIDED)
@pytest.mark.parametrize(
    "loss", [contrastive, balanced, keras.losses.Circle()], ids=["pairs", "balanced", "circle"]
)
def test_losses_that_look_across_samples(loss: Any, strategy: str) -> None:
    plain = made(loss=loss)
    with DIVIDED[strategy]().scope():
        model = made(loss=loss)
    wanted, found = (
        each.fit(X, Y, batch_size=10, shuffle=False, verbose=0).history for each in (plain, model)
    )
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("stack", "loss"),
    [
        ((layers.Dropout(0.5),), CROSS_ENTROPY),
        ((Noisy(),), CROSS_ENTROPY),
        ((layers.BatchNormalization(),), CROSS_ENTROPY),
        ((layers.LayerNormalization(), layers.Softmax()), "sparse_categorical_crossentropy"),
        ((keras.layers.TorchModuleWrapper(torch.nn.BatchNorm1d(5)),), CROSS_ENTROPY),
        ((layers.Dense(1),), by_sample),
        ((layers.Dense(2),), by_class),
        ((layers.Dense(4),), by_class),
        ((layers.Dense(1),), in_fours),
        ((layers.Dense(1),), cancelling),
        ((layers.Dense(2),), keras.losses.MeanSquaredError(dtype="bfloat16")),
        ((layers.Dense(2),), keras.losses.CosineSimilarity(reduction="sum")),
    ],
    ids=[
        "dropout",
        "noise",
        "statistics",
        "rows",
        "torch's statistics",
        "own loss",
        "two classes",
        "four classes",
        "fours",
        "cancelling",
        "bfloat16",
        "sum",
    ],
)
def test_what_looks_at_single_samples_trains(stack: tuple[Any, ...], loss: Any) -> None:
    with lockstep.MirroredStrategy(2).scope():
        model = made(*stack, loss=loss)
    targets = Y if stack[0].name.split("_")[0] != "dense" else np.eye(4)[Y][:, : stack[0].units]
    before = model.get_weights()
    model.fit(X, targets, batch_size=8, verbose=0)
    assert not all(map(np.array_equal, model.get_weights(), before))
    assert len(model.predict(X, verbose=0)) == SAMPLES


def test_a_loss_that_counts_is_left_as_it_was_found() -> None:
    loss = Annealed()
    with lockstep.MirroredStrategy(2).scope():
        model = made(layers.Dense(1), loss=loss)
    model.evaluate(X, Y, verbose=0)
    calls, seen = loss.calls, float(loss.seen.value)
    model.fit(X, Y, batch_size=SAMPLES, verbose=0)  # which looks anew, and then makes one step
    assert (loss.calls, float(loss.seen.value)) == (calls + 1, seen + 1)


def test_one_device_takes_whole_batches() -> None:
    plain = made(Centered(), loss=contrastive)
    with lockstep.SingleDeviceStrategy().scope():
        model = made(Centered(), loss=contrastive)
    for each in (plain, model):
        each.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_model_that_nobody_compiled_is_looked_at_before_it_predicts() -> None:
    with lockstep.MirroredStrategy(2).scope():
        model = made(Centered(), compiles=False)
    with pytest.raises(ModelError, match="must not depend on the other samples"):
        model.predict(X, verbose=0)
