"""All that Keras takes as data, under strategies: what plain Keras comes to."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lockstep
from lockstep.errors import DataError, OptionError
from tests import keras_zoo as zoo
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

SAMPLES, BATCH = 50, 12
X, Y = zoo.vectors(SAMPLES), zoo.classes(SAMPLES)
WEIGHTS = np.random.default_rng(5).uniform(0.1, 2, size=SAMPLES)

STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "mirrored": lambda: lockstep.MirroredStrategy(devices=2),
    "pipeline": lambda: lockstep.PipelineStrategy(stages=2, microbatches=3),
}


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with zoo.true_float64():
        yield


# Data is read alike whatever it trains. So CI has stages where other kinds of batches come to them.
in_stages = pytest.mark.parametrize(
    "strategy", core_of(STRATEGIES, ["mirrored"], ["pipeline"]), indirect=True
)


@pytest.fixture(params=core_of(STRATEGIES, ["mirrored"], []))
def strategy(request: pytest.FixtureRequest) -> lockstep.Strategy:
    return STRATEGIES[request.param]()


class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # Keras is untyped
    """Batches by index, with weights."""

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)

    def __getitem__(self, index: int) -> Any:
        part = slice(index * BATCH, (index + 1) * BATCH)
        return X[part], Y[part], WEIGHTS[part]


class Told(Batches):
    """Notes what it is asked and told."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        self.calls.append(index)
        return super().__getitem__(index)

    def on_epoch_begin(self) -> None:
        self.calls.append("begins")

    def on_epoch_end(self) -> None:
        self.calls.append("ends")


def batches() -> Iterator[Any]:
    """Batches without end."""
    while True:
        for start in range(0, SAMPLES, BATCH):
            yield X[start : start + BATCH], Y[start : start + BATCH]


def loader() -> Any:
    return DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=BATCH)


DATA: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "tensors": lambda: ((torch.from_numpy(X), torch.from_numpy(Y)), {"batch_size": BATCH}),
    "loader": lambda: ((loader(),), {}),
    "dataset": lambda: ((Batches(),), {}),
    "dataset with workers": lambda: ((Batches(workers=2),), {}),
    "generator": lambda: ((batches(),), {"steps_per_epoch": 3}),
}


@pytest.mark.parametrize(
    ("strategy", "name"),
    core_of(
        [(strategy, name) for strategy in STRATEGIES for name in DATA],
        lambda strategy, name: strategy == "mirrored",
        [("pipeline", "generator"), ("pipeline", "dataset")],
    ),
    indirect=["strategy"],
)
def test_kinds_of_data(strategy: lockstep.Strategy, name: str) -> None:
    plain = zoo.compiled(zoo.sequential, metrics=["accuracy"])
    with strategy.scope():
        model = zoo.compiled(zoo.sequential, metrics=["accuracy"])
    histories = []
    for each in (plain, model):
        data, options = DATA[name]()
        histories.append(each.fit(*data, epochs=2, verbose=0, shuffle=False, **options))
    assert zoo.distance(plain, model) < 1e-12
    for key, values in histories[0].history.items():
        np.testing.assert_allclose(histories[1].history[key], values, rtol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", ["loader", "dataset"])
@in_stages
def test_evaluation_and_prediction(strategy: lockstep.Strategy, name: str) -> None:
    plain = zoo.compiled(zoo.sequential, metrics=["accuracy"])
    with strategy.scope():
        model = zoo.compiled(zoo.sequential, metrics=["accuracy"])
    one, other = (each.evaluate(*DATA[name]()[0], verbose=0) for each in (plain, model))
    np.testing.assert_allclose(other, one, rtol=1e-6)
    one, other = (each.predict(*DATA[name]()[0], verbose=0) for each in (plain, model))
    np.testing.assert_allclose(other, one, rtol=1e-9)


def test_a_loader_with_a_part_of_the_data(strategy: lockstep.Strategy) -> None:
    with strategy.scope():
        model = zoo.compiled(zoo.sequential)
    rows = loader().dataset
    part: Any = DataLoader(rows, BATCH, sampler=DistributedSampler(rows, num_replicas=2, rank=0))
    for call in (model.fit, model.evaluate, model.predict):
        with pytest.raises(DataError, match=r"`x` must give all samples.*DistributedSampler"):
            call(part, verbose=0)
    with pytest.raises(DataError, match="`validation_data` must give all samples"):
        model.fit(X, Y, validation_data=part, verbose=0)
    assert model.optimizer.iterations.value == 0


def test_no_samples(strategy: lockstep.Strategy) -> None:
    with strategy.scope():
        model = zoo.compiled(zoo.sequential)
    for call in (model.fit, model.evaluate, lambda x, _: model.predict(x)):
        with pytest.raises(DataError, match="`x` must have at least one sample"):
            call(X[:0], Y[:0])
    with pytest.raises(DataError, match="`validation_data` must have at least one sample"):
        model.fit(X, Y, validation_data=(X[:0], Y[:0]))


@pytest.mark.parametrize("is_fresh", [True, False])
def test_what_a_dataset_is_told(strategy: lockstep.Strategy, is_fresh: bool) -> None:
    calls = []
    for scope in (nullcontext(), strategy.scope()):
        with scope:
            model = zoo.compiled(zoo.sequential, metrics=["accuracy"])
        for method in ("fit", "evaluate", "predict"):
            data, validation = Told(), Told()
            more: dict[str, Any] = {}
            if method == "fit":
                more = {"epochs": 3, "shuffle": False, "validation_data": validation}
            elif is_fresh:
                model.compile(loss=model.loss, metrics=["accuracy"])
            getattr(model, method)(data, verbose=0, **more)
            calls.append((data.calls, validation.calls))
    assert calls[3:] == calls[:3]


@in_stages
def test_validation_by_batches(strategy: lockstep.Strategy) -> None:
    plain = zoo.compiled(zoo.sequential, metrics=["accuracy"])
    with strategy.scope():
        model = zoo.compiled(zoo.sequential, metrics=["accuracy"])
    one, other = (
        each.fit(
            batches(),
            steps_per_epoch=3,
            epochs=3,
            validation_data=loader(),
            validation_steps=4,
            verbose=0,
            shuffle=False,
        )
        for each in (plain, model)
    )
    assert zoo.distance(plain, model) < 1e-12
    for key, values in one.history.items():
        np.testing.assert_allclose(other.history[key], values, rtol=1e-6, err_msg=key)


@pytest.mark.thorough
def test_batches_of_validation_may_be_larger_than_those_of_training() -> None:
    """Their messages between stages are, too."""
    plain = zoo.compiled(zoo.sequential)
    with lockstep.PipelineStrategy(2, microbatches=2).scope():
        model = zoo.compiled(zoo.sequential)
    data = zoo.vectors(44), zoo.classes(44)
    one, other = (
        each.fit(
            *(part[:6] for part in data),
            batch_size=3,
            validation_data=data,
            validation_batch_size=44,
            verbose=0,
            shuffle=False,
        )
        for each in (plain, model)
    )
    np.testing.assert_allclose(other.history["val_loss"], one.history["val_loss"], rtol=1e-6)


def test_shuffling_is_a_function_of_the_seed() -> None:
    """Of the seed alone, and not of the number of devices."""
    found = []
    for seed, devices in ((3, 2), (3, 3), (4, 2)):
        keras.utils.set_random_seed(seed)
        with lockstep.MirroredStrategy(devices=devices, num_shares=3).scope():
            model = zoo.compiled(with_noise)
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
        found.append(model)
    assert zoo.distance(found[0], found[1]) == 0
    assert zoo.distance(found[0], found[2]) > 1e-6


def test_the_seed_may_be_set_anew() -> None:
    found = []
    for seed in (3, 4, 3):
        with lockstep.MirroredStrategy(devices=2).scope():
            model = zoo.compiled(with_noise)
        model.predict(X, verbose=0)
        keras.utils.set_random_seed(seed)
        model.fit(X, Y, batch_size=BATCH, verbose=0)
        found.append(model)
    assert zoo.distance(found[0], found[2]) == 0
    assert zoo.distance(found[0], found[1]) > 1e-6


def with_noise() -> Any:
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.GaussianNoise(0.1),
            layers.Dense(11, activation="relu"),
            layers.Dropout(0.3),
            layers.Dropout(0.3, seed=7),
            layers.Dense(zoo.NUM_CLASSES),
        ]
    )


def test_shares_draw_their_own_numbers() -> None:
    """Were the noise of all shares the same, equal samples would be equal after it."""

    class Noise(layers.Layer):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.seeds = keras.random.SeedGenerator(3)
            self.scale = self.add_weight(shape=(1,), initializer="ones")

        def call(self, inputs: Any) -> Any:
            return inputs * self.scale + keras.random.normal(inputs.shape, seed=self.seeds)

    with lockstep.MirroredStrategy(devices=2).scope():
        model = keras.Sequential([layers.Input((3,)), Noise()])
        model.compile("sgd", "mse")
    outputs = model.predict(np.zeros((8, 3)), batch_size=8, verbose=0)
    assert len(np.unique(outputs)) == outputs.size


@pytest.mark.parametrize("strategy_name", ["pipeline", "mirrored"])
def test_noise_in_training(strategy_name: str) -> None:
    with STRATEGIES[strategy_name]().scope():
        model = zoo.compiled(with_noise)
    history = model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
    assert all(np.isfinite(history.history["loss"]))


def pairs_of(*parts: Any) -> Iterator[Any]:
    """Batches, once."""
    for start in range(0, SAMPLES, BATCH):
        yield tuple(part[start : start + BATCH] for part in parts)


STEPS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "arrays": lambda: ((X, Y), {"batch_size": BATCH}),
    "arrays in as many batches": lambda: ((X, Y), {}),
    "generator": lambda: ((pairs_of(X, Y),), {}),
    "loader": lambda: ((loader(),), {}),
    "dataset": lambda: ((Batches(),), {}),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_evaluation_and_prediction(strategy: lockstep.Strategy, name: str) -> None:
    plain = zoo.compiled(zoo.sequential, metrics=["accuracy"])
    with strategy.scope():
        model = zoo.compiled(zoo.sequential, metrics=["accuracy"])
    evaluated, predicted, left = [], [], []
    for each in (plain, model):
        data, options = STEPS[name]()
        evaluated.append(each.evaluate(*data, steps=2, verbose=0, **options))
        left.append(sum(1 for _ in data[0]) if name == "generator" else 0)
        data, options = STEPS[name]()
        predicted.append(each.predict(data[0], steps=2, verbose=0, **options))
        left.append(sum(1 for _ in data[0]) if name == "generator" else 0)
    np.testing.assert_allclose(evaluated[1], evaluated[0], rtol=1e-6)
    np.testing.assert_allclose(predicted[1], predicted[0], rtol=1e-9)
    assert left[:2] == left[2:]


def test_more_steps_than_batches(strategy: lockstep.Strategy) -> None:
    with strategy.scope():
        model = zoo.compiled(zoo.sequential)
    with pytest.warns(UserWarning, match="ran out of data"):
        model.evaluate(X, Y, batch_size=BATCH, steps=7, verbose=0)
    with pytest.warns(UserWarning, match="ran out of data"):
        assert len(model.predict(X, batch_size=BATCH, steps=7, verbose=0)) == SAMPLES
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(
            X, Y, validation_data=(X, Y), validation_batch_size=BATCH, validation_steps=7, verbose=0
        )


def test_what_is_no_number(strategy: lockstep.Strategy) -> None:
    with strategy.scope():
        model = zoo.compiled(zoo.sequential)
    validation = {"validation_data": (X, Y)}
    for used in (False, True):
        for size in (-1, 12.0, True, "many"):
            with pytest.raises(OptionError, match=f"batch_size={size!r}"):
                model.fit(X, Y, batch_size=size)
            with pytest.raises(OptionError, match=f"validation_batch_size={size!r}"):
                model.fit(X, Y, validation_batch_size=size, **validation)
            with pytest.raises(OptionError, match=f"batch_size={size!r}"):
                model.evaluate(X, Y, batch_size=size)
            with pytest.raises(OptionError, match=f"batch_size={size!r}"):
                model.predict(X, batch_size=size)
        for name in ("epochs", "initial_epoch", "steps_per_epoch", "validation_steps"):
            with pytest.raises(OptionError, match=f"{name}=2.0"):
                model.fit(X, Y, **validation, **{name: 2.0})
        with pytest.raises(OptionError, match="epochs=None"):
            model.fit(X, Y, epochs=None)
        with pytest.raises(OptionError, match="-1 steps, and no batch size"):
            model.fit(X, Y, steps_per_epoch=-1)
        with pytest.raises(OptionError, match="-1 steps, and no batch size"):
            model.fit(X, Y, validation_steps=-1, **validation)
        with pytest.raises(OptionError, match="validation_freq=0"):
            model.fit(X, Y, validation_freq=0, **validation)
        for call in (partial(model.evaluate, X, Y), partial(model.predict, X)):
            with pytest.raises(OptionError, match=r"steps=2\.0"):
                call(steps=2.0)
            with pytest.raises(OptionError, match="-1 steps, and no batch size"):
                call(steps=-1)
        assert model.optimizer.iterations.value == int(used)
        model.fit(X, Y, batch_size=SAMPLES, verbose=0)


def test_what_is_no_argument(strategy: lockstep.Strategy) -> None:
    with strategy.scope():
        model = zoo.compiled(zoo.sequential)
    for name in ("fit", "evaluate", "predict", "train_on_batch"):
        with pytest.raises(TypeError, match=rf"^Model\.{name}\(\) got an unexpected .* 'size'"):
            getattr(model, name)(X, size=3)


NUMBERS: list[dict[str, Any]] = [
    {"batch_size": 0, "steps_per_epoch": 0, "validation_steps": 0, "validation_batch_size": 0},
    {"batch_size": BATCH, "epochs": 0},
    {"batch_size": BATCH, "epochs": -1},
    {"batch_size": BATCH, "epochs": 1, "initial_epoch": -2, "validation_freq": 2},
    {"batch_size": BATCH, "epochs": 0, "initial_epoch": -1},
    {"batch_size": BATCH, "epochs": 2, "initial_epoch": 5},
]


def test_numbers_that_keras_takes(strategy: lockstep.Strategy) -> None:
    with strategy.scope():
        model = zoo.compiled(zoo.sequential, metrics=["accuracy"])
    plain = zoo.compiled(zoo.sequential, metrics=["accuracy"])
    for options in NUMBERS:
        one, other = (
            each.fit(X, Y, validation_data=(X, Y), shuffle=False, verbose=0, **options)
            for each in (plain, model)
        )
        assert one.epoch == other.epoch
        assert one.history.keys() == other.history.keys()
        assert zoo.distance(plain, model) < 1e-12
    for steps in ({"steps": 0}, {"steps": 0, "batch_size": 0}):
        one, other = (each.evaluate(X, Y, verbose=0, **steps) for each in (plain, model))
        np.testing.assert_allclose(other, one, rtol=1e-6)
        assert len(model.predict(X, verbose=0, **steps)) == SAMPLES
    model.fit(X, Y, batch_size=BATCH, validation_freq=0, verbose=0)  # nothing to validate on


def test_a_negative_number_of_steps_is_all(strategy: lockstep.Strategy) -> None:
    plain = zoo.compiled(zoo.sequential)
    with strategy.scope():
        model = zoo.compiled(zoo.sequential)
    options = {"batch_size": BATCH, "steps_per_epoch": -1, "shuffle": False, "verbose": 0}
    with pytest.warns(UserWarning, match="ran out of data"):
        plain.fit(X, Y, epochs=2, **options)
    model.fit(X, Y, epochs=2, **options)
    assert int(model.optimizer.iterations.value) == 10
    assert zoo.distance(plain, model) < 1e-12
    assert len(model.predict(X, batch_size=BATCH, steps=-1, verbose=0)) == SAMPLES
