"""What a call leaves behind in a model's layers, where each device sees a part of the batch.

The statistics of ``BatchNormalization`` are those of the whole batch. What any other layer keeps
of the samples it has seen (a moving average of the user's own, say) would be of a part. So before
training the model is run on some samples, on others, and on both. A variable that all three leave
alike depends on no samples: it counts calls, or goes on by itself, and is the same on all devices.
"""

from collections.abc import Sequence
from typing import Any

import keras
import torch
from keras.src.layers.normalization.batch_normalization import BatchNormalization

from lockstep.capture.state import ModelState
from lockstep.data.sources import Batch
from lockstep.errors import ModelError
from lockstep.frontends.keras.model import KerasModel
from lockstep.units import first_few

_TOLERANCE = 1e-5


def check_layer_state(module: KerasModel, state: ModelState, lots: Sequence[Batch]) -> None:
    """Refuse layers that keep what depends on the samples in a batch.

    Args:
        module: the model.
        state: its state, which is restored.
        lots: some samples, others, and both.

    Raises:
        ModelError: with the variables, or the metrics.
    """
    layers = module.model._flatten_layers()
    kept = [
        variable
        for layer in layers
        if not isinstance(layer, BatchNormalization)
        for variable in layer._non_trainable_variables
    ]
    metrics = [metric for layer in layers for metric in layer._metrics]
    _refuse_writers(module, state, lots[0])
    if not (kept or metrics):
        return
    counts = [variable for metric in metrics for variable in metric.variables]
    found = [value.clone() for value in _values(counts)]
    left, counted = [], []
    for batch in lots:
        for metric in metrics:
            metric.reset_state()
        module.train()
        with torch.no_grad():
            module(*batch.inputs)
        left.append([value.clone() for value in _values(kept)])
        counted.append([value.clone() for value in _values(counts)])
        state.restore()
    for variable, value in zip(counts, found, strict=True):
        variable.assign(value)
    _refuse_kept(kept, left)
    _refuse_counts(metrics, dict(zip(map(id, counts), zip(*counted, strict=True), strict=True)))


def _refuse_writers(module: KerasModel, state: ModelState, batch: Batch) -> None:
    """Refuse calls that write to what is trained: every share would, one after the other.

    What ``SpectralNormalization`` writes is the same the second time.
    """
    normalized = {
        id(variable)
        for layer in module.model._flatten_layers()
        if type(layer) is keras.layers.SpectralNormalization
        for variable in layer.layer.trainable_variables
    }
    variables = [one for one in module.variables.values() if id(one) not in normalized]
    before = [one.value._version for one in variables]
    module.train()
    with torch.no_grad():
        module(*batch.inputs)
    written = [
        one.path
        for one, version in zip(variables, before, strict=True)
        if one.value._version != version
    ]
    state.restore()
    if written:
        raise ModelError(
            "Each device calls the model on its own part of the batch, so a call must not "
            "change what is trained.",
            received=f"calls change {first_few(written)}",
            fix="Give the variable a constraint, which acts once a step, or use "
            "SingleDeviceStrategy.",
        )


def _refuse_kept(variables: Sequence[Any], left: Sequence[Sequence[torch.Tensor]]) -> None:
    unlike = [
        variable.path
        for variable, some, others, both in zip(variables, *left, strict=True)
        if not (_is_close(some, both) and _is_close(others, both))
    ]
    if unlike:
        raise ModelError(
            "Each device sees a part of the batch, so what a layer keeps must not depend on "
            "the samples.",
            received=f"calls change {first_few(unlike)}",
            fix="Use BatchNormalization for statistics of the batch, or SingleDeviceStrategy.",
        )


def _refuse_counts(
    metrics: Sequence[Any], counted: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
) -> None:
    """Refuse metrics that are no sums over samples; random values are sums but roughly."""
    means = []
    for metric in metrics:
        lots = [counted[id(variable)] for variable in metric.variables]
        is_constant = type(metric) is keras.metrics.Mean and all(
            _is_close(some, both) and _is_close(others, both) for some, others, both in lots
        )
        if not is_constant and not all(_is_sum(*lot) for lot in lots):
            means.append(metric.name)
    if means:
        raise ModelError(
            "Each device sees a part of the batch, so a metric that a layer updates must get "
            "a value for each sample.",
            received=f"one value for a batch: {first_few(means)}",
            fix="Pass values of shape (batch,) to update_state: keras.metrics.Mean takes the "
            "mean over them. Or use SingleDeviceStrategy.",
        )


def _is_sum(some: torch.Tensor, others: torch.Tensor, both: torch.Tensor) -> bool:
    """Whether it is nearer to a sum than to a mean."""
    total = some + others
    return bool((both - total).abs().sum() <= (both - total / 2).abs().sum())


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    pair = one.double(), other.double()
    return torch.allclose(*pair, rtol=_TOLERANCE, atol=_TOLERANCE**2, equal_nan=True)


def _values(variables: Sequence[Any]) -> list[torch.Tensor]:
    return [variable.value.detach() for variable in variables]
