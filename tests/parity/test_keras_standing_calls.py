"""Calls of which the ranks keep what they can: as plain Keras, whatever has changed in between.

In float64. A counter says which calls were made again and which were sent in full.
"""

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.train.runtime.session import Session
from tests import keras_zoo as zoo
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

Model = Any
X, Y = zoo.vectors(12), zoo.classes(12)


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with zoo.true_float64():
        yield


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that helpers are called with, call by call."""
    names: list[str] = []
    send = Session._send

    def noting(self: Session, part: Any, function: Any, *rest: Any) -> None:
        names.append(function.__name__)
        send(self, part, function, *rest)

    monkeypatch.setattr(Session, "_send", noting)
    return names


def make(loss: Any = None) -> Model:
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(11, activation="relu", kernel_regularizer="l2", name="first"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(4, name="last"),
        ]
    )
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    zoo.set_weights(model)
    return model


def pair(**options: Any) -> list[Model]:
    """The same model, plain and on two replicas."""
    plain = make(**options)
    with lockstep.MirroredStrategy(2).scope():
        return [plain, make(**options)]


def train(model: Model, rows: slice = slice(None)) -> Any:
    return model.train_on_batch(X[rows], Y[rows], return_dict=True)


def assert_alike(models: list[Model]) -> None:
    plain, mirrored = models
    pairs = [*zip(plain.weights, mirrored.weights, strict=True)]
    pairs += zip(plain.optimizer.variables, mirrored.optimizer.variables, strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(other.numpy(), one.numpy(), atol=1e-12, err_msg=one.path)


def test_calls_of_every_kind_in_turn(sent: list[str]) -> None:
    """With batches of other sizes, odd ones and such that leave a rank without samples."""
    models = pair()
    for stop in (12, 12, 12, 7, 5, 1, 12, 12, 12):
        rows = slice(stop)
        for model in models:
            train(model, rows)
        outputs = [model.predict(X[rows], verbose=0) for model in models]
        np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-12)
        losses = [model.test_on_batch(X[rows], Y[rows])[0] for model in models]
        assert losses[1] == pytest.approx(losses[0], abs=1e-12)
        assert_alike(models)
    # The Plan of training and evaluation on one sample has another note, as a rank is left without:
    # all is sent for it, and for the next two calls. That of a prediction has none.
    assert sent.count("serve_again") == 4 + 6 + 4


def test_fit_again_with_other_data(sent: list[str]) -> None:
    models = pair()
    for seed in range(4):
        data = zoo.vectors(10 + seed, seed=seed), zoo.classes(10 + seed, seed=seed)
        for model in models:
            model.fit(*data, batch_size=4, epochs=2, shuffle=False, verbose=0)
        assert_alike(models)
    assert sent.count("serve_again") == 2


def _set_rate(model: Model) -> None:
    model.optimizer.learning_rate = 0.1


def _set_beta(model: Model) -> None:
    model.optimizer.beta_1 = 0.5


def _set_clip(model: Model) -> None:
    model.optimizer.clipvalue = 1e-3


def _set_clip_norm(model: Model) -> None:
    model.optimizer.clipnorm = 1e-3


def _set_count(model: Model) -> None:
    model.optimizer.iterations.assign(100)


def _set_slot(model: Model) -> None:
    model.optimizer.variables[2].assign(ops.ones_like(model.optimizer.variables[2]))


def _set_weights(model: Model) -> None:
    zoo.set_weights(model, seed=5)


def _set_statistics(model: Model) -> None:
    norm = model.get_layer("norm")
    norm.moving_mean.assign(ops.full((11,), 0.5))
    norm.moving_variance.assign(ops.full((11,), 2.0))


def _replace_weight(model: Model) -> None:
    value = model.get_layer("last").kernel._value
    value.data = value.data.clone() * 2


def _set_momentum(model: Model) -> None:
    model.get_layer("norm").momentum = 0.5


def _set_activation(model: Model) -> None:
    model.get_layer("first").activation = keras.activations.tanh


def _set_penalty(model: Model) -> None:
    model.get_layer("first").kernel.regularizer.l2 = 0.5


def _freeze(model: Model) -> None:
    model.get_layer("first").trainable = False
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def _freeze_statistics(model: Model) -> None:
    model.get_layer("norm").trainable = False


def _compile_anew(model: Model) -> None:
    model.compile("adamw", keras.losses.SparseCategoricalCrossentropy(), metrics=["accuracy"])


def _set_epsilon(model: Model) -> None:
    keras.config.set_epsilon(1e-3)


CHANGES: list[Callable[[Model], None]] = [
    *(_set_rate, _set_beta, _set_clip, _set_clip_norm, _set_count, _set_slot, _set_weights),
    *(_set_statistics, _replace_weight, _set_momentum, _set_activation, _set_penalty, _freeze),
    *(_freeze_statistics, _compile_anew, _set_epsilon),
]
CORE = (_set_rate, _set_slot, _set_weights, _set_activation, _freeze, _compile_anew)


@pytest.mark.parametrize("change", core_of(CHANGES, CORE, []))
def test_what_changes_in_between(change: Callable[[Model], None], sent: list[str]) -> None:
    models, epsilon = pair(), keras.config.epsilon()
    try:
        for _ in range(4):
            for model in models:
                train(model)
                model.predict(X, verbose=0)
        assert sent[-2:] == ["serve_again"] * 2
        for model in models:
            change(model)
        for _ in range(4):
            outputs = [model.predict(X, verbose=0) for model in models]
            np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-12)
            losses = [model.evaluate(X, Y, verbose=0, return_dict=True)["loss"] for model in models]
            assert losses[1] == pytest.approx(losses[0], abs=1e-12)
            for model in models:
                train(model)
            assert_alike(models)
        # An optimizer that looks at whole variables keeps slots that nobody else has.
        assert sent[-3:-1] == ["serve_again"] * 2
        assert sent[-1] == ("serve" if change is _set_clip_norm else "serve_again")
    finally:
        keras.config.set_epsilon(epsilon)


def test_a_function_whose_variables_change() -> None:
    """It goes by value, with what it looks at."""
    scale = [1.0]

    def loss(y_true: Any, y_pred: Any) -> Any:
        return scale[0] * ops.mean(ops.square(ops.one_hot(y_true, 4) - y_pred), axis=-1)

    models = pair(loss=loss)
    for number in range(8):
        scale[0] = 1.0 + number // 4
        for model in models:
            train(model)
        assert_alike(models)


def test_a_function_with_an_array_is_sent_each_time(sent: list[str]) -> None:
    factors = np.ones(2000)

    def loss(y_true: Any, y_pred: Any) -> Any:
        return factors[0] * ops.mean(ops.square(ops.one_hot(y_true, 4) - y_pred), axis=-1)

    models = pair(loss=loss)
    for number in range(4):
        factors[:] = 1.0 + number
        for model in models:
            train(model)
        assert_alike(models)
    assert "serve_again" not in sent


def test_layers_of_the_users_are_sent_each_time(sent: list[str]) -> None:
    """They may keep anything."""

    class Counts(layers.Layer):  # type: ignore[misc]  # Keras is untyped
        num_calls = 0

        def call(self, inputs: Any, training: Any = None) -> Any:
            if training:
                self.num_calls = self.num_calls + 1
            return inputs * (0.5 if self.num_calls < 3 else 1.0)

    def counting() -> Model:
        model = keras.Sequential([keras.Input((8,)), Counts(), layers.Dense(4)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        zoo.set_weights(model)
        return model

    with lockstep.MirroredStrategy(2).scope():
        mirrored = counting()
    for _ in range(4):
        train(mirrored)
    assert set(sent) == {"serve"}


def test_a_helper_that_died_in_between() -> None:
    models = pair()
    for number in range(8):
        for model in models:
            train(model)
        assert_alike(models)
        if number == 5:
            team = models[1]._lockstep.trainer.runner.session._team
            os.kill(team.pids()[0], signal.SIGKILL)


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    models = pair()
    for _ in range(4):
        for model in models:
            train(model)
    for model in models:
        with pytest.raises(Exception, match=r"out of bounds"):
            model.train_on_batch(X, Y + 100)
    for _ in range(4):
        for model in models:
            train(model)
        assert_alike(models)


def test_interrupted_training_is_not_gone_on_with(sent: list[str]) -> None:
    """The ranks of a call that was told to stop would stop again."""
    with lockstep.MirroredStrategy(2).scope():
        model = make()
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "verbose": 0}
    for _ in range(3):
        model.fit(X, Y, **options)
    assert sent[-1] == "serve_again"
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, epochs=100_000, **options)
    timer.join()
    assert sent[-1] == "serve_again"
    before = int(model.optimizer.iterations.value)
    model.fit(X, Y, epochs=2, **options)
    assert int(model.optimizer.iterations.value) == before + 6


def test_models_are_freed() -> None:
    with lockstep.MirroredStrategy(2).scope():
        model = make()
    for _ in range(5):
        train(model)
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None
