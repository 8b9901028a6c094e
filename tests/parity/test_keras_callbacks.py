"""Keras's callbacks run once, on the driver, and see and change what plain Keras shows them."""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from operator import setitem
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.util.tensor_util import make_ndarray

import lockstep
from lockstep.errors import OptionError
from tests import keras_zoo as zoo
from tests.thorough import core_of

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


# Callbacks act on rank 0, which gets from a pipeline what it gets from replicas. So CI has stages
# for a test of each thing that callbacks get or change.
in_stages = pytest.mark.parametrize(
    "pair", core_of(STRATEGIES, ["mirrored"], ["pipeline"]), indirect=True
)


@pytest.fixture(params=core_of(STRATEGIES, ["mirrored"], []))
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


@in_stages
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


def two_heads() -> Any:
    inputs = keras.Input((8,))
    heads = {name: keras.layers.Dense(zoo.NUM_CLASSES, name=name) for name in ("a", "b")}
    return keras.Model(inputs, {name: head(inputs) for name, head in heads.items()})


def bar_of(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], *data: Any
) -> list[dict[str, float]]:
    """The values that a progress bar is given, step by step, and at the end."""
    shown: list[dict[str, float]] = []

    def update(self: Any, current: int, values: Any = (), finalize: Any = None) -> None:
        shown.append(dict(values))

    with monkeypatch.context() as patch:
        patch.setattr("keras.utils.Progbar.update", update)
        call(*data, **{**OPTIONS, "verbose": 1})
    return shown


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_losses", core_of([1, 2], [2]))
def test_the_progress_bar_shows_the_loss_of_each_step_and_now_and_then_all_values(
    monkeypatch: pytest.MonkeyPatch, strategy: str, num_losses: int
) -> None:
    steps = 35
    x, y = zoo.vectors(steps * BATCH - 5), zoo.classes(steps * BATCH - 5)
    make, targets = zoo.sequential, y
    metrics: list[Any] = ["accuracy"]
    if num_losses == 2:
        make, targets = two_heads, {"a": y, "b": y}
        metrics = [metrics, metrics]
    plain = zoo.compiled(make, metrics=metrics)
    with STRATEGIES[strategy]().scope():
        model = zoo.compiled(make, metrics=metrics)
    diary = Diary()  # Keras's own bar is shown by a thread, which may be late
    plain.fit(x, targets, callbacks=[diary], **OPTIONS)
    wanted = [logs for name, _, logs in diary.entries if name in ("batch ends", "epoch ends")]
    found = bar_of(monkeypatch, model.fit, x, targets)
    assert {0, steps} <= {step for step, logs in enumerate(found) if len(logs) > 1}  # by time
    assert len(found) == len(wanted) == steps + 1
    for ours, theirs in zip(found, wanted, strict=True):
        assert "loss" in ours
        for name, value in ours.items():
            np.testing.assert_allclose(value, theirs[name], rtol=1e-6, err_msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_averages_in_place_of_weights_where_it_is_evaluated(strategy: str) -> None:
    def make() -> Any:
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8)
        return zoo.compiled(zoo.sequential, optimizer=optimizer)

    plain = make()
    with STRATEGIES[strategy]().scope():
        model = make()
    histories = [
        one.fit(
            X,
            Y,
            epochs=3,
            validation_data=(X, Y),
            callbacks=[keras.callbacks.SwapEMAWeights()],
            **OPTIONS,
        )
        for one in (plain, model)
    ]
    assert_same_history(histories[1], histories[0])
    assert zoo.distance(plain, model) < 1e-12


@in_stages
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


@pytest.mark.exhaustive
def test_a_learning_rate_that_changes_after_the_last_step_of_ranks_over_gloo() -> None:
    plain = zoo.compiled(zoo.sequential)
    with lockstep.MirroredStrategy(2, engine="gloo").scope():
        found = zoo.compiled(zoo.sequential)
    for model in (plain, found):

        def slow_down(epoch: int, logs: Any, model: Any = model) -> None:
            model.optimizer.learning_rate = 1e-3

        halved = keras.callbacks.LambdaCallback(on_epoch_end=slow_down)
        for _ in range(2):
            model.fit(X, Y, callbacks=[halved], **OPTIONS)
        assert float(model.optimizer.learning_rate) == pytest.approx(1e-3)
    assert zoo.distance(plain, found) < 1e-12


@in_stages
def test_what_a_callback_changes(pair: tuple[Any, Any]) -> None:
    histories = [model.fit(X, Y, epochs=5, callbacks=[zoo.Meddler()], **OPTIONS) for model in pair]
    assert_same_history(histories[1], histories[0])
    assert zoo.distance(*pair) < 1e-12


@in_stages
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


MOMENTS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_epoch_end",
)


@pytest.mark.parametrize("moment", core_of(MOMENTS, ["on_train_batch_end", "on_epoch_end"]))
def test_a_callback_evaluates(pair: tuple[Any, Any], moment: str) -> None:
    seen: list[float] = []

    class Looking(keras.callbacks.Callback):  # type: ignore[misc]
        looks = False

        def look(self, *args: Any, **named: Any) -> None:
            if not self.looks:  # an evaluation has callbacks, too
                self.looks = True
                seen.append(self.model.evaluate(X[:20], Y[:20], verbose=0)[0])
                seen.append(float(self.model.predict(X[:3], verbose=0).sum()))
                self.looks = False

    setattr(Looking, moment, Looking.look)
    options = {"epochs": 2, "validation_data": (X[20:], Y[20:]), **OPTIONS}
    histories = [model.fit(X, Y, callbacks=[Looking()], **options) for model in pair]
    wanted, found = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert found
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert zoo.distance(*pair) < 1e-12
    # Plain Keras mixes the samples of such an evaluation into the metrics of the epoch.
    if moment in ("on_epoch_begin", "on_train_batch_end"):
        histories[0] = zoo.compiled(zoo.sequential, metrics=["accuracy"]).fit(X, Y, **options)
    assert_same_history(histories[1], histories[0])


def test_batches_of_predict(pair: tuple[Any, Any]) -> None:
    diaries: list[list[Any]] = []

    class Outputs(keras.callbacks.Callback):  # type: ignore[misc]
        def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
            diaries[-1].append((batch, 0))

        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            diaries[-1].append((batch, logs["outputs"]))

    for model in pair:
        diaries.append([])
        model.predict(X, batch_size=BATCH, verbose=0, callbacks=[Outputs()])
    for wanted, found in zip(*diaries, strict=True):
        assert wanted[0] == found[0]
        np.testing.assert_allclose(found[1], wanted[1], rtol=1e-9)


class Ending(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends a loop at a moment, at the second batch if it is one of a batch; counts batches."""

    def __init__(self, flag: str, moment: str) -> None:
        super().__init__()
        self.flag = flag
        self.num_batches = 0
        setattr(self, moment, self.end)

    def end(self, number: int | None = None, logs: Any = None) -> None:
        if number is None or not isinstance(number, int) or number == 1:
            setattr(self.model, self.flag, True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_batches += 1

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_batches += 1

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_batches += 1


class ByIndex(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches that are read one after the other."""

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)

    def __getitem__(self, index: int) -> Any:
        part = slice(index * BATCH, (index + 1) * BATCH)
        return X[part], Y[part]


@pytest.mark.parametrize("moment", ["begin", "batch_begin", "batch_end"])
def test_callbacks_end_evaluations_and_predictions(pair: tuple[Any, Any], moment: str) -> None:
    found: list[list[Any]] = []
    for model in pair:
        found.append([])
        for data in ((X, Y), (ByIndex(),)):
            options = {"batch_size": BATCH if len(data) == 2 else None, "verbose": 0}
            ending = Ending("stop_evaluating", f"on_test_{moment}")
            found[-1] += model.evaluate(*data, callbacks=[ending], **options)
            found[-1].append(ending.num_batches)
            ending = Ending("stop_predicting", f"on_predict_{moment}")
            found[-1].append(model.predict(data[0], callbacks=[ending], **options))
            found[-1].append(ending.num_batches)
    for wanted, value in zip(*found, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-6)
    assert max(len(outputs) for outputs in found[1] if np.ndim(outputs)) == (
        BATCH if moment == "begin" else 2 * BATCH
    )


@pytest.mark.parametrize(
    "moment",
    core_of(
        ["train_begin", "epoch_begin", "train_batch_begin", "batch_begin", "epoch_end"],
        ["train_begin", "train_batch_begin"],
    ),
)
def test_the_step_that_is_made_before_training_stops(pair: tuple[Any, Any], moment: str) -> None:
    histories = []
    for model in pair:
        ending = Ending("stop_training", f"on_{moment}")
        histories.append(
            model.fit(X, Y, epochs=3, validation_data=(X, Y), callbacks=[ending], **OPTIONS)
        )
    steps = {"train_begin": 1, "epoch_begin": 6, "epoch_end": 10}.get(moment, 2)
    assert int(pair[0].optimizer.iterations.value) == steps
    assert int(pair[1].optimizer.iterations.value) == steps
    assert_same_history(histories[1], histories[0])
    assert zoo.distance(*pair) < 1e-12


def test_a_model_that_changes_where_training_is_to_stop(pair: tuple[Any, Any]) -> None:
    class Freezing(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                self.model.layers[1].trainable = False
                self.model.stop_training = True

    histories = [model.fit(X, Y, epochs=3, callbacks=[Freezing()], **OPTIONS) for model in pair]
    assert int(pair[1].optimizer.iterations.value) == 6
    assert_same_history(histories[1], histories[0])
    assert zoo.distance(*pair) < 1e-12


@pytest.mark.parametrize("data", ["arrays", "batches"])
def test_callbacks_end_validations(pair: tuple[Any, Any], data: str) -> None:
    found = []
    for model in pair:
        ending = Ending("stop_evaluating", "on_test_batch_begin")
        history = model.fit(
            X,
            Y,
            epochs=3,
            validation_data=(X, Y) if data == "arrays" else ByIndex(),
            callbacks=[ending],
            **OPTIONS,
        )
        found.append((history, ending.num_batches))
    assert found[1][1] == found[0][1] == 3 * (5 + 2)
    assert_same_history(found[1][0], found[0][0])
    assert zoo.distance(*pair) < 1e-12


def test_tensorboard(pair: tuple[Any, Any], tmp_path: Path) -> None:
    seen = []
    for name, model in zip(("plain", "found"), pair, strict=True):
        folder = tmp_path / name
        board = keras.callbacks.TensorBoard(folder, histogram_freq=1, update_freq=2)
        model.fit(X, Y, epochs=2, validation_split=0.3, callbacks=[board], **OPTIONS)
        seen.append({run: written(folder / run) for run in ("train", "validation")})
    plain, found = seen
    for run, series in plain.items():
        assert len(series) == len(found[run]) >= 3
        for (tag, wanted), (_, points) in zip(series, found[run], strict=True):
            np.testing.assert_allclose(points, wanted, rtol=1e-6, err_msg=tag)


def by_number(tag: str) -> list[Any]:
    return [(part.isdigit() and int(part), part) for part in re.split(r"(\d+)", tag)]


def written(folder: Path) -> list[tuple[str, list[Any]]]:
    """What TensorBoard shows of a run: its scalars and histograms, in the order of their names.

    These have numbers in them, which go on from model to model.
    """
    events = event_accumulator.EventAccumulator(str(folder), {"tensors": 0})
    events.Reload()
    return [
        (tag, [(event.step, *make_ndarray(event.tensor_proto).flatten()) for event in points])
        for tag in sorted(events.Tags()["tensors"], key=by_number)
        if "keras" not in tag
        for points in [events.Tensors(tag)]
    ]


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


SCALE = keras.Variable(1.0, dtype="float64", name="scale")


class Weighted(keras.losses.Loss):  # type: ignore[misc]
    """A loss with an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.scale = 1.0, SCALE

    def call(self, y_true: Any, y_pred: Any) -> Any:
        error = keras.ops.mean(keras.ops.square(y_pred), axis=-1)
        own = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        return own + self.factor * self.scale.value * error


def scaled() -> Any:
    """With a layer that looks at a variable which is none of the model's."""
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(6, activation="relu"),
            keras.layers.Lambda(lambda hidden: hidden * SCALE.value),
            keras.layers.Dense(zoo.NUM_CLASSES),
        ]
    )


CHANGES: dict[str, Callable[[Any, int], object]] = {
    "an attribute of the loss": lambda model, epoch: setattr(model.loss, "factor", epoch + 2.0),
    "what the loss looks at": lambda model, epoch: SCALE.assign(1.5 + epoch),
    "the count of steps": lambda model, epoch: model.optimizer.iterations.assign(50),
    "slots": lambda model, epoch: [one.assign(one * 0) for one in model.optimizer._momentums],
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "strategy"),
    core_of(
        [(change, strategy) for change in CHANGES for strategy in STRATEGIES],
        lambda change, strategy: strategy == "mirrored" or change == "slots",
    ),
)
def test_what_a_callback_changes_beside_weights(change: str, strategy: str) -> None:
    class Changing(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            CHANGES[change](self.model, epoch)

    def trained(where: Any) -> Any:
        SCALE.assign(1.0)
        optimizer = keras.optimizers.Adam(0.01, clipnorm=0.5)
        with where:
            model = zoo.compiled(make, optimizer=optimizer, loss=Weighted())
        model.fit(X, Y, epochs=3, callbacks=[Changing()], **OPTIONS)
        return model

    make = scaled if strategy == "mirrored" else zoo.sequential
    assert zoo.distance(trained(nullcontext()), trained(STRATEGIES[strategy]().scope())) < 1e-12


class Noting(keras.layers.Layer):  # type: ignore[misc]
    """Has a setting, counts its calls, and keeps what it has made last."""

    def __init__(self) -> None:
        super().__init__()
        self.options, self.calls = {"beta": 1.0}, 0

    def call(self, inputs: Any) -> Any:
        self.calls += 1
        self.last = inputs * self.options["beta"]
        return self.last


def noting() -> Any:
    return keras.Sequential(
        [keras.layers.Input((8,)), Noting(), keras.layers.Dense(zoo.NUM_CLASSES)]
    )


def write_slots(model: Any, batch: int) -> None:
    model.optimizer._momentums[0].assign(np.ones((8, zoo.NUM_CLASSES)))


SETTINGS: dict[str, tuple[Callable[[Any, int], object], str]] = {
    "layer": (
        lambda model, batch: setitem(model.layers[0].options, "beta", batch),
        "options.*beta",
    ),
    "loss": (lambda model, batch: setattr(model.loss, "factor", batch), "`factor` of loss 0"),
    "slots": (write_slots, "slots of Adam"),
}


@pytest.mark.parametrize(
    "moment", core_of(["on_train_batch_begin", "on_train_batch_end"], ["on_train_batch_end"])
)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_cannot_change_within_an_epoch(setting: str, moment: str) -> None:
    change, message = SETTINGS[setting]

    def act(callback: Any, batch: int, logs: Any = None) -> None:
        if batch == 3:
            change(callback.model, batch)

    callback = type("Changing", (keras.callbacks.Callback,), {moment: act})()
    optimizer = keras.optimizers.Adam(0.01, clipnorm=0.5)
    with STRATEGIES["mirrored"]().scope():
        model = zoo.compiled(noting, optimizer=optimizer, loss=Weighted())
    with pytest.raises(OptionError, match=rf"Within an epoch.*{message}"):
        model.fit(X, Y, callbacks=[callback], **OPTIONS)


def test_callbacks_may_look_at_layers_and_take_notes_within_an_epoch() -> None:
    class Looking(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model(X[:3])
            self.model.predict(X[:3], verbose=0)
            self.model.note = batch
            keras.Sequential(self.model.layers[:1])(X[:3])

    plain = zoo.compiled(noting)
    with STRATEGIES["mirrored"]().scope():
        model = zoo.compiled(noting)
    for one in (plain, model):
        one.fit(X, Y, epochs=2, callbacks=[Looking()], **OPTIONS)
    assert zoo.distance(plain, model) < 1e-12


@pytest.mark.parametrize("clipnorm", [None, 0.1])
def test_a_checkpoint_within_an_epoch_holds_the_optimizer(
    clipnorm: float | None, tmp_path: Path
) -> None:
    saved = []
    for name, where in (("plain", nullcontext()), ("ours", STRATEGIES["mirrored"]().scope())):
        path = tmp_path / f"{name}.keras"
        with where:
            model = zoo.compiled(
                zoo.sequential, optimizer=keras.optimizers.Adam(0.01, clipnorm=clipnorm)
            )
        saving = keras.callbacks.ModelCheckpoint(path, save_freq=3)
        model.fit(X, Y, callbacks=[saving], **OPTIONS)
        saved.append(keras.models.load_model(path))
    assert zoo.distance(*saved) < 1e-12
    for one, other in zip(*(model.optimizer.variables for model in saved), strict=True):
        np.testing.assert_allclose(other.numpy(), one.numpy(), atol=1e-12, err_msg=one.path)


def test_a_run_that_goes_on_in_the_orders_of_one(pair: tuple[Any, Any]) -> None:
    """Where an epoch is a part of a pass, too."""
    plain, model = pair
    x, y = X[:48], Y[:48]
    options = {"batch_size": BATCH, "steps_per_epoch": 2, "verbose": 0}  # two epochs are a pass
    with STRATEGIES["mirrored"]().scope():
        other = zoo.compiled(zoo.sequential, metrics=["accuracy"])
    model.fit(x, y, epochs=6, **options)
    other.fit(x, y, epochs=2, **options)
    other.fit(x, y, epochs=6, initial_epoch=2, **options)
    assert zoo.distance(other, model) < 1e-12
    assert zoo.distance(plain, model) > 1e-3


@in_stages
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
