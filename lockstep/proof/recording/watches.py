"""Calls a recorder right before and right after each update, whatever optimizer makes it.

A watch puts its hooks on an optimizer and removes them. It keeps neither the optimizer nor the
model alive.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from lockstep.proof.recording.observation import groups_of
from lockstep.proof.recording.record_frames import Group


class Update(NamedTuple):
    """An update, as a watch shows it.

    Attributes:
        optimizer: its number.
        gradients: with their parameters' names: tensors, or pieces of them.
        groups: of the optimizer.
    """

    optimizer: int
    gradients: Sequence[tuple[str, Any]]
    groups: tuple[Group, ...]


class Observer(Protocol):
    """What a watch calls."""

    @property
    def is_done(self) -> bool:
        """Whether nothing more is recorded."""

    def end_script(self) -> None:
        """End the script, if nothing but the record was asked for."""

    def names_for(self, parameters: Sequence[torch.Tensor]) -> dict[int, str]:
        """Names of parameters by id; those that the model does not have are left out."""

    def start(self) -> None:
        """Record what is there before the first update, which ``before`` may come too late for."""

    def before(self, update: Update) -> None:
        """Gradients are as the optimizer takes them."""

    def after(self, slots: Iterator[tuple[str, Any]]) -> None:
        """The update was made; ``slots`` are its optimizer's."""


class Watch(ABC):
    """Watches optimizers until it is removed."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the hooks."""


class TorchWatch(Watch):
    """Watches optimizers of torch: given ones, or all that step on the model's parameters.

    Hooks are not removed within a step, of this or of another thread, which goes through them. So
    the hook on all optimizers is one for the process, and stays.
    """

    def __init__(self, observer: Observer, optimizers: Sequence[Any] | None) -> None:
        self._observer = observer
        self._is_given = optimizers is not None
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._stepping = threading.local()  # an optimizer may call another one's step
        self._handles = []
        if optimizers is None:
            _watch_all(self)
            return
        for number, each in enumerate(optimizers):
            self._numbers[each] = number
            self._handles += [
                each.register_step_pre_hook(self.before),
                each.register_step_post_hook(self.after),
            ]

    def remove(self) -> None:
        _everywhere.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if self._observer.is_done:
            self._observer.end_script()
            return None
        stepping = getattr(self._stepping, "number", None)
        if stepping is not None and stepping != self._numbers.get(optimizer):
            return None  # a step within another's; one that failed is begun again
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        names = self._observer.names_for(parameters)
        if not (names or self._is_given):
            return None
        number = self._numbers.setdefault(optimizer, len(self._numbers))
        self._stepping.number = number
        names |= {
            id(each): f"optimizer {number}, parameter {index}"
            for index, each in enumerate(parameters)
            if id(each) not in names
        }

        def see() -> None:
            found = [(names[id(each)], each.grad) for each in parameters if each.grad is not None]
            self._observer.before(Update(number, found, groups_of(optimizer, names)))

        return _after_closure(see, args, kwargs)

    def after(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if getattr(self._stepping, "number", None) != self._numbers.get(optimizer, -1):
            return
        self._stepping.number = None
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        names = self._observer.names_for(parameters)
        self._observer.after(
            (f"{names[id(parameter)]} {slot}", value)
            for parameter in parameters
            if id(parameter) in names
            for slot, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor | int | float)
        )


_everywhere: set[TorchWatch] = set()
_hooks: list[Any] = []


def _watch_all(watch: TorchWatch) -> None:
    _everywhere.add(watch)
    if not _hooks:
        from torch.optim import optimizer as module

        _hooks.append(module.register_optimizer_step_pre_hook(_before_any))
        _hooks.append(module.register_optimizer_step_post_hook(_after_any))


def _before_any(optimizer: Any, args: Any, kwargs: Any) -> Any:
    for watch in tuple(_everywhere):
        args, kwargs = watch.before(optimizer, args, kwargs) or (args, kwargs)
    return args, kwargs


def _after_any(optimizer: Any, args: Any, kwargs: Any) -> None:
    for watch in tuple(_everywhere):
        watch.after(optimizer, args, kwargs)


def _after_closure(see: Callable[[], None], args: Any, kwargs: Any) -> Any:
    """See the gradients now, or behind the closure that computes them; returns new arguments."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        see()
        return None

    def closing() -> Any:
        result = closure()
        see()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closing}
    return (args[0], closing, *args[2:]), kwargs


def named(parameters: Sequence[torch.Tensor], names: Mapping[int, str]) -> dict[int, str]:
    """Those of the names that belong to parameters."""
    return {id(each): names[id(each)] for each in parameters if id(each) in names}
