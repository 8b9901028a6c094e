"""Calls a recorder right before and after each update of an optimizer of Keras, on torch."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lockstep.proof.recording.record_frames import Group
from lockstep.proof.recording.watches import Observer, Update, Watch

_OPTIONS = ("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "beta_1", "beta_2")


def is_of_keras(optimizer: Any) -> bool:
    """Whether it is an optimizer of Keras."""
    return any(each.__module__.startswith("keras.") for each in type(optimizer).__mro__)


class KerasWatch(Watch):
    """Watches optimizers of Keras, by their method ``apply``, which ``fit`` calls, too.

    Gradients are those of ``_backend_update_step``, which ``apply`` calls for an update: summed by
    a wrapper of ``apply``, accumulated and clipped.
    """

    def __init__(self, observer: Observer, optimizers: Sequence[Any]) -> None:
        self._observer = observer
        self._optimizers = [weakref.ref(each) for each in optimizers]
        self._has_seen = False
        for number, each in enumerate(optimizers):
            each._backend_update_step = self._seeing(number, each, each._backend_update_step)
            each.apply = self._wrapped(each, each.apply)

    def remove(self) -> None:
        for reference in self._optimizers:
            if (optimizer := reference()) is not None:
                del optimizer.apply, optimizer._backend_update_step
        self._optimizers.clear()

    def _wrapped(self, optimizer: Any, apply: Callable[..., Any]) -> Any:
        def applying(*args: Any, **kwargs: Any) -> Any:
            if self._observer.is_done:
                self._observer.end_script()
                return apply(*args, **kwargs)
            self._observer.start()
            self._has_seen = False
            result = apply(*args, **kwargs)
            if self._has_seen:
                self._observer.after(_slots(optimizer))
            return result

        return applying

    def _seeing(self, number: int, optimizer: Any, update: Callable[..., Any]) -> Any:
        def updating(gradients: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
            gradients = list(gradients)
            self._see(number, optimizer, gradients, variables)
            return update(gradients, variables, *args, **kwargs)

        return updating

    def _see(
        self, number: int, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        if self._observer.is_done:
            return
        self._has_seen = True
        names = self._observer.names_for([each.value for each in variables])
        named = [names.get(id(each.value), each.path) for each in variables]
        found = [
            (name, torch.as_tensor(each))
            for name, each in zip(named, gradients, strict=True)
            if each is not None
        ]
        self._observer.before(Update(number, found, (_group(optimizer, named),)))


def _group(optimizer: Any, names: Sequence[str]) -> Group:
    options = {name: getattr(optimizer, name) for name in _OPTIONS if hasattr(optimizer, name)}
    plain = {name: each for name, each in options.items() if isinstance(each, float | int | None)}
    return Group(tuple(names), {"lr": float(optimizer.learning_rate), **plain})


def _slots(optimizer: Any) -> Iterator[tuple[str, Any]]:
    for each in optimizer.variables:
        _, _, name = each.path.rpartition("/")
        if name not in ("iteration", "learning_rate"):
            yield name, each.value
