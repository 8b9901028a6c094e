"""Calls a recorder right before and right after each update of DeepSpeed's ZeRO, stages 1 and 2.

There a rank's optimizer steps on a flat float32 tensor for each group: its partition of the group's
parameters, one after the other. DeepSpeed notes on every parameter which elements of it are where
in the partition (``_hp_mapping``). The partitions' gradients and slots are recorded as pieces of
the parameters, as those of any other sharding.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lockstep.proof.recording.names import torch_optimizer, wrapped_by
from lockstep.proof.recording.observation import group_of
from lockstep.proof.recording.shards import pieces_of
from lockstep.proof.recording.watches import Observer, Update, Watch

_GROUPS = ("bit16_groups", "bf16_groups")  # the model's parameters, by group


def zero_of(optimizer: Any) -> Any:
    """An optimizer of ZeRO, itself or what a wrapper has of one; None if there is none."""
    while optimizer is not None:
        if any(each.__name__ == "ZeROOptimizer" for each in type(optimizer).__mro__):
            return optimizer
        optimizer = wrapped_by(optimizer)
    return None


def has_partitions(zero: Any) -> bool:
    """Whether it is of a stage whose partitions are known."""
    return all(hasattr(each, "_hp_mapping") for each in _parameters(zero)) and any(
        hasattr(zero, each) for each in _GROUPS
    )


class ZeroWatch(Watch):
    """Watches optimizers of ZeRO, by their method ``step``, which an engine calls."""

    def __init__(self, observer: Observer, optimizers: Sequence[Any]) -> None:
        self._steps = [_Steps(observer, *each) for each in enumerate(optimizers)]

    def remove(self) -> None:
        for each in self._steps:
            each.remove()
        self._steps.clear()


class _Steps:
    """The steps of one optimizer, which makes one of its inner optimizer's for each group."""

    def __init__(self, observer: Observer, number: int, zero: Any) -> None:
        self._observer = observer
        self._number = number
        self._zero = weakref.ref(zero)
        self._inner_groups: list[dict[str, Any]] = []
        self._gradients: dict[int, torch.Tensor] = {}
        self._handle = torch_optimizer(zero.optimizer).register_step_pre_hook(self._before)
        zero.step = self._wrapped(zero.step)

    def remove(self) -> None:
        self._handle.remove()
        if (zero := self._zero()) is not None:
            del zero.step

    def _wrapped(self, step: Any) -> Any:
        def stepping(*args: Any, **kwargs: Any) -> Any:
            if self._observer.is_done:
                self._observer.end_script()
                return step(*args, **kwargs)
            zero: Any = self._zero()
            self._inner_groups = list(zero.optimizer.param_groups)  # in a step DeepSpeed sets one
            self._observer.start()
            result = step(*args, **kwargs)
            if len(self._gradients) == len(self._inner_groups):  # else it has left out the update
                self._observer.after(self._slots(zero))
            self._gradients.clear()
            return result

        return stepping

    def _before(self, inner: Any, args: Any, kwargs: Any) -> None:
        zero = self._zero()
        if self._observer.is_done or zero is None:
            return
        for index, group in enumerate(self._inner_groups):
            if any(group is each for each in inner.param_groups):
                self._gradients[index] = group["params"][0].grad
        if len(self._gradients) == len(self._inner_groups):
            found = list(self._named_gradients(zero))
            groups = tuple(
                group_of(group, self._names(own))
                for group, own in zip(self._inner_groups, _groups(zero), strict=True)
            )
            self._observer.before(Update(self._number, found, groups))

    def _names(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        names = self._observer.names_for(parameters)
        return [names[id(each)] for each in parameters]

    def _named_gradients(self, zero: Any) -> Iterator[tuple[str, Any]]:
        for index, parameters in enumerate(_groups(zero)):
            for name, each in zip(self._names(parameters), parameters, strict=True):
                yield from ((name, piece) for piece in _pieces(each, self._gradients[index]))

    def _slots(self, zero: Any) -> Iterator[tuple[str, Any]]:
        for group, parameters in zip(self._inner_groups, _groups(zero), strict=True):
            partition = group["params"][0]
            for slot, value in zero.optimizer.state.get(partition, {}).items():
                is_divided = isinstance(value, torch.Tensor) and value.shape == partition.shape
                for name, each in zip(self._names(parameters), parameters, strict=True):
                    values = _pieces(each, value) if is_divided else (value,)
                    yield from ((f"{name} {slot}", own) for own in values)


def _groups(zero: Any) -> list[list[torch.Tensor]]:
    found: list[list[torch.Tensor]] = next(
        (getattr(zero, each) for each in _GROUPS if hasattr(zero, each)), []
    )
    return found


def _parameters(zero: Any) -> Iterator[torch.Tensor]:
    return (each for group in _groups(zero) for each in group)


def _pieces(parameter: Any, partition: torch.Tensor) -> Iterator[Any]:
    """What a partition has of a parameter; a piece without elements if it has nothing."""
    mapping, shape = vars(parameter)["_hp_mapping"], tuple(parameter.shape)
    if mapping is None:
        return pieces_of(shape, partition[:0], 0)
    own = mapping.hp_fragment_address
    flat = partition.view(-1)[own.start : own.start + own.numel]
    return pieces_of(shape, flat, mapping.lp_fragment_address.start)
