"""Looking at a model before it is used on several devices: what it makes of a few samples.

It is run on them, and on either half of them (``parallel.independence.split_test``): from the same
state, with the same random numbers for the same samples, and is left as it was found. Where what is
drawn does not go by samples, or statistics of a batch are looked at, each run is as it comes.
"""

from collections.abc import Iterator, Sequence
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
from lockstep.parallel.independence.split_test import halves, on_halves, rows_of

_FEW = 8


@dataclass(frozen=True)
class DryRunResult:
    """What the model made of some samples, and what that has left in it.

    Attributes:
        made: its outputs, with losses.
        kept: variables of layers that are not trained, but for statistics of batches.
        counts: variables of metrics that layers update, from 0 on.
        written: the paths of trained variables that were written to.
    """

    made: Tree
    kept: list[torch.Tensor]
    counts: list[torch.Tensor]
    written: list[str]

    @property
    def added(self) -> list[float]:
        """The losses that layers have added."""
        return [float(rows[0]) for rows in self.made["losses"]]


def dry_run(
    module: KerasModel, source: ArraySource, *, is_divided: bool, training: bool
) -> list[DryRunResult]:
    """What a model makes of a few samples, and of either half; not divided, of all of them only.

    Args:
        module: the model.
        source: samples, which are taken from all over.
        is_divided: batches are.
        training: the mode in which it is run.
    """
    variables, metrics = kept_variables(module), metrics_of_layers(module)

    def run(part: Batch) -> DryRunResult:
        for metric in metrics:
            metric.reset_state()
        versions = [one.value._version for one in module.variables.values()]
        made = module(*part.inputs)
        written = [
            one.path
            for one, version in zip(module.variables.values(), versions, strict=True)
            if one.value._version != version
        ]
        counts = [one for metric in metrics for one in metric.variables]
        return DryRunResult(made, _values(variables), _values(counts), written)

    def run_anew(rows: slice) -> DryRunResult:
        state.restore()
        module.train(training)
        return run(rows_of(batch, rows))

    batch = few_samples(module, source, is_divided=is_divided)
    everything = slice(0, batch.num_samples)
    with giving_losses(module, True), torch.no_grad():
        state = ModelState(module)
        try:
            if not is_divided:
                return [run_anew(everything)]
            found = on_halves(module, run, batch, state, training=training)
            return found or [run_anew(rows) for rows in (everything, *halves(batch))]
        finally:
            state.restore()


def kept_variables(module: KerasModel) -> list[Any]:
    """Variables of layers that are not trained, but for statistics of batches."""
    return [
        variable
        for layer in module.model._flatten_layers()
        if not isinstance(layer, BatchNormalization)
        for variable in layer._non_trainable_variables
    ]


def metrics_of_layers(module: KerasModel) -> list[Any]:
    """The metrics that layers have, and may update."""
    return [metric for layer in module.model._flatten_layers() for metric in layer._metrics]


@contextmanager
def in_evaluation(module: KerasModel) -> Iterator[None]:
    """Within the block a model is in evaluation mode, and gives the losses that layers add."""
    mode = module.training
    module.eval()
    try:
        with giving_losses(module, True):
            yield
    finally:
        module.train(mode)
        module.model.train(mode)


@contextmanager
def frozen_as_keras(module: KerasModel) -> Iterator[None]:
    """A frozen model trains none of its layers, be they frozen themselves or not."""
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
def counts_kept(model: Any) -> Iterator[None]:
    """A callback's own ``evaluate`` counts with the metrics that training counts with."""
    counts = [(one, one.value.clone()) for one in model.metrics_variables]
    try:
        yield
    finally:
        for variable, value in counts:
            variable.assign(value)


def few_samples(module: KerasModel, source: ArraySource, *, is_divided: bool = True) -> Batch:
    """A few samples, from all over; not divided, as many as the model takes."""
    fixed = None if is_divided else fixed_batch_size(module.model)
    indices = torch.linspace(0, len(source) - 1, fixed or _FEW).long()
    dtype = next((one.dtype for one in module.parameters()), torch.get_default_dtype())
    return source.read(indices, dtype)


def fixed_batch_size(model: Any) -> int | None:
    """The only number of samples that a model takes at a time; None where it takes any.

    That an Input names one binds stateful layers only, which have states of that size once built.
    """
    stateful = [one for one in model._flatten_layers() if getattr(one, "stateful", False)]
    if not stateful:
        return None
    sized = [getattr(model, "inputs", None), [getattr(one, "states", None) for one in stateful]]
    shapes = [getattr(one, "shape", None) for one in keras.tree.flatten(sized)]
    return next((shape[0] for shape in shapes if shape and shape[0] is not None), None)


def _values(variables: Sequence[Any]) -> list[torch.Tensor]:
    return [variable.value.detach().clone() for variable in variables]
