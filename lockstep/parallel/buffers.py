"""Buffers that several shares of one rank must not see each other change.

One forward pass over the whole batch changes a buffer once (running statistics, a power iteration,
a count of calls). So every share of a rank starts from the buffers that the step began with, and
those that its first share leaves behind are kept.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

# Each buffer's values.
Kept = list[torch.Tensor]


class Buffers:
    """A model's buffers, to be kept and put back."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(model.buffers())

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def keep(self) -> Kept:
        """A copy of them all."""
        return [buffer.clone() for buffer in self._buffers]

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

    def _set(self, values: Sequence[torch.Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.data.copy_(value)

    @torch.no_grad()
    def restore(self, kept: Kept) -> None:
        """Put back what has changed; the others may be needed by a backward pass as they are.

        Values are compared: torch's own BatchNorm changes running statistics without moving the
        version.
        """
        for buffer, values in zip(self._buffers, kept, strict=True):
            if not buffer.equal(values):
                buffer.copy_(values)
