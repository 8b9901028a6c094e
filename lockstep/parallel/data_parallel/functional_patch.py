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

    Attributes:
        own: ``own.target`` is the thread's replacement.
    """

    def __init__(self, name: str, owner: ModuleType | type[Any] = F) -> None:
        self._patch = _PATCHES.setdefault((owner, name), _Patch(name, owner))
        self.own = threading.local()

    @property
    def plain(self) -> Callable[..., Any]:
        """What is redirected."""
        below: Redirection | None = getattr(self.own, "below", None)
        plain: Callable[..., Any] = self._patch.plain if below is None else below.own.target
        return plain

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
        patch = self._patch
        with patch.lock:
            if patch.blocks == 0:
                patch.plain = getattr(patch.owner, patch.name)
                call = torch.compiler.disable(patch.call) if is_compiled else patch.call
                setattr(patch.owner, patch.name, call)
            patch.blocks += 1
        before = getattr(self.own, "target", None)
        self.own.target = target
        if before is None:
            self.own.below = getattr(patch.own, "top", None)
            patch.own.top = self
        return before

    def end(self, before: Any) -> None:
        """End what ``begin`` began; ``before`` is what it returned."""
        patch = self._patch
        self.own.target = before
        if before is None:
            patch.own.top, self.own.below = self.own.below, None
        with patch.lock:
            patch.blocks -= 1
            if patch.blocks == 0:
                setattr(patch.owner, patch.name, patch.plain)


class _Patch:
    """Stands in for a function while any thread redirects it.

    Attributes:
        call: the stand-in.
        own: ``own.top`` is the redirection that the thread began last.
        blocks: how many have begun, in all threads; ``lock`` is held to change it.
        plain: the function.
    """

    def __init__(self, name: str, owner: ModuleType | type[Any]) -> None:
        self.name, self.owner = name, owner
        self.lock = threading.Lock()
        self.blocks = 0
        self.call = self._function()
        self.own = threading.local()
        self.plain: Callable[..., Any] = getattr(owner, name)

    def _function(self) -> Callable[..., Any]:
        """The patched function: a plain function, so that it can be a method, too."""

        def call(*args: Any, **kwargs: Any) -> Any:
            top: Redirection | None = getattr(self.own, "top", None)
            return (self.plain if top is None else top.own.target)(*args, **kwargs)

        return call


_PATCHES: dict[tuple[ModuleType | type[Any], str], _Patch] = {}
