"""Checks of a Trainer's arguments, before any process starts."""

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep import accelerators
from lockstep.accelerators import rank_device
from lockstep.capture.layers import check_modules
from lockstep.comm.transports.process_group import missing_backend
from lockstep.data.map_style.sources import ArraySource, Source
from lockstep.errors import DataError, DeviceError, ModelError, OptionError, Problems
from lockstep.options import check_choice, check_count, check_flag, check_seed
from lockstep.parallel.data_parallel.forward import DTYPES, PARAMETER_DTYPES
from lockstep.parallel.loss.function_losses import missing_targets
from lockstep.parallel.loss.loss_options import check_loss
from lockstep.parallel.loss.share_losses import ONE_LOSS, LossAdapter
from lockstep.parallel.storage.device_memory import noting_shortage
from lockstep.parallel.storage.store import move_model
from lockstep.plan.engine_kinds import ProcessGroup
from lockstep.plan.spec import Plan
from lockstep.train.callbacks.callback import Callback
from lockstep.train.logging.metrics import Metrics, targetless
from lockstep.train.optim.learning_rates import RunningSchedule
from lockstep.train.optim.optimizer_state import place_slots
from lockstep.train.optim.update_config import UpdateConfig


def filled(source: Source, name: str) -> Source:
    """The source, which must not be empty.

    Raises:
        DataError: it is.
    """
    if len(source) == 0:
        raise DataError(
            f"`{name}` must have at least one sample.",
            received="0 samples",
            fix="Check its source.",
        )
    return source


def check_targets(source: Source | None, loss: LossAdapter, metrics: Metrics) -> None:
    """Check that arrays have targets if loss or metrics need them. Datasets are checked later.

    Raises:
        DataError: they are missing.
    """
    if not isinstance(source, ArraySource) or source.targets is not None:
        return
    if loss.needs_targets:
        raise missing_targets()
    if metrics:
        raise targetless()


def log_names(
    loss: LossAdapter | None, metrics: Metrics, update_config: UpdateConfig, *, has_validation: bool
) -> list[str]:
    """Names of an epoch's logs; a train_step of the user's own gives no outputs to metrics."""
    own = ONE_LOSS if loss is None else loss.parts
    trained = [*(update_config.turns or own).log_names]
    trained += metrics.by_name if update_config.train_step is None else []
    validated = [*own.log_names, *metrics.by_name] if has_validation else []
    return [*trained, *(f"val_{name}" for name in validated)]


def check_names(
    loss: LossAdapter | None, schedule: RunningSchedule | None, metrics: Metrics
) -> None:
    """Check that no metric has the name of another value in the logs.

    Raises:
        OptionError: one has.
    """
    names = set() if loss is None else set(loss.parts.log_names)
    taken = {
        name
        for name in metrics.by_name
        if name in names or (schedule is not None and re.fullmatch(r"lr(_\d+)?", name))
    }
    if taken:
        raise OptionError(
            "A metric cannot have the name of a part of the loss, or of the learning rate.",
            received=", ".join(sorted(taken)),
            fix="Give it another name.",
        )


def check_strategy(strategy: object, problems: Problems) -> None:
    """Note a problem with a value that is not a strategy: a name, a class, or another object."""
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
                received=f"the class {callback.__name__}"
                if isinstance(callback, type)
                else type(callback).__name__,
                fix="Derive its class from lockstep.Callback, and pass an instance.",
            )


def check_arguments(
    model: object,
    loss: object,
    loss_weights: object,
    strategy: object,
    precision: object,
    seed: object,
    deterministic: object,
    callbacks: object,
) -> None:
    """Check the Trainer's arguments.

    Raises:
        OptionError: with all that is invalid.
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
    check_loss(loss, loss_weights, problems)
    check_strategy(strategy, problems)
    check_choice("precision", precision, DTYPES, problems, fix="Use 'fp32'.")
    check_seed(seed, problems)
    check_flag("deterministic", deterministic, problems)
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


def check_restarts(restarts: object) -> None:
    """Check ``restarts``.

    Raises:
        OptionError: it is not a number of restarts.
    """
    problems = Problems()
    fix = "Pass 3, for example, to survive the loss of a process three times."
    check_count("restarts", restarts, problems, least=0, fix=fix)
    problems.raise_if_any(OptionError)


def check_on_bad_record(on_bad_record: object) -> None:
    """Check ``on_bad_record``.

    Raises:
        OptionError: it is invalid.
    """
    if on_bad_record not in ("error", "skip"):
        raise OptionError(
            '`on_bad_record` must be "error" or "skip".',
            received=f"on_bad_record={on_bad_record!r}",
            fix='Pass "error" to stop at a bad record, or "skip" to leave it out.',
        )


def prepare_model(model: nn.Module, precision: str) -> None:
    """Convert the model to the requested precision.

    Raises:
        ModelError: its parameters have another dtype.
    """
    check_modules(model)
    wanted = PARAMETER_DTYPES[precision]
    if precision == "fp64":
        model.double()
    elif precision == "bf16":
        model.bfloat16()
    strange = {
        str(value.dtype)
        for value in model.parameters()
        if value.is_floating_point() and value.dtype != wanted
    }
    if strange:
        raise ModelError(
            f"precision={precision!r} needs parameters of {wanted}.",
            received=", ".join(sorted(strange)),
            fix="Convert the model: model.float(), or use precision='fp64'.",
        )


def check_backend(plan: Plan) -> None:
    """Check that torch has the Plan's backend for tensors.

    Raises:
        OptionError: it was built without it.
    """
    engine = plan.engine
    if isinstance(engine, ProcessGroup) and missing_backend(engine.backend):
        raise OptionError(
            f"This torch ({torch.__version__}) was built without {engine.backend}.",
            received=f"engine={engine.backend!r}",
            fix='Use engine="gloo", or a build of torch that has it.',
        )


def device_of(model: nn.Module) -> str:
    """The name of a model's device, as Plans have it."""
    first = next(iter((*model.parameters(), *model.buffers())), torch.empty(0))
    return "cpu:0" if first.device.type in ("cpu", "meta") else str(first.device)


def place_model(model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> torch.device:
    """Move a model and its optimizers' slots to the device of the Plan's first rank.

    Parameters stay the same objects. Returns the device, which becomes this thread's current one.

    Raises:
        DeviceError: the model is on an accelerator, and the Plan is for CPUs; or it is on the meta
            device.
    """
    wanted = rank_device(plan.devices, 0)
    if plan.sharding is not None and plan.sharding.streams_parameters:
        move_model(model, torch.device("cpu"))
        accelerators.use(wanted)
        return wanted
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    elsewhere = found - {wanted}
    if elsewhere and (wanted.type == "cpu" or torch.device("meta") in elsewhere):
        raise DeviceError(
            f"The model must be on {wanted}.",
            received=f"parameters or buffers on {', '.join(sorted(map(str, elsewhere)))}",
            fix=f"Move it first: model.to({str(wanted)!r}).",
        )
    with noting_shortage(wanted):
        accelerators.use(wanted)
        if elsewhere:
            move_model(model, wanted)
        stay = wanted.type == "cpu" or (plan.sharding is not None and plan.sharding.offload)
        for optimizer in () if stay else optimizers:
            place_slots(optimizer)
    return wanted
