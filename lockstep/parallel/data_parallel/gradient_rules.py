"""Checks and clipping of the gradient of a batch, between its sum and the update.

Both need the whole gradient: one that is not finite must not reach the weights, and clipping needs
the norm. Each rank has the pieces that it updates, so ranks exchange their norms
(``StatusBoard.all_gather``) and all reach the same decision. They need not where a bound of the
gradient (``Exchange.gradient_bound``) says that it is finite, and nothing is clipped by norm.

The norm does not depend on the number of ranks: it is computed from fixed blocks
(``plan.layout.block_sizes``), and a rank's sum of their squares is exact.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from lockstep import accelerators
from lockstep.comm.shared_memory.status_board import StatusBoard, look_around_of
from lockstep.errors import NonFiniteGradientError
from lockstep.parallel.updater_interface import BoundPiece

OnNonFinite = Literal["raise", "skip", "ignore"]

# For float16: the first loss scale and its growth interval, as in torch.amp.GradScaler.
_FIRST_SCALE = 2.0**16
_STEPS_UNTIL_GROWTH = 2000

# Doubles that represent a sum of squares exactly: each is the rounding error of those before.
_TERMS = 3
_NOTHING_BAD = -1.0

# Sums of gradients with a smaller norm are finite in every dtype of parameters.
_SAFE_BOUND = 1e37


@dataclass
class LossScale:
    """The scale of a loss in float16, so that small gradients do not vanish.

    It doubles after 2,000 steps without overflow and halves with every overflow (Micikevicius et
    al. 2018, Mixed Precision Training, section 3.2). Every rank sees the same gradients overflow,
    so all have the same scale.
    """

    scale: float = _FIRST_SCALE
    steps_since_change: int = 0

    def note(self, *, is_finite: bool) -> None:
        """Adapt the scale after a step."""
        self.steps_since_change += 1
        if not is_finite:
            self.scale, self.steps_since_change = self.scale / 2, 0
        elif self.steps_since_change == _STEPS_UNTIL_GROWTH:
            self.scale, self.steps_since_change = self.scale * 2, 0


@dataclass(frozen=True, kw_only=True)
class GradientRules:
    """The user's options for gradients.

    Attributes:
        clip_norm: largest norm of all parameters' gradients together; None for no limit.
        clip_value: largest element; None for no limit.
        on_nonfinite: the treatment of a step whose loss or gradient is NaN or infinite.
        loss_scale: of float16; None without.
    """

    clip_norm: float | None = None
    clip_value: float | None = None
    on_nonfinite: OnNonFinite = "raise"
    loss_scale: LossScale | None = None

    @property
    def scale(self) -> float:
        """The factor of losses before backward."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    @property
    def only_raises(self) -> bool:
        """True if values that are not finite end training, and nothing else is done."""
        changes = (self.clip_norm, self.clip_value, self.loss_scale)
        return self.on_nonfinite == "raise" and all(one is None for one in changes)

    @property
    def needs_norm(self) -> bool:
        """True if the whole gradient is checked."""
        return (
            self.on_nonfinite != "ignore"
            or self.clip_norm is not None
            or self.loss_scale is not None
        )


@dataclass(eq=False)
class GradientJudge:
    """Applies the rules to this rank's pieces.

    Attributes:
        rules: the user's.
        pieces: those that this rank updates.
        blocks: of every piece, the sizes of the blocks of its norm.
        names: of all parameters, in the model's order.
        board: status board of the ranks; None for a single rank.
        counted_elsewhere: parameters that other hosts update too, and include in the norm.
    """

    rules: GradientRules
    pieces: Sequence[BoundPiece]
    blocks: Sequence[Sequence[int]]
    names: Sequence[str]
    board: StatusBoard | None
    counted_elsewhere: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._counted = [one for one in self.pieces if one.name not in self.counted_elsewhere]
        self._needs_norm = self.rules.needs_norm
        self._clips = self.rules.clip_norm is not None or self.rules.clip_value is not None

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def settle(self, step: int, bound: float) -> bool:
        """Clip the gradients of the pieces; every rank calls it after the sum.

        Args:
            step: the number of the step.
            bound: at least the norm of all ranks' gradients; infinite or NaN if it is unknown.

        Returns:
            True to take the step, False to skip it.

        Raises:
            NonFiniteGradientError: on all ranks, with ``on_nonfinite="raise"``.
        """
        if not self._needs_norm:
            if self._clips:
                self._clip(math.inf)
            return True
        norm, bad = 0.0, _NOTHING_BAD
        is_known = bound < _SAFE_BOUND  # by all ranks alike, which need not meet for a verdict
        if self.rules.clip_norm is not None or not (is_known or self._are_finite()):
            norm, bad = self._norm()
        is_finite = math.isfinite(norm)
        if self.rules.loss_scale is not None and self._overflows(is_finite):
            return False
        if not is_finite and self.rules.on_nonfinite != "ignore":
            return self._refuse(step, bad)
        if self._clips:
            self._clip(norm)
        return True

    def _are_finite(self) -> bool:
        """True if all ranks' gradients, and their norms in their own precision, are finite.

        Values stay on the device until the ranks exchange them; this waits for the device, because
        non-finite values must not reach the weights.
        """
        used = []
        for piece in self._counted:
            gradient = piece.tensor.grad
            if gradient is None:
                continue
            if gradient.is_sparse or gradient.requires_grad:  # it may have a history
                gradient = _elements(gradient)
            used.append(gradient)
        norms = torch._foreach_norm(used) if used else ()
        found: torch.Tensor | list[float]
        if norms and accelerators.computes(norms[0]):
            found = self._fetched(torch.stack(norms).sum(dtype=torch.float64)[None])
        else:
            found = [sum(map(float, norms))]
        if self.board is None:
            return math.isfinite(found.numpy()[0] if isinstance(found, torch.Tensor) else found[0])
        gathered = self.board.all_gather(found)
        are_finite = math.isfinite(sum(number for (number,) in gathered))
        if not are_finite:
            self.board.barrier()  # before ranks write other values
        return are_finite

    def _fetched(self, numbers: torch.Tensor) -> torch.Tensor:
        return accelerators.fetched(numbers, look_around_of(self.board))

    def _overflows(self, is_finite: bool) -> bool:
        """True if the loss scale was too large: the step is skipped, and the scale falls."""
        scale = self.rules.loss_scale
        if scale is None:
            return False
        is_ours = scale.scale >= 1  # below 1 the unscaled gradient is not finite
        scale.note(is_finite=is_finite)
        return not is_finite and is_ours

    @torch.no_grad()
    def _clip(self, norm: float) -> None:
        gradients = [piece.tensor.grad for piece in self.pieces]
        used = [_elements(gradient) for gradient in gradients if gradient is not None]
        if not used:
            return
        if self.rules.clip_value is not None:
            torch._foreach_clamp_min_(used, -self.rules.clip_value)
            torch._foreach_clamp_max_(used, self.rules.clip_value)
        most = self.rules.clip_norm
        # As in torch.nn.utils.clip_grad_norm_.
        if most is not None and not (factor := most / (norm + 1e-6)) >= 1:
            torch._foreach_mul_(used, factor)

    @torch.no_grad()
    def _norm(self) -> tuple[float, float]:
        """The norm of all ranks' gradients, and the last parameter that is not finite."""
        squares: list[float] = []
        bad = _NOTHING_BAD
        norms = self._block_norms()
        for piece, found in zip(self.pieces, norms, strict=True):
            if found and not math.isfinite(math.fsum(found)):
                bad = max(bad, float(self._places[piece.name]))
            squares += [norm * norm for norm in found]
        gathered = [[*_terms(squares), bad]]
        if self.board is not None:
            gathered = self.board.all_gather(gathered[0])
        bad = max(row[-1] for row in gathered)
        if bad != _NOTHING_BAD:  # NaN, or infinite
            return sum(row[0] for row in gathered), bad
        return math.sqrt(math.fsum(term for row in gathered for term in row[:-1])), bad

    def _block_norms(self) -> list[list[float]]:
        """The norms of the blocks of every piece; none for a piece without a gradient."""
        cut = [
            ()
            if piece.name in self.counted_elsewhere
            else _blocks_of(piece, blocks if self.rules.clip_norm is not None else None)
            for piece, blocks in zip(self.pieces, self.blocks, strict=True)
        ]
        every = [block for blocks in cut for block in blocks]
        if not every:
            return [[] for _ in cut]
        norms = self._fetched(torch.stack(torch._foreach_norm(every)).double()).tolist()
        if not math.isfinite(sum(norms)):  # squares in float32 overflow long before elements do
            norms = [float(block.double().norm()) for block in every]
        found = iter(norms)
        return [[next(found) for _ in blocks] for blocks in cut]

    def _refuse(self, step: int, bad: float) -> bool:
        if self.rules.on_nonfinite == "skip":
            return False
        name = self.names[int(bad)]
        error = NonFiniteGradientError(
            f"The gradient of step {step} is not finite.",
            received=f"NaN or infinite values first in the gradient of {name!r}",
            fix="Lower the learning rate, look for sqrt(0) or log(0) after that layer, or pass "
            'on_nonfinite="skip". The weights are those before this step.',
        )
        error.step, error.parameter = step, name
        raise error


def _blocks_of(piece: BoundPiece, sizes: Sequence[int] | None) -> Sequence[torch.Tensor]:
    """The piece's gradient in blocks, or whole."""
    gradient = piece.tensor.grad
    if gradient is None:
        return ()
    if sizes is None or gradient.is_sparse:
        return (_elements(gradient),)
    if gradient.stride() != piece.tensor.stride():  # blocks follow the parameter's memory
        gradient = torch.empty_like(piece.tensor).copy_(gradient)
    flat = gradient.as_strided((gradient.numel(),), (1,))
    blocks: Sequence[torch.Tensor] = flat.split(list(sizes))
    return blocks


def _elements(gradient: torch.Tensor) -> torch.Tensor:
    """All elements of a gradient, without history; of a sparse one those of its rows, each once."""
    return (gradient._values() if gradient.is_sparse else gradient).detach()


def _terms(values: Sequence[float]) -> list[float]:
    """A few numbers whose sum is exactly that of the values, for other ranks to add."""
    total = sum(values)
    if not math.isfinite(total):
        return [total] + [0.0] * (_TERMS - 1)
    terms: list[float] = []
    for _ in range(_TERMS):
        terms.append(math.fsum([*values, *(-term for term in terms)]))
    return terms
