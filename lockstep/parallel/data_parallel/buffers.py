"""Buffers that several shares of one rank must not see each other change.

One forward pass over the whole batch changes a buffer once (running statistics, a power iteration,
a count of calls). So every share of a rank starts from the buffers that the step began with, and
those that its first share leaves behind are kept. In a pipeline so does every microbatch, but for
the statistics of BatchNorm.

A ``forward`` may write to a buffer, or assign another tensor in its place. Both are put back.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from lockstep import accelerators


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
        unique = list({id(one): one for one in tensors if one is not None}.values())
        return Kept(tensors, list(zip(unique, _copies(unique), strict=True)))

    def are_as_in(self, kept: Kept) -> bool:
        """Whether none has changed; of those on a device nobody asks, and they may have."""
        tensors = [buffers.get(name) for buffers, name in self._places]
        return all(now is then for now, then in zip(tensors, kept.tensors, strict=True)) and all(
            not accelerators.computes(buffer) and buffer.equal(values)
            for buffer, values in kept.values
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
        version. On a device that would wait for each of them: there all are written, and no version
        moves.
        """
        self._put_back(kept)
        written = []
        for buffer, values in kept.values:
            if _is_written_unasked(buffer):
                written.append((buffer.data, values))
            elif not buffer.equal(values):
                buffer.copy_(values)
        _copy(written)


def _is_written_unasked(buffer: torch.Tensor) -> bool:
    """It is on a device, and was not expanded: that cannot be written."""
    dims = zip(buffer.shape, buffer.stride(), strict=True)
    is_expanded = any(size > 1 and stride == 0 for size, stride in dims)
    return accelerators.computes(buffer) and not is_expanded


def _copies(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if not any(map(accelerators.computes, tensors)):
        return [one.clone() for one in tensors]
    copies = [torch.empty_like(one) for one in tensors]
    _copy(list(zip(copies, tensors, strict=True)))
    return copies


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """To each first the second: on a device one kernel does it for many of one type."""
    for dtype in {source.dtype for _, source in pairs}:
        own = [pair for pair in pairs if pair[1].dtype == dtype]
        torch._foreach_copy_([target for target, _ in own], [source for _, source in own])


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
