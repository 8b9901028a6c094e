"""Keras models that several hosts and plain Keras must train alike: a script, run on every host.

Each job trains a model under a strategy, and the first process another one plainly. Told is how far
apart they are, and by every process a digest of what it has come to.

Arguments: a folder that the hosts share, names of jobs.
"""

import hashlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lockstep  # isort: skip  # before Keras, whose backend it chooses

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops
from torch.utils.data import DataLoader, TensorDataset

from lockstep.errors import HostError
from tests import keras_own_steps as own_steps
from tests import keras_zoo as zoo
from tests.launching import be_strict

BATCH = 13
SAMPLES = 3 * BATCH + 1  # the last batch is one sample: a whole host has none
X, Y = zoo.vectors(SAMPLES), zoo.classes(SAMPLES)
WEIGHTS = np.random.default_rng(5).uniform(0.1, 2, size=SAMPLES)
OPTIONS: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
TIMEOUT_SECONDS = 180.0

# A story trains a model and tells what it has come to, weights apart.
Story = Callable[[Any, Path], Mapping[str, Any]]


def fitted(model: Any, *data: Any, **options: Any) -> dict[str, Any]:
    """What ``fit`` and the other methods come to."""
    given = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    history = model.fit(*data, **given)
    return {
        "history": dict(history.history),
        "epochs": [float(epoch) for epoch in history.epoch],
        "evaluate": model.evaluate(X, Y, batch_size=7, verbose=0, return_dict=True),
        "predict": model.predict(X, batch_size=7, verbose=0),
    }


def plainly(model: Any, folder: Path) -> Mapping[str, Any]:
    return fitted(model, X, Y, validation_data=(X[:17], Y[:17]))


def with_weights(model: Any, folder: Path) -> Mapping[str, Any]:
    return fitted(model, X, Y, sample_weight=WEIGHTS, validation_split=0.3)


def loader() -> Any:
    return DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=BATCH)


def batches() -> Iterator[Any]:
    while True:
        for start in range(0, SAMPLES, BATCH):
            yield X[start : start + BATCH], Y[start : start + BATCH]


def from_a_loader(model: Any, folder: Path) -> Mapping[str, Any]:
    told = fitted(model, loader(), batch_size=None, validation_data=loader())
    seen = model.predict(loader(), verbose=0)
    return {**told, "seen": seen, "values": model.evaluate(loader(), verbose=0)}


def from_a_generator(model: Any, folder: Path) -> Mapping[str, Any]:
    return fitted(model, batches(), batch_size=None, steps_per_epoch=3)


def on_batches(model: Any, folder: Path) -> Mapping[str, Any]:
    values = [
        model.train_on_batch(X[start : start + 10], Y[start : start + 10], return_dict=True)
        for start in range(0, 40, 10)
    ]
    return {"values": values, "test": model.test_on_batch(X[:9], Y[:9])}


def stopping_early(model: Any, folder: Path) -> Mapping[str, Any]:
    callbacks = [
        keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5, min_lr=1e-4),
    ]
    return fitted(model, X, Y, epochs=12, validation_split=0.3, callbacks=callbacks)


class Ending(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Ends evaluations and predictions at their second batch, training in its second epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = epoch == 1

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.stop_evaluating = batch == 1

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.stop_predicting = batch == 1


def ended(model: Any, folder: Path) -> Mapping[str, Any]:
    told = fitted(model, X, Y, epochs=4, validation_data=loader(), callbacks=[Ending()])
    return {
        **told,
        "ended": [
            model.evaluate(loader(), callbacks=[Ending()], verbose=0),
            model.evaluate(X, Y, batch_size=7, steps=2, verbose=0),
            model.predict(X, batch_size=7, callbacks=[Ending()], verbose=0),
            model.predict(loader(), steps=2, verbose=0),
        ],
    }


def with_averages(model: Any, folder: Path) -> Mapping[str, Any]:
    """In place of the weights, while it is evaluated."""
    swapping = keras.callbacks.SwapEMAWeights()
    return fitted(model, X, Y, epochs=3, validation_split=0.3, callbacks=[swapping])


def meddled_with(model: Any, folder: Path) -> Mapping[str, Any]:
    return fitted(model, X, Y, epochs=5, callbacks=[zoo.Meddler()])


class Looking(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Evaluates before, during and after training.

    But not in ``on_epoch_begin``: there plain Keras counts it among the epoch's metrics.
    """

    def look(self, *_: Any) -> None:
        self.model.evaluate(X[:20], Y[:20], verbose=0)
        self.model.predict(X[:3], verbose=0)

    on_train_begin = on_epoch_end = on_train_end = look


def looked_at(model: Any, folder: Path) -> Mapping[str, Any]:
    return fitted(model, X, Y, callbacks=[Looking()])


def with_checkpoints(model: Any, folder: Path) -> Mapping[str, Any]:
    name = f"{type(model).__name__}-{'several' if is_bound(model) else f'alone-{HOST}'}"
    own = folder / name
    own.mkdir(exist_ok=True)
    saving = keras.callbacks.ModelCheckpoint(own / "{epoch}.keras")
    logging = keras.callbacks.CSVLogger(own / "log.csv")
    told = fitted(model, X, Y, callbacks=[saving, logging])
    loaded = keras.models.load_model(own / "2.keras")
    return {**told, "files": len(list(own.iterdir())), "saved": flat(loaded.get_weights())}


class PowerCut(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise RuntimeError("power cut")


def backed_up(model: Any, folder: Path) -> Mapping[str, Any]:
    """The second run goes on from the backup of the first, which host 0 alone has seen."""
    if not is_bound(model):
        return fitted(model, X, Y, epochs=4)
    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    with pytest.raises((RuntimeError, HostError), match="power cut"):
        fitted(model, X, Y, epochs=4, callbacks=[backup, PowerCut()])
    zoo.set_weights(model, seed=HOST)
    model.optimizer.iterations.assign(0)
    told = fitted(model, X, Y, epochs=4, callbacks=[backup])
    assert len(told["history"].pop("loss")) == len(told.pop("epochs")) == 2
    del told["history"]
    return told


def made_differently(model: Any, folder: Path) -> Mapping[str, Any]:
    """Host 1's weights are other ones: what counts is host 0's."""
    if is_bound(model):
        zoo.set_weights(model, seed=HOST)
    return plainly(model, folder)


def is_bound(model: Any) -> bool:
    return "_lockstep" in vars(model)


class OwnSGD(keras.optimizers.SGD):  # type: ignore[misc]  # Keras is untyped
    """Of a class that nobody knows."""


def with_added_losses() -> Any:
    inputs = layers.Input((8,))
    hidden = layers.Dense(9, activation="tanh", kernel_regularizer="l2")(inputs)
    hidden = layers.ActivityRegularization(l2=0.01)(hidden)
    return keras.Model(inputs, layers.Dense(zoo.NUM_CLASSES)(hidden))


def root(target: Any, output: Any) -> Any:
    """A loss that looks across samples."""
    return ops.sqrt(ops.mean(ops.square(ops.one_hot(target, zoo.NUM_CLASSES) - output)))


class Rooted(zoo.Subclassed):
    """One that is made of Keras's own."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return ops.sqrt(super().compute_loss(*args, **kwargs))


def spread(target: Any, output: Any) -> Any:
    """A metric of the user's, of which nothing is known."""
    return ops.max(output) - ops.min(output)


def compiled(make: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    return lambda: zoo.compiled(make, **{"metrics": ["accuracy"], **options})


def several() -> lockstep.Strategy:
    return lockstep.MultiWorkerMirroredStrategy(timeout_seconds=TIMEOUT_SECONDS)


def pipeline() -> lockstep.Strategy:
    return lockstep.PipelineStrategy(stages=2, microbatches=3, timeout_seconds=TIMEOUT_SECONDS)


def served() -> lockstep.Strategy:
    return lockstep.ParameterServerStrategy(servers=1, workers=1, timeout_seconds=TIMEOUT_SECONDS)


# By name: what makes the model, the story, the strategy.
JOBS: dict[str, tuple[Callable[[], Any], Story, Callable[[], lockstep.Strategy]]] = {
    **{name: (compiled(make), plainly, several) for name, make in zoo.MODELS.items()},
    "batch normalization": (compiled(zoo.normalized, optimizer="sgd"), plainly, several),
    "sample weights": (compiled(zoo.sequential), with_weights, several),
    "added losses": (compiled(with_added_losses), plainly, several),
    "across samples": (compiled(zoo.sequential, loss=root), plainly, several),
    "own loss": (compiled(Rooted), with_weights, several),
    "own step": (partial(own_steps.made, "distillation"), plainly, several),
    "own metric": (compiled(zoo.sequential, metrics=[spread]), plainly, several),
    "momentum": (
        lambda: zoo.compiled(zoo.sequential, optimizer=keras.optimizers.SGD(0.1, momentum=0.9)),
        plainly,
        several,
    ),
    "by variables": (
        lambda: zoo.compiled(zoo.sequential, optimizer=keras.optimizers.Lamb(0.01)),
        plainly,
        several,
    ),
    "own optimizer": (
        lambda: zoo.compiled(zoo.sequential, optimizer=OwnSGD(0.1)),
        plainly,
        several,
    ),
    "averages": (
        lambda: zoo.compiled(
            zoo.sequential,
            optimizer=keras.optimizers.Adam(1e-2, use_ema=True, ema_overwrite_frequency=3),
        ),
        plainly,
        several,
    ),
    "swapped averages": (
        lambda: zoo.compiled(zoo.sequential, optimizer=keras.optimizers.SGD(0.1, use_ema=True)),
        with_averages,
        several,
    ),
    "loader": (compiled(zoo.sequential), from_a_loader, several),
    "generator": (compiled(zoo.sequential), from_a_generator, several),
    "on batches": (compiled(zoo.sequential), on_batches, several),
    "stopping early": (compiled(zoo.sequential), stopping_early, several),
    "ended": (compiled(zoo.sequential), ended, several),
    "meddler": (compiled(zoo.sequential), meddled_with, several),
    "looking": (compiled(zoo.sequential), looked_at, several),
    "checkpoints": (compiled(zoo.sequential), with_checkpoints, several),
    "backup": (compiled(zoo.sequential), backed_up, several),
    "made differently": (compiled(zoo.sequential), made_differently, several),
    "servers": (compiled(zoo.sequential), plainly, served),
    "servers, batch normalization": (compiled(zoo.normalized), plainly, served),
    "servers, sample weights": (compiled(zoo.sequential), with_weights, served),
    "servers, loader": (compiled(zoo.sequential), from_a_loader, served),
    "pipeline": (compiled(zoo.sequential), plainly, pipeline),
    "pipeline of a subclass": (compiled(zoo.Subclassed), plainly, pipeline),
    "pipeline of one with its own loss": (compiled(Rooted), with_weights, pipeline),
}


def flat(values: Any) -> list[float]:
    """All numbers in a tree, in an order of its own."""
    if isinstance(values, Mapping):
        return [number for key in sorted(values) for number in flat(values[key])]
    if isinstance(values, list | tuple):
        return [number for value in values for number in flat(value)]
    return [float(number) for number in np.asarray(values).reshape(-1)]


def far(ours: Any, theirs: Any) -> float:
    one, other = np.array(flat(ours)), np.array(flat(theirs))
    if one.shape != other.shape:
        return float("inf")
    return float(np.max(np.abs(one - other) / np.maximum(1, np.abs(other)), initial=0.0))


def run(name: str, folder: Path) -> dict[str, Any]:
    make, story, strategy = JOBS[name]
    plain = make()
    with strategy().scope():
        model = make()
    ours = story(model, folder)
    told = {
        "digest": digest([model.get_weights(), ours]),
        "digest of slots": digest(slots(model)),
    }
    if not IS_FIRST:
        return told
    theirs = story(plain, folder)
    return {
        **told,
        "weights": zoo.distance(plain, model),
        "slots": far(slots(model), slots(plain)),
        "values": {part: far(ours[part], theirs[part]) for part in theirs if part in ours},
    }


def digest(values: Any) -> str:
    return hashlib.blake2b(np.array(flat(values)).tobytes(), digest_size=8).hexdigest()


def slots(model: Any) -> list[Any]:
    return [variable.numpy() for variable in model.optimizer.variables]


def main() -> None:
    folder, *names = sys.argv[1:]
    for name in names or JOBS:
        told: dict[str, Any] = {"job": name}
        try:
            with zoo.true_float64():
                told |= run(name, Path(folder))
        except Exception:
            told["error"] = traceback.format_exc()
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


HOST = 0
IS_FIRST = True  # the process that also trains plainly

if __name__ == "__main__":
    be_strict()
    warnings.filterwarnings("ignore", "__array__ implementation")  # Keras's
    if "TF_CONFIG" in os.environ:
        HOST = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    IS_FIRST = HOST == 0 and os.environ.get("LOCAL_RANK", "0") == "0"
    main()
