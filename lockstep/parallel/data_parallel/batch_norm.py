"""BatchNorm whose statistics are those of the global batch.

torch's SyncBatchNorm does this for GPUs only. Here each share contributes (count, mean, sum of
squared deviations) per channel; the shares' rows are merged in their order by the parallel
algorithm of Chan, Golub and LeVeque (1979), which keeps the variance accurate where a plain sum of
squares would cancel. Backward gathers the two sums that the gradient of the normalisation needs
(Ioffe and Szegedy 2015, section 3).

The layers are not changed: the function that all of them call, ``F.batch_norm``, is replaced while
a pass runs (``parallel.data_parallel.functional_patch``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.accelerators import has_whole_batch_norm, sent
from lockstep.capture.layers import BatchLayer, num_features_of
from lockstep.errors import LockstepError, ModelError
from lockstep.launch.health.failure import add_note
from lockstep.parallel.data_parallel.functional_patch import Redirection

# row -> rows of all filled shares, shape (shares, len(row)), in the order of the shares
Gather = Callable[[torch.Tensor], torch.Tensor]


class BatchNorms:
    """The BatchNorm layers of a model, numbered, so that shares can compare their positions."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm | BatchLayer)
        ]
        self._numbers = {
            id(one): number
            for number, (_, layer) in enumerate(self._layers)
            for one in _marks(layer)
            if one is not None
        }

    def __bool__(self) -> bool:
        return bool(self._layers)

    @property
    def buffer_names(self) -> frozenset[str]:
        """Names of these layers' buffers in the model."""
        return frozenset(
            f"{name}.{buffer}" if name else buffer
            for name, layer in self._layers
            for buffer in layer._buffers
        )

    @property
    def row_length(self) -> int:
        """The longest row that these layers gather."""
        return max((2 + 2 * num_features_of(layer) for _, layer in self._layers), default=0)

    @property
    def use_batch_statistics(self) -> bool:
        """True if any layer, in its current mode, normalises by the batch."""
        return any(
            layer.training or getattr(layer, "running_mean", layer) is None
            for _, layer in self._layers
        )

    @property
    def num_numbers(self) -> int:
        """How many values ``number_of`` has: the layers, and one for functional batch norms."""
        return len(self._layers) + 1

    def number_of(self, *marks: object) -> int:
        """The number of the layer that is, or owns, one of these; one more for any other."""
        numbers = (self._numbers.get(id(mark)) for mark in marks)
        return next((number for number in numbers if number is not None), len(self._layers))

    def name_of(self, number: int) -> str:
        """A layer's name, for messages."""
        return self._layers[number][0] if number < len(self._layers) else "a functional batch_norm"


def _marks(layer: nn.Module) -> tuple[object, ...]:
    """The objects that identify a layer when it computes."""
    return (layer.running_mean, layer.weight) if isinstance(layer, _BatchNorm) else (layer,)


class GlobalStatistics:
    """Replaces batch statistics in a thread by those of the global batch.

    Args:
        norms: the model's layers.
        gather: of the share that runs in the block.
        part: the share's part of the batch's loss, if its loss is scaled after backward; 1 if it
            is divided by the batch's weight before.
    """

    def __init__(self, norms: BatchNorms, gather: Gather, part: float = 1.0) -> None:
        self._norms = norms
        self._gather = gather
        self._part = part

    @contextmanager
    def applied(self, *, is_compiled: bool = False) -> Iterator[None]:
        """Apply within the block, which runs a model that may be compiled."""
        token = _current.set(self)
        try:
            with _redirection.to(self.batch_norm, is_compiled=is_compiled):
                yield
        finally:
            _current.reset(token)

    def of(self, *marks: object) -> "LayerStatistics":
        """The statistics of the layer that is, or owns, one of these."""
        number = self._norms.number_of(*marks)
        return LayerStatistics(self._norms, number, self._gather, self._part)

    def batch_norm(
        self,
        input: torch.Tensor,  # as F.batch_norm names it
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        """The replacement of ``F.batch_norm`` within the block."""
        if not training:
            return torch.batch_norm(
                input, weight, bias, running_mean, running_var, False, 0.0, eps, False
            )
        statistics = self.of(running_mean, weight)

        def settle(mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
            if running_mean is not None and running_var is not None:
                _update_running(running_mean, running_var, mean, variance, count, momentum)

        output: torch.Tensor = _GlobalBatchNorm.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, eps, statistics, settle
        )
        return output


def note_lone_sample(error: BaseException) -> None:
    """Add a note to torch's error about a microbatch of one sample."""
    if "Expected more than 1 value per channel" in str(error):
        add_note(
            error,
            "In a pipeline BatchNorm uses the statistics of each microbatch, and this one has a "
            "single sample. Use fewer microbatches (microbatches=1 computes what one device does) "
            "or larger batches, including the last one.",
        )


@contextmanager
def updating_statistics(*, is_compiled: bool = False) -> Iterator[None]:
    """Within the block ``F.batch_norm`` updates running statistics on devices where it does not.

    ``GlobalStatistics`` that are applied stay so.
    """
    with _redirection.to(_updating_batch_norm, is_compiled=is_compiled):
        yield


def _updating_batch_norm(
    input: torch.Tensor,  # as F.batch_norm names it
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    applied = _current.get()
    if applied is not None:
        return applied.batch_norm(
            input, running_mean, running_var, weight, bias, training, momentum, eps
        )
    if not training and running_mean is not None and running_var is not None:
        return _normalised(input, running_mean, running_var, weight, bias, eps)
    F._verify_batch_size(list(input.shape))  # type: ignore[attr-defined]
    exact, dims = exact_type(input), [dim for dim in range(input.dim()) if dim != 1]
    variance, mean = torch.var_mean(input.to(exact), dims, correction=0)
    if running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[1]
        _update_running(
            running_mean, running_var, mean.detach(), variance.detach(), count, momentum
        )
    return _normalised(input, mean, variance, weight, bias, eps)


def _normalised(
    inputs: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """What a batch norm computes with given statistics, by products and sums."""
    inverse = torch.rsqrt(variance + eps)
    scale = inverse if weight is None else inverse * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = [1, -1] + [1] * (inputs.dim() - 2)
    normal = inputs.to(variance.dtype) * scale.reshape(shape) + shift.reshape(shape)
    return normal.to(inputs.dtype)


_redirection = Redirection("batch_norm")
_current: ContextVar[GlobalStatistics | None] = ContextVar("global_statistics", default=None)


def global_statistics() -> GlobalStatistics | None:
    """The global statistics applied in this thread."""
    return _current.get()


class LayerStatistics:
    """Gathers one layer's rows, and checks that all shares are at the same layer.

    Rows are exchanged and merged in host memory: only the result is copied back to the device. A
    share waits until the device has computed its row.
    """

    def __init__(self, norms: BatchNorms, number: int, gather: Gather, part: float) -> None:
        self._norms = norms
        self._number = number
        self._gather = gather
        self._part = part

    def forward(self, row: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
        """(count, mean, biased variance) of all shares, from the row of one share."""
        count, mean, variance = merge(self._checked(row, 2 * self._number))
        return count, sent(mean, row.device), sent(variance, row.device)

    def backward(self, row: torch.Tensor) -> torch.Tensor:
        """The sum over the shares."""
        rows = self._checked(row * self._part, 2 * self._number + 1) / self._part
        return sent(sum_in_order(rows), row.device)

    def _checked(self, row: torch.Tensor, code: int) -> torch.Tensor:
        # The code, which also tells ``ModelPasses`` where the pass is, comes first in the row.
        rows = self._gather(torch.cat([row.new_full((1,), code), row]))
        other = next((found for found in rows[:, 0].tolist() if found != code), None)
        if other is not None:
            names = (self._norms.name_of(number) for number in (self._number, int(other) // 2))
            raise LockstepError(
                "BatchNorm layers must run in the same order for every share of a batch.",
                received=" in one share, ".join(map(repr, names)) + " in another",
                fix="Do not choose layers by the values of the samples before a BatchNorm.",
            )
        return rows[:, 1:]


@torch.no_grad()
def _update_running(
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    count: int,
    momentum: float,
) -> None:
    """As ``F.batch_norm``: the running variance is unbiased."""
    unbiased = variance * (count / (count - 1))
    running_mean.mul_(1 - momentum).add_(mean.to(running_mean), alpha=momentum)
    running_var.mul_(1 - momentum).add_(unbiased.to(running_var), alpha=momentum)


class _GlobalBatchNorm(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with statistics of all shares."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        statistics: LayerStatistics,
        settle: Callable[[torch.Tensor, torch.Tensor, int], None],
    ) -> torch.Tensor:
        count = inputs.numel() // inputs.shape[1]
        dims = [dim for dim in range(inputs.dim()) if dim != 1]
        exact = exact_type(inputs)
        variance, mean = torch.var_mean(inputs.to(exact), dims, correction=0)
        mean, variance = mean.double(), variance.double()
        row = torch.cat([mean.new_full((1,), count), mean, variance * count])
        total, mean, variance = statistics.forward(row)
        if total <= 1:
            raise ModelError(
                "BatchNorm needs more than one value per channel in training.",
                received=f"a global batch of shape {tuple(inputs.shape)}",
                fix="Use larger batches, or drop the last short one.",
            )
        mean, variance = mean.to(exact), variance.to(exact)
        factor, shift = _in(exact, weight), _in(exact, bias)
        if has_whole_batch_norm(inputs.device):
            output = torch.batch_norm(inputs, factor, shift, mean, variance, False, 0.0, eps, False)
        else:
            output = _normalised(inputs, mean, variance, factor, shift, eps)
        ctx.save_for_backward(inputs, weight, mean, variance)
        ctx.eps, ctx.total, ctx.statistics, ctx.dims = eps, total, statistics, dims
        ctx.has_bias = bias is not None
        # Here and not after: a checkpoint's recomputation ends once it has the saved tensors.
        settle(mean, variance, total)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs, weight, mean, variance = ctx.saved_tensors
        shape = [1, -1] + [1] * (inputs.dim() - 2)
        inverse = torch.rsqrt(variance + ctx.eps)
        normal = (inputs.to(mean.dtype) - mean.reshape(shape)) * inverse.reshape(shape)
        gradient = gradient.to(mean.dtype)
        own_sum = gradient.sum(ctx.dims)
        own_dot = (gradient * normal).sum(ctx.dims)
        both = ctx.statistics.backward(torch.cat([own_sum, own_dot]).double()) / ctx.total
        mean_gradient, mean_dot = both.to(gradient.dtype).chunk(2)
        scale = inverse if weight is None else inverse * weight
        input_gradient = (
            gradient - mean_gradient.reshape(shape) - normal * mean_dot.reshape(shape)
        ) * scale.reshape(shape)
        return (
            input_gradient.to(inputs.dtype),
            None if weight is None else own_dot,
            own_sum if ctx.has_bias else None,
            None,
            None,
            None,
        )


def _in(dtype: torch.dtype, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def exact_type(inputs: torch.Tensor) -> torch.dtype:
    """The dtype of statistics: float32 also for inputs in less."""
    is_low = inputs.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if is_low else inputs.dtype


def merge(rows: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """(count, mean, biased variance) of the union of the shares, merged in their order."""
    features = (rows.shape[1] - 1) // 2
    count, mean, squares = 0.0, rows.new_zeros(features), rows.new_zeros(features)
    for row in rows:
        share_count = row[0].item()
        delta = row[1 : 1 + features] - mean
        total = count + share_count
        if total == 0:
            continue
        mean = mean + delta * (share_count / total)
        squares = squares + row[1 + features :] + delta * delta * (count * share_count / total)
        count = total
    return int(count), mean, squares / max(count, 1.0)


def sum_in_order(rows: torch.Tensor) -> torch.Tensor:
    """The sum of the shares' rows, in their order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
