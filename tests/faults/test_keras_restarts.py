"""Keras's fit with restarts outlives what kills its helpers: same bits, callbacks called once."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import lockstep
import lockstep.keras
from lockstep.errors import OptionError, WorkerError
from lockstep.frontends.keras.fit.checkpoints import FitSnapshot
from lockstep.train.fault_tolerance import overhead_budget
from lockstep.train.fault_tolerance.run_record import VARIABLE, read_record
from tests.thorough import core_of

SAMPLES, BATCH, EPOCHS = 48, 12, 3
CHANCE = np.random.default_rng(2)
X = CHANCE.normal(size=(SAMPLES, 6)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")
STRATEGIES: dict[str, Any] = {
    "mirrored": lambda: lockstep.MirroredStrategy(2),
    "pipeline": lambda: lockstep.PipelineStrategy(2, microbatches=2),
}


class MetricUpdate(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes all that it is told, and kills a helper after some steps, counted from 1."""

    def __init__(self, *kills: int) -> None:
        super().__init__()
        self.kills = kills
        self.told: list[Any] = []
        self.num_steps = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.told.append(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_steps += 1
        self.told.append((batch, plain(logs)))
        if self.num_steps in self.kills:
            os.kill(self.model._lockstep.trainer.runner.session._team.pids()[-1], signal.SIGKILL)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.told.append(("tested", batch, plain(logs)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.told.append((epoch, plain(logs)))


def plain(logs: Any) -> dict[str, float]:
    return {name: float(value) for name, value in (logs or {}).items()}


class Meddler(keras.callbacks.Callback):  # type: ignore[misc]
    """Changes the rate and weights, and ends the training."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate * 0.9)
        if batch == 2:
            self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 0.5)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["rate"] = float(self.model.optimizer.learning_rate)
        self.model.stop_training = epoch == 1


@pytest.fixture(params=["from the beginning", "from the last step"])
def replays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    often = request.param == "from the last step"
    monkeypatch.setattr(overhead_budget, "LEAST_SECONDS", 0.0 if often else 1e9)
    monkeypatch.setattr(overhead_budget, "PART", 1e9)


def trained(
    strategy: str, seen: MetricUpdate, *others: Any, restarts: int = 0, **options: Any
) -> tuple[Any, ...]:
    keras.utils.clear_session()  # layers have their first names again
    keras.utils.set_random_seed(0)
    with STRATEGIES[strategy]().scope():
        model = keras.Sequential(
            [
                *(keras.Input((6,)), keras.layers.Dense(16), keras.layers.Dropout(0.3)),
                keras.layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    callbacks = [*others, seen, *([lockstep.keras.Restarts(restarts)] if restarts else [])]
    options = {"x": X, "y": Y, "batch_size": BATCH, "validation_data": (X[:20], Y[:20]), **options}
    history = model.fit(epochs=EPOCHS, verbose=0, callbacks=callbacks, **options)
    state = model._lockstep.trainer.state.take().digest()
    model._lockstep.trainer.runner.close()
    values = {name: [*map(float, each)] for name, each in history.history.items()}
    return state, values, seen.told


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("strategy", core_of(list(STRATEGIES), ["mirrored"]))
def test_helpers_are_killed(strategy: str) -> None:
    expected = trained(strategy, MetricUpdate())
    assert trained(strategy, MetricUpdate(2, 9), restarts=2) == expected


@pytest.mark.usefixtures("replays")
@pytest.mark.thorough
def test_what_callbacks_have_changed_is_changed_again() -> None:
    expected = trained("mirrored", MetricUpdate(), Meddler())
    assert trained("mirrored", MetricUpdate(3, 7), Meddler(), restarts=2) == expected


@pytest.mark.usefixtures("replays")
@pytest.mark.thorough
def test_streams_are_not_read_again() -> None:
    num_read = []

    def batches() -> Iterator[Any]:
        for epoch in range(EPOCHS):
            for start in range(0, SAMPLES, BATCH):
                num_read.append(epoch)
                yield X[start : start + BATCH], Y[start : start + BATCH]

    def run(seen: MetricUpdate, restarts: int) -> tuple[Any, ...]:
        num_read.clear()
        data = {"x": batches(), "y": None, "batch_size": None, "steps_per_epoch": 4}
        found = trained("mirrored", seen, restarts=restarts, **data)
        return found, len(num_read)

    assert run(MetricUpdate(2, 7), 2) == run(MetricUpdate(), 0)


@pytest.mark.thorough
def test_restarts_are_used_up(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(WorkerError, match="SIGKILL"):
        trained("mirrored", MetricUpdate(2, 3), restarts=1)
    faults = [event.fault for event in read_record(tmp_path) if event.fault is not None]
    assert [fault.kind for fault in faults] == ["dead", "dead"]
    assert faults[0].then.startswith("Restart 1 of 1")


class Accumulating(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps numbers of which some are there from its first step on."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.mean = np.zeros(2)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])
        self.mean += 1
        self.last = logs["loss"]


def test_a_fit_begins_once_more_with_what_it_began_with() -> None:
    keras.utils.set_random_seed(0)
    with lockstep.SingleDeviceStrategy().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(X, X[:, :1], verbose=0, batch_size=BATCH)
    trainer = model._lockstep.trainer
    seen, done = Accumulating(), Accumulating()
    done.losses.append(2.0)
    callbacks = [seen, done, lockstep.keras.Restarts(1)]
    begun = FitSnapshot(model, trainer, callbacks)
    model.fit(X, X[:, :1], verbose=0, batch_size=BATCH, epochs=2, callbacks=callbacks)
    assert (int(model.optimizer.iterations), trainer.runner.epochs_trained) == (12, 3), (
        trainer.runner.epochs_trained
    )
    assert len(done.losses) == 9
    begun.restore(trainer)
    assert (int(model.optimizer.iterations), trainer.runner.epochs_trained) == (4, 1)
    assert (seen.losses, done.losses) == ([], [2.0])
    assert not seen.mean.any()
    assert not hasattr(seen, "last")


def test_what_cannot_be_asked() -> None:
    with pytest.raises(OptionError, match="restarts"):
        lockstep.keras.Restarts(-1)
    STRATEGIES["local"] = lambda: lockstep.LocalSGDStrategy(3, devices=2)
    with pytest.raises(OptionError, match="Restarts under LocalSGDStrategy"):
        trained("local", MetricUpdate(), restarts=1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(OptionError, match="plain Keras"):
        model.fit(X, X[:, :1], verbose=0, callbacks=[lockstep.keras.Restarts(1)])
