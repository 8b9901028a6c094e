"""Checks what a Trainer is given, before any process starts."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.capture.layers import check_shapes
from lockstep.data.sources import Source
from lockstep.errors import (
    DataError,
    DeviceError,
    ModelError,
    OptionError,
    Problems,
    problem,
)
from lockstep.parallel.forward import DTYPES
from lockstep.plan.spec import Plan
from lockstep.train.callbacks import Callback


def filled(source: Source, name: str) -> Source:
    """The source, which must not be empty.

    Raises:
        DataError: it is.
    """
    if len(source) == 0:
        raise DataError(
            problem(f"`{name}` must hold a sample.", received="0 samples", fix="Check its source.")
        )
    return source


def check_strategy(strategy: object, problems: Problems) -> None:
    """Note what is no strategy: its name, its class, anything else without a maker of Plans."""
    if strategy is None or (hasattr(strategy, "maker") and not isinstance(strategy, type)):
        return
    problems.add(
        "`strategy` must be a strategy.",
        received=f"the class {strategy.__name__}" if isinstance(strategy, type) else repr(strategy),
        fix="Pass an instance: lockstep.MirroredStrategy(devices=2), for example.",
    )


def _check_callbacks(callbacks: object, problems: Problems) -> None:
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        problems.add(
            "`callbacks` must be a list of callbacks.",
            received=type(callbacks).__name__,
            fix="Put it into a list: callbacks=[callback].",
        )
        return
    for callback in callbacks:
        if not isinstance(callback, Callback):
            problems.add(
                "Callbacks must be instances of lockstep.Callback.",
                received=type(callback).__name__,
                fix="Derive its class from lockstep.Callback, and pass an instance.",
            )


def check_arguments(
    model: object,
    loss: object,
    strategy: object,
    precision: object,
    seed: object,
    callbacks: object,
) -> None:
    """Everything that the Trainer is made with, all problems at once.

    Raises:
        OptionError: an argument cannot be what it is.
    """
    problems = Problems()
    if not isinstance(model, nn.Module) and (isinstance(model, type) or not callable(model)):
        problems.add(
            "`model` must be a torch.nn.Module, or a function that makes one.",
            received=f"the class {model.__name__}"
            if isinstance(model, type)
            else type(model).__name__,
            fix="Pass an instance, not a class.",
        )
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        problems.add(
            "`loss` must be callable as loss(output, target).",
            received=f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss),
            fix="Pass an instance: torch.nn.CrossEntropyLoss(), for example.",
        )
    check_strategy(strategy, problems)
    if precision not in DTYPES:
        problems.add(
            f"`precision` must be one of {', '.join(DTYPES)}.",
            received=repr(precision),
            fix="Use 'fp32'.",
        )
    if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        problems.add(
            "`seed` must be an integer from 0 to 2**63 - 1.", received=repr(seed), fix="Use 0."
        )
    _check_callbacks(callbacks, problems)
    problems.raise_if_any(OptionError)


def check_counts(maybe: Mapping[str, Any] | None = None, /, **counts: Any) -> list[Any]:
    """The counts as plain integers (numpy's are welcome), then those that may be None."""
    problems = Problems()
    found: list[Any] = []
    for name, value in {**counts, **(maybe or {})}.items():
        if value is None and name not in counts:
            found.append(None)
            continue
        try:
            found.append(0 if isinstance(value, bool) else operator.index(value))
        except TypeError:
            found.append(0)
        if found[-1] < 1:
            problems.add(
                f"`{name}` must be an integer of at least 1.",
                received=f"{name}={value!r}",
                fix="Pass a positive integer.",
            )
    problems.raise_if_any(OptionError)
    return found


def prepare_model(model: nn.Module, precision: str) -> None:
    """Bring the model to the precision asked for.

    Raises:
        ModelError: it cannot be.
    """
    check_shapes(model)
    if precision == "fp64":
        model.double()
    wanted = DTYPES[precision]
    strange = {
        str(value.dtype)
        for value in model.parameters()
        if value.is_floating_point() and value.dtype != wanted
    }
    if strange:
        raise ModelError(
            problem(
                f"precision={precision!r} needs parameters of {wanted}.",
                received=", ".join(sorted(strange)),
                fix="Convert the model: model.float(), or use precision='fp64'.",
            )
        )


def check_device(model: nn.Module, plan: Plan) -> torch.device:
    """The device of rank 0's model, where the Plan wants it.

    Raises:
        DeviceError: the model is elsewhere.
    """
    wanted = torch.device(plan.devices[0])
    tensors = [*model.parameters(), *model.buffers()]
    found = {str(tensor.device) for tensor in tensors}
    fits = {"cpu"} if wanted.type == "cpu" else {str(wanted)}
    if found - fits:
        raise DeviceError(
            problem(
                f"The model must be on {wanted.type if wanted.type == 'cpu' else wanted}.",
                received=f"parameters or buffers on {', '.join(sorted(found))}",
                fix=f"Move it first: model.to({wanted.type!r}).",
            )
        )
    return wanted
