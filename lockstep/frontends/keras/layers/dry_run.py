"""Dry runs of a model on a few samples, before it is used on several devices.

The model runs on the samples and on either half (``parallel.independence.split_trial``): from the
same state, with the same random numbers for the same samples. Afterwards it is restored. If random
numbers do not belong to samples, or layers use statistics of the batch, each run draws its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import torch
from keras.src.layers.normalization.batch_normalization import BatchNormalization

from lockstep.capture.state import ModelState
from lockstep.data.map_style.sources import ArraySource, Batch
from lockstep.data.trees import Tree
from lockstep.frontends.keras.model import KerasModel, giving_losses
from lockstep.parallel.data_parallel.staging import moved
from lockstep.parallel.independence.split_trial import halves, on_halves, rows_of

_FEW = 8


@dataclass(frozen=True)
class DryRunResult:
    """The model's outputs for some samples, and its state afterwards.

    Attributes:
        outputs: the outputs, with losses.
        state: variables of layers that are not trained, without statistics of batches.
        counts: variables of metrics that layers update, starting at 0.
        written: the paths of trained variables that the call wrote to.
    """

    outputs: Tree
    state: list[torch.Tensor]
    counts: list[torch.Tensor]
    written: list[str]

    @property
    def added(self) -> list[float]:
        """The losses that layers have added."""
        return [float(rows[0]) for rows in self.outputs["losses"]]


def dry_run(
    module: KerasModel, source: ArraySource, *, is_divided: bool, training: bool
) -> list[DryRunResult]:
    """Run a model on a few samples and on either half; if batches are not divided, on all only.

    Args:
        module: the model.
        source: samples, which are picked evenly.
        is_divided: True if devices work on parts of a batch.
        training: True for training mode.
    """
    variables, metrics = state_variables(module), metrics_of_layers(module.model)

    def run(part: Batch) -> DryRunResult:
        for metric in metrics:
            metric.reset_state()
        versions = [one.value._version for one in module.variables.values()]
        outputs = module(*part.inputs)
        written = [
            one.path
            for one, version in zip(module.variables.values(), versions, strict=True)
            if one.value._version != version
        ]
        counts = [one for metric in metrics for one in metric.variables]
        return DryRunResult(outputs, _values(variables), _values(counts), written)

    def run_from_start(rows: slice) -> DryRunResult:
        state.restore()
        module.train(training)
        return run(rows_of(batch, rows))

    batch = few_samples(module, source, is_divided=is_divided)
    everything = slice(0, batch.num_samples)
    with giving_losses(module, True), torch.no_grad():
        state = ModelState(module)
        try:
            if not is_divided:
                return [run_from_start(everything)]
            found = on_halves(module, run, batch, state, training=training)
            return found or [run_from_start(rows) for rows in (everything, *halves(batch))]
        finally:
            state.restore()


def state_variables(module: KerasModel) -> list[Any]:
    """Variables of layers that are not trained, without statistics of batches."""
    return [
        variable
        for layer in module.model._flatten_layers()
        if not isinstance(layer, BatchNormalization)
        for variable in layer._non_trainable_variables
    ]


def metrics_of_layers(model: Any) -> list[Any]:
    """The metrics of layers, which these may update."""
    return [metric for layer in model._flatten_layers() for metric in layer._metrics]


@contextmanager
def frozen_as_keras(module: KerasModel) -> Iterator[None]:
    """Within the block no layer of a frozen model is trained, as in Keras."""
    trained = set(map(id, module.model.trainable_variables))
    frozen = [
        one._value
        for one in module.variables.values()
        if one._value.requires_grad and id(one) not in trained
    ]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


@contextmanager
def values_restored(variables: Iterable[Any]) -> Iterator[None]:
    """After the block variables have their values from before."""
    before = [(one, one.value.clone()) for one in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def few_samples(module: KerasModel, source: ArraySource, *, is_divided: bool = True) -> Batch:
    """A few samples on the model's device, picked evenly.

    If batches are not divided, they are as many as the model needs.
    """
    fixed = None if is_divided else fixed_batch_size(module.model)
    indices = torch.linspace(0, len(source) - 1, fixed or _FEW).long()
    first = next(module.parameters(), torch.empty(0))
    return moved(source.read(indices, first.dtype), first.device)


def fixed_batch_size(model: Any) -> int | None:
    """The only batch size that a model takes; None if it takes any.

    A batch size of an Input binds only stateful layers, whose states have that size once built.
    """
    stateful = [one for one in model._flatten_layers() if getattr(one, "stateful", False)]
    if not stateful:
        return None
    sized = [getattr(model, "inputs", None), [getattr(one, "states", None) for one in stateful]]
    shapes = [getattr(one, "shape", None) for one in keras.tree.flatten(sized)]
    return next((shape[0] for shape in shapes if shape and shape[0] is not None), None)


def _values(variables: Sequence[Any]) -> list[torch.Tensor]:
    return [variable.value.detach().clone() for variable in variables]
