"""Makes the user's optimizer, if given as a class or function, and checks it before training."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, optim

from lockstep.errors import ModelError, OptionError
from lockstep.parallel.exchange.exchange_layout import sparse_weights
from lockstep.plan.spec import Plan
from lockstep.train.optim.optimizer_kinds import ELEMENTWISE, LAZY, PARAMETERWISE


def make_optimizer(optimizer: Any, model: nn.Module) -> optim.Optimizer:
    """The user's optimizer: an instance over the model's parameters, or a class or function.

    Raises:
        OptionError: it is neither, or steps on other parameters than the model's.
        ModelError: the model has no parameters.
    """
    if not isinstance(optimizer, optim.Optimizer):
        if not callable(optimizer):
            raise _no_optimizer(optimizer)
        if next(model.parameters(), None) is None:
            raise ModelError(
                "The model has no parameters to train.",
                received=type(model).__name__,
                fix="Make its layers attributes, or put a list of them into an nn.ModuleList.",
            )
        with _without_compiler():
            made = optimizer(model.parameters())
        if not isinstance(made, optim.Optimizer):
            raise _no_optimizer(made)
        return make_optimizer(made, model)
    needs_rows = isinstance(optimizer, optim.SparseAdam) and not sparse_weights(model)
    if needs_rows or isinstance(optimizer, optim.LBFGS):
        raise OptionError(
            "LBFGS evaluates the loss several times per step, and SparseAdam needs embeddings with "
            "sparse=True.",
            received=type(optimizer).__name__,
            fix="Use another optimizer, such as torch.optim.AdamW.",
        )
    if getattr(optimizer, "is_cross_replica", False):
        raise OptionError(
            "A Trainer's strategy makes its optimizer step across replicas.",
            received=type(optimizer).__name__,
            fix="Pass the optimizer that it wraps, or train in a loop of your own.",
        )
    _check_parameters(optimizer, model)
    _widen_slots(optimizer)
    return optimizer


def _no_optimizer(received: object) -> OptionError:
    return OptionError(
        "`optimizer` must be a torch optimizer over model.parameters(), or make one from them.",
        received=type(received).__name__,
        fix="Pass functools.partial(torch.optim.Adam, lr=1e-3), for example.",
    )


def _check_parameters(optimizer: optim.Optimizer, model: nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    strange = sum(
        id(parameter) not in own
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    if strange:
        raise OptionError(
            "The optimizer must hold the model's own parameters.",
            received=f"{strange} tensors that are not the model's",
            fix="Make it from model.parameters() of the model given to the Trainer.",
        )


def _widen_slots(optimizer: optim.Optimizer) -> None:
    """Slots made before the model became float64 follow it, as in ``Optimizer.load_state_dict``."""
    if type(optimizer) not in ELEMENTWISE | PARAMETERWISE:
        return
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            if (
                parameter.dtype == torch.float64
                and isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and slot != "step"
            ):
                slots[slot] = value.double()


def check_divisible(model: nn.Module, optimizer: object, plan: Plan, *, is_known: bool) -> None:
    """Check that a model and an optimizer can be divided as the Plan says.

    Raises:
        ModelError: hooks would see a share's gradients.
        OptionError: stages, or hosts, cannot step this optimizer separately.
    """
    if plan.num_shares > 1:
        check_hooks(model)
    if plan.pipeline is not None and not is_known:
        raise OptionError(
            "In a pipeline each stage steps its own parameters, which is known to be exact only "
            "for optimizers of PyTorch or Keras that treat each parameter separately.",
            received=class_of(optimizer),
            fix="Use one of torch.optim, or of keras.optimizers without global_clipnorm, or a "
            "data parallel strategy.",
        )
    if plan.compression is not None and not is_known:
        raise OptionError(
            "With compressed gradients every host updates all weights, which is known to give the "
            "same bits only with optimizers of PyTorch or Keras.",
            received=class_of(optimizer),
            fix="Use one of torch.optim, or leave `compression` out.",
        )


def class_of(optimizer: object) -> str:
    """The class of an optimizer that is not known to step as torch's do, and why if it is one."""
    is_changed = type(optimizer) in ELEMENTWISE | PARAMETERWISE | LAZY
    return f"{type(optimizer).__name__}{' with hooks or a step of its own' if is_changed else ''}"


def check_offload(updater: Any, optimizer: object, plan: Plan) -> None:
    """Check that the optimizer can step on slots that are in memory one part after the other.

    Raises:
        OptionError: it is none of torch's own that treat each element separately.
    """
    is_offloaded = plan.sharding is not None and plan.sharding.offload is not None
    if is_offloaded and not updater.is_elementwise:
        raise OptionError(
            "`offload` has the optimizer step one part of the slots after the other, which is "
            "exact only for optimizers of torch that treat each element separately.",
            received=type(optimizer).__name__,
            fix="Use one of torch.optim, such as AdamW, without hooks; or leave `offload` out.",
        )


def check_hooks(model: nn.Module) -> None:
    """Check that no parameter has gradient hooks, which would see the gradients of shares.

    Raises:
        ModelError: with the parameters' names.
    """
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    if names:
        raise ModelError(
            "Gradient hooks on parameters would see the gradient of a share, not of the batch.",
            received=f"hooks on {', '.join(names)}",
            fix="Remove them, or train with SingleDeviceStrategy.",
        )


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Keep torch's optimizers from importing torch.compile, which takes a second."""
    wrapped = optim.Optimizer.add_param_group
    optim.Optimizer.add_param_group = inspect.unwrap(wrapped)  # type: ignore[method-assign]
    try:
        yield
    finally:
        optim.Optimizer.add_param_group = wrapped  # type: ignore[method-assign]
