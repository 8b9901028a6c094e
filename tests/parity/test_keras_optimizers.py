"""Keras's optimizers, divided among devices: the weights and slots that plain Keras comes to."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from tests import keras_zoo as zoo
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

SAMPLES, BATCH = 50, 12
X, Y = zoo.vectors(SAMPLES), zoo.classes(SAMPLES)

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05),
    "lion": lambda: keras.optimizers.Lion(0.001),
    "schedule free": lambda: keras.optimizers.ScheduleFreeAdamW(0.01, warmup_steps=2),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipped values": lambda: keras.optimizers.Adam(0.01, clipvalue=0.01),
    "clipped norms": lambda: keras.optimizers.Adam(0.01, clipnorm=0.05),
    "clipped norm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05),
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.02, decay_steps=3, decay_rate=0.5)
    ),
    "averages": lambda: keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4
    ),
    "averages at the end": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8),
    "accumulation": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3),
    "accumulation of Adam": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "loss scale": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
    "own class": lambda: HalfSteps(0.1),
    "several": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.Nadam(0.01), {".*bias": keras.optimizers.SGD(0.1, momentum=0.9)}
        )
    ),
}

CORE = ("sgd", "amsgrad", "adafactor", "muon", "clipped norm", "averages", "own class", "several")


class HalfSteps(keras.optimizers.SGD):  # type: ignore[misc]  # Keras is untyped
    """An optimizer of which nothing is known."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate / 2)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with zoo.true_float64():
        yield


def compare(strategy: lockstep.Strategy, make: Callable[[], Any], optimizer: str) -> None:
    """Train twice for an epoch, plainly and under a strategy."""
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    plain = zoo.compiled(make, optimizer=OPTIMIZERS[optimizer]())
    with strategy.scope():
        model = zoo.compiled(make, optimizer=OPTIMIZERS[optimizer]())
    for _ in range(2):
        plain.fit(X, Y, **options)
        model.fit(X, Y, **options)
    assert zoo.distance(plain, model) < 1e-12
    assert len(plain.optimizer.variables) == len(model.optimizer.variables)
    for one, other in zip(plain.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_allclose(other.numpy(), one.numpy(), atol=1e-12, err_msg=one.path)


@pytest.mark.parametrize("optimizer", core_of(OPTIMIZERS, CORE))
def test_mirrored(optimizer: str) -> None:
    compare(lockstep.MirroredStrategy(devices=2), zoo.sequential, optimizer)


@pytest.mark.parametrize(
    "optimizer",
    core_of(
        [name for name in OPTIMIZERS if name not in ("clipped norm", "own class")],
        ["sgd", "amsgrad", "averages"],
        ["nadam", "muon"],
    ),
)
def test_in_stages(optimizer: str) -> None:
    compare(lockstep.PipelineStrategy(stages=2, microbatches=3), zoo.sequential, optimizer)


@pytest.mark.parametrize("optimizer", ["clipped norm", "own class"])
def test_unknown_in_stages(optimizer: str) -> None:
    strategy = lockstep.PipelineStrategy(stages=2, microbatches=3)
    with pytest.raises(lockstep.LockstepError, match="In a pipeline each stage steps"):
        compare(strategy, zoo.sequential, optimizer)


@pytest.mark.parametrize(
    "strategy",
    [
        lockstep.LocalSGDStrategy(2, 2),
        lockstep.ParameterServerStrategy(1, 1),
        lockstep.ParameterServerStrategy(1, 1, staleness=1),
    ],
    ids=["local SGD", "servers", "servers with a staleness"],
)
def test_replicas_and_servers_cannot_copy_a_norm_of_all_weights(strategy: Any) -> None:
    with strategy.scope():
        model = zoo.sequential()
        model.compile(OPTIMIZERS["clipped norm"](), "sparse_categorical_crossentropy")
    with pytest.raises(lockstep.LockstepError, match=r"keras\.optimizers without global_clipnorm"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


def constrained() -> Any:
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(11, kernel_constraint=keras.constraints.MaxNorm(0.7)),
            layers.Dense(zoo.NUM_CLASSES, bias_constraint="non_neg"),
        ]
    )


@pytest.mark.parametrize("optimizer", ["amsgrad", "clipped norm"])
def test_constraints(optimizer: str) -> None:
    compare(lockstep.MirroredStrategy(devices=2), constrained, optimizer)


def frozen() -> Any:
    model = zoo.sequential()
    model.layers[0].trainable = False
    return model


def test_frozen_layers() -> None:
    for strategy in (lockstep.MirroredStrategy(devices=2), lockstep.PipelineStrategy(stages=2)):
        compare(strategy, frozen, "nesterov")


def with_a_frozen_stage() -> Any:
    """Of which a rank has nothing to update."""
    model = zoo.sequential()
    for layer in model.layers[:-1]:
        layer.trainable = False
    return model


def test_what_an_optimizer_has_once_goes_on_without_weights() -> None:
    strategy = lockstep.PipelineStrategy(stages=2, microbatches=3)
    compare(strategy, with_a_frozen_stage, "nadam")


def test_excluded_from_decay() -> None:
    def make() -> Any:
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.2)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    OPTIMIZERS["excluded"] = make
    compare(lockstep.MirroredStrategy(devices=2), zoo.sequential, "excluded")


@pytest.mark.thorough
def test_an_optimizer_of_two_models() -> None:
    """It was built for all layers of the one, of which the other has a part."""

    def make(strategy: lockstep.Strategy | None) -> Any:
        with nullcontext() if strategy is None else strategy.scope():
            whole = zoo.compiled(zoo.sequential, optimizer=keras.optimizers.Adam(0.01))
            part = keras.Sequential([layers.Input((8,)), *whole.layers[:1]])
            part.compile(whole.optimizer, "mse")
        targets = zoo.vectors(SAMPLES, part.output_shape[-1])
        for model, y in ((whole, Y), (part, targets), (whole, Y)):
            model.fit(X, y, batch_size=BATCH, shuffle=False, verbose=0)
        return whole

    assert zoo.distance(make(None), make(lockstep.MirroredStrategy(devices=2))) < 1e-12
