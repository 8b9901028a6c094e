"""The Worker: one rank's part of a Plan, run on real tensors.

There are two. ``parallel.replica`` holds the whole model and works on its shares of each batch;
``parallel.stages`` holds some of the model's layers and works on the microbatches that come by.
What trains, evaluates and predicts with them (``train.tasks``) knows no difference.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.comm.board import Board
from lockstep.data.sources import Batch, Source
from lockstep.data.trees import Tree, map_tensors
from lockstep.errors import LossError, NonFiniteLossError, problem
from lockstep.parallel.update import Updater
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
    """

    total: float
    weight: float
    num_samples: int

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
    """

    plan: Plan
    rank: int
    model: nn.Module
    updater: Updater | None
    board: Board | None

    @abstractmethod
    def train_step(
        self, source: Source, indices: torch.Tensor, step: int, observe: Observe | None = None
    ) -> StepResult:
        """One step on the global batch at ``indices``; every rank calls it with the same.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite; nothing has been updated.
            LossError: the loss function broke its contract.
        """

    @abstractmethod
    def evaluate_step(
        self, source: Source, indices: torch.Tensor, observe: Observe | None = None
    ) -> list[tuple[float, float]]:
        """(total, weight) of the shares of the batch at ``indices`` whose loss is known here."""

    @abstractmethod
    def predict_step(self, source: Source, indices: torch.Tensor) -> list[tuple[int, Tree]]:
        """(position in the batch, output) of the shares whose output is known here."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def gradients(self, num_samples: int) -> dict[str, torch.Tensor | None]:
        """Gradients of the last step, summed over all shares; every name on one rank only."""

    @abstractmethod
    def held_names(self) -> frozenset[str] | None:
        """Names of the parameters and buffers that this rank has; None for all of the model's."""

    @abstractmethod
    def ruled_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of which this rank has the values that count."""

    @abstractmethod
    def leaves_a_rank_idle(self, num_samples: int) -> bool:
        """Whether some rank works on no share of such a batch, and sees no buffer change."""


_NO_SPAN = nullcontext()


def span(name: object) -> AbstractContextManager[Any]:
    """Shows as a block of that name where a trace is taken (``train.tracing``), else nothing."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(str(name))
    return _NO_SPAN


def check_finite(step: int, bounds: Sequence[tuple[int, int]], totals: Sequence[float]) -> None:
    """A total that is not finite has such gradients, also where its weight is 0.

    Args:
        step: the step's number.
        bounds: samples ``[start, stop)`` of each share.
        totals: of each filled share.

    Raises:
        NonFiniteLossError: one is not.
    """
    for share, total in enumerate(totals):
        if not math.isfinite(total):
            start, stop = bounds[share]
            raise NonFiniteLossError(
                problem(
                    f"The loss of step {step} is not finite.",
                    received=f"{total} from share {share} "
                    f"(samples {start} to {stop - 1} of the batch)",
                    fix="Lower the learning rate, or look at these samples. "
                    "The weights are those before this step.",
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
