"""Isolates the buffers of several shares of one rank from each other's changes.

One forward pass over the whole batch changes a buffer once (running statistics, a power iteration,
a count of calls). So every share of a rank starts from the step's initial buffers, and the buffers
after its first share are kept. In a pipeline the same holds for every microbatch, except for the
statistics of BatchNorm.

A ``forward`` may write to a buffer, resize it (as observers of quantization do in their first
pass), or assign another tensor in its place. All of this is restored.
"""

import operator
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import nn

from lockstep import accelerators
from lockstep.data.trees import MOST_RESIZED_BYTES


class Kept(NamedTuple):
    """A model's buffers at one moment.

    Attributes:
        tensors: the buffers themselves, by place; None for a missing one.
        values: each of them once, with a copy of its values.
    """

    tensors: list[torch.Tensor | None]
    values: list[tuple[torch.Tensor, torch.Tensor]]


class Buffers:
    """Copies and restores a model's buffers.

    Args:
        model: the model.
        names: of some of its buffers; None for all.
    """

    def __init__(self, model: nn.Module, names: Collection[str] | None = None) -> None:
        # Their places, not the tensors: a forward pass may assign other tensors.
        self._places = [
            (module._buffers, name)
            for path, module in model.named_modules()
            for name in module._buffers
            if names is None or f"{path}.{name}".lstrip(".") in names
        ]

    def __bool__(self) -> bool:
        return bool(self._places)

    @torch.no_grad()
    def keep(self, older: Kept | None = None) -> Kept:
        """A copy of all buffers; in the memory of an older copy, if it is of the same tensors."""
        tensors = [buffers.get(name) for buffers, name in self._places]
        if older is not None and older.values and _fits(tensors, older):
            _copy([(values, buffer) for buffer, values in older.values])
            return older
        unique = list({id(one): one for one in tensors if one is not None}.values())
        return Kept(tensors, list(zip(unique, _copies(unique), strict=True)))

    def are_as_in(self, kept: Kept) -> bool:
        """True if none has changed; buffers on a device are not compared and count as changed."""
        tensors = [buffers.get(name) for buffers, name in self._places]
        return all(now is then for now, then in zip(tensors, kept.tensors, strict=True)) and all(
            not accelerators.computes(buffer) and buffer.equal(values)
            for buffer, values in kept.values
        )

    def as_in(self, kept: Kept) -> AbstractContextManager[None]:
        """Sets the kept values within a block, and restores the current ones after it.

        Versions do not change: the block recomputes values of these buffers for a backward pass.
        It may be entered again: several backward passes recompute one forward pass.
        """
        return _SetWithin(self, kept)

    def _set(self, kept: Kept) -> None:
        self._put_back(kept)
        for buffer, values in kept.values:
            buffer.data.copy_(values)

    def _put_back(self, kept: Kept) -> None:
        """Put the same tensors in the same places, in the same sizes."""
        for (buffers, name), tensor in zip(self._places, kept.tensors, strict=True):
            if buffers.get(name) is not tensor:
                buffers[name] = tensor
        for buffer, values in kept.values:
            if buffer.shape != values.shape:
                buffer.resize_(values.shape)

    @torch.no_grad()
    def restore(self, kept: Kept) -> None:
        """Restore changed buffers only: a backward pass may need the others unmodified.

        Values are compared: torch's own BatchNorm changes running statistics without a new version.
        On a device comparisons would wait for each buffer: there all are written, without a new
        version.
        """
        self._put_back(kept)
        written = []
        for buffer, values in kept.values:
            if _is_written_unasked(buffer):
                written.append((buffer.data, values))
            elif not buffer.equal(values):
                buffer.copy_(values)
        _copy(written)


class _SetWithin(AbstractContextManager[None]):
    def __init__(self, buffers: Buffers, kept: Kept) -> None:
        self._buffers, self._kept = buffers, kept
        self._before: list[Kept] = []

    def __enter__(self) -> None:
        self._before.append(self._buffers.keep())
        self._buffers._set(self._kept)

    def __exit__(self, *error: object) -> None:
        self._buffers._set(self._before.pop())


def give_own_memory(model: nn.Module) -> None:
    """Move small buffers that came in another process's memory, so that passes may resize them."""
    for buffer in model.buffers():
        is_small = buffer.layout == torch.strided and buffer.nbytes <= MOST_RESIZED_BYTES
        if is_small and not buffer.untyped_storage().resizable():
            buffer.data = buffer.data.clone()


def _fits(tensors: Sequence[torch.Tensor | None], older: Kept) -> bool:
    """True if these are the tensors of an older copy, in the sizes that they had."""
    sizes = [buffer.shape == values.shape for buffer, values in older.values]
    own = older.tensors
    return all(sizes) and len(tensors) == len(own) and all(map(operator.is_, tensors, own))


def _is_written_unasked(buffer: torch.Tensor) -> bool:
    """True for a buffer on a device that is not expanded: an expanded one cannot be written."""
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
    """Copy each second tensor to the first: on a device one kernel copies many of one type."""
    for dtype in {source.dtype for _, source in pairs}:
        own = [pair for pair in pairs if pair[1].dtype == dtype]
        torch._foreach_copy_([target for target, _ in own], [source for _, source in own])


class ChangedOnce:
    """Makes a batch change buffers once, by its first microbatch.

    Args:
        buffers: of a stage.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._first: Kept | None = None
        self._changes = False

    def begin(self) -> None:
        """Begin another batch."""
        self._first = None

    @contextmanager
    def in_microbatch(self) -> Iterator[None]:
        """Entered around a microbatch's forward pass: all start from the same buffers."""
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
