"""What differs between the libraries of models that a Runner runs: PyTorch itself, and Keras."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn, optim

from lockstep.parallel.loss.share_losses import LossAdapter
from lockstep.plan.makers.data_parallel import Maker
from lockstep.plan.spec import Plan
from lockstep.train.resume.differences import Difference
from lockstep.train.resume.fit_facts import Facts
from lockstep.train.resume.fit_record import FitState


class FrontEnd(ABC):
    """A library's part of a training: the optimizer, and what its models need around a task.

    Attributes:
        model: what is trained.
        optimizer: updates the model; None if it is not trained.
        schedule: of the learning rate; None without one.
        stop_training: True to end training after the step under way.
        is_on_one_device: the call under way must run on one device.
        proves: ranks can check before training that they compute the same.
    """

    model: nn.Module
    optimizer: Any
    schedule: Any = None
    stop_training: bool
    is_on_one_device = False
    proves = True

    @property
    @abstractmethod
    def preload(self) -> tuple[str, ...]:
        """Modules that helpers need besides what all need."""

    @property
    def torch_optimizers(self) -> Sequence[optim.Optimizer]:
        """The optimizers whose options and slots must be the same on all hosts."""
        return ()

    @abstractmethod
    def make_updater(self, maker: Maker) -> Any:
        """The updater of the weights on every rank, for Plans of this maker."""

    def check_plan(self, plan: Plan) -> None:
        """Refuse a Plan by which the call cannot be made."""
        return

    def place(self, device: torch.device) -> None:
        """Move what belongs to the model, which is on this device by now, unless it is torch's."""
        return

    @abstractmethod
    def set_new_options(
        self, begun: Any, found: FitState, asked: Facts, taken: Sequence[Difference]
    ) -> None:
        """Set the script's new values, after a checkpoint was loaded.

        Args:
            begun: the state of the schedule before the ``fit``; None without one.
            found: the checkpoint.
            asked: the facts of the script.
            taken: the differences for which the script's value is used.
        """

    def running(self, loss: LossAdapter | None) -> AbstractContextManager[object]:
        """Around every task.

        Gives a fingerprint of model, loss and metrics for the next call to compare, or None.
        """
        return nullcontext()
