"""Buffers that several shares of one rank must not see each other change.

One forward pass over the whole batch changes a buffer once (running statistics, a power iteration,
a count of calls). So every share of a rank starts from the buffers that the step began with, and
those that its first share leaves behind are kept.

A ``forward`` may write to a buffer, or assign another tensor in its place. Both are put back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn


class Kept(NamedTuple):
    """A model's buffers at one moment.

    Attributes:
        tensors: the buffers themselves, by place; None where there was none.
        values: each of them once, and its values.
    """

    tensors: list[torch.Tensor | None]
    values: list[tuple[torch.Tensor, torch.Tensor]]


class Buffers:
    """A model's buffers, to be kept and put back."""

    def __init__(self, model: nn.Module) -> None:
        # Where they are, not what they are: a forward pass may assign other tensors.
        self._places = [
            (module._buffers, name) for module in model.modules() for name in module._buffers
        ]

    def __bool__(self) -> bool:
        return bool(self._places)

    @torch.no_grad()
    def keep(self) -> Kept:
        """A copy of them all."""
        tensors = [buffers.get(name) for buffers, name in self._places]
        unique = {id(one): one for one in tensors if one is not None}
        return Kept(tensors, [(one, one.clone()) for one in unique.values()])

    @contextmanager
    def as_in(self, kept: Kept) -> Iterator[None]:
        """Within the block they have the values that were kept, and afterwards those of before.

        No version moves: what a backward pass needs of them is computed again in the block.
        """
        now = self.keep()
        self._set(kept)
        try:
            yield
        finally:
            self._set(now)

    def _set(self, kept: Kept) -> None:
        self._put_back(kept)
        for buffer, values in kept.values:
            buffer.data.copy_(values)

    def _put_back(self, kept: Kept) -> None:
        """The same tensors in the same places."""
        for (buffers, name), tensor in zip(self._places, kept.tensors, strict=True):
            if buffers.get(name) is not tensor:
                buffers[name] = tensor

    @torch.no_grad()
    def restore(self, kept: Kept) -> None:
        """Put back what has changed; the others may be needed by a backward pass as they are.

        Values are compared: torch's own BatchNorm changes running statistics without moving the
        version.
        """
        self._put_back(kept)
        for buffer, values in kept.values:
            if not buffer.equal(values):
                buffer.copy_(values)
