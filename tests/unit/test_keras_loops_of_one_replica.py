"""A Keras optimizer in a loop of one's own: one replica, and what is refused."""

from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers, optimizers

import lockstep
from lockstep.errors import CheckpointError, ModelError, OptionError

X = torch.arange(12.0).view(4, 3) / 10


def make_model() -> Any:
    return keras.Sequential([layers.Input((3,)), layers.Dense(2, kernel_initializer="ones")])


def make(optimizer: Any = None, **options: Any) -> tuple[Any, Any]:
    model = make_model()
    optimizer = optimizers.SGD(0.1, momentum=0.9) if optimizer is None else optimizer
    return model, lockstep.CrossReplicaOptimizer(optimizer, model, **options)


def gradients_of(model: Any) -> list[torch.Tensor]:
    model.zero_grad()
    model(X).square().mean().backward()
    return [weight.value.grad for weight in model.trainable_weights]


def test_one_replica_does_what_its_optimizer_does() -> None:
    model, optimizer = make()
    reference, plain = make_model(), optimizers.SGD(0.1, momentum=0.9)
    for _ in range(3):
        optimizer.apply(gradients_of(model), model.trainable_weights, weight=4)
        gradients = gradients_of(reference)
        with torch.no_grad():
            plain.apply(gradients, reference.trainable_weights)
    for own, wanted in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_array_equal(own, wanted)
    assert int(optimizer.iterations.value) == 3, "what is not its own is the Keras optimizer's"
    assert all(weight.value.grad is None for weight in model.trainable_weights)


def test_its_state_is_that_of_keras() -> None:
    model, optimizer = make()
    optimizer.apply(gradients_of(model))
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    _, fresh = make()
    fresh.load_own_variables(store)
    for name, value in fresh.state_dict().items():
        np.testing.assert_array_equal(value, store[name])
    with pytest.raises(CheckpointError, match="the same variables as the optimizer"):
        fresh.load_state_dict({"0": torch.tensor(1)})
    with pytest.raises(CheckpointError, match="of other shapes"):
        fresh.load_state_dict({**optimizer.state_dict(), "2": torch.zeros(9)})


def test_a_loss_is_scaled_and_gradients_are_scaled_back() -> None:
    """By a power of two: not one bit is another."""
    model, optimizer = make(optimizers.SGD(0.1, loss_scale_factor=8.0))
    reference, plain = make(optimizers.SGD(0.1))
    optimizer.scale_loss(model(X).square().mean()).backward()
    optimizer.step()
    plain.apply(gradients_of(reference))
    for own, wanted in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_array_equal(own, wanted)


def test_numbers_can_be_set() -> None:
    _, optimizer = make()
    optimizer.learning_rate = 0.5
    optimizer.momentum = 0.5
    assert float(optimizer.learning_rate) == 0.5
    assert optimizer.momentum == 0.5
    with pytest.raises(OptionError, match="only its learning rate and its float options"):
        optimizer.clipnorm = 1.0


def test_zero_grad_forgets() -> None:
    model, optimizer = make()
    gradients_of(model)
    optimizer.zero_grad()
    assert all(weight.value.grad is None for weight in model.trainable_weights)


def test_gradients_of_other_variables() -> None:
    model, optimizer = make()
    for grads, variables in (
        (gradients_of(model), make_model().trainable_weights),
        (gradients_of(model)[:1], None),
    ):
        with pytest.raises(OptionError, match="a gradient for each of the variables"):
            optimizer.apply(grads, variables)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        pytest.param(optimizers.LossScaleOptimizer(optimizers.SGD()), "wraps others", id="scale"),
        pytest.param(optimizers.SGD(), "`accumulate`", id="options"),
    ],
)
def test_what_cannot_be(optimizer: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        make(optimizer, accumulate=0)


def test_models_that_cannot_be() -> None:
    model, optimizer = make()
    with pytest.raises(OptionError, match="needs the Keras model"):
        lockstep.CrossReplicaOptimizer(optimizers.SGD())
    with pytest.raises(ModelError, match="not built"):
        lockstep.CrossReplicaOptimizer(optimizers.SGD(), keras.Sequential([layers.Dense(2)]))
    built = optimizers.SGD()
    built.build(model.trainable_variables)
    with pytest.raises(OptionError, match="the model's own variables"):
        lockstep.CrossReplicaOptimizer(built, make_model())
    with pytest.raises(OptionError, match="must be a torch optimizer"):
        lockstep.CrossReplicaOptimizer(optimizer, model)


def test_what_was_frozen_takes_no_step() -> None:
    model = make_model()
    optimizer: Any = optimizers.SGD()
    optimizer.build(model.trainable_variables)
    model.layers[0].trainable = False
    optimizer = lockstep.CrossReplicaOptimizer(optimizer, model)
    model.layers[0].trainable = True
    gradients = gradients_of(model)
    with pytest.raises(ModelError, match="kernel"):
        optimizer.apply(gradients, model.trainable_weights)
