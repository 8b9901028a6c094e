"""The state of a Keras model's training, by name: one epoch, a state, another model, one more.

In float64. Slots have the names of the model's parameters and their own, and no places.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import msgspec
import pytest
from keras import layers, optimizers

import lockstep
from lockstep.errors import CheckpointError
from tests import keras_zoo as zoo
from tests.states import from_flat
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

Model = Any
X, Y = zoo.vectors(22), zoo.classes(22)


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with zoo.true_float64():
        yield


class Plain(optimizers.Optimizer):  # type: ignore[misc]  # Keras has no types
    """Of which nothing is known."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.speeds = [self.add_variable_from_reference(one, name="speed") for one in variables]
        self.once = self.add_variable((), initializer="zeros", name="once")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        speed = self.speeds[self._get_variable_index(variable)]
        self.assign(speed, 0.9 * speed + gradient)
        self.assign_add(self.once, 1.0)
        self.assign_sub(variable, learning_rate * speed)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adam": lambda: optimizers.Adam(0.01),
    "SGD": lambda: optimizers.SGD(0.1, momentum=0.9),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "averages": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8),
    "a schedule": lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "one's own": lambda: Plain(0.1),
}


def make(optimizer: str, strategy: Any, *, scale: float = 1.0) -> tuple[Model, Any]:
    """A model, and its Trainer."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(11, activation="relu", name="first"),
                layers.BatchNormalization(name="norm"),
                layers.Dense(4, name="last"),
            ],
            name="model",
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(OPTIMIZERS[optimizer](), loss)
    zoo.set_weights(model)
    model.set_weights([scale * one for one in model.get_weights()])
    model.evaluate(X[:2], Y[:2], verbose=0)
    return model, model._lockstep.trainer


STRATEGIES = {
    "single": lockstep.SingleDeviceStrategy(),
    "mirrored-2": lockstep.MirroredStrategy(2),
}
# With this net the steps of Adafactor depend on the strategy by 1e-7, without any state, too.
ROWS = [
    (name, one, other)
    for name in OPTIMIZERS
    for one in STRATEGIES
    for other in STRATEGIES
    if one == other or name != "Adafactor"
]
CORE = [("Adam", "mirrored-2", "single"), ("one's own", "single", "mirrored-2")]
MORE = [("Adafactor", "mirrored-2", "mirrored-2")]


@pytest.mark.parametrize(("optimizer", "saving", "loading"), core_of(ROWS, CORE, MORE))
def test_another_model_goes_on(optimizer: str, saving: str, loading: str) -> None:
    (whole, _), (first, trainer) = (make(optimizer, STRATEGIES[saving]) for _ in range(2))
    keras.utils.set_random_seed(3)
    losses = [whole.fit(X, Y, batch_size=6, verbose=0).history["loss"] for _ in range(2)]
    assert first.fit(X, Y, batch_size=6, verbose=0).history["loss"] == losses[0]
    tensors, values = trainer.runner.state().copied().flat()
    read = msgspec.json.decode(msgspec.json.encode(values))
    second, receiver = make(optimizer, STRATEGIES[loading], scale=0.5)
    receiver.runner.set_state(from_flat(tensors, read))
    found = second.fit(X, Y, batch_size=6, verbose=0).history["loss"]
    assert found == (losses[1] if saving == loading else pytest.approx(losses[1], rel=1e-12))
    for one, other in zip(whole.get_weights(), second.get_weights(), strict=True):
        assert abs(one - other).max() <= (0 if saving == loading else 1e-12)
    slots = whole.optimizer.variables, second.optimizer.variables
    for mine, theirs in zip(*slots, strict=True):
        difference = (mine.value.detach() - theirs.value.detach()).abs().max().item()
        assert difference <= (0 if saving == loading else 1e-12)


def test_slots_have_names() -> None:
    model, trainer = make("one's own", STRATEGIES["single"])
    model.fit(X, Y, verbose=0)
    slots = trainer.runner.state().optimizer
    assert set(slots.pop("")) == {"once"}
    assert set(slots) == set(trainer.model.variables)
    assert all(set(own) == {"speeds"} for own in slots.values())
    model, trainer = make("Adam", STRATEGIES["mirrored-2"])
    model.fit(X, Y, verbose=0)
    slots = trainer.runner.state().optimizer
    assert set(slots) == set(trainer.model.variables)
    assert all(set(own) == {"momentum", "velocity"} for own in slots.values())


def test_the_slots_of_another_optimizer_are_refused() -> None:
    (_, one), (_, other) = (make(name, STRATEGIES["single"]) for name in ("Adam", "SGD"))
    with pytest.raises(CheckpointError, match="must have the same slots"):
        other.runner.set_state(one.runner.state())
