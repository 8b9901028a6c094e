"""A loop of one's own on a Keras model: its arguments are the engine and the loops to run.

Each loop trains with ``CrossReplicaOptimizer`` on this replica's parts, as Keras's guide to loops
on torch has it; then every replica does the same with the plain optimizer on whole batches. It
tells by how much each variable of the model and of the optimizer differs.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from keras import layers, optimizers
from torch import Tensor

import lockstep
from tests import keras_zoo as zoo

# The last two leave replicas without samples.
SIZES = (10, 7, 10, 2, 1)
Batch = tuple[Tensor, Tensor]


def mean_loss(targets: Tensor, logits: Tensor) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(targets, logits)


def vectors(size: int, number: int) -> Any:
    return zoo.vectors(size, seed=number)


def images(size: int, number: int) -> Any:
    return zoo.vectors(size, 8 * 8 * 3, seed=number).reshape(size, 8, 8, 3)


def words(size: int, number: int) -> Any:
    return np.random.default_rng(number).integers(0, 50, size=(size, 3))


def cnn() -> Any:
    """Batches are normalised: by the statistics of what a replica sees, and of no others."""
    made = [
        layers.Input((8, 8, 3)),
        layers.Conv2D(6, 3, use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(zoo.NUM_CLASSES),
    ]
    return keras.Sequential(made)


def embedding() -> Any:
    """Few rows of the first have a gradient; the last is frozen."""
    return keras.Sequential(
        [
            layers.Input((3,), dtype="int32"),
            layers.Embedding(50, 8),
            layers.GlobalAveragePooling1D(),
            layers.Dense(zoo.NUM_CLASSES),
            layers.Dense(zoo.NUM_CLASSES, trainable=False),
        ]
    )


def constrained() -> Any:
    inputs = layers.Input((8,))
    hidden = layers.Dense(11, kernel_constraint="non_neg", activation="tanh")(inputs)
    return keras.Model(inputs, layers.Dense(zoo.NUM_CLASSES)(hidden))


class OfTheUser(optimizers.SGD):  # type: ignore[misc]  # Keras is untyped
    """Nothing is known of it, so the first replica steps it alone."""


MLP, CNN, WORDS = (zoo.sequential, vectors), (cnn, images), (embedding, words)
SGD = partial(optimizers.SGD, 0.1, momentum=0.9)
ADAM = partial(optimizers.Adam, 1e-2)
DECAY = optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
Entry = tuple[tuple[Any, Any], Callable[..., Any], dict[str, Any]]

# Model and data, optimizer, and what is special.
LOOPS: dict[str, Entry] = {
    "mlp, SGD": (MLP, partial(SGD, nesterov=True), {}),
    "mlp, Adam": (MLP, ADAM, {}),
    "mlp, AdamW": (MLP, partial(optimizers.AdamW, 1e-2, weight_decay=0.1), {}),
    "mlp, RMSprop": (MLP, partial(optimizers.RMSprop, 1e-2, momentum=0.5), {}),
    "mlp, Adagrad": (MLP, partial(optimizers.Adagrad, 1e-2), {}),
    "mlp, Nadam": (MLP, partial(optimizers.Nadam, 1e-2), {}),
    "mlp, schedule-free": (MLP, partial(optimizers.ScheduleFreeAdamW, 1e-2), {}),
    "mlp, Adafactor": (MLP, partial(optimizers.Adafactor, 1e-2), {}),
    "mlp, Muon": (MLP, partial(optimizers.Muon, 1e-2), {}),
    "mlp, not Keras's": (MLP, partial(OfTheUser, 0.1, momentum=0.9), {}),
    "mlp, scheduled": (MLP, partial(optimizers.SGD, DECAY, momentum=0.9), {}),
    "mlp, set": (MLP, ADAM, {"sets": True}),
    "mlp, clipped": (MLP, ADAM, {"clip_norm": 0.1}),
    "mlp, clipnorm": (MLP, partial(ADAM, clipnorm=0.02), {}),
    "mlp, global_clipnorm": (MLP, partial(ADAM, global_clipnorm=0.05), {}),
    "mlp, clipvalue": (MLP, partial(SGD, clipvalue=0.01), {}),
    "mlp, decayed": (MLP, partial(SGD, weight_decay=0.1), {}),
    "mlp, averaged": (
        MLP,
        partial(ADAM, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
        {"finalizes": True},
    ),
    "mlp, scaled": (MLP, partial(SGD, loss_scale_factor=1024.0), {}),
    "mlp, Keras accumulates": (MLP, partial(ADAM, gradient_accumulation_steps=2), {}),
    "mlp, accumulated": (MLP, ADAM, {"accumulate": 2}),
    "mlp, held": (MLP, SGD, {"holds": True}),
    "mlp, by step": (MLP, SGD, {"by": "step"}),
    "mlp, in pairs": (MLP, SGD, {"by": "pairs"}),
    "constrained": ((constrained, vectors), ADAM, {}),
    "cnn": (CNN, SGD, {"has_own_statistics": True}),
    "cnn, Adam": (CNN, ADAM, {"has_own_statistics": True}),
    "words": (WORDS, SGD, {}),
    "words, Adagrad": (WORDS, partial(optimizers.Adagrad, 0.1), {}),
}


def batches_of(read: Callable[[int, int], Any]) -> list[Batch]:
    return [
        (torch.as_tensor(read(size, number)), torch.as_tensor(zoo.classes(size, seed=number)))
        for number, size in enumerate(SIZES)
    ]


def updates_of(batches: Sequence[Batch], own: dict[str, Any]) -> Iterator[Sequence[Batch]]:
    """Batches, by the updates that they make."""
    parts = 2 if own.get("holds") else int(own.get("accumulate", 1))
    for first in range(0, len(batches) - len(batches) % parts, parts):
        yield batches[first : first + parts]


def backward(model: Any, optimizer: Any, batch: Batch) -> None:
    inputs, targets = batch
    model.zero_grad()
    if len(inputs):  # Keras's mean over no samples is no scalar
        optimizer.scale_loss(mean_loss(targets, model(inputs, training=True))).backward()


def hand_over(model: Any, optimizer: Any, by: str, **options: Any) -> None:
    """Have an optimizer update with what ``backward`` has left."""
    variables = model.trainable_weights
    gradients = [variable.value.grad for variable in variables]
    with torch.no_grad():
        if by == "step":
            optimizer.step(**options)
        elif by == "pairs":
            optimizer.apply_gradients(zip(gradients, variables, strict=True), **options)
        else:
            optimizer.apply(gradients, variables, **options)


def replicated(model: Any, loop: str) -> dict[str, Any]:
    """Train on this replica's parts; the optimizer's state."""
    (_, read), make, own = LOOPS[loop]
    batches, by = batches_of(read), own.get("by", "lists")
    if lockstep.rank():  # the first replica's count
        model.set_weights([np.zeros_like(one) for one in model.get_weights()])
    options = {name: own[name] for name in ("clip_norm", "accumulate") if name in own}
    optimizer: Any = lockstep.CrossReplicaOptimizer(make(), model, **options)
    for update in updates_of(batches, own):
        for number, batch in enumerate(update):
            part = lockstep.share(batch)
            backward(model, optimizer, part)
            if own.get("holds") and not number:
                with optimizer.no_sync():
                    hand_over(model, optimizer, by, weight=len(part[0]))
            else:
                hand_over(model, optimizer, by, weight=len(part[0]))
        if own.get("sets") and not lockstep.rank():  # the first replica's count
            optimizer.learning_rate = optimizer.learning_rate * 0.5
            optimizer.beta_1 = 0.8
    optimizer.join()
    saved = {name: value.clone() for name, value in optimizer.state_dict().items()}
    optimizer.load_state_dict(saved)  # and goes on from there
    for _ in range(own.get("accumulate", 1)):
        part = lockstep.share(batches[0])
        backward(model, optimizer, part)
        hand_over(model, optimizer, by, weight=len(part[0]))
    if own.get("finalizes"):
        optimizer.finalize_variable_values(model.trainable_variables)
    state: dict[str, Any] = optimizer.state_dict()
    return state


def plain(model: Any, loop: str) -> dict[str, Any]:
    """The same on one device: what makes an update is one batch."""
    (_, read), make, own = LOOPS[loop]
    batches, optimizer = batches_of(read), make()
    optimizer.build(model.trainable_variables)
    step = separately if own.get("has_own_statistics") else backward
    updates: list[Any] = [
        tuple(map(torch.cat, zip(*update, strict=True))) for update in updates_of(batches, own)
    ]
    for number, batch in enumerate([*updates, batches[0]]):
        step(model, optimizer, batch)
        if "clip_norm" in own:
            torch.nn.utils.clip_grad_norm_(model.parameters(), own["clip_norm"])
        hand_over(model, optimizer, "lists")
        if own.get("sets") and number < len(updates):
            optimizer.learning_rate = optimizer.learning_rate * 0.5
            optimizer.beta_1 = 0.8
    if own.get("finalizes"):
        optimizer.finalize_variable_values(model.trainable_variables)
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    return store


def separately(model: Any, optimizer: Any, batch: Batch) -> None:
    """A backward pass of a mean over all samples; only a share of them is normalised together.

    Moving averages become those of this replica's share.
    """
    count, kept = lockstep.num_replicas(), model.non_trainable_variables
    before = [np.array(one.numpy()) for one in kept]
    own: list[Any] = []
    model.zero_grad()
    bounds = np.cumsum(
        [0, *(len(batch[0]) // count + (r < len(batch[0]) % count) for r in range(count))]
    )
    for rank in range(count):
        start, stop = int(bounds[rank]), int(bounds[rank + 1])
        for one, value in zip(kept, before, strict=True):
            one.assign(value)
        if stop > start:
            loss = mean_loss(batch[1][start:stop], model(batch[0][start:stop], training=True))
            (loss * (stop - start) / len(batch[0])).backward()
        if rank == lockstep.rank():
            own = [np.array(one.numpy()) for one in kept]
    for one, value in zip(kept, own, strict=True):
        one.assign(value)


def differences(loop: str) -> dict[str, float]:
    """By tensor: ‖a − b‖ / max(‖b‖, S), with S the norm of all tensors of its kind."""
    make_model = LOOPS[loop][0][0]
    model, reference = make_model(), make_model()
    for one in (model, reference):
        zoo.set_weights(one)
    state, expected = replicated(model, loop), plain(reference, loop)
    weights = {one.path: one.numpy() for one in model.variables}
    wanted = dict(zip(weights, (one.numpy() for one in reference.variables), strict=True))
    found = {}
    for own, right in ((weights, wanted), (state, expected)):
        assert own.keys() == right.keys()
        scale = np.sqrt(sum(float(np.square(np.asarray(one)).sum()) for one in right.values()))
        for name, one in right.items():
            found[name] = float(np.linalg.norm(np.asarray(own[name]) - np.asarray(one)) / scale)
    return found


if __name__ == "__main__":
    where, *loops = sys.argv[1:]
    engine, _, kind = where.partition("@")
    lockstep.init(timeout_seconds=60, engine=None if engine == "shared" else engine)
    device = "cpu"
    if kind:
        device = f"{kind}:{lockstep.rank() % torch.accelerator.device_count()}"
    with zoo.true_float64(), keras.device(device):
        for loop in loops:
            told = {"loop": loop, "replicas": lockstep.num_replicas(), "found": differences(loop)}
            line = json.dumps({"rank": lockstep.rank(), **told})
            sys.stdout.write(f"{line}\n")
