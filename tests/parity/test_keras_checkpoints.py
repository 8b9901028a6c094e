"""``model.fit`` with a Checkpoint that is begun anew goes on where the last of them was taken."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.checkpoint.generations import generations
from lockstep.errors import CheckpointError, DataError, OptionError
from lockstep.train.checkpointing.training_state import TrainingState
from tests import keras_zoo as zoo
from tests.states import first_difference
from tests.thorough import core_of

X, Y = zoo.vectors(34).astype("float32"), zoo.classes(34)


STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "single": lockstep.SingleDeviceStrategy,
    "mirrored-2": lambda: lockstep.MirroredStrategy(2),
    "pipeline-2": lambda: lockstep.PipelineStrategy(2, microbatches=2),
    "local-2": lambda: lockstep.LocalSGDStrategy(1, 2),
}


class Ending(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Notes what every step is told, and ends a training with an error after so many."""

    def __init__(self, step: int = 0) -> None:
        super().__init__()
        self.step = step
        self.logs: dict[tuple[int, int], Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {}  # it notes what one attempt sees

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.number = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs[self.number, batch] = dict(logs)
        if len(self.logs) == self.step:
            raise ZeroDivisionError


class Halving(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps numbers, arrays and lists of them, and acts by them."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.best = np.full(2, np.inf)
        self.seen: list[float] = []
        self.names = {1: "one"}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(logs["loss"])
        self.best = np.minimum(self.best, [logs["loss"], 1.0])
        if len(self.seen) % 5 == 0:
            rate = 0.01 * float(self.best.sum())
            self.model.optimizer.learning_rate = rate


class Telling(keras.callbacks.Callback):  # type: ignore[misc]
    """Says itself what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.found.add(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"found": sorted(self.found)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = set(state["found"])


class OwnMetric(keras.metrics.Metric):  # type: ignore[misc]
    """The largest output so far, of which nothing is known."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.most = self.add_variable((), initializer="zeros", name="most")

    def update_state(self, target: Any, output: Any, sample_weight: Any = None) -> None:
        self.most.assign(ops.maximum(self.most, ops.max(output)))

    def result(self) -> Any:
        return self.most.value


def compiled(**options: Any) -> Any:
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    stack = [layers.Dense(11, activation="relu"), layers.BatchNormalization()]
    stack += [layers.Dropout(0.2), layers.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *stack])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": loss, **options})
    return model


def early() -> list[Any]:
    stopping = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    return [stopping, keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10)]


def two_losses() -> Any:
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8,))
    hidden = layers.Dense(9, activation="tanh")(inputs)
    outputs = [layers.Dense(4, name=name)(hidden) for name in ("one", "other")]
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", [loss, loss], metrics=[["accuracy"], [OwnMetric()]])
    return model


Feature = tuple[Callable[[], Any], Callable[[], list[Any]], dict[str, Any]]
FEATURES: dict[str, Feature] = {
    "plain": (compiled, list, {}),
    "metrics": (lambda: compiled(metrics=["accuracy", OwnMetric()]), early, {}),
    "callbacks": (compiled, lambda: [Halving(), Telling()], {}),
    "a schedule": (
        lambda: compiled(
            optimizer=keras.optimizers.SGD(
                keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9
            )
        ),
        list,
        {},
    ),
    "averages": (
        lambda: compiled(optimizer=keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8)),
        list,
        {},
    ),
    "several losses": (two_losses, list, {"y": [Y, Y[::-1].copy()], "validation_split": 0.0}),
    "short epochs": (compiled, list, {"steps_per_epoch": 2, "batch_size": 7}),
    "a later epoch": (compiled, list, {"initial_epoch": 1}),
}
ROWS = [
    *(
        (strategy, feature, "3 steps")
        for strategy in STRATEGIES
        for feature in ("plain", "metrics")
    ),
    *(("mirrored-2", feature, "3 steps") for feature in [*FEATURES][2:]),
    ("single", "metrics", "epoch"),
]
CORE = [
    ("single", "metrics", "epoch"),
    ("mirrored-2", "metrics", "3 steps"),
]
MORE = [("mirrored-2", "callbacks", "3 steps"), ("pipeline-2", "metrics", "3 steps")]


def fit(
    model: Any, folder: Path | None, *callbacks: Any, every: str = "3 steps", **options: Any
) -> Any:
    listed = [*callbacks]
    if folder is not None:
        listed.append(lockstep.keras.Checkpoint(folder, every=every))
    options = {"x": X, "y": Y, "batch_size": 9, "epochs": 3, "validation_split": 0.25, **options}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("warnings.showwarning", lambda *args, **named: None)
        return model.fit(verbose=0, callbacks=listed, **options)


def state_of(model: Any) -> TrainingState:
    state: TrainingState = model._lockstep.trainer.state.take()
    return state


@pytest.mark.parametrize(("strategy", "feature", "every"), core_of(ROWS, CORE, MORE))
def test_a_script_that_is_started_again_goes_on(
    strategy: str, feature: str, every: str, tmp_path: Path
) -> None:
    make, callbacks, options = FEATURES[feature]

    def run(step: int, folder: Path | None) -> tuple[Any, Any, list[Any]]:
        with STRATEGIES[strategy]().scope():
            model = make()
        listed = [*callbacks(), Ending(step)]
        return model, fit(model, folder, *listed, every=every, **options), listed

    wanted, history, others = run(0, None)
    steps = len(others[-1].logs)
    for step in (steps // 2 + 1, 0):
        if step:
            with pytest.raises(ZeroDivisionError):
                run(step, tmp_path / "run")
            continue
        model, found, listed = run(step, tmp_path / "run")
    assert found.history == history.history
    assert found.epoch == history.epoch
    assert first_difference(state_of(wanted), state_of(model)) is None
    assert 0 < len(listed[-1].logs) < steps
    assert listed[-1].logs.items() <= others[-1].logs.items()
    for one, other in zip(listed[:-1], others[:-1], strict=True):
        for name in ("wait", "best", "best_epoch", "seen", "names", "found"):
            mine, theirs = getattr(one, name, None), getattr(other, name, None)
            np.testing.assert_equal(mine, theirs)
    again, found, listed = run(0, tmp_path / "run")  # which had ended
    assert (found.history, found.epoch) == (history.history, history.epoch)
    assert not listed[-1].logs
    assert first_difference(state_of(wanted), state_of(again)) is None


def test_every_second_attempt_may_have_another_number_of_devices(tmp_path: Path) -> None:
    def run(devices: int, step: int, folder: Path | None) -> Any:
        with lockstep.MirroredStrategy(devices, num_shares=2).scope():
            model = compiled(metrics=["accuracy"])
        return model, fit(model, folder, Ending(step)).history

    wanted, history = run(2, 0, None)
    for devices, step in ((2, 5), (1, 4)):
        with pytest.raises(ZeroDivisionError):
            run(devices, step, tmp_path)
    model, found = run(2, 0, tmp_path)
    assert found["loss"] == history["loss"]
    np.testing.assert_allclose(found["accuracy"], history["accuracy"], rtol=1e-6)
    assert first_difference(state_of(wanted), state_of(model)) is None


# --- streams -------------------------------------------------------------------------------------


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches by number."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.shift = shift

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        rows = slice(8 * index, 8 * index + 8)
        return X[rows] + self.shift, Y[rows]


def generator(shift: float = 0.0) -> Iterator[Any]:
    while True:
        yield from (Batches(shift)[index] for index in range(3))


STREAMS = {"a dataset": (Batches, None), "a generator": (generator, 4)}


@pytest.mark.thorough
@pytest.mark.parametrize("name", core_of(STREAMS, ["a generator"], []))
def test_a_stream_is_read_again_up_to_there(name: str, tmp_path: Path) -> None:
    make, steps = STREAMS[name]
    plain: dict[str, Any] = {
        "y": None,
        "batch_size": None,
        "validation_split": 0.0,
        "steps_per_epoch": steps,
    }
    plain |= {"validation_data": make(), "validation_steps": 2, "validation_freq": 2}

    def run(step: int, folder: Path | None, shift: float = 0.0) -> Any:
        with lockstep.MirroredStrategy(2).scope():
            model = compiled()
        options = {**plain, "validation_data": make()}
        return model, fit(model, folder, Ending(step), x=make(shift), **options).history

    wanted, history = run(0, None)
    with pytest.raises(ZeroDivisionError):
        run(7, tmp_path)
    with pytest.raises(DataError, match="give the same batches"):
        run(0, tmp_path, shift=1.0)
    model, found = run(0, tmp_path)
    assert found == history
    assert all(map(np.array_equal, wanted.get_weights(), model.get_weights()))


# --- what is wrong -------------------------------------------------------------------------------


def focal(target: Any, output: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(target, output, from_logits=True) ** 2


@pytest.mark.exhaustive
def test_what_has_changed_is_named(tmp_path: Path) -> None:
    """One folder for all: what is refused writes nothing."""
    adam, decay = keras.optimizers.Adam, keras.optimizers.schedules.CosineDecay
    own_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)
    compiles: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": adam(0.005)}, "optimizer.learning_rate: 0.01 in the checkpoint, 0.005 now"),
        ({"optimizer": adam(0.01, beta_1=0.5, clipnorm=1.0)}, "clipnorm: None .*beta_1: 0.9 "),
        ({"optimizer": keras.optimizers.Nadam(0.01)}, "optimizer: 'Adam'"),
        ({"optimizer": adam(decay(0.01, 9))}, "learning_rate: a number .*'CosineDecay' now"),
        ({"loss": own_loss}, "loss.ignore_class: None in the checkpoint, 1 now"),
        ({"loss": focal}, "loss: 'SparseCategoricalCrossentropy' .* 'focal' now"),
    ]
    fits: list[tuple[dict[str, Any], str]] = [
        ({"batch_size": 8}, "batch_size"),
        ({"shuffle": False}, "shuffle: True"),
        ({"x": X + 1}, "data: arrays"),
        ({"epochs": 1}, "Received: epochs=1"),
    ]
    with lockstep.SingleDeviceStrategy().scope():
        fit(compiled(), tmp_path)
        for options, match in compiles:
            with pytest.raises(CheckpointError, match=match):
                fit(compiled(**options), tmp_path)
        for options, match in fits:
            with pytest.raises(CheckpointError, match=match):
                fit(compiled(), tmp_path, **options)
        model = compiled()
        keras.utils.set_random_seed(4)
        with pytest.raises(CheckpointError, match="seed: 3"):
            fit(model, tmp_path)
        longer, model = compiled(), compiled()
        assert fit(longer, tmp_path, epochs=5).history == fit(model, None, epochs=5).history
        assert all(map(np.array_equal, longer.get_weights(), model.get_weights()))
        model = compiled(optimizer=adam(0.005))
        taking = lockstep.keras.Checkpoint(tmp_path, on_difference="take new")
        fit(model, None, taking, epochs=6)
        assert float(model.optimizer.learning_rate.value) == pytest.approx(0.005)
        last = compiled(optimizer=adam(0.005))
        fit(last, tmp_path, epochs=6)  # what was taken is no difference any more
        assert all(map(np.array_equal, last.get_weights(), model.get_weights()))


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end", "on_test_batch_end"])
def test_an_error_of_a_callback_leaves_the_last_whole_step(hook: str) -> None:
    """Over gloo, where each process has slots of its own, as on one device."""

    def fail(self: Any, number: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) >= 3:
            raise ZeroDivisionError

    failing = type("Failing", (keras.callbacks.Callback,), {hook: fail})
    models = []
    for strategy in (
        lockstep.SingleDeviceStrategy(),
        lockstep.MirroredStrategy(2, num_shares=2, engine="gloo"),
    ):
        with strategy.scope():
            model = compiled()
            model.layers[-2].rate = 0.0
        with pytest.raises(ZeroDivisionError):
            fit(model, None, failing())
        models.append(model)
    found = [[one.numpy() for one in (*m.variables, *m.optimizer.variables)] for m in models]
    assert len(found[0]) == len(found[1])
    assert int(models[0].optimizer.iterations) == 3
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_another_model_is_refused(tmp_path: Path) -> None:
    with lockstep.SingleDeviceStrategy().scope():
        fit(compiled(), tmp_path)
        keras.utils.set_random_seed(3)
        model = zoo.compiled(zoo.sequential)
        with pytest.raises(CheckpointError, match="must have the model's parameters"):
            fit(model, tmp_path)


def test_plain_keras_writes_none(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="a model of plain Keras"):
        fit(compiled(), tmp_path)
    assert not generations(tmp_path)


def test_one_callback_says_where_a_fit_goes_on(tmp_path: Path) -> None:
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    others = [backup, lockstep.keras.Checkpoint(tmp_path / "other")]
    for other in others:
        refused = pytest.raises(OptionError, match="Only one callback")
        with lockstep.SingleDeviceStrategy().scope(), refused:
            fit(compiled(), tmp_path / "run", other)


@pytest.mark.parametrize("options", [{"every": "now and then"}, {"keep": 0}])
def test_options_are_checked(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=next(iter(options)).replace("every", "`every` of a Checkpoint")
    ):
        lockstep.keras.Checkpoint(tmp_path, **options)


def test_plain_torch_reads_the_weights(tmp_path: Path) -> None:
    with lockstep.MirroredStrategy(2).scope():
        model = compiled()
    fit(model, tmp_path)
    weights = lockstep.checkpoint.load_state_dict(tmp_path)
    values = {name.partition(".")[2]: value for name, value in weights.items()}
    for variable in model.variables:
        if "seed" not in variable.path:
            name = variable.path.partition("/")[2].replace("/", ".")
            np.testing.assert_array_equal(values[name], variable.numpy())
