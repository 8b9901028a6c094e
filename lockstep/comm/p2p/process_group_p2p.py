"""Mail between stages that share no memory: announced at the board, sent from rank to rank.

A channel leads from each rank to each of its readers: a group of these two for the
tensors (``comm.transports.process_group``), and a mailbox of ``SharedMail`` for the metadata that
is needed to receive them. So ranks wait for each other where they check for failures, and the
metadata need no read from a device.

Messages of a channel are received in the order in which they were sent, which the sender's program
gives, and kept until they are read. Whenever a rank sends or reads a message, it begins to receive
all that are announced by then: so they come while it computes. A sender never waits for a reader to
want a message, as long as the mailbox has slots for all that may be on their way. So no order of
programs that is right with mailboxes alone can deadlock here; and backends that know messages by
their order only, and not by tags, are fine.

A message is one buffer, with any contents.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.comm.codec.message_codec import decode, encode
from lockstep.comm.collectives.gradients import TensorSpec, views_in
from lockstep.comm.p2p.interface import MailCarrier, MailKey, SharedMail
from lockstep.comm.p2p.shm_p2p import MailboxSpec
from lockstep.comm.shared_memory.shared_region import dense_stride
from lockstep.comm.transports.process_group import ProcessGroups
from lockstep.data.trees import Tree, map_tensors, tensors_of
from lockstep.plan.layout import flat_offsets

# The ranks that send and receive.
Pair = tuple[int, int]

# A placeholder for a tensor in the announcement of a message.
_PLACEHOLDER = torch.empty(0)


def announcement_key(pair: Pair) -> MailKey:
    """The kind of message by which a channel's messages are announced."""
    sender, receiver = pair
    return MailKey("announcement", receiver, 0, sender)


def channel_name(pair: Pair) -> str:
    """The name of a channel's group; the sender is its rank 0."""
    return "mail {} > {}".format(*pair)


@dataclass
class _Arrived:
    """A message that is here, and how many readers still need it."""

    tree: Tree
    num_readers: int


class GroupMail(MailCarrier):
    """One rank's end.

    Args:
        channels: the mailbox of each channel.
        announcements: carries what these mailboxes hold; see ``announcement_key``.
        groups: this rank's.
        rank: this rank.
        device: for tensors that arrive.
    """

    def __init__(
        self,
        channels: Mapping[Pair, MailboxSpec],
        announcements: SharedMail,
        groups: ProcessGroups,
        rank: int,
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._groups = groups
        self._out: dict[int, _Outgoing] = {}
        self._in: dict[int, _Incoming] = {}
        for pair, spec in channels.items():
            sender, receiver = pair
            if sender == rank:
                self._out[receiver] = _Outgoing(pair, groups, announcements, spec.num_slots)
            elif receiver == rank:
                self._in[sender] = _Incoming(pair, groups, announcements, device)
        self._here: dict[tuple[MailKey, int], _Arrived] = {}

    def put(self, key: MailKey, message: int, tree: Tree, readers: Sequence[int]) -> None:
        self._receive_announced()
        packed = None
        for reader, count in Counter(readers).items():
            if reader == self._rank:
                self._here[key, message] = _Arrived(map_tensors(_copy, tree), count)
            else:
                packed = _Packed(tree, self._groups) if packed is None else packed
                self._out[reader].send((*vars(key).values(), message, count), packed)

    def take(self, key: MailKey, message: int) -> Tree:
        tree = self._arrived(key, message).tree
        self._receive_announced()
        return map_tensors(_as_leaf, tree)

    def give_back(self, key: MailKey, message: int, reader: int) -> None:
        arrived = self._arrived(key, message)
        arrived.num_readers -= 1
        if not arrived.num_readers:
            del self._here[key, message]

    def _arrived(self, key: MailKey, message: int) -> _Arrived:
        while (key, message) not in self._here:
            (*parts, number, count), tree = self._in[key.sender].receive()
            self._here[MailKey(*parts), number] = _Arrived(tree, count)
        return self._here[key, message]

    def _receive_announced(self) -> None:
        for channel in self._in.values():
            channel.begin_announced()


class _Packed:
    """A tree as one buffer, and what is needed to make it of the buffer again."""

    def __init__(self, tree: Tree, groups: ProcessGroups) -> None:
        tensors = list(tensors_of(tree))
        specs = [TensorSpec("", tuple(one.shape), dense_stride(one), one.dtype) for one in tensors]
        _, self.num_bytes = flat_offsets([spec.extent for spec in specs])
        self.buffer = groups.buffer(self.num_bytes, groups.device)
        views = views_in(self.buffer, specs)
        if views:
            torch._foreach_copy_(views, [tensor.detach() for tensor in tensors])
        forms = [
            (spec.shape, spec.stride, spec.dtype, tensor.requires_grad)
            for spec, tensor in zip(specs, tensors, strict=True)
        ]
        self.form = (self.num_bytes, forms, map_tensors(lambda tensor: _PLACEHOLDER, tree))


def _unpacked(form: Any, buffer: torch.Tensor, device: torch.device) -> Tree:
    """The tree that ``_Packed`` was made of."""
    _, forms, frame = form
    specs = [TensorSpec("", shape, stride, dtype) for shape, stride, dtype, _ in forms]
    flags = [flag for *_, flag in forms]
    tensors = (
        view.to(device).requires_grad_(flag)
        for view, flag in zip(views_in(buffer, specs), flags, strict=True)
    )
    return map_tensors(lambda placeholder: next(tensors), frame)


@dataclass
class _Channel:
    """One end of a channel.

    Attributes:
        pair: the ranks at its ends.
        groups: this rank's.
        announcements: of the messages of all channels.
        number: of the last message that was sent, or begun to be received.
    """

    pair: Pair
    groups: ProcessGroups
    announcements: SharedMail
    number: int = field(default=0, init=False)


@dataclass
class _Outgoing(_Channel):
    """A channel's end where it is sent."""

    num_slots: int
    # gloo reads from the buffers.
    _pending: deque[tuple[Any, _Packed]] = field(default_factory=deque, init=False)

    def send(self, address: tuple[Any, ...], packed: _Packed) -> None:
        """Begin to send a message; wait only while the mailbox has no slot for it."""
        self.number += 1
        self._pending.append((self._begun(packed), packed))
        key, announcement = announcement_key(self.pair), encode((address, packed.form))
        self.announcements.put(key, self.number, announcement, [self.pair[1]])
        while len(self._pending) > self.num_slots:  # the one before in this slot was received
            work, _ = self._pending.popleft()
            if work is not None:
                self.groups.finish_begun(work)

    def _begun(self, packed: _Packed) -> Any:
        if not packed.num_bytes:
            return None
        with self.groups.naming_lost_rank():
            return self.groups[channel_name(self.pair)].send([packed.buffer], 1, self.number)


@dataclass
class _Coming:
    """A message that this rank has begun to receive.

    Attributes:
        number: of the message.
        address: of the message.
        form: of the tree in the buffer.
        buffer: to receive in.
        work: the transfer; None for an empty buffer.
    """

    number: int
    address: tuple[Any, ...]
    form: Any
    buffer: torch.Tensor
    work: Any


@dataclass
class _Incoming(_Channel):
    """A channel's end where it is received."""

    device: torch.device
    _coming: deque[_Coming] = field(default_factory=deque, init=False)

    def begin_announced(self) -> None:
        """Begin to receive all messages that are announced."""
        while self.announcements.is_here(announcement_key(self.pair), self.number + 1):
            self._begin()

    def receive(self) -> tuple[tuple[Any, ...], Tree]:
        """Wait for the next message: its address, and what it holds."""
        if not self._coming:
            self._begin()
        coming = self._coming.popleft()
        if coming.work is not None:
            self.groups.finish_begun(coming.work)
        self.announcements.give_back(announcement_key(self.pair), coming.number, 0)
        return coming.address, _unpacked(coming.form, coming.buffer, self.device)

    def _begin(self) -> None:
        """Begin to receive the next message, once it is announced."""
        self.number += 1
        announcement = self.announcements.take(announcement_key(self.pair), self.number)
        address, form = decode(announcement)
        buffer, work = self.groups.buffer(form[0], self.groups.device), None
        if form[0]:
            group = self.groups[channel_name(self.pair)]
            with self.groups.naming_lost_rank():
                work = group.recv([buffer], 0, self.number)
        self._coming.append(_Coming(self.number, address, form, buffer, work))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
