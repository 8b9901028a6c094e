"""Checks of the state that calls leave in layers, since each device sees a part of the batch.

The statistics of ``BatchNormalization`` are those of the whole batch. The state of any other layer
(a user's moving average, for example) would depend on a part. So before training the model runs on
a few samples, and on either half. A variable that is equal after all three runs depends on no
samples: it counts calls, for example, and is the same on all devices.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import keras
import torch

from lockstep.errors import ModelError
from lockstep.formatting import first_few
from lockstep.frontends.keras.layers.dry_run import DryRunResult, metrics_of_layers, state_variables
from lockstep.frontends.keras.model import KerasModel

_TOLERANCE = 1e-5


def check_layer_state(module: KerasModel, seen: Sequence[DryRunResult]) -> None:
    """Refuse layers whose state depends on the samples of a batch.

    Args:
        module: the model.
        seen: dry runs in training mode: on samples, and on either half.

    Raises:
        ModelError: with the variables, or the metrics.
    """
    check_gradients(module)
    check_state(module, seen)


def check_state(module: KerasModel, seen: Sequence[DryRunResult]) -> None:
    """As ``check_layer_state``, for passes without training."""
    _refuse_writes(seen[0].written)
    _refuse_state_changes(state_variables(module), [one.state for one in seen])
    _refuse_counts(metrics_of_layers(module.model), [one.counts for one in seen])


def check_gradients(module: KerasModel) -> None:
    """Refuse variables whose gradients are not gradients, but their next values.

    A float8 layer returns the largest number that it has seen in this way, as the scale of the next
    batch. Those of parts differ from that of the batch, and so does the rounding of gradients.

    Raises:
        ModelError: with the variables.
    """
    overwritten = [
        one.path
        for one in module.variables.values()
        if one.overwrite_with_gradient and one.trainable
    ]
    if overwritten:
        raise ModelError(
            "Devices add up the gradients of their parts of the batch, so every trained variable "
            "needs a gradient.",
            received=f"ranges of values instead, as float8 layers have: {first_few(overwritten)}",
            fix="Train in another dtype, such as mixed_bfloat16, or use SingleDeviceStrategy.",
        )


def _refuse_writes(written: Sequence[str]) -> None:
    """Refuse calls that write to trained variables: every share would, one after the other."""
    if written:
        raise ModelError(
            "Each device calls the model on its own part of the batch, so a call must not "
            "change trained variables.",
            received=f"calls change {first_few(written)}",
            fix="Give the variable a constraint, which acts once a step, or use "
            "SingleDeviceStrategy.",
        )


def _refuse_state_changes(variables: Sequence[Any], left: Sequence[Sequence[torch.Tensor]]) -> None:
    unlike = [
        variable.path
        for variable, whole, some, others in zip(variables, *left, strict=True)
        if not (_is_close(some, whole) and _is_close(others, whole))
    ]
    if unlike:
        raise ModelError(
            "Each device sees a part of the batch, so the state of a layer must not depend on "
            "the samples.",
            received=f"calls change {first_few(unlike)}",
            fix="Use BatchNormalization for statistics of the batch, or SingleDeviceStrategy.",
        )


def _refuse_counts(metrics: Sequence[Any], counts: Sequence[Sequence[torch.Tensor]]) -> None:
    """Refuse metrics that are no sums over samples; random values are only roughly sums."""
    means, of_all = [], zip(*counts, strict=True)
    for metric in metrics:
        columns = list(islice(of_all, len(metric.variables)))
        is_constant = type(metric) is keras.metrics.Mean and all(
            _is_close(some, whole) and _is_close(others, whole) for whole, some, others in columns
        )
        if not is_constant and not all(_is_sum(*column) for column in columns):
            means.append(metric.name)
    if means:
        raise ModelError(
            "Each device sees a part of the batch, so a metric that a layer updates must get "
            "a value for each sample.",
            received=f"one value for a batch: {first_few(means)}",
            fix="Pass values of shape (batch,) to update_state: keras.metrics.Mean takes the "
            "mean over them. Or use SingleDeviceStrategy.",
        )


def _is_sum(whole: torch.Tensor, some: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether the whole is nearer to the sum of its halves than to their mean."""
    total = some + others
    return bool((whole - total).abs().sum() <= (whole - total / 2).abs().sum())


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    pair = one.double(), other.double()
    return torch.allclose(*pair, rtol=_TOLERANCE, atol=_TOLERANCE**2, equal_nan=True)
