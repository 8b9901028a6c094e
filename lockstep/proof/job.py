"""A Job: the description of a training for ``lockstep verify`` and ``lockstep plan``.

A proof trains float64 copies of the job, never the user's own model and optimizer. Model, loss and
optimizer are copied together, because they may hold the same parameters.
"""

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn, optim

from lockstep.data.batch_dims import BatchDims
from lockstep.errors import ModelError, OptionError, Problems
from lockstep.options import is_count
from lockstep.parallel.loss.loss_options import check_loss
from lockstep.parallel.storage.store import move_model
from lockstep.parallel.transfer.serialization import optimizer_contents, rebuild_optimizer


@dataclass(frozen=True)
class Job:
    """A training.

    Attributes:
        model: the model.
        loss: as for the Trainer: a function that returns a mean, values of shape (n,), or a pair
            (total, weight); several of them; or an ``OwnLoss``.
        optimizer: a torch optimizer over ``model.parameters()``, or a class or function that makes
            one from them.
        data: as for ``Trainer.fit``.
        batch_size: samples of a global batch; unused if the data has batches of its own.
        loss_weights: a factor for each of several losses.
        train_step: as for the Trainer: ``train_step(model, batch)`` returns the loss; ``loss`` is
            None then.
        batch_dim: as for the Trainer: the dim of the samples in data, model and loss.

    Raises:
        OptionError: an argument has the wrong type or value.
    """

    model: nn.Module
    loss: Any
    optimizer: Any
    data: Any
    batch_size: int = 32
    loss_weights: Any = None
    train_step: Any = None
    batch_dim: Any = 0

    def __post_init__(self) -> None:
        problems = Problems()
        BatchDims.of(self.batch_dim)
        model: object = self.model
        if not isinstance(model, nn.Module):
            problems.add(
                "A Job's model must be a torch.nn.Module.",
                received=type(model).__name__,
                fix="Pass an instance, not a class or a function.",
            )
        if (self.loss is None) != (self.train_step is not None):
            problems.add(
                "A Job must have either a loss or a train_step.",
                received="neither" if self.loss is None else "both",
                fix="See lockstep.Trainer.",
            )
        if self.train_step is not None and not callable(self.train_step):
            problems.add(
                "A Job's train_step must be one function of model and batch.",
                received=type(self.train_step).__name__,
                fix="Make a job of each of several.",
            )
        check_loss(self.loss, self.loss_weights, problems, "A Job's loss")
        if not callable(self.optimizer) and not isinstance(self.optimizer, optim.Optimizer):
            problems.add(
                "A Job's optimizer must be a torch optimizer, or make one from parameters.",
                received=repr(self.optimizer),
                fix="See the documentation of lockstep.Trainer.",
            )
        if not is_count(self.batch_size):
            problems.add(
                "A Job's batch_size must be an integer of at least 1.",
                received=repr(self.batch_size),
                fix="Give the number of samples of a global batch.",
            )
        problems.raise_if_any(OptionError)

    @property
    def dims(self) -> BatchDims:
        """The dim of the samples in inputs, targets and outputs."""
        return BatchDims.of(self.batch_dim)


def copy_job(job: Job, *, in_double: bool = True, device: torch.device | None = None) -> Job:
    """The job with copies of model, loss and train_step, and an optimizer over the copied model.

    Args:
        job: the job.
        in_double: True for copies in float64.
        device: of the copies; None for the job's own.

    Raises:
        ModelError: the model cannot be copied.
        OptionError: the optimizer function returns no optimizer.
    """
    memo: dict[int, Any] = {}
    try:
        model: nn.Module = copy.deepcopy(job.model, memo)
        loss, train_step = copy.deepcopy((job.loss, job.train_step), memo)
    except Exception as error:
        raise ModelError(
            "A proof needs copies of the model and the loss, and copy.deepcopy fails.",
            received=f"{type(error).__name__}: {error}",
            fix="Look for tensors with a history (weights computed outside of forward), "
            "or for open files and locks.",
        ) from error
    if in_double:
        model._apply(_double)
        loss, train_step = _in_double(loss), _in_double(train_step)
    if device is not None:
        move_model(model, device)
        for one in (loss, train_step):
            if isinstance(one, nn.Module):
                move_model(one, device)
    return replace(
        job,
        model=model,
        loss=loss,
        optimizer=_copied_optimizer(job.optimizer, model, memo, in_double=in_double),
        train_step=train_step,
    )


def _in_double(loss: Any) -> Any:
    """The loss with its tensors (class weights, say) in the precision of its inputs."""
    if isinstance(loss, nn.Module):
        return loss._apply(_double)
    if isinstance(loss, Mapping):
        return {key: _in_double(one) for key, one in loss.items()}
    if isinstance(loss, list | tuple):
        return [_in_double(one) for one in loss]
    if isinstance(loss, functools.partial):
        return functools.partial(
            _in_double(loss.func),
            *map(_double, loss.args),
            **{key: _double(value) for key, value in loss.keywords.items()},
        )
    return loss


def _double(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def _copied_optimizer(
    optimizer: Any, model: nn.Module, memo: dict[int, Any], *, in_double: bool
) -> optim.Optimizer:
    if not isinstance(optimizer, optim.Optimizer):
        made = optimizer(model.parameters())
        if not isinstance(made, optim.Optimizer):
            raise OptionError(
                "A Job's optimizer must be a torch optimizer, or make one from parameters.",
                received=f"a function that returns a {type(made).__name__}",
                fix="Pass functools.partial(torch.optim.Adam, lr=1e-3), for example.",
            )
        return made
    # deepcopy of an optimizer drops attributes that subclasses add. The memo maps its parameters to
    # those of the copied model.
    contents = copy.deepcopy(optimizer_contents(optimizer), memo)
    for slots in contents["state"].values():
        for name, value in slots.items():
            if in_double and name != "step":  # a count, which torch keeps in float32
                slots[name] = _double(value)
    return rebuild_optimizer(type(optimizer), contents)
