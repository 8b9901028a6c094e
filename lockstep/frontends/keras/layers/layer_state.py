"""What a call leaves behind in a model's layers, where each device sees a part of the batch.

The statistics of ``BatchNormalization`` are those of the whole batch. What any other layer keeps
of the samples it has seen (a moving average of the user's own, say) would be of a part. So before
training the model is run on a few samples, and on either half. A variable that all three leave
alike depends on no samples: it counts calls, or goes on by itself, and is the same on all devices.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import keras
import torch

from lockstep.errors import ModelError
from lockstep.frontends.keras.layers.dry_run import DryRunResult, kept_variables, metrics_of_layers
from lockstep.frontends.keras.model import KerasModel
from lockstep.units import first_few

_TOLERANCE = 1e-5


def check_layer_state(module: KerasModel, seen: Sequence[DryRunResult]) -> None:
    """Refuse layers that keep what depends on the samples in a batch.

    Args:
        module: the model.
        seen: what it has left, in training: of samples, and of either half.

    Raises:
        ModelError: with the variables, or the metrics.
    """
    check_gradients(module)
    check_kept(module, seen)


def check_kept(module: KerasModel, seen: Sequence[DryRunResult]) -> None:
    """As ``check_layer_state``, for passes that are not trained on."""
    _refuse_writers(seen[0].written)
    _refuse_kept(kept_variables(module), [one.kept for one in seen])
    _refuse_counts(metrics_of_layers(module), [one.counts for one in seen])


def check_gradients(module: KerasModel) -> None:
    """Refuse variables whose gradients are no gradients, but what they are to be next.

    A layer in float8 gives the largest numbers it has seen so, to scale the next batch by. Those of
    parts are not that of the batch, and neither is what gradients of parts are rounded to.

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
            fix="Train in another dtype (mixed_bfloat16, say), or use SingleDeviceStrategy.",
        )


def _refuse_writers(written: Sequence[str]) -> None:
    """Refuse calls that write to what is trained: every share would, one after the other."""
    if written:
        raise ModelError(
            "Each device calls the model on its own part of the batch, so a call must not "
            "change trained variables.",
            received=f"calls change {first_few(written)}",
            fix="Give the variable a constraint, which acts once a step, or use "
            "SingleDeviceStrategy.",
        )


def _refuse_kept(variables: Sequence[Any], left: Sequence[Sequence[torch.Tensor]]) -> None:
    unlike = [
        variable.path
        for variable, both, some, others in zip(variables, *left, strict=True)
        if not (_is_close(some, both) and _is_close(others, both))
    ]
    if unlike:
        raise ModelError(
            "Each device sees a part of the batch, so the state of a layer must not depend on "
            "the samples.",
            received=f"calls change {first_few(unlike)}",
            fix="Use BatchNormalization for statistics of the batch, or SingleDeviceStrategy.",
        )


def _refuse_counts(metrics: Sequence[Any], counts: Sequence[Sequence[torch.Tensor]]) -> None:
    """Refuse metrics that are no sums over samples; random values are sums but roughly."""
    means, of_all = [], zip(*counts, strict=True)
    for metric in metrics:
        lots = list(islice(of_all, len(metric.variables)))
        is_constant = type(metric) is keras.metrics.Mean and all(
            _is_close(some, both) and _is_close(others, both) for both, some, others in lots
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


def _is_sum(both: torch.Tensor, some: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether it is nearer to a sum than to a mean."""
    total = some + others
    return bool((both - total).abs().sum() <= (both - total / 2).abs().sum())


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    pair = one.double(), other.double()
    return torch.allclose(*pair, rtol=_TOLERANCE, atol=_TOLERANCE**2, equal_nan=True)
