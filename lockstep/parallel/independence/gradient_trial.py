"""Tests whether the gradient of a few samples is the sum of the gradients of their parts.

A backward pass may mix samples where the forward pass does not: ``scale_grad_by_freq`` divides by
how often a row of an embedding is used, a hook divides a gradient by its norm, an autograd function
takes a mean. So the gradient of three samples (the first one occurs twice) is compared with the
gradients of the first alone and of the others. Where they differ, two more samples must show it,
too: a sample whose rounding crosses a kink differs by itself.

Of a large parameter's gradient a sketch is kept: sums of its elements with random signs, which are
linear in it and have its norm on average (Alon, Matias, Szegedy, "The space complexity of
approximating the frequency moments", STOC 1996). So the trial needs no memory for all gradients.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.capture.calls import uncompiled
from lockstep.capture.state import ModelState, left_alone
from lockstep.data.map_style.sources import Batch
from lockstep.data.order import seed_streams
from lockstep.errors import ModelError
from lockstep.formatting import first_few
from lockstep.parallel.independence.split_trial import (
    begin_again,
    on_halves,
    repeated,
    with_another,
)

# Relative to a parameter's gradient, and to the largest one: above rounding errors, also where a
# sample crosses a kink, and below the effect of mixing samples. Then the same for low precision.
_TOLERANCE, _FLOOR = 3e-3, 1e-5
_LOW_TOLERANCE, _LOW_FLOOR = 0.3, 2e-2

# From samples and the number of the first: the scalar that backward starts from, a sum over them.
# None if nothing requires a gradient.
RootOf = Callable[[Batch, int], torch.Tensor | None]


# Elements of the largest gradient that is kept as it is, and the size of a larger one's sketch.
_MOST_ELEMENTS = 1 << 17
_NUM_SIGNS, _COLUMNS = 16, 1024

# Factors of the loss, to test whether gradients are linear in it.
_SMALL, _LARGE = 2.0**-7, 2.0**7


def check_gradients(model: nn.Module, root_of: RootOf, batch: Batch, *, is_low: bool) -> bool:
    """Compare gradients of a few samples with those of parts; leaves the model as it is.

    Args:
        model: in training mode.
        root_of: runs it on samples.
        batch: the samples.
        is_low: it computes in less than float32; autocast within a model is detected.

    Returns:
        True if they are linear in the loss; with a hook that clips they are not.

    Raises:
        ModelError: they do not add up.
    """
    trial, scaled = _Trial(model, root_of), None
    with left_alone(model) as state, torch.enable_grad():
        for few in _few(batch):
            try:
                wrong = trial.differing(few, state, is_low=is_low)
                scaled = trial.of_multiples(few, state)
                break
            except Exception:  # the model requires other batch sizes: no result
                wrong = None
        if wrong and batch.num_samples > 3:
            others = trial.differing(repeated(batch, [2, 3, 2]), state, is_low=is_low)
            if others is not None:
                wrong = {name: size for name, size in wrong.items() if name in others}
    if wrong:
        _refuse(wrong)
    return scaled is None or not _differing(scaled, is_low=False)  # the same bits, scaled


def _few(batch: Batch) -> list[Batch]:
    """Samples whose halves differ, and share a sample if possible."""
    if batch.num_samples > 1:
        return [repeated(batch, [0, 1, 0])]
    return [with_another(batch), repeated(batch, [0, 0])]


@dataclass(frozen=True)
class _Residue:
    """The norms of each parameter's gradient, and of its difference from the parts' sum."""

    sizes: Mapping[str, float]
    left: Mapping[str, float]


class _Precision(TorchDispatchMode):
    """Records whether anything is computed in less than float32."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_low = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports torch.compile's modules to disable it, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.is_low |= result.dtype in (torch.bfloat16, torch.float16)
        return result


class _Trial:
    """Subtracts the gradients of parts of some samples from the whole's, in ``.grad``.

    Those of large parameters are in sketches instead.
    """

    def __init__(self, model: nn.Module, root_of: RootOf) -> None:
        self._model = model
        self._root_of = root_of
        self.precision = _Precision()
        self._trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._large = {
            name: one for name, one in self._trained.items() if one.numel() > _MOST_ELEMENTS
        }
        self._sketches: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, float] = {}
        self._starts: list[int] = []  # first samples of the next runs

    def differing(
        self, batch: Batch, state: ModelState, *, is_low: bool
    ) -> dict[str, float] | None:
        """The relative differences of the gradients that are no sums; None without a result."""
        residue = self.of(batch, state)
        if residue is None:
            return None
        return _differing(residue, is_low=is_low or self.precision.is_low)

    def of(self, batch: Batch, state: ModelState) -> _Residue | None:
        """The residue of some samples and their halves; None without a result."""
        for training in (None, False):
            self._begin(batch)
            if on_halves(self._model, self._run, batch, state, training=training) is not None:
                return self._residue()
        return None

    def of_multiples(self, batch: Batch, state: ModelState) -> _Residue | None:
        """The residue of a small and a large multiple of the root of backward."""
        self._begin(batch)
        for factor in (_SMALL, _LARGE):
            if not begin_again(self._model, state, None):
                return None
            seed_streams(0)
            with uncompiled():
                self._run(batch, factor)
            self._starts = [0]
        return self._residue()

    def _begin(self, batch: Batch) -> None:
        self._sizes, self._starts = {}, [0, 0, batch.num_samples // 2]
        self._sketches = {}
        for parameter in self._trained.values():
            parameter.grad = None

    def _run(self, part: Batch, factor: float = 1.0) -> None:
        """Go backward; subtract the gradients of later runs from those of the first.

        With a factor, the first run's gradients are scaled to those of the large factor.
        """
        with self.precision:
            root = self._root_of(part, self._starts.pop(0))
        if root is not None and root.requires_grad:
            with self._sketching():
                (factor * root).backward()
        if not self._sizes:
            self._scale(-1.0 if factor == 1.0 else -_LARGE / factor)
            self._sizes = self._norms()

    def _scale(self, factor: float) -> None:
        for parameter in self._trained.values():
            if parameter.grad is not None:
                parameter.grad = factor * parameter.grad
        self._sketches = {name: factor * one for name, one in self._sketches.items()}

    @contextmanager
    def _sketching(self) -> Iterator[None]:
        """Within the block keep sketches of large parameters' gradients."""

        def take(name: str, parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse:
                sketch, before = _sketch_of(gradient), self._sketches.get(name)
                self._sketches[name] = sketch if before is None else before + sketch
                parameter.grad = None

        with ExitStack() as hooks:
            for name, one in self._large.items():
                hooks.callback(one.register_post_accumulate_grad_hook(partial(take, name)).remove)
            yield

    def _norms(self) -> dict[str, float]:
        kept = {name: self._sketches.get(name, one.grad) for name, one in self._trained.items()}
        return {name: _norm(one) for name, one in kept.items()}

    def _residue(self) -> _Residue:
        return _Residue(self._sizes, self._norms())


def _differing(residue: _Residue, *, is_low: bool) -> dict[str, float]:
    """The relative differences of the gradients that differ, by parameter."""
    tolerance, floor = (_LOW_TOLERANCE, _LOW_FLOOR) if is_low else (_TOLERANCE, _FLOOR)
    # Gradients of parts may be much larger than their sum.
    sizes = {name: max(size, residue.left[name]) for name, size in residue.sizes.items()}
    largest = max(sizes.values(), default=0.0)
    return {
        name: residue.left[name] / size
        for name, size in sizes.items()
        if math.isfinite(largest)
        and size > floor * largest
        and residue.left[name] > tolerance * size
    }


def _refuse(wrong: Mapping[str, float]) -> NoReturn:
    raise ModelError(
        "The gradient of a batch must be the sum of its samples' gradients: shares of the batch "
        "run backward separately.",
        received=f"gradients of {first_few([*wrong])} that differ by {max(wrong.values()):.1%} "
        "from the sum over parts of the samples",
        fix="Remove scale_grad_by_freq, and hooks or autograd functions that mix samples in "
        "backward (by a norm or a mean of their gradients), or train on one device.",
    )


@torch.no_grad()
def _sketch_of(gradient: torch.Tensor) -> torch.Tensor:
    """Sums of the elements of each column, in several ways: each row has a random sign in each."""
    flat = gradient.reshape(-1)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    whole = len(flat) // _COLUMNS * _COLUMNS
    rows = flat[:whole].view(-1, _COLUMNS)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (_NUM_SIGNS, len(rows)), generator=generator) * 2 - 1
    sums = signs.to(rows) @ rows / math.sqrt(_NUM_SIGNS)
    return torch.cat([sums.view(-1), flat[whole:]])


def _norm(gradient: torch.Tensor | None) -> float:
    if gradient is None:
        return 0.0
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(values.detach().double().norm())
