"""Mail between stages: who sends what to whom, and in which mailbox it lies.

For every value that crosses a cut, each rank of its stage has a mailbox, which the stages that use
it read. There is one for the random stream where a stage goes on with that of another, and in
training one for each user's gradient of a value on the way back.

Messages are numbered by what their stage has computed on their rank, so sender and readers know the
number without asking.

What goes to another host, or comes from there, a mail thread carries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.board import Board
from lockstep.comm.codec import decode, encode
from lockstep.comm.mail_channels import MailChannels
from lockstep.comm.mailboxes import Mailbox, MailboxSpec
from lockstep.comm.shared_memory import SharedRegion
from lockstep.data.trees import tensors_of
from lockstep.parallel.partition import Partition
from lockstep.plan.schedules import StageGraph

_VALUE, _GRADIENT, _STREAM = "value", "gradient", "stream"


@dataclass(frozen=True)
class _Key:
    """A mailbox: what lies in it, of which stage, sent by which rank."""

    kind: str
    number: int  # of the value; of the stage that leaves the stream
    stage: int  # that sends
    sender: int


@dataclass(frozen=True, kw_only=True)
class MailSpec:
    """All mailboxes of a model in training, or of one in evaluation: the same on every rank.

    Attributes:
        graph: the stages and their ranks.
        partition: what crosses.
        boxes: the mailboxes, in the order in which they lie in memory.
    """

    graph: StageGraph
    partition: Partition
    boxes: Mapping[_Key, MailboxSpec]

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return sum(box.num_bytes for box in self.boxes.values())


def mail_spec(
    graph: StageGraph, partition: Partition, num_slots: int, *, training: bool
) -> MailSpec:
    """The mailboxes of a partition.

    Args:
        graph: the stages and their ranks.
        partition: what crosses.
        num_slots: messages of one kind that may be in use at once.
        training: there are gradients.
    """
    stream_bytes = torch.get_rng_state().numel()
    boxes: dict[_Key, MailboxSpec] = {}

    def add(kind: str, number: int, stage: int, num_readers: int, num_bytes: int) -> None:
        for sender in graph.ranks[stage]:
            boxes[_Key(kind, number, stage, sender)] = MailboxSpec(
                name=f"what stage {stage} sends ({kind} {number})",
                num_slots=num_slots,
                num_readers=num_readers,
                capacity_bytes=num_bytes,
            )

    for stage, part in enumerate(partition.parts):
        for value, users in part.sent.items():
            add(_VALUE, value, stage, len(users), partition.value_bytes[value])
        if part.stream_to is not None:
            add(_STREAM, stage, stage, 1, stream_bytes)
        for value in part.received if training else ():
            add(_GRADIENT, value, stage, 1, partition.value_bytes[value])
    return MailSpec(graph=graph, partition=partition, boxes=boxes)


class StageMail:
    """One rank's view of the mailboxes.

    Args:
        spec: the layout.
        region: where they lie.
        offset_bytes: from where on.
        board: to wait at.
        ranks_here: those of this host.
        mail_channels: to the others; None where there are none.
        first_box: the number of the first mailbox, as mail threads count them.
    """

    def __init__(
        self,
        spec: MailSpec,
        region: SharedRegion,
        offset_bytes: int,
        board: Board,
        *,
        ranks_here: range,
        mail_channels: MailChannels | None = None,
        first_box: int = 0,
    ) -> None:
        self._ranks_here = ranks_here
        self._mail_channels = mail_channels
        self._numbers = {key: number for number, key in enumerate(spec.boxes, first_box)}
        self._specs = spec.boxes
        self._graph = spec.graph
        self._parts = spec.partition.parts
        self._rank = board.rank
        self._boxes: dict[_Key, Mailbox] = {}
        for key, box in spec.boxes.items():
            self._boxes[key] = Mailbox(box, region, offset_bytes, board)
            offset_bytes += box.num_bytes
        self._sent = [[0] * len(ranks) for ranks in spec.graph.ranks]
        self._num_filled = 0

    def begin_pass(self, num_filled: int) -> None:
        """The first ``num_filled`` shares of another batch are on their way."""
        for sent in self._sent:
            for replica in range(len(sent)):
                sent[replica] += len(range(replica, self._num_filled, len(sent)))
        self._num_filled = num_filled

    # --- values ----------------------------------------------------------------------------------

    def send(self, stage: int, value: int, share: int, tree: Any) -> None:
        """Send a value of ``stage`` to all that use it."""
        readers = [self._graph.rank_of(user, share) for user in self._parts[stage].sent[value]]
        self._put(_VALUE, value, stage, share, tree, readers)

    def receive(self, value: int, sender: int, share: int) -> Any:
        """A value of stage ``sender``; it is good until ``give_back``."""
        return self._take(_VALUE, value, sender, share)

    def give_back(self, stage: int, share: int) -> None:
        """``stage`` needs what it has received for a share no more."""
        for value, sender in self._parts[stage].received.items():
            reader = self._parts[sender].sent[value].index(stage)
            self._give_back(_VALUE, value, sender, share, reader)

    # --- gradients -------------------------------------------------------------------------------

    def send_gradient(self, stage: int, value: int, share: int, gradients: Any) -> None:
        """Send the gradient of a value that ``stage`` has received back to where it came from."""
        home = self._parts[stage].received[value]
        self._put(_GRADIENT, value, stage, share, gradients, [self._graph.rank_of(home, share)])

    def receive_gradients(self, stage: int, value: int, share: int) -> list[Any]:
        """What all stages that use a value of ``stage`` have sent back, in their order."""
        users = self._parts[stage].sent[value]
        return [self._take(_GRADIENT, value, user, share) for user in users]

    def give_gradients_back(self, stage: int, value: int, share: int) -> None:
        """``stage`` needs these gradients no more."""
        for user in self._parts[stage].sent[value]:
            self._give_back(_GRADIENT, value, user, share, 0)

    # --- random streams --------------------------------------------------------------------------

    def send_stream(self, stage: int, share: int) -> None:
        """Leave torch's random stream to the next stage that draws, if there is one."""
        successor = self._parts[stage].stream_to
        if successor is not None:
            readers = [self._graph.rank_of(successor, share)]
            self._put(_STREAM, stage, stage, share, torch.get_rng_state(), readers)

    def receive_stream(self, stage: int, share: int) -> None:
        """Go on with torch's random stream where another stage has left it, if one has."""
        before = self._parts[stage].stream_from
        if before is not None:
            torch.set_rng_state(self._take(_STREAM, before, before, share).clone())
            self._give_back(_STREAM, before, before, share, 0)

    # --- parts -----------------------------------------------------------------------------------

    def _put(
        self, kind: str, number: int, stage: int, share: int, tree: Any, readers: Sequence[int]
    ) -> None:
        key = _Key(kind, number, stage, self._rank)
        message = self._number(stage, share)
        here = [rank if rank in self._ranks_here else None for rank in readers]
        if any(rank is not None for rank in here):
            self._boxes[key].put(message, tree, here)
        abroad = [rank for rank in readers if rank not in self._ranks_here]
        if abroad:
            assert self._mail_channels is not None
            payload = encode((tree, [each.requires_grad for each in tensors_of(tree)]))
            num_slots = self._specs[key].num_slots
            self._mail_channels.put(self._numbers[key], message, payload, abroad, num_slots)

    def _take(self, kind: str, number: int, stage: int, share: int) -> Any:
        sender = self._graph.rank_of(stage, share)
        key = _Key(kind, number, stage, sender)
        message = self._number(stage, share)
        if sender in self._ranks_here:
            return self._boxes[key].take(message, sender)
        assert self._mail_channels is not None
        tree, flags = decode(self._mail_channels.take(self._numbers[key], message, sender))
        for tensor, needs_gradient in zip(tensors_of(tree), flags, strict=True):
            tensor.requires_grad_(needs_gradient)
        return tree

    def _give_back(self, kind: str, number: int, stage: int, share: int, reader: int) -> None:
        sender = self._graph.rank_of(stage, share)
        key = _Key(kind, number, stage, sender)
        message = self._number(stage, share)
        if sender in self._ranks_here:
            self._boxes[key].give_back(message, reader)
            return
        assert self._mail_channels is not None
        self._mail_channels.acknowledge(self._numbers[key], message, sender)

    def _number(self, stage: int, share: int) -> int:
        sent = self._sent[stage]
        return sent[share % len(sent)] + share // len(sent) + 1
