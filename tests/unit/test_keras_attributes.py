"""What a callback may change of a model is seen, attribute by attribute."""

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers

import lockstep  # noqa: F401  # before Keras: it chooses Keras's PyTorch backend
from lockstep.frontends.keras.layers.attributes import Attributes
from tests import keras_zoo as zoo


def model() -> Any:
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(5, kernel_regularizer=keras.regularizers.L2(0.1), activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(3, kernel_constraint="non_neg"),
        ]
    )


def set_item(one: Any) -> None:
    one.layers[0].kernel_regularizer.l2 = 0.2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda one: setattr(one.layers[1], "rate", 0.1),
    "what is trained": lambda one: setattr(one.layers[0], "trainable", False),
    "a function": lambda one: setattr(one.layers[0], "activation", keras.activations.tanh),
    "an option of a regularizer": set_item,
    "a constraint": lambda one: setattr(one.layers[2].kernel, "constraint", None),
    "a new attribute": lambda one: setattr(one.layers[0], "mine", 3),
    "a hook": lambda one: one.layers[0].register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    one = model()
    assert Attributes.are_enough(one)
    before = Attributes(one)
    assert Attributes(one) == before
    CHANGES[name](one)
    assert Attributes(one) != before


def test_values_of_weights_are_no_change() -> None:
    one = model()
    before = Attributes(one)
    zoo.set_weights(one)
    assert Attributes(one) == before


class Strength:
    """Of the user's own: nobody knows what it holds."""


class OwnRegularizer(keras.regularizers.L2):  # type: ignore[misc]  # Keras is untyped
    """It may hold anything."""


def holding(value: Any) -> Any:
    one = model()
    one.layers[0].mine = value
    return one


@pytest.mark.parametrize(
    "make",
    [
        zoo.Subclassed,
        lambda: holding(Strength()),
        lambda: holding([Strength()]),
        lambda: holding(OwnRegularizer(0.1)),
    ],
)
def test_what_is_not_keras_own_is_not_known(make: Callable[[], Any]) -> None:
    assert not Attributes.are_enough(make())
