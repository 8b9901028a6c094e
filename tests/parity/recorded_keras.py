"""Trainings of Keras models under DDP, right ones and with planted faults.

``python recorded_keras.py FOLDER NAME...``, as in ``recorded_loops``: a name is a training, or
a training and a fault, and with one process a training is the reference, without the fault.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lockstep
from tests.parity.recorded_libraries import BATCH, STEPS, data, run_trainings


def make_model(*middle: Any) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    first, last = keras.layers.Dense(16, "tanh", name="body"), keras.layers.Dense(3, name="head")
    return keras.Sequential([keras.layers.Input((6,)), first, *middle, last], name="net")


def loop(path: Path, fault: str, *, normalised: bool = False, dropped: bool = False) -> None:
    """A loop that applies gradients with an optimizer of Keras's."""
    import keras

    rank, size = dist.get_rank(), dist.get_world_size()
    middle = [keras.layers.BatchNormalization(name="norm")] if normalised else []
    middle += [keras.layers.Dropout(0.5, name="drop")] if dropped else []
    model = make_model(*middle)
    wrapped: Any = model if fault == "not wrapped" else DistributedDataParallel(model)
    rate = 0.1 * (size if fault == "rate times ranks" else 1)
    clipping = {"global_clipnorm": 0.1} if fault == "clipped" else {}
    optimizer: Any = keras.optimizers.SGD(rate, momentum=0.9, **clipping)
    kind = "sum" if fault == "sum" else "sum_over_batch_size"
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=kind)
    variables = model.trainable_variables
    with lockstep.record(wrapped, optimizer, path, steps=STEPS) as recorder:
        for step in range(STEPS):
            numbers = np.arange(BATCH) + step * BATCH
            if fault == "batch of each":
                numbers = np.arange(BATCH) + (step * size + rank) * BATCH
            elif fault != "no sampler":
                numbers = numbers[rank::size]
            x, y, _ = data()[numbers]
            model.zero_grad()
            loss = loss_function(y, wrapped(x, training=True))
            recorder.batch(numbers)
            recorder.loss(loss / (len(x) if kind == "sum" else 1), weight=len(x))
            loss.backward()
            optimizer.apply([each.value.grad for each in variables], variables)


def fit(path: Path, fault: str) -> None:
    """``fit`` on each process's part of the data: Keras itself sums nothing."""
    import keras

    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    if fault != "each for itself":
        _sum_gradients(model.optimizer)
    x = data()[:][0].numpy()[rank::size]
    with lockstep.record(model, model.optimizer, path, steps=STEPS):
        model.fit(x, x[:, :3], batch_size=BATCH // size, shuffle=False, verbose=0)


def _sum_gradients(optimizer: Any) -> None:
    """The means of the ranks' gradients, as Horovod's optimizer makes them."""
    apply = optimizer.apply

    def applying(gradients: Any, variables: Any = None) -> Any:
        for each in gradients:
            dist.all_reduce(each)
            each /= dist.get_world_size()
        return apply(gradients, variables)

    optimizer.apply = applying


TRAININGS: dict[str, Callable[[Path, str], None]] = {
    "keras": loop,
    "keras, batch norm": partial(loop, normalised=True),
    "keras, dropout": partial(loop, dropped=True),
    "keras, fit": fit,
}

if __name__ == "__main__":
    run_trainings(TRAININGS)
