"""Models with a ``train_step`` of their own, written as for Keras's PyTorch backend.

Noise comes with the data, so that one device and several see the same.
"""

from typing import Any

import keras
import numpy as np
import torch
from keras import layers, ops

from tests.keras_zoo import classes, set_weights, vectors

SAMPLES = 44


class Autoencoder(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """A variational autoencoder: its loss is made of two, and told by three metrics."""

    def __init__(self) -> None:
        super().__init__()
        inputs = layers.Input((8,))
        hidden = layers.Dense(12, activation="tanh")(inputs)
        outputs = [layers.Dense(3, name="mean")(hidden), layers.Dense(3, name="log")(hidden)]
        self.encoder = keras.Model(inputs, outputs)
        self.decoder = keras.Sequential(
            [layers.Input((3,)), layers.Dense(12, activation="tanh"), layers.Dense(8)]
        )
        self.trackers = {
            name: keras.metrics.Mean(name=name) for name in ("loss", "reconstruction", "divergence")
        }
        self.built = True

    @property
    def metrics(self) -> list[Any]:
        return list(self.trackers.values())

    def losses_of(self, data: Any) -> dict[str, Any]:
        x, noise = data[0]
        mean, log = self.encoder(x)
        made = self.decoder(mean + ops.exp(0.5 * log) * noise)
        divergence = -0.5 * (1 + log - ops.square(mean) - ops.exp(log))
        found = {
            "reconstruction": ops.mean(ops.sum(ops.square(x - made), axis=1)),
            "divergence": ops.mean(ops.sum(divergence, axis=1)),
        }
        return {"loss": found["reconstruction"] + found["divergence"], **found}

    def train_step(self, data: Any) -> dict[str, Any]:
        self.zero_grad()
        losses = self.losses_of(data)
        losses["loss"].backward()
        gradients = [one.value.grad for one in self.trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        return self.told(losses)

    def test_step(self, data: Any) -> dict[str, Any]:
        return self.told(self.losses_of(data))

    def told(self, losses: dict[str, Any]) -> dict[str, Any]:
        for name, tracker in self.trackers.items():
            tracker.update_state(losses[name])
        return {name: tracker.result() for name, tracker in self.trackers.items()}


class Gan(keras.Model):  # type: ignore[misc]
    """Two optimizers, which take turns in a step; the generator normalizes its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = keras.Sequential(
            [layers.Input((8,)), layers.Dense(160, activation="tanh"), layers.Dense(1)]
        )
        self.generator = keras.Sequential(
            [
                layers.Input((3,)),
                layers.Dense(120),
                layers.BatchNormalization(),
                layers.Activation("tanh"),
                layers.Dense(8),
            ]
        )
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")
        self.built = True

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_of = d_optimizer, g_optimizer, loss

    @property
    def metrics(self) -> list[Any]:
        return [self.d_tracker, self.g_tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        real, noise = data[0]
        made = self.generator(noise, training=True)
        both = torch.concat([made, real], dim=0)
        labels = torch.concat([torch.ones((len(real), 1)), torch.zeros((len(real), 1))], dim=0)
        self.zero_grad()
        d_loss = self.loss_of(labels, self.discriminator(both))
        d_loss.backward()
        self._apply(self.d_optimizer, self.discriminator)

        self.zero_grad()
        found = self.discriminator(self.generator(noise, training=True))
        g_loss = self.loss_of(torch.zeros((len(real), 1)), found)
        g_loss.backward()
        self._apply(self.g_optimizer, self.generator)

        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}

    def _apply(self, optimizer: Any, part: Any) -> None:
        gradients = [one.value.grad for one in part.trainable_weights]
        with torch.no_grad():
            optimizer.apply(gradients, part.trainable_weights)


class Distiller(keras.Model):  # type: ignore[misc]
    """A student learns of a frozen teacher; compiled metrics see its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = keras.Sequential([layers.Input((8,)), layers.Dense(4)])
        self.student = keras.Sequential(
            [layers.Input((8,)), layers.Dense(6, activation="relu"), layers.Dense(4)]
        )
        self.teacher.trainable = False
        self.divergence = keras.losses.KLDivergence()
        self.built = True

    def call(self, x: Any) -> Any:
        return self.student(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        soft = ops.softmax(self.teacher(x, training=False) / 2)
        self.zero_grad()
        y_pred = self.student(x, training=True)
        known = self.compute_loss(x=x, y=y, y_pred=y_pred)
        loss = 0.3 * known + 0.7 * self.divergence(soft, ops.softmax(y_pred / 2))
        loss.backward()
        weights = self.student.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([one.value.grad for one in weights], weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class Averaged(keras.Model):  # type: ignore[misc]
    """Keeps a second net, whose weights follow those of the first; returns plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = keras.Sequential([layers.Input((8,)), layers.Dense(9), layers.Dense(4)])
        self.follower = keras.models.clone_model(self.net)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.follower(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self.zero_grad()
        loss = ops.mean(ops.square(self.net(x) - ops.one_hot(y, 4)))
        loss.backward()
        weights = self.net.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([one.value.grad for one in weights], weights)
            for one, other in zip(self.net.weights, self.follower.weights, strict=True):
                other.assign(0.9 * other + 0.1 * one)
        return {"error": loss, "total": loss * len(x)}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        return {"error": ops.mean(ops.square(self(x) - ops.one_hot(y, 4)))}


def sgd() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam() -> Any:
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def autoencoder() -> Any:
    model = Autoencoder()
    model.compile(optimizer=adam())
    return model


def gan() -> Any:
    model = Gan()
    model.compile(adam(), sgd(), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def distiller() -> Any:
    model = Distiller()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=sgd(), loss=loss, metrics=["accuracy"])
    return model


def averaged() -> Any:
    model = Averaged()
    model.compile(optimizer=sgd())
    return model


MODELS = {"VAE": autoencoder, "GAN": gan, "distillation": distiller, "average": averaged}


def data_for(name: str) -> tuple[Any, Any]:
    """x and y."""
    x = vectors(SAMPLES)
    if name in ("VAE", "GAN"):
        return (x, vectors(SAMPLES, 3, seed=5)), None
    return x, classes(SAMPLES)


def made(name: str) -> Any:
    """A model, compiled, with weights."""
    model = MODELS[name]()
    set_weights(model)
    if name == "average":
        model.follower.set_weights(model.net.get_weights())
    assert np.isfinite(model.count_params())
    return model
