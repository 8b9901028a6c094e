"""Measures how far rounding alone can move a training.

Not every model agrees to 1e-12 in float64. Some always compute in float32 or bf16 inside (norms and
softmaxes of transformers). Others are badly conditioned: BatchNorm over few samples, or code that
compares numbers (the buckets of a hash). Dividing the work reorders sums, so errors in the last
place differ, and such models amplify them.

The plain loop is therefore run twice more: unchanged, and with an error of one unit in the last
place in the results of all operations that sum (products, convolutions, norms, means) or round to a
shorter dtype. Their difference, by kind of tensor and step, is the effect of rounding; a proof
allows a multiple of it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.data.trees import map_tensors, tensors_of
from lockstep.proof.comparison import TOLERANCE, Comparison, compare_records
from lockstep.proof.reference import Reference

# Sums in another order, and fused operations, err a few times as much as the perturbed run.
_FACTOR = 16.0

# The largest bound that still makes a proof, by the bytes of the shortest dtype.
_MAX_BOUNDS = {8: 1e-6, 4: 1e-2, 2: 0.3, 1: 0.3}

# Prefixes of the names of operations that sum.
_SUMMING = (
    "mm",
    "addmm",
    "addmv",
    "mv",
    "dot",
    "bmm",
    "baddbmm",
    "linear",
    "convolution",
    "sum",
    "mean",
    "var",
    "std",
    "linalg_vector_norm",
    "cumsum",
    "_softmax",
    "_log_softmax",
    "logsumexp",
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "_native_batch_norm",
    "_fused_rms_norm",
    "_scaled_dot_product",
    "mkldnn_rnn_layer",
    "embedding_dense_backward",
    "index_add",
    "nll_loss",
    "mse_loss",
)


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """The effect of rounding on a training.

    Attributes:
        dtype: the shortest floating dtype that it computes in.
        module: name of the first module that computes in it; None if all compute in float64.
        bounds: the largest relative difference allowed, by kind and step.
    """

    dtype: torch.dtype
    module: str | None
    bounds: dict[str, list[float]]

    @property
    def largest(self) -> float:
        """The largest bound."""
        return max((each for own in self.bounds.values() for each in own), default=TOLERANCE)

    def bound(self, kind: str, step: int) -> float:
        """The largest relative difference allowed for a kind of tensor after a step."""
        own = self.bounds.get(kind, [])
        return own[step] if step < len(own) else TOLERANCE

    @property
    def max_bound(self) -> float:
        """The largest bound that still makes a proof."""
        return _MAX_BOUNDS[self.dtype.itemsize]

    def loosened(self, comparisons: Sequence[Comparison]) -> list[Comparison]:
        """The comparisons, with these bounds as tolerances."""
        return [
            replace(one, tolerance=min(self.bound(one.kind, one.step), self.max_bound))
            for one in comparisons
        ]

    def summary(self) -> str:
        """As a sentence."""
        where = "in float64"
        if self.module is not None:
            place = f"{self.module!r}" if self.module else "the model's own code"
            short = str(self.dtype).removeprefix("torch.")
            where = f"in {short} (first in {place}), whatever the precision of its inputs"
        text = (
            f"the model computes {where}, and there errors of one unit in the last place move its "
            f"results by at most {self.largest / _FACTOR:.1e}"
        )
        if self.largest > self.max_bound:
            text += ": too much to tell a fault from rounding. Try SGD, and no BatchNorm"
        return text


def measure(
    reference: Reference, perturbed: Reference, num_shares: int, steps: int
) -> Conditioning:
    """Run two references of the same job side by side, ``perturbed`` with rounding errors."""
    errors = LastPlace(perturbed.model)
    largest: dict[str, float] = {}
    bounds: dict[str, list[float]] = {}
    for step in range(steps):
        record = reference.step(num_shares)
        with errors.enabled():
            other = perturbed.step(num_shares, lambda _: errors.stop())
        for one in compare_records(other, record):
            largest[one.kind] = max(largest.get(one.kind, 0.0), one.relative)
        for kind, relative in largest.items():
            own = bounds.setdefault(kind, [TOLERANCE] * step)  # some slots appear later
            own.append(max(TOLERANCE, _FACTOR * relative))
    return Conditioning(dtype=errors.dtype, module=errors.module, bounds=bounds)


class LastPlace(TorchDispatchMode):
    """While active, adds an error of one unit in the last place, up or down, to sums.

    Args:
        model: gives the names of modules.

    Attributes:
        dtype: the shortest floating dtype of a result so far.
        module: name of the first module with such a result; None for float64.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = torch.float64
        self.module: str | None = None
        self._model = model
        self._names: list[str] = []
        self._generator = torch.Generator().manual_seed(0)
        self._is_enabled = False

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Add errors within the block, until ``stop``."""
        self._is_enabled = True

        def leave(*_: Any) -> None:
            self._names.pop()

        handles = [
            handle
            for name, module in self._model.named_modules()
            for handle in (
                module.register_forward_pre_hook(lambda *_, own=name: self._names.append(own)),
                module.register_forward_hook(leave),
            )
        ]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._names.clear()

    def stop(self) -> None:
        """Add no further errors."""
        self._is_enabled = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_enabled:
            return result
        floating = [one for one in tensors_of(result) if one.is_floating_point()]
        is_shortened = _is_shortened(args, floating)
        for one in floating if is_shortened and self._names else ():
            if one.dtype.itemsize < self.dtype.itemsize:
                self.dtype, self.module = one.dtype, self._names[-1]
        name = func._schema.name.removeprefix("aten::")
        is_new = not any(one.alias_info for one in func._schema.returns)
        sums = name.startswith(_SUMMING) or (name == "_to_copy" and is_shortened)
        return map_tensors(self._with_error, result) if sums and is_new else result

    def _with_error(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel():
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=self._generator).to(tensor) * 2 - 1
        return tensor + tensor * (signs * torch.finfo(tensor.dtype).eps)


def _is_shortened(args: Any, results: Sequence[torch.Tensor]) -> bool:
    taken = [one.dtype.itemsize for one in tensors_of(args) if one.is_floating_point()]
    return bool(taken) and any(one.dtype.itemsize < min(taken) for one in results)
