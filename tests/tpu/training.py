"""Trainings of the zoo's cases in fp64: by Lockstep, and by a loop that is as plain as can be."""

from typing import Any

import torch

import lockstep
from lockstep.strategies.base import Strategy
from tests.zoo import Case

States = dict[str, torch.Tensor]


def _batch(inputs: Any, rows: slice) -> Any:
    if isinstance(inputs, dict):
        return {name: value[rows] for name, value in inputs.items()}
    return tuple(value[rows] for value in inputs) if isinstance(inputs, tuple) else inputs[rows]


def plain(one: Case) -> States:
    """An epoch of a loop that is as plain as can be."""
    model = one.make_model().double()
    optimizer = one.optimizer(model.parameters())
    for start in range(0, len(one.targets), one.batch_size):
        rows = slice(start, start + one.batch_size)
        given = _batch(one.inputs, rows)
        output = model(**given) if isinstance(given, dict) else model(given)
        loss = one.loss(output, one.targets[rows])
        if isinstance(loss, tuple):
            loss = loss[0] / loss[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return dict(model.state_dict())


def make_trainer(one: Case, strategy: Strategy) -> lockstep.Trainer:
    return lockstep.Trainer(
        one.make_model(),
        loss=one.loss,
        optimizer=one.optimizer,
        strategy=strategy,
        precision="fp64",
        seed=3,
    )


def fit(one: Case, trainer: lockstep.Trainer, **options: Any) -> States:
    data = one.inputs, one.targets
    trainer.fit(data, batch_size=one.batch_size, shuffle=False, verbose=0, **options)
    return {name: value.cpu() for name, value in trainer.model.state_dict().items()}
