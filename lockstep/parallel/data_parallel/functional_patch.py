"""Redirects a function of ``torch.nn.functional`` while a pass runs.

Layers look these functions up at every call, so no module is changed: subclasses that do more than
their base, and layers that run again in backward (activation checkpointing), are redirected, too.
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

    Args:
        name: of the function.
        owner: the module, or the class, that has it.
    """

    def __init__(self, name: str, owner: ModuleType | type[Any] = F) -> None:
        self._name = name
        self._owner = owner
        self._own = threading.local()
        self._lock = threading.Lock()
        self._blocks = 0
        self._call = self._function()
        self.plain: Callable[..., Any] = getattr(owner, name)

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
        with self._lock:
            if self._blocks == 0:
                self.plain = getattr(self._owner, self._name)
                call = torch.compiler.disable(self._call) if is_compiled else self._call
                setattr(self._owner, self._name, call)
            self._blocks += 1
        before = getattr(self._own, "target", None)
        self._own.target = target
        return before

    def end(self, before: Any) -> None:
        """End what ``begin`` began; ``before`` is what it returned."""
        self._own.target = before
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                setattr(self._owner, self._name, self.plain)

    def _function(self) -> Callable[..., Any]:
        """The patched function: a plain function, so that it can be a method, too."""

        def call(*args: Any, **kwargs: Any) -> Any:
            target = getattr(self._own, "target", None)
            return (target or self.plain)(*args, **kwargs)

        return call
