"""Buffers that several shares of one rank must not see each other change.

One forward pass over the whole batch changes a buffer once (running statistics, a power iteration,
a count of calls). So every share of a rank starts from the buffers that the step began with, and
those that its first share leaves behind are kept. In a pipeline so does every microbatch, but for
the statistics of BatchNorm.

A ``forward`` may write to a buffer, or assign another tensor in its place. Both are put back.
"""

from collections.abc import Collection, Iterator
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
    """A model's buffers, to be kept and put back.

    Args:
        model: the model.
        names: of some of its buffers; None for all.
    """

    def __init__(self, model: nn.Module, names: Collection[str] | None = None) -> None:
        # Where they are, not what they are: a forward pass may assign other tensors.
        self._places = [
            (module._buffers, name)
            for path, module in model.named_modules()
            for name in module._buffers
            if names is None or f"{path}.{name}".lstrip(".") in names
        ]

    def __bool__(self) -> bool:
        return bool(self._places)

    @torch.no_grad()
    def keep(self) -> Kept:
        """A copy of them all."""
        tensors = [buffers.get(name) for buffers, name in self._places]
        unique = {id(one): one for one in tensors if one is not None}
        return Kept(tensors, [(one, one.clone()) for one in unique.values()])

    def are_as_in(self, kept: Kept) -> bool:
        """Whether none has changed."""
        tensors = [buffers.get(name) for buffers, name in self._places]
        return all(now is then for now, then in zip(tensors, kept.tensors, strict=True)) and all(
            buffer.equal(values) for buffer, values in kept.values
        )

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


class ChangedOnce:
    """Has a batch change buffers once, as the first of its microbatches does.

    Args:
        buffers: of a stage.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._first: Kept | None = None
        self._changes = False

    def begin(self) -> None:
        """Another batch is on its way."""
        self._first = None

    @contextmanager
    def in_microbatch(self) -> Iterator[None]:
        """Around the forward pass of a microbatch: it sees what the first one has seen."""
        if self._first is None:
            self._first = self._buffers.keep()
            yield
            self._changes = not self._buffers.are_as_in(self._first)
        elif not self._changes:
            yield
        else:
            left = self._buffers.keep()
            self._buffers.restore(self._first)
            yield
            self._buffers.restore(left)
