"""Detects callbacks' changes of more than values.

Weights lie in shared memory, and options of the optimizer and buffers are sent to all ranks. After
any other change between two epochs (a frozen layer, another dropout rate, a new parameter group, a
loaded optimizer state) the ranks are sent everything anew. This module detects such changes.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import nn, optim

from lockstep.errors import OptionError
from lockstep.formatting import first_few
from lockstep.parallel.transfer.serialization import describe
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.devices import is_cpu
from lockstep.plan.spec import Plan
from lockstep.train.callbacks.state_values import changed_values, copied_values
from lockstep.train.optim.optimizers import Optimizers, each_optimizer


class ModelFingerprint(NamedTuple):
    """The model at one time; two of them show the changes in between.

    Attributes:
        structure: the modules and parameters, which are trained, and the modes.
        places: addresses of parameters.
        versions: place and version of every buffer, by name.
    """

    structure: list[object]
    places: list[object]
    versions: dict[str, tuple[int, int]]


class ModelSnapshotter:
    """Takes fingerprints before and after every step that a callback watches, so it must be quick.

    It lists the modules once: a model with other modules has another structure.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(f"{name}." if name else "", one) for name, one in model.named_modules()]

    def look(self) -> ModelFingerprint:
        """The model as it is now."""
        found = ModelFingerprint([], [], {})
        structure, places, versions = found
        for prefix, module in self._modules:
            structure.append((module.training, [*map(id, module._modules.values())]))
            for parameter in module._parameters.values():
                if parameter is not None:
                    structure.append((id(parameter), parameter.requires_grad))
                    places.append((parameter.data_ptr(), parameter.stride(), parameter.dtype))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    versions[prefix + name] = buffer.data_ptr(), buffer._version
        return found


class ChangeWatch:
    """Detects changes that callbacks make to a model's values while all ranks wait.

    Args:
        model: the model.
        readopt: brings parameters that a callback moved back to where all ranks see them.
        sees_weights: also report changed weights that all ranks share.
    """

    def __init__(
        self, model: nn.Module, readopt: Callable[[], None], *, sees_weights: bool = False
    ) -> None:
        self._model = model
        self._sees_weights = sees_weights
        self._readopt = readopt
        self._snapshotter: ModelSnapshotter | None = None

    def over(
        self, act: Callable[[], None], *, in_epoch: bool, plan: Plan | None
    ) -> dict[str, torch.Tensor]:
        """Act; returns the changed tensors that other ranks do not see, by name.

        Args:
            act: calls the callbacks.
            in_epoch: the epoch continues with the same modules.
            plan: its ranks get the changes; None if no rank needs them.

        Raises:
            OptionError: more than values has changed within an epoch.
        """
        model = self._model
        snapshotter = self._snapshotter or ModelSnapshotter(model)
        before = snapshotter.look()
        # Changes that other ranks do not see: buffers, and parameters in other domains. Writes to
        # ``buffer.data`` show only in the values.
        are_sent = plan is not None and plan.num_ranks > 1
        is_elsewhere = self._sees_weights or (plan is not None and len(plan.domains) > 1)
        known = copied_values(model, with_parameters=is_elsewhere) if are_sent else {}
        act()
        # Between epochs the modules may change.
        self._snapshotter = snapshotter if in_epoch else None
        after = snapshotter.look() if in_epoch else ModelSnapshotter(model).look()
        if in_epoch and after.structure != before.structure:
            raise OptionError(
                "Within an epoch a callback may change only values.",
                received="a change of requires_grad, of a module's training mode, or of the "
                "Parameters that it has",
                fix="Do it in on_epoch_begin or on_epoch_end; within an epoch write values with "
                "`parameter.copy_(...)`.",
            )
        if after.places != before.places:
            self._readopt()
        if not are_sent:
            return {}
        unseen = changed_values(known, model, with_parameters=is_elsewhere)
        return changed_buffers(model, before, after) | unseen


# The types of settings; or a dict of these, or a short list.
_PLAIN = (bool, int, float, str, type(None))
_MOST_HELD = 100

# The attributes of objects, by the object's name and the attribute's.
Settings = dict[tuple[str, str], object]


def settings_of(objects: Mapping[str, object], left_out: Container[str]) -> Settings:
    """The attributes that are, or contain, numbers, flags and text.

    Args:
        objects: by name.
        left_out: names of attributes that are no settings.
    """
    found: Settings = {}
    for name, obj in objects.items():
        for attribute, value in vars(obj).items():
            if attribute in left_out:
                continue
            if isinstance(value, _PLAIN):
                found[name, attribute] = value
            elif isinstance(value, dict):
                for key, one in value.items():
                    if isinstance(one, _PLAIN):
                        found[name, f"{attribute}[{key!r}]"] = one
            elif isinstance(value, list | tuple) and len(value) <= _MOST_HELD:
                if all(isinstance(one, _PLAIN) for one in value):
                    found[name, attribute] = tuple(value)
            elif isinstance(value, np.ndarray) and value.size <= _MOST_HELD:
                found[name, attribute] = value.tobytes()
    return found


class SettingsWatch:
    """Detects settings, copied on every rank, that callbacks change within an epoch.

    Not settings are attributes that a step changes itself (a layer may count its calls), and those
    added after training began.

    Args:
        find: finds the objects that have settings, by name.
        left_out: names of attributes that are no settings.
    """

    def __init__(self, find: Callable[[], Mapping[str, object]], left_out: Container[str]) -> None:
        self._find = find
        self._left_out = left_out
        self._objects = find()
        self._last = self._look()
        self._watched = set(self._last)

    def begin_epoch(self) -> None:
        """All ranks have the current settings."""
        self._objects = self._find()
        self._last = self._look()

    def _look(self) -> Settings:
        return settings_of(self._objects, self._left_out)

    def over(self, act: Callable[[], None]) -> None:
        """Act, and compare.

        Raises:
            OptionError: settings have changed.
        """
        before = self._look()
        self._watched -= _changed(self._last, before)
        act()
        self._last = self._look()
        changed = sorted(_changed(before, self._last) & self._watched)
        if changed:
            names = [f"`{attribute}` of {name}" for name, attribute in changed]
            raise OptionError(
                "Within an epoch a callback may change only values: the other ranks have the "
                "attributes of the epoch's beginning.",
                received=f"a change of {first_few(names)}",
                fix="Do it in on_epoch_begin or on_epoch_end, or have a buffer or variable "
                "hold it; keep notes in the callback.",
            )


def _changed(before: Settings, after: Settings) -> set[tuple[str, str]]:
    """Those that exist before and after, and differ."""
    return {
        key
        for key, value in before.items()
        if key in after and after[key] is not value and after[key] != value
    }


def changed_buffers(
    model: nn.Module, before: ModelFingerprint, after: ModelFingerprint
) -> dict[str, torch.Tensor]:
    """The buffers that were written to, or made, between two fingerprints.

    Also those whose value is unchanged: another rank may have had another.
    """
    if before.versions == after.versions:
        return {}
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if after.versions[name] != before.versions.get(name)
    }


def structure(model: nn.Module) -> object:
    """The trained parameters, and the modules' modes."""
    return [id(module) for module in model.modules()], ModelSnapshotter(model).look().structure


def fingerprint(
    model: nn.Module, optimizer: optim.Optimizer | Optimizers | None, plan: Plan
) -> object:
    """What ranks were sent or have made, but for values, which are sent to them anyway."""
    are_seen = ranks_see_writes(plan)
    slots = [_slots_of(each, are_seen=are_seen) for each in each_optimizer(optimizer)]
    if plan.num_ranks > 1 or plan.pipeline is not None:  # stages run a trace of the model
        return structure(model), _contents(model), slots
    # The user's own model runs, and the optimizer steps itself; on master weights a clone does.
    return structure(model), slots if plan.precision == "bf16" else []


def _contents(model: nn.Module) -> object:
    """What a pickle of the model without the values of its tensors would say, at less cost.

    Settings are taken as they are; anything else is pickled, such as hooks, and classes that
    helpers cannot import.
    """
    plain: list[object] = []
    others: list[object] = [*{type(module): None for module in model.modules()}]
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) in _PLAIN:
                plain.append((name, value))
            elif name in ("_parameters", "_modules"):  # see ``structure``
                plain.append((name, *value))
            elif name == "_buffers":
                plain.append([(key, _form(buffer)) for key, buffer in value.items()])
            elif isinstance(value, dict | set) and not value:
                plain.append((name, type(value)))
            else:
                plain.append(name)
                others.append(value)
    return plain, describe(others, list(model.parameters()))


def _form(tensor: torch.Tensor | None) -> object:
    return tensor is not None and (tensor.shape, tensor.dtype, tensor.layout, tensor.device)


def ranks_see_writes(plan: Plan) -> bool:
    """True if all ranks see what rank 0 writes to stored slots: the memory is theirs, too."""
    if plan.num_hosts > 1 or isinstance(plan.update, AveragedUpdate):
        return False
    sharding = plan.sharding
    if is_cpu(plan.devices):
        return plan.engine.shares_memory or sharding is not None
    return sharding is not None and sharding.streams_parameters


def _slots_of(optimizer: optim.Optimizer, *, are_seen: bool) -> object:
    groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    slots = {
        id(parameter): [
            (name, id(value), getattr(value, "_version", None), _mark_of(value, are_seen))
            for name, value in values.items()
        ]
        for parameter, values in optimizer.state.items()
    }
    return groups, slots


@contextmanager
def kept_slots(optimizers: Sequence[optim.Optimizer], plan: Plan) -> Iterator[None]:
    """Around callbacks that see the optimizer's slots within an epoch.

    Raises:
        OptionError: they have changed slots, and ranks would not see that.
    """
    are_seen = ranks_see_writes(plan)
    before = _marked_slots(optimizers, are_seen)
    yield
    after = _marked_slots(optimizers, are_seen)
    if before.keys() != after.keys() or any(
        value is not after[key][0] or mark != after[key][1] for key, (value, mark) in before.items()
    ):
        raise OptionError(
            "Within an epoch a callback may read the optimizer's slots, not change them: the ranks "
            "that update by them have their own.",
            received="a change of optimizer.state",
            fix="Change it in on_epoch_begin or on_epoch_end.",
        )


def _marked_slots(
    optimizers: Sequence[optim.Optimizer], are_seen: bool
) -> dict[object, tuple[object, object]]:
    """Every slot, with a mark that shows writes unless all ranks see them."""
    return {
        (number, id(parameter), name): (value, _mark_of(value, are_seen))
        for number, optimizer in enumerate(optimizers)
        for parameter, values in optimizer.state.items()
        for name, value in values.items()
    }


def _mark_of(value: object, is_seen: bool) -> object:
    """The version of a tensor, and a sum, which shows writes to ``value.data``, too."""
    if not isinstance(value, torch.Tensor) or (is_seen and value.numel() > 1):
        return None
    dtype = torch.float64 if value.is_floating_point() else None
    found = value.detach().sum(dtype=dtype).item()
    return value._version, str(found)  # in text NaN is equal to itself
