"""The Worker: one rank's part of a Plan, run on real tensors.

There are two. ``parallel.replica`` holds the whole model and works on its shares of each batch;
``parallel.stages`` holds some of the model's layers and works on the microbatches that come by.
What trains, evaluates and predicts with them (``train.fit_task``, ``train.tasks``) knows no
difference.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.comm.board import Board
from lockstep.comm.exchange import ShareTotals
from lockstep.data.order import evaluation_seed, share_seed
from lockstep.data.read_ahead import Read
from lockstep.data.sources import Batch, Source
from lockstep.data.trees import Tree, map_tensors
from lockstep.errors import LossError, NonFiniteLossError, problem
from lockstep.parallel.gradient_rules import OnNonFinite
from lockstep.parallel.losses import Sums
from lockstep.parallel.update import Updater
from lockstep.plan.shares import share_bounds
from lockstep.plan.spec import Plan

# Called with (output, target) of every share whose output this rank computes.
Observe = Callable[[Tree, Tree], None]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did.

    Attributes:
        total: weighted sum of the losses of the global batch.
        weight: the sum of the weights; 0 means that nothing was updated.
        num_samples: size of the global batch.
        is_skipped: something was not finite: nothing was updated, and the loss does not count.
        parts: of several losses, the sums of each share whose loss is known on this rank.
    """

    total: float
    weight: float
    num_samples: int
    is_skipped: bool = False
    parts: list[Sums] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """The batch's loss: its weighted mean; NaN for a batch of weight 0."""
        return self.total / self.weight if self.weight else math.nan


class Worker(ABC):
    """Runs one rank of a Plan. Made by ``parallel.build``.

    Attributes:
        plan: the Plan.
        rank: this rank.
        model: the model, as far as this rank has it.
        updater: the optimizer; None where nothing is trained.
        board: where the ranks of the host wait for each other; None where there is one alone.
        reading: entered around every read of samples.
    """

    plan: Plan
    rank: int
    model: nn.Module
    updater: Updater | None
    board: Board | None
    reading: AbstractContextManager[object] = nullcontext()

    @abstractmethod
    def train_step(
        self,
        source: Source,
        indices: torch.Tensor,
        step: int,
        observe: Observe | None = None,
        turn: int = 0,
    ) -> StepResult:
        """One step on the global batch at ``indices``; every rank calls it with the same.

        Where several functions train on each batch, ``turn`` is whose turn it is.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite; nothing has been updated.
            LossError: the loss function broke its contract.
        """

    @abstractmethod
    def evaluate_step(
        self, source: Source, indices: torch.Tensor, observe: Observe | None = None
    ) -> list[Sums]:
        """The sums of the shares of the batch at ``indices`` whose loss is known here."""

    @abstractmethod
    def predict_step(self, source: Source, indices: torch.Tensor) -> list[tuple[int, Tree]]:
        """(position in the batch, output) of the shares whose output is known here."""

    @abstractmethod
    def reads(self, indices: torch.Tensor, step: int | None = None, turn: int = 0) -> list[Read]:
        """What this rank is going to read of the batch at ``indices``, in this order.

        Args:
            indices: of the global batch.
            step: of training; None in evaluation and prediction.
            turn: see ``train_step``.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def gradients(self, num_samples: int) -> dict[str, torch.Tensor | None]:
        """Gradients of the last step, summed over all shares; every name on one rank only."""

    def gather_slots(self) -> None:
        """Bring what lies in the stores of slots to all hosts; every rank calls it."""
        return

    @abstractmethod
    def held_names(self) -> frozenset[str] | None:
        """Names of the parameters and buffers that this rank has; None for all of the model's."""

    @abstractmethod
    def ruled_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of which this rank has the values that count."""

    def close(self) -> None:
        """A task is done; every rank calls it."""
        return

    def abandon(self) -> None:
        """A task has failed; whoever notices it calls this."""
        return

    @abstractmethod
    def leaves_a_rank_idle(self, num_samples: int) -> bool:
        """Whether some rank works on no share of such a batch, and sees no buffer change."""


_NO_SPAN = nullcontext()


def span(name: object) -> AbstractContextManager[Any]:
    """Shows as a block of that name where a trace is taken (``train.tracing``), else nothing."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(str(name))
    return _NO_SPAN


def step_result(
    totals: ShareTotals, num_samples: int, parts: list[Sums], *, is_skipped: bool
) -> StepResult:
    """What a step did, from the losses of its shares; one that was left out had none."""
    total, weight = math.fsum(totals.totals), math.fsum(totals.weights)
    if is_skipped:
        total, weight, parts = 0.0, 0.0, []
    return StepResult(
        total=total, weight=weight, num_samples=num_samples, is_skipped=is_skipped, parts=parts
    )


def refuses(
    rule: OnNonFinite,
    step: int,
    bounds: Sequence[tuple[int, int]],
    totals: Sequence[float],
    diagnose: Callable[[int], str],
) -> bool:
    """Whether a step is to be left out because the loss of a share is NaN or infinite.

    One such loss makes the whole gradient so, also where its weight is 0.

    Args:
        rule: what becomes of such a step.
        step: the step's number.
        bounds: samples ``[start, stop)`` of each share.
        totals: of each filled share.
        diagnose: says where a share's values cease to be finite; empty where nobody knows.

    Raises:
        NonFiniteLossError: if that is the rule.
    """
    share = next((share for share, total in enumerate(totals) if not math.isfinite(total)), None)
    if share is None or rule == "ignore":
        return False
    if rule == "raise":
        raise _nonfinite_loss(step, bounds[share], share, totals[share], diagnose(share))
    return True


def _nonfinite_loss(
    step: int, bounds: tuple[int, int], share: int, total: float, diagnosis: str
) -> NonFiniteLossError:
    start, stop = bounds
    where = f"; {diagnosis}" if diagnosis else ""
    return NonFiniteLossError(
        problem(
            f"The loss of step {step} is not finite.",
            received=f"{total} from share {share} "
            f"(samples {start} to {stop - 1} of the batch){where}",
            fix="Lower the learning rate, or look at these samples, or leave such steps out with "
            'on_nonfinite="skip". The weights are those before this step.',
        )
    )


def check_used(step: int, is_any_used: bool) -> None:
    """A loss that depends on no parameter trains nothing.

    Raises:
        LossError: it does not.
    """
    if not is_any_used:
        raise LossError(
            problem(
                f"The loss of step {step} must depend on a trainable parameter.",
                received="a loss that needs no gradient",
                fix="Look for detach(), no_grad() or frozen parameters on the way to it.",
            )
        )


def reads_of_shares(
    shares: Iterable[int],
    indices: torch.Tensor,
    *,
    num_shares: int,
    dtype: torch.dtype,
    seed: int,
    step: int | None,
    turn: int = 0,
) -> list[Read]:
    """The reads of some shares of a batch; see ``Worker.reads``."""
    bounds = share_bounds(len(indices), num_shares)
    return [
        Read(
            indices=indices[slice(*bounds[share])],
            dtype=dtype,
            seed=evaluation_seed(seed, int(indices[bounds[share][0]]))
            if step is None
            else share_seed(seed, step, share, turn),
        )
        for share in shares
    ]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """What users see of an output: values, in torch's own memory format."""
    return tensor.detach().contiguous()


def moved(batch: Batch, device: torch.device) -> Batch:
    """A batch on another device."""
    if device.type == "cpu":
        return batch

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    return Batch(
        inputs=map_tensors(move, batch.inputs),
        targets=map_tensors(move, batch.targets),
        sample_weight=map_tensors(move, batch.sample_weight),
        num_samples=batch.num_samples,
    )


@contextmanager
def modes_of(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model in training or evaluation mode, and give every module its own mode back.

    In training, a model that is in training mode keeps its modules' modes: what the user has put
    in evaluation mode (a frozen backbone's BatchNorm) stays so.
    """
    if training and model.training:
        yield
        return
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode
