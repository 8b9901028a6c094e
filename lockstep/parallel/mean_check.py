"""Whether losses of shares say what the loss of them all is, tried with a share and its halves.

A loss that a model or a training step computes inside cannot be taken on the whole batch. It is
divided among shares as a weighted mean, which it must be: of a share's samples together it must
come to the mean of what it comes to for each half of them. A mean over what one half has more of
(padding, a mask), a root or a ratio of means, and what compares samples with each other do not.

Tried in evaluation mode, where dropout and BatchNorm's statistics make no difference between a
share and its halves. What is drawn there nevertheless (noise of a diffusion, of a VAE) is drawn
once, and each half gets its rows. A model that has no loss in that mode stays in training mode,
with dropout drawn likewise.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.capture.calls import has_drawn, host_streams, streams_differ
from lockstep.capture.state import left_alone
from lockstep.data.sources import Batch
from lockstep.data.trees import map_tensors
from lockstep.errors import LossError, problem
from lockstep.parallel.batch_norm import BatchNorms
from lockstep.parallel.losses import JointLoss, ShareLoss

# From here on, every power of two is a step that is tried: half a percent of the time at most.
_FIRST_LATER_STEP = 256

# Relative, by what the loss or the model computes in; models often compute their losses in float32.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
_LOW_TOLERANCE = 0.05

# The function, its limits, and what was drawn.
_Draw = tuple[Any, tuple[float, ...], torch.Tensor]

LossOf = Callable[[Batch], ShareLoss | JointLoss]


def is_tried(step: int | None) -> bool:
    """Whether a training step is one of those on which the loss is tried."""
    if step is None:
        return False
    return step == 0 or (step >= _FIRST_LATER_STEP and step & (step - 1) == 0)


def check_mean(model: nn.Module, loss_of: LossOf, batch: Batch) -> None:
    """Compare the loss of some samples with those of their halves; leaves the model as it is.

    Args:
        model: what computes the loss.
        loss_of: runs it on samples.
        batch: the samples; a single one is compared with itself twice.

    Raises:
        LossError: it is not the weighted mean of them.
    """
    middle = batch.num_samples // 2
    cuts = [slice(0, middle), slice(middle, batch.num_samples)]
    if not middle:
        batch = _mapped(batch, lambda one: torch.cat([one, one]), 2)
        cuts = [slice(0, 1), slice(1, 2)]
    with left_alone(model), torch.no_grad():
        try:
            found = _losses(model, loss_of, batch, cuts, training=False)
        except LossError:  # it computes none in evaluation mode
            found = _losses(model, loss_of, batch, cuts, training=True)
    if found is not None:
        _compare(found, batch.num_samples, _tolerance(model, found[0]))


def _losses(
    model: nn.Module, loss_of: LossOf, batch: Batch, cuts: Sequence[slice], *, training: bool
) -> list[ShareLoss | JointLoss] | None:
    """Of the whole and of its parts; None where they cannot be compared."""
    model.train(training)
    norms = BatchNorms(model)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
    if norms.use_batch_statistics:  # of layers that keep none: their statistics are of the batch
        return None
    host = host_streams()
    draws = _Draws(batch.num_samples)
    losses = []
    for cut in (slice(0, batch.num_samples), *cuts):
        size = cut.stop - cut.start
        with draws.of(cut):
            losses.append(loss_of(_mapped(batch, lambda one, cut=cut: one[cut], size)))  # type: ignore[misc]
    is_comparable = draws.fit and not streams_differ(host, host_streams())
    return losses if is_comparable else None


def _compare(losses: Sequence[ShareLoss | JointLoss], num_samples: int, tolerance: float) -> None:
    whole, *parts = (loss.sums for loss in losses)
    for (total, weight), *shares in zip(whole, *parts, strict=True):
        sums = math.fsum(part[0] for part in shares), math.fsum(part[1] for part in shares)
        if not all(map(math.isfinite, (total, *sums))):
            continue  # an error of its own
        if not math.isclose(weight, sums[1], rel_tol=1e-6):
            raise _no_mean(f"weights {sums[1]:g} of halves, {weight:g} of all {num_samples}")
        if not weight:
            continue
        means = [total / weight, sums[0] / sums[1]]
        size = max(map(abs, (*means, *(one / of for one, of in shares if of))))
        if abs(means[0] - means[1]) > tolerance * size:
            raise _no_mean(
                f"{means[0]:.7g} for {num_samples} samples, {means[1]:.7g} for their halves"
            )


def _no_mean(received: str) -> LossError:
    return LossError(
        problem(
            "A loss that is computed in the model, or in train_step, must be a weighted mean: "
            "shares of the batch compute it apart.",
            received=received,
            fix="Say what it is a mean over: OwnLoss(weight=...), or return (total, weight) or "
            "values of shape (n,). If it compares samples with each other, pass it as a loss "
            "function, loss=..., which is taken on the whole batch.",
        )
    )


def _tolerance(model: nn.Module, loss: ShareLoss | JointLoss) -> float:
    values = [] if isinstance(loss, JointLoss) else list(loss.values)
    dtypes = {one.dtype for one in (*values, *model.parameters()) if one.is_floating_point()}
    return max((_TOLERANCES.get(dtype, _LOW_TOLERANCE) for dtype in dtypes), default=1e-3)


def _mapped(
    batch: Batch, function: Callable[[torch.Tensor], torch.Tensor], num_samples: int
) -> Batch:
    return Batch(
        inputs=map_tensors(function, batch.inputs),
        targets=map_tensors(function, batch.targets),
        sample_weight=map_tensors(function, batch.sample_weight),
        num_samples=num_samples,
    )


class _Draws(TorchDispatchMode):
    """Random draws of a batch, and the same ones, row by row, for parts of it.

    Args:
        num_samples: of the batch; the first pass runs over all of them.

    Attributes:
        fit: whether the parts have drawn what the whole had, but for the number of samples.
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fit = True
        self._num_samples = num_samples
        self._drawn: list[_Draw] = []
        self._rest: list[_Draw] | None = None
        self._rows = slice(0, num_samples)
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports torch.compile's machinery, to keep it away: a second."""
        return False

    @contextmanager
    def of(self, rows: slice) -> Iterator[None]:
        """Around the pass over some samples."""
        self._rows = rows
        try:
            with self:
                yield
            self.fit &= not self._rest
        finally:
            self._rest = list(self._drawn)
            for generator, state in self._generators.values():
                generator.set_state(state)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None:
            self._generators.setdefault(id(generator), (generator, generator.get_state()))
        stream = torch.get_rng_state()
        result = func(*args, **kwargs)
        if generator is None and not has_drawn(stream):  # attention without dropout
            return result
        if isinstance(result, torch.Tensor):
            # Limits may be numbers of samples: those of another number are other draws.
            limits = tuple(each for each in args if isinstance(each, int | float))
            self._note(func, limits, result)
        else:
            self.fit = False
        return result

    def _note(self, func: Any, limits: tuple[float, ...], result: torch.Tensor) -> None:
        if self._rest is None:
            self._drawn.append((func, limits, result.clone()))
            return
        *call, drawn = self._rest.pop(0) if self._rest else (None, None, None)
        is_same = call == [func, limits] and drawn is not None
        rows = self._rows_of(drawn, result.shape) if is_same else None
        self.fit &= rows is not None
        if rows is not None:
            result.copy_(rows)

    def _rows_of(self, drawn: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        """A part's rows of what the whole has drawn; None where it has none."""
        if drawn.shape == shape:
            return drawn
        if drawn.dim() != len(shape):
            return None
        others = [dim for dim, size in enumerate(shape) if drawn.shape[dim] != size]
        each, rest = divmod(drawn.shape[others[0]], self._num_samples)
        size = (self._rows.stop - self._rows.start) * each
        if len(others) > 1 or rest or shape[others[0]] != size:
            return None
        return drawn.narrow(others[0], self._rows.start * each, size)
