"""Keras models with steps of their own end with the weights that plain Keras gives them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from tests import keras_zoo as zoo
from tests.keras_own_steps import MODELS, data_for, made
from tests.thorough import core_of

STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "one device": lambda: lockstep.SingleDeviceStrategy(),
    "mirrored 2": lambda: lockstep.MirroredStrategy(2),
    "mirrored 3": lambda: lockstep.MirroredStrategy(3),
    "gloo 2": lambda: lockstep.MirroredStrategy(2, engine="gloo"),
}
BATCH = 21  # the last batch is one of two samples: with three devices one has none


CELLS = core_of(
    [(name, strategy) for name in MODELS for strategy in STRATEGIES],
    lambda name, strategy: strategy == "mirrored 3" or (name, strategy) == ("GAN", "gloo 2"),
)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of what steps make with torch.ones
    try:
        with zoo.true_float64():
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("name", "strategy"), CELLS)
def test_same_weights(name: str, strategy: str) -> None:
    x, y = data_for(name)
    options: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    if name != "GAN":
        options["validation_data"] = (x, y)
    plain = made(name)
    with STRATEGIES[strategy]().scope():
        model = made(name)
    for _ in range(2):
        wanted = plain.fit(x, y, **options).history
        found = model.fit(x, y, **options).history
        assert zoo.distance(plain, model) < 1e-12
        assert found.keys() == wanted.keys()
        for key, values in wanted.items():
            np.testing.assert_allclose(found[key], values, rtol=1e-6, err_msg=key)
    if name != "GAN":
        values = [
            one.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
            for one in (plain, model)
        ]
        assert values[1] == pytest.approx(values[0], rel=1e-6)
