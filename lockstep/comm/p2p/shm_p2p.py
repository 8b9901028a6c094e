"""Mailboxes: tensors on their way from one rank of a host to others, in memory that all map.

A stage of a pipeline hands what it has computed to the stages that need it. For each such value
there is a mailbox with a few slots that are used in turn. The sender copies the value into a slot
once; its readers use it right there, without a copy, until they give the slot back.

A slot holds two kinds of words, all of which only grow: the number of the message that lies in it,
written by the sender, and for each reader the number of the last message that it is done with.
A rank that waits for a word reads it, yields the core for a moment, then sleeps on the bell of the
rank that will write it (``comm.shared_memory.status_board``). The message itself is a pickled
skeleton (structure, shapes, flags) and the tensors' elements. So a value may be any tree of tensors
and numbers, and its shape may differ from message to message as long as there is room for it.
"""

import ctypes
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.shared_memory.shared_region import SharedRegion, dense_stride
from lockstep.comm.shared_memory.status_board import StatusBoard
from lockstep.errors import ModelError
from lockstep.formatting import format_bytes
from lockstep.pickling import Pickler
from lockstep.plan.layout import align

# Room for the skeleton of a message.
SKELETON_BYTES = 4096

_WORD_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class MailboxSpec:
    """A mailbox: the same on every rank.

    Attributes:
        name: its purpose, for error messages.
        num_slots: messages that may be on their way or in use.
        num_readers: stages that read every message.
        capacity_bytes: room for a message's tensors.
    """

    name: str
    num_slots: int
    num_readers: int
    capacity_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Size of a slot: its words, the skeleton, the tensors."""
        return self.data_offset + align(self.capacity_bytes)

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return self.num_slots * self.slot_bytes

    @property
    def data_offset(self) -> int:
        """Where in a slot the tensors begin."""
        return align((2 + self.num_readers) * _WORD_BYTES + SKELETON_BYTES)


class Mailbox:
    """One rank's view of a mailbox. One rank alone puts messages into it.

    Args:
        spec: the layout.
        region: where it lies.
        offset_bytes: from where on.
        board: to wait at.
    """

    def __init__(
        self, spec: MailboxSpec, region: SharedRegion, offset_bytes: int, board: StatusBoard
    ) -> None:
        self._spec = spec
        self._board = board
        self._slots = [
            _Slot(spec, region, offset_bytes + slot * spec.slot_bytes)
            for slot in range(spec.num_slots)
        ]
        # The last messages put.
        self._readers: list[Sequence[int | None]] = [()] * spec.num_slots

    def put(self, number: int, tree: Any, readers: Sequence[int | None]) -> None:
        """Send message ``number``, once its slot is free.

        Args:
            number: messages are numbered from 1; each goes to the slot that its number says.
            tree: tensors and what else a message holds.
            readers: the ranks that will read it here, one per reader; None for another host's.

        Raises:
            ModelError: the message is larger than the slot.
        """
        index = number % len(self._slots)
        slot = self._slots[index]
        for rank, done in zip(self._readers[index], slot.done, strict=False):
            if rank is not None:
                self._wait_for(done, slot.ready.value, rank)
        self._readers[index] = tuple(readers)
        slot.write(tree)
        slot.ready.value = number
        self._board.ring()

    def take(self, number: int, sender: int) -> Any:
        """Message ``number`` of rank ``sender``; its tensors lie in the slot.

        They are good until ``give_back``.
        """
        slot = self._slots[number % len(self._slots)]
        self._wait_for(slot.ready, number, sender)
        assert slot.ready.value == number, (self._spec.name, slot.ready.value, number)
        return slot.read()

    def is_here(self, number: int) -> bool:
        """True if message ``number`` can be taken without waiting."""
        return self._slots[number % len(self._slots)].ready.value == number

    def give_back(self, number: int, reader: int) -> None:
        """Reader ``reader`` no longer needs message ``number``."""
        self._slots[number % len(self._slots)].done[reader].value = number
        self._board.ring()

    def _wait_for(self, word: ctypes.c_uint64, number: int, rank: int) -> None:
        if word.value < number:
            self._board.wait_until(rank, lambda: word.value >= number)


# Where a tensor lies after the beginning of the tensors, and how: offset in bytes, dtype, shape,
# strides, whether it takes part in backward.
_Place = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], bool]


class _Slot:
    """One place for a message."""

    def __init__(self, spec: MailboxSpec, region: SharedRegion, offset_bytes: int) -> None:
        self._spec = spec
        self._region = region
        words = [
            ctypes.c_uint64.from_buffer(region.memory, offset_bytes + index * _WORD_BYTES)
            for index in range(2 + spec.num_readers)
        ]
        self.ready, self._skeleton_bytes, *self.done = words
        self._skeleton = offset_bytes + len(words) * _WORD_BYTES
        self._data = offset_bytes + spec.data_offset
        self._tensors: dict[_Place, torch.Tensor] = {}

    def write(self, tree: Any) -> None:
        """Copy a message into the slot."""
        buffer = io.BytesIO()
        _Packer(buffer, self._write_tensor, self._spec).dump(tree)
        skeleton = buffer.getvalue()
        if len(skeleton) > SKELETON_BYTES:
            raise _too_large(self._spec, f"{len(skeleton)} bytes besides its tensors")
        self._region.memory[self._skeleton : self._skeleton + len(skeleton)] = skeleton
        self._skeleton_bytes.value = len(skeleton)

    def read(self) -> Any:
        """The message; its tensors lie in the slot, and each is a leaf of autograd's graph."""
        stop = self._skeleton + self._skeleton_bytes.value
        skeleton = self._region.memory[self._skeleton : stop]
        return _Unpacker(io.BytesIO(skeleton), self._open_tensor).load()

    def _write_tensor(self, place: _Place, tensor: torch.Tensor) -> None:
        self._tensor(place).copy_(tensor.detach())

    def _open_tensor(self, place: _Place) -> torch.Tensor:
        return self._tensor(place).detach().requires_grad_(place[-1])

    def _tensor(self, place: _Place) -> torch.Tensor:
        if place not in self._tensors:
            offset, dtype, shape, stride, _ = place
            self._tensors[place] = self._region.tensor(self._data + offset, dtype, shape, stride)
        return self._tensors[place]


class _Packer(Pickler):
    """Writes tensors aside, one after the other, and their places into the pickle."""

    def __init__(
        self, file: io.BytesIO, write: Callable[[_Place, torch.Tensor], None], spec: MailboxSpec
    ) -> None:
        super().__init__(file)
        self._write = write
        self._spec = spec
        self._end = 0

    def persistent_id(self, obj: Any) -> _Place | None:
        if not isinstance(obj, torch.Tensor):
            return None
        stride = dense_stride(obj)
        place = self._end, obj.dtype, tuple(obj.shape), stride, obj.requires_grad
        self._end = align(self._end + obj.numel() * obj.element_size())
        if self._end > align(self._spec.capacity_bytes):
            raise _too_large(self._spec, f"{format_bytes(self._end)} and more")
        self._write(place, obj)
        return place


class _Unpacker(pickle.Unpickler):
    """The inverse of ``_Packer``."""

    def __init__(self, file: io.BytesIO, read: Callable[[_Place], torch.Tensor]) -> None:
        super().__init__(file)
        self._read = read

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return self._read(pid)


def _too_large(spec: MailboxSpec, received: str) -> ModelError:
    return ModelError(
        f"There is room for {format_bytes(spec.capacity_bytes)} of {spec.name}, as much as "
        "the first batch needed.",
        received=received,
        fix="Pad samples to one size, begin with the largest batch, or cut the model elsewhere.",
    )
