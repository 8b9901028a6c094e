"""All that Keras takes as data, under strategies: what plain Keras comes to."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests import keras_zoo as zoo

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


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> lockstep.Strategy:
    return STRATEGIES[request.param]()


class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # Keras is untyped
    """Batches by index, with weights."""

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)

    def __getitem__(self, index: int) -> Any:
        part = slice(index * BATCH, (index + 1) * BATCH)
        return X[part], Y[part], WEIGHTS[part]


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


@pytest.mark.parametrize("name", DATA)
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
def test_evaluation_and_prediction(strategy: lockstep.Strategy, name: str) -> None:
    plain = zoo.compiled(zoo.sequential, metrics=["accuracy"])
    with strategy.scope():
        model = zoo.compiled(zoo.sequential, metrics=["accuracy"])
    one, other = (each.evaluate(*DATA[name]()[0], verbose=0) for each in (plain, model))
    np.testing.assert_allclose(other, one, rtol=1e-6)
    one, other = (each.predict(*DATA[name]()[0], verbose=0) for each in (plain, model))
    np.testing.assert_allclose(other, one, rtol=1e-9)


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
