"""Redirects a function of ``torch.nn.functional`` while a pass runs.

Layers look these functions up at every call, so no module is changed: subclasses that do more than
their base, and layers that run again in backward (activation checkpointing), are redirected, too.
A function has one patch for all threads, so Trainers may train in several of them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F


class Redirection:
    """Redirects one function, only in threads inside a block of ``to``.

    Several may redirect the same function: calls go to the one that the thread began last, and its
    ``plain`` is the one begun before.

    Args:
        name: of the function.
        owner: the module, or the class, that has it.
    """

    def __init__(self, name: str, owner: ModuleType | type[Any] = F) -> None:
        self._patch = _PATCHES.setdefault((owner, name), _Patch(name, owner))
        self._own = threading.local()

    @property
    def plain(self) -> Callable[..., Any]:
        """What is redirected."""
        below: Redirection | None = getattr(self._own, "below", None)
        return self._patch.plain if below is None else below.call

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement."""
        return self._own.target(*args, **kwargs)

    @contextmanager
    def to(self, target: Callable[..., Any], *, is_compiled: bool = False) -> Iterator[None]:
        """Within the block, calls in this thread go to ``target``; see ``begin``."""
        before = self.begin(target, is_compiled=is_compiled)
        try:
            yield
        finally:
            self.end(before)

    def begin(self, target: Callable[..., Any], *, is_compiled: bool = False) -> Any:
        """From now on, calls in this thread go to ``target``; returns the target before.

        Args:
            target: the replacement.
            is_compiled: the caller is compiled: ``target`` must not be compiled with it, because it
                may wait for other ranks.
        """
        self._patch.begin(is_compiled=is_compiled)
        before = getattr(self._own, "target", None)
        self._own.target = target
        if before is None:
            self._own.below = getattr(self._patch.own, "top", None)
            self._patch.own.top = self
        return before

    def end(self, before: Any) -> None:
        """End what ``begin`` began; ``before`` is what it returned."""
        self._own.target = before
        if before is None:
            self._patch.own.top, self._own.below = self._own.below, None
        self._patch.end()


class _Patch:
    """Stands in for a function while any thread redirects it.

    Attributes:
        own: ``own.top`` is the redirection that the thread began last.
        plain: the function.
    """

    def __init__(self, name: str, owner: ModuleType | type[Any]) -> None:
        self._name, self._owner = name, owner
        self._lock = threading.Lock()
        self._blocks = 0
        self._call = self._function()
        self.own = threading.local()
        self.plain: Callable[..., Any] = getattr(owner, name)

    def begin(self, *, is_compiled: bool) -> None:
        with self._lock:
            if self._blocks == 0:
                self.plain = getattr(self._owner, self._name)
                call = torch.compiler.disable(self._call) if is_compiled else self._call
                setattr(self._owner, self._name, call)
            self._blocks += 1

    def end(self) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                setattr(self._owner, self._name, self.plain)

    def _function(self) -> Callable[..., Any]:
        """The patched function: a plain function, so that it can be a method, too."""

        def call(*args: Any, **kwargs: Any) -> Any:
            top: Redirection | None = getattr(self.own, "top", None)
            return (self.plain if top is None else top.call)(*args, **kwargs)

        return call


_PATCHES: dict[tuple[ModuleType | type[Any], str], _Patch] = {}
