"""A training step and its result."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat

import torch

from lockstep.comm.exchange import ShareTotals
from lockstep.parallel.batch_run import Run, StepBatch
from lockstep.parallel.data_parallel.late_check import LateCheck
from lockstep.parallel.loss.share_losses import Sums

_NO_SPAN = nullcontext()
_NO_TOTALS = ShareTotals([], [])


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one step.

    Attributes:
        total: weighted sum of the batch's losses; ``float(total)`` may wait for a device.
        weight: the sum of the weights; 0 means that nothing was updated.
        num_samples: size of the global batch.
        is_skipped: a value was not finite: nothing was updated, and the loss does not count.
        parts: sums of several losses, for each share whose loss this rank computes.
        num_bad: bad records, left out of the batch.
    """

    total: SupportsFloat
    weight: float
    num_samples: int
    is_skipped: bool = False
    parts: list[Sums] = field(default_factory=list)
    num_bad: int = 0

    @property
    def loss(self) -> float:
        """The batch's loss: its weighted mean; NaN for a batch of weight 0."""
        return float(self.total) / self.weight if self.weight else math.nan

    def settled(self) -> "StepResult":
        """This result with its total on the host."""
        return self if isinstance(self.total, float) else replace(self, total=float(self.total))


class TrainingStep:
    """A step that is being made.

    Attributes:
        totals: the losses of all shares.
        weight: their weight.
        is_skipped: a value was not finite: nothing is updated.
        is_void: nothing is updated, for that reason or because the weight is 0.
        late: the check of its values, if the host learns the verdict later.
    """

    totals = _NO_TOTALS
    weight = 0.0
    is_skipped = is_void = False

    def __init__(self, batch: StepBatch, num_shares: int, late: LateCheck | None = None) -> None:
        self.batch = Run(
            batch.source,
            batch.indices,
            num_shares,
            step=batch.step,
            observe=batch.observe,
            turn=batch.turn,
            first_share=batch.first_share,
            batch_size=batch.batch_size,
        )
        self.step = batch.step
        self.late = late

    def result(self) -> StepResult:
        """The result; a skipped step has no loss."""
        is_skipped = self.is_skipped
        late = self.totals.late
        total = math.fsum(self.totals.totals) if late is None else late
        return StepResult(
            total=0.0 if is_skipped else total,
            weight=0.0 if is_skipped else self.weight,
            num_samples=self.batch.num_samples,
            is_skipped=is_skipped,
            parts=[] if is_skipped else self.batch.parts,
        )


# True while a trace is recorded (``train.fit.step_profiler``).
is_traced: Callable[[], bool] = torch._C._autograd._profiler_enabled


def span(*parts: object) -> AbstractContextManager[Any]:
    """A named block in a trace, if one is recorded."""
    return torch.profiler.record_function(" ".join(map(str, parts))) if is_traced() else _NO_SPAN
