"""Keras's callbacks run once, on the driver, and see and change what plain Keras shows them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import lockstep
from tests import keras_zoo as zoo

SAMPLES, BATCH = 50, 12
X, Y = zoo.vectors(SAMPLES), zoo.classes(SAMPLES)
OPTIONS: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "verbose": 0}

STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "mirrored": lambda: lockstep.MirroredStrategy(devices=2),
    "pipeline": lambda: lockstep.PipelineStrategy(stages=2, microbatches=3),
}


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with zoo.true_float64():
        yield


@pytest.fixture(params=STRATEGIES)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A plain model, and one under a strategy."""
    plain = zoo.compiled(zoo.sequential, metrics=["accuracy"])
    with STRATEGIES[request.param]().scope():
        return plain, zoo.compiled(zoo.sequential, metrics=["accuracy"])


def assert_same_history(found: Any, wanted: Any) -> None:
    assert list(found.history) == list(wanted.history)
    assert found.epoch == wanted.epoch
    for key, values in wanted.history.items():
        np.testing.assert_allclose(found.history[key], values, rtol=1e-6, err_msg=key)


class Diary(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Notes what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, int | None, dict[str, float]]] = []

    def note(self, name: str, number: int | None, logs: dict[str, float] | None) -> None:
        self.entries.append((name, number, dict(logs or {})))

    def on_train_begin(self, logs: Any = None) -> None:
        self.note("train begins", None, logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.note("epoch begins", epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.note("batch begins", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note("batch ends", batch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        self.note("test begins", None, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note("test batch ends", batch, logs)

    def on_test_end(self, logs: Any = None) -> None:
        self.note("test ends", None, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note("epoch ends", epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        self.note("train ends", None, logs)


def test_calls_and_values(pair: tuple[Any, Any]) -> None:
    diaries = []
    for model in pair:
        diaries.append(Diary())
        model.fit(X, Y, epochs=2, validation_split=0.3, callbacks=[diaries[-1]], **OPTIONS)
    plain, found = (diary.entries for diary in diaries)
    assert [entry[:2] for entry in found] == [entry[:2] for entry in plain]
    for (name, number, wanted), (_, _, logs) in zip(plain, found, strict=True):
        assert logs.keys() == wanted.keys(), name
        for key, value in wanted.items():
            np.testing.assert_allclose(logs[key], value, rtol=1e-6, err_msg=f"{name} {number}")


def test_stopping_early_with_the_best_weights(pair: tuple[Any, Any]) -> None:
    histories = [
        model.fit(
            X,
            Y,
            epochs=12,
            validation_split=0.3,
            callbacks=[
                keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
                keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5, min_lr=1e-4),
            ],
            **OPTIONS,
        )
        for model in pair
    ]
    assert len(histories[0].epoch) < 12
    assert_same_history(histories[1], histories[0])
    assert zoo.distance(*pair) < 1e-12


def test_learning_rates(pair: tuple[Any, Any]) -> None:
    for model in pair:
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        model.fit(X, Y, epochs=3, callbacks=[rates], **OPTIONS)
    assert zoo.distance(*pair) < 1e-12


class Meddler(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Changes weights, learning rate and what is trained."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            self.model.set_weights([0.9 * weight for weight in self.model.get_weights()])
            self.model.optimizer.learning_rate = 0.005

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.layers[1].trainable = epoch > 0
        if epoch == 2:
            self.model.stop_training = True


def test_what_a_callback_changes(pair: tuple[Any, Any]) -> None:
    histories = [model.fit(X, Y, epochs=5, callbacks=[Meddler()], **OPTIONS) for model in pair]
    assert_same_history(histories[1], histories[0])
    assert zoo.distance(*pair) < 1e-12


def test_logs_and_checkpoints(pair: tuple[Any, Any], tmp_path: Path) -> None:
    for name, model in zip(("plain", "found"), pair, strict=True):
        folder = tmp_path / name
        folder.mkdir()
        model.fit(
            X,
            Y,
            epochs=2,
            validation_split=0.3,
            callbacks=[
                keras.callbacks.CSVLogger(folder / "log.csv"),
                keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras"),
                keras.callbacks.ModelCheckpoint(
                    folder / "step.weights.h5", save_weights_only=True, save_freq=3
                ),
                keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
                keras.callbacks.TerminateOnNaN(),
            ],
            **OPTIONS,
        )
    one, other = ((tmp_path / name / "log.csv").read_text() for name in ("plain", "found"))
    assert one.splitlines()[0] == other.splitlines()[0]
    loaded = [keras.models.load_model(tmp_path / name / "2.keras") for name in ("plain", "found")]
    assert zoo.distance(*loaded) < 1e-12
    assert int(loaded[1].optimizer.iterations.value) == 6
    slots = (model.optimizer.variables for model in loaded)
    for wanted, slot in zip(*slots, strict=True):
        np.testing.assert_allclose(slot.numpy(), wanted.numpy(), atol=1e-12)
    for model, name in zip(pair, ("plain", "found"), strict=True):
        model.load_weights(tmp_path / name / "step.weights.h5")
    assert zoo.distance(*pair) < 1e-12


def test_backup_and_restore(tmp_path: Path) -> None:
    """Two runs, the first of which is interrupted, continue one another."""
    whole = zoo.compiled(zoo.sequential)
    whole.fit(X, Y, epochs=4, **OPTIONS)

    class Crash(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise RuntimeError("power cut")

    def run(*more: Any) -> Any:
        with lockstep.MirroredStrategy(devices=2).scope():
            model = zoo.compiled(zoo.sequential)
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        model.fit(X, Y, epochs=4, callbacks=[backup, *more], **OPTIONS)
        return model

    with pytest.raises(RuntimeError, match="power cut"):
        run(Crash())
    assert zoo.distance(whole, run()) < 1e-12


def test_a_callback_evaluates(pair: tuple[Any, Any]) -> None:
    seen: list[float] = []

    class Looking(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(self.model.evaluate(X[:20], Y[:20], verbose=0)[0])
            seen.append(float(self.model.predict(X[:3], verbose=0).sum()))

    for model in pair:
        model.fit(X, Y, epochs=2, callbacks=[Looking()], **OPTIONS)
    np.testing.assert_allclose(seen[4:], seen[:4], rtol=1e-6)
    assert zoo.distance(*pair) < 1e-12


def test_validation_options(pair: tuple[Any, Any]) -> None:
    histories = [
        model.fit(
            X,
            Y,
            epochs=4,
            validation_data=(X, Y),
            validation_freq=2,
            validation_steps=2,
            validation_batch_size=7,
            **OPTIONS,
        )
        for model in pair
    ]
    assert_same_history(histories[1], histories[0])


def test_steps_and_first_epoch(pair: tuple[Any, Any]) -> None:
    histories = []
    for model in pair:
        with pytest.warns(UserWarning, match="ran out of data"):  # it has five batches
            histories.append(
                model.fit(X, Y, epochs=6, initial_epoch=2, steps_per_epoch=2, **OPTIONS)
            )
    assert_same_history(histories[1], histories[0])
    assert zoo.distance(*pair) < 1e-12


def test_on_batches(pair: tuple[Any, Any]) -> None:
    for start in range(0, 40, 10):
        part = slice(start, start + 10)
        one, other = (model.train_on_batch(X[part], Y[part], return_dict=True) for model in pair)
        assert one.keys() == other.keys()
        for key, value in one.items():
            np.testing.assert_allclose(other[key], value, rtol=1e-6)
    one, other = (model.test_on_batch(X[:9], Y[:9]) for model in pair)
    np.testing.assert_allclose(other, one, rtol=1e-6)
    one, other = (model.predict_on_batch(X[:9]) for model in pair)
    np.testing.assert_allclose(other, one, rtol=1e-9)
    assert zoo.distance(*pair) < 1e-12
