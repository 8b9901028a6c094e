"""Keras models whose losses are no means over samples, as users of Keras write them.

Batches in order that no number of replicas divides, the last one of two samples: some shares are
empty there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests import keras_zoo as zoo

BATCH = 11
SAMPLES = 2 * BATCH + 2
X, OTHER = zoo.vectors(SAMPLES), zoo.vectors(SAMPLES, seed=7)
WEIGHTS = np.random.default_rng(5).uniform(0.1, 2, size=SAMPLES)


def late(width: int = 4) -> Any:
    """Targets of which late ones are mostly padding: 0; in the last batch all but one row."""
    rng = np.random.default_rng(41)
    targets = rng.normal(size=(SAMPLES, width))
    place = np.arange(SAMPLES)[:, None] % BATCH
    targets[(rng.uniform(size=targets.shape) * BATCH < place) & (place > 0)] = 0.0
    return targets


LATE = late()
THERE = (LATE > 0).astype("float64")


# --- functions and classes ------------------------------------------------------------------------


def masked_mean(y_true: Any, y_pred: Any) -> Any:
    mask = ops.cast(ops.not_equal(y_true, 0), y_pred.dtype)
    return ops.sum(ops.square(y_true - y_pred) * mask) / ops.sum(mask)


def root(y_true: Any, y_pred: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


class Dice(keras.losses.Loss):  # type: ignore[misc]  # Keras is untyped
    def call(self, y_true: Any, y_pred: Any) -> Any:
        found = ops.sigmoid(y_pred)
        both = ops.sum(found * y_true)
        return 1 - (2 * both + 1) / (ops.sum(found) + ops.sum(y_true) + 1)


class Balanced(keras.losses.Loss):  # type: ignore[misc]
    """Cross-entropy weighted by the batch's labels, with a call of its own."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        y_true = ops.convert_to_tensor(y_true, y_pred.dtype)
        share = ops.mean(y_true)
        weights = ops.where(y_true > 0, 1 - share, share)
        values = weights * ops.binary_crossentropy(y_true, y_pred, from_logits=True)
        if sample_weight is not None:
            values = values * ops.convert_to_tensor(sample_weight, y_pred.dtype)[:, None]
        return ops.sum(values) / ops.sum(weights)


def in_batch_negatives(y_true: Any, y_pred: Any) -> Any:
    """A value for each sample, which depends on all: the output is two views, side by side."""
    one, two = (ops.normalize(each, axis=1) for each in ops.split(y_pred, 2, axis=1))
    logits = ops.matmul(one, ops.transpose(two)) / 0.2
    places = ops.arange(ops.shape(logits)[0])
    return keras.losses.sparse_categorical_crossentropy(places, logits, from_logits=True)


def by_sample(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.abs(y_true - y_pred), axis=-1) + 0.1 * ops.sum(ops.square(y_pred), axis=-1)


def mean_and_sum(y_true: Any, y_pred: Any) -> Any:
    return 0.5 * ops.mean(ops.square(y_true - y_pred)) - ops.mean(ops.log(1 + ops.abs(y_pred)))


# --- models ---------------------------------------------------------------------------------------


class OwnLoss(keras.Model):  # type: ignore[misc]
    """As in Keras's docs: with a tracker of its own, and what layers have added."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(9, activation="tanh", kernel_regularizer="l2")
        self.middle = layers.Dense(6, activity_regularizer=keras.regularizers.L2(1e-3))
        self.last = layers.Dense(4)
        self.error = keras.metrics.Mean(name="error")

    def call(self, inputs: Any) -> Any:
        return self.last(self.middle(self.first(inputs)))

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        loss = root(ops.convert_to_tensor(y), y_pred) * ops.mean(ops.abs(x)) + ops.sum(self.losses)
        if sample_weight is not None:
            loss = loss * ops.mean(sample_weight)
        self.error.update_state(loss)
        return loss


class Clip(keras.Model):  # type: ignore[misc]
    """Two outputs, a temperature that is learned, and beside it all what was compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = layers.Dense(5), layers.Dense(5)
        self.scale = layers.Dense(1, use_bias=False)

    def call(self, inputs: Any) -> Any:
        one, two = inputs
        scale = self.scale(ops.ones_like(one[:, :1]))
        return self.images(one), self.texts(two), scale

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        one, two = (ops.normalize(each, axis=1) for each in y_pred[:2])
        logits = ops.exp(y_pred[2][0, 0]) * ops.matmul(one, ops.transpose(two))
        places = ops.arange(len(one))
        rows = keras.losses.sparse_categorical_crossentropy(places, logits, from_logits=True)
        columns = keras.losses.sparse_categorical_crossentropy(
            places, ops.transpose(logits), from_logits=True
        )
        return ops.mean(rows + columns) / 2


class Extended(OwnLoss):
    """Adds to Keras's own."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super(OwnLoss, self).compute_loss(*args, **kwargs) ** 2


class Divergence(layers.Layer):  # type: ignore[misc]
    """The loss of a VAE's latent values, summed over the batch."""

    def call(self, inputs: Any) -> Any:
        mean, spread = ops.split(inputs, 2, axis=1)
        loss = -5e-4 * ops.sum(1 + spread - ops.square(mean) - ops.exp(spread))
        self.add_loss(loss)
        return mean + ops.exp(0.5 * spread)


def vae() -> Any:
    stack = [
        layers.Dense(6),
        Divergence(),
        layers.Dense(8, activity_regularizer=keras.regularizers.L1(1e-3)),
    ]
    return keras.Sequential([layers.Input((8,)), *stack])


def summed(y_true: Any, y_pred: Any) -> Any:
    return 1e-3 * ops.sum(ops.square(y_true - y_pred))


def two_headed() -> Any:
    ends = [layers.Input((8,), name="a"), layers.Input((8,), name="b")]
    shared = layers.Dense(6, activation="tanh")
    one, two = map(shared, ends)
    joined = layers.Dense(4, name="joined")(layers.Concatenate()([one, two]))
    return keras.Model(ends, [layers.Concatenate(name="pair")([one, two]), joined])


def hardest(y_true: Any, y_pred: Any) -> Any:
    """Of the pairs of the batch."""
    one, two = ops.split(y_pred, 2, axis=1)
    distances = ops.sum(ops.square(one - two), axis=1)
    return ops.mean(ops.top_k(distances, 2)[0])


def masked() -> Any:
    stack = [layers.Masking(), layers.Dense(5, activation="tanh", kernel_regularizer="l2")]
    return keras.Sequential([layers.Input((4, 2)), *stack, layers.Dense(1)])


def padded() -> Any:
    x = X.reshape(SAMPLES, 4, 2).copy()
    x[np.arange(SAMPLES) % BATCH > 4, 1:] = 0
    return x


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, what it is compiled with, and its data."""

    make: Callable[[], Any] = zoo.sequential
    loss: Callable[[], Any] = lambda: None
    x: Any = field(default_factory=lambda: X)
    y: Any = field(default_factory=lambda: LATE)
    fit: dict[str, Any] = field(default_factory=dict)


JOBS = {
    "masked mean": Job(loss=lambda: masked_mean),
    "Dice": Job(loss=Dice, y=THERE),
    "Keras's Dice": Job(loss=keras.losses.Dice, y=THERE),
    "RMSE": Job(loss=lambda: root),
    "RMSE, weighted": Job(loss=lambda: root, fit={"sample_weight": WEIGHTS}),
    "BCE weighted by the batch": Job(loss=Balanced, y=THERE),
    "BCE, weighted": Job(loss=Balanced, y=THERE, fit={"sample_weight": WEIGHTS}),
    "InfoNCE": Job(loss=lambda: in_batch_negatives, fit={"sample_weight": WEIGHTS}),
    "own loss": Job(make=OwnLoss),
    "own loss, weighted": Job(make=OwnLoss, fit={"sample_weight": WEIGHTS}),
    "CLIP": Job(make=Clip, x=[X, OTHER]),
    "extended": Job(make=Extended, loss=lambda: "mse"),
    "VAE": Job(make=vae, loss=lambda: summed, y=X),
    "siamese": Job(
        make=two_headed,
        loss=lambda: [hardest, by_sample],
        x=[X, OTHER],
        y=[LATE, LATE],
    ),
    "masks": Job(make=masked, loss=lambda: root, x=padded(), y=LATE[:, :, None]),
    "classes": Job(
        loss=lambda: lambda y, p: root(ops.one_hot(y, 4), p),
        y=zoo.classes(SAMPLES),
        fit={"class_weight": {0: 1.0, 1: 3.0, 2: 0.25, 3: 1.0}},
    ),
    "by sample": Job(loss=lambda: by_sample),
    "by sample, weighted": Job(loss=lambda: by_sample, fit={"sample_weight": WEIGHTS}),
    "mean": Job(loss=lambda: mean_and_sum),
}
# What these are means of is seen: no outputs are exchanged.
KNOWN = ("VAE", "mean")
