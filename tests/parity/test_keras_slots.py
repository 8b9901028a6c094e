"""What Keras's callbacks write to the optimizer's slots comes to all ranks, or is refused."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import lockstep
from lockstep.errors import OptionError
from tests import keras_zoo as zoo
from tests.thorough import core_of

X, Y = zoo.vectors(50), zoo.classes(50)

STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "gloo": lambda: lockstep.MirroredStrategy(2, engine="gloo"),
    "sharded, gloo": lambda: lockstep.FullyShardedStrategy(2, engine="gloo"),
    "shared memory": lambda: lockstep.MirroredStrategy(2),
}


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with zoo.true_float64():
        yield


class Shrinks(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Makes the optimizer's slots smaller in one of the methods of callbacks."""

    def __init__(self, method: str) -> None:
        super().__init__()
        setattr(self, method, self._shrink)

    def _shrink(self, *args: Any, **named: Any) -> None:
        for variable in self.model.optimizer.variables[2:]:
            variable.assign(variable.value * 0.25)


def trained(strategy: lockstep.Strategy | None, method: str) -> list[Any]:
    if strategy is None:
        model = zoo.compiled(zoo.sequential)
    else:
        with strategy.scope():
            model = zoo.compiled(zoo.sequential)
    options = {"batch_size": 12, "shuffle": False, "verbose": 0}
    model.fit(X, Y, epochs=3, validation_data=(X, Y), callbacks=[Shrinks(method)], **options)
    model.fit(X, Y, **options)
    found: list[Any] = model.get_weights()
    return found


@pytest.mark.parametrize(
    ("name", "method"),
    core_of(
        [(name, f"on_epoch_{when}") for name in STRATEGIES for when in ("begin", "end")],
        [("gloo", "on_epoch_end")],
        [],
    ),
)
def test_ranks_get_slots_between_epochs(name: str, method: str) -> None:
    for one, other in zip(trained(STRATEGIES[name](), method), trained(None, method), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["on_train_batch_end", "on_test_begin"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_within_an_epoch_ranks_see_them_or_they_are_refused(name: str, method: str) -> None:
    if name == "gloo":
        with pytest.raises(OptionError, match="cannot write to slots of the optimizer"):
            trained(STRATEGIES[name](), method)
    else:  # slots lie in memory that ranks share
        test_ranks_get_slots_between_epochs(name, method)
