"""Mail between stages: the senders and readers of messages.

For every value that crosses a cut, each rank of its stage sends messages to the stages that use it.
Other messages have the random stream, if a stage continues that of another, and in training the
gradient of a value from each stage that uses it.

Messages are numbered by their rank's passes of their stage, so sender and readers know the number
without communication. ``comm.p2p.interface`` carries them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.comm.p2p.interface import MailCarrier, MailKey
from lockstep.comm.p2p.process_group_p2p import Pair
from lockstep.comm.p2p.shm_p2p import MailboxSpec
from lockstep.data.order import set_torch_streams, torch_streams
from lockstep.parallel.pipeline.partition import Partition
from lockstep.plan.pipeline.stage_graph import StageGraph

_VALUE, _GRADIENT, _STREAM = "value", "gradient", "stream"


@dataclass(frozen=True, kw_only=True)
class MailSpec:
    """All mail of a model in training, or of one in evaluation: the same on every rank.

    Attributes:
        graph: the stages and their ranks; ``degree`` ranks that divide layers together are one.
        degree: how many those are. They run the same passes, and each has mail from, and to, those
            at its place.
        partition: lists the values that cross.
        boxes: the mailboxes, in their order in memory, if ranks share memory.
        channels: the channels, if they do not; see ``GroupMail``.
    """

    graph: StageGraph
    degree: int
    partition: Partition
    boxes: Mapping[MailKey, MailboxSpec]
    channels: Mapping[Pair, MailboxSpec]

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return sum(box.num_bytes for box in (*self.boxes.values(), *self.channels.values()))


def mail_spec(
    graph: StageGraph,
    partition: Partition,
    num_slots: int,
    *,
    degree: int = 1,
    training: bool,
    shares_memory: bool = True,
) -> MailSpec:
    """The mail of a partition.

    Args:
        graph: see ``MailSpec``.
        partition: lists the values that cross.
        num_slots: messages of one kind that may be in use at once.
        degree: see ``MailSpec``.
        training: there are gradients.
        shares_memory: ranks of a host share memory.
    """
    stream_bytes = torch_streams().numel()
    graphs = [graph.at(place, degree) for place in range(degree)]
    boxes: dict[MailKey, MailboxSpec] = {}
    kinds: Counter[Pair] = Counter()

    def add(kind: str, number: int, stage: int, readers: Sequence[int], num_bytes: int) -> None:
        for sender in (rank for one in graphs for rank in one.ranks[stage]):
            boxes[MailKey(kind, number, stage, sender)] = MailboxSpec(
                name=f"what stage {stage} sends ({kind} {number})",
                num_slots=num_slots,
                num_readers=len(readers),
                capacity_bytes=num_bytes,
            )
        met = {pair for one in graphs for reader in readers for pair in one.meetings(stage, reader)}
        kinds.update(pair for pair in met if len(set(pair)) == 2)

    for stage, part in enumerate(partition.parts):
        for value, users in part.sent.items():
            add(_VALUE, value, stage, users, partition.value_bytes[value])
        if part.stream_to is not None:
            add(_STREAM, stage, stage, [part.stream_to], stream_bytes)
        for value, home in part.received.items() if training else ():
            add(_GRADIENT, value, stage, [home], partition.value_bytes[value])
    if shares_memory:
        return MailSpec(graph=graph, degree=degree, partition=partition, boxes=boxes, channels={})
    channels = {
        pair: MailboxSpec(
            name="the announcement of what rank {} sends to rank {}".format(*pair),
            num_slots=num_slots * kinds[pair],
            num_readers=1,
            capacity_bytes=0,
        )
        for pair in sorted(kinds)
    }
    return MailSpec(graph=graph, degree=degree, partition=partition, boxes={}, channels=channels)


class StageMail:
    """One rank's view of the mail.

    Args:
        spec: all mail.
        carrier: carries it.
        rank: this rank.
    """

    def __init__(self, spec: MailSpec, carrier: MailCarrier, rank: int) -> None:
        self._graph = spec.graph.at(rank % spec.degree, spec.degree)
        self._parts = spec.partition.parts
        self._carrier = carrier
        self._rank = rank
        self._sent = [[0] * len(ranks) for ranks in spec.graph.ranks]
        self._num_filled = 0

    def begin_pass(self, num_filled: int) -> None:
        """Begin another batch, of ``num_filled`` shares."""
        for sent in self._sent:
            for replica in range(len(sent)):
                sent[replica] += len(range(replica, self._num_filled, len(sent)))
        self._num_filled = num_filled

    # --- values ----------------------------------------------------------------------------------

    def send(self, stage: int, value: int, share: int, tree: Any) -> None:
        """Send a value of ``stage`` to all stages that use it."""
        readers = [self._graph.rank_of(user, share) for user in self._parts[stage].sent[value]]
        self._put(_VALUE, value, stage, share, tree, readers)

    def receive(self, value: int, sender: int, share: int) -> Any:
        """A value of stage ``sender``; it is valid until ``give_back``."""
        return self._take(_VALUE, value, sender, share)

    def give_back(self, stage: int, share: int) -> None:
        """Give back the values that ``stage`` has received for a share."""
        for value, sender in self._parts[stage].received.items():
            reader = self._parts[sender].sent[value].index(stage)
            self._give_back(_VALUE, value, sender, share, reader)

    # --- gradients -------------------------------------------------------------------------------

    def send_gradient(self, stage: int, value: int, share: int, gradients: Any) -> None:
        """Send the gradient of a value that ``stage`` has received back to the value's stage."""
        home = self._parts[stage].received[value]
        self._put(_GRADIENT, value, stage, share, gradients, [self._graph.rank_of(home, share)])

    def receive_gradients(self, stage: int, value: int, share: int) -> list[Any]:
        """The gradients from all stages that use a value of ``stage``, in their order."""
        users = self._parts[stage].sent[value]
        return [self._take(_GRADIENT, value, user, share) for user in users]

    def give_gradients_back(self, stage: int, value: int, share: int) -> None:
        """Give back these gradients."""
        for user in self._parts[stage].sent[value]:
            self._give_back(_GRADIENT, value, user, share, 0)

    # --- random streams --------------------------------------------------------------------------

    def send_stream(self, stage: int, share: int) -> None:
        """Send torch's random stream to the next stage that draws, if there is one."""
        successor = self._parts[stage].stream_to
        if successor is not None:
            readers = [self._graph.rank_of(successor, share)]
            self._put(_STREAM, stage, stage, share, torch_streams(), readers)

    def receive_stream(self, stage: int, share: int) -> None:
        """Continue torch's random stream of an earlier stage, if there is one."""
        before = self._parts[stage].stream_from
        if before is not None:
            set_torch_streams(self._take(_STREAM, before, before, share).cpu())
            self._give_back(_STREAM, before, before, share, 0)

    # --- parts -----------------------------------------------------------------------------------

    def _put(
        self, kind: str, number: int, stage: int, share: int, tree: Any, readers: Sequence[int]
    ) -> None:
        key = MailKey(kind, number, stage, self._rank)
        self._carrier.put(key, self._number(stage, share), tree, readers)

    def _take(self, kind: str, number: int, stage: int, share: int) -> Any:
        key = MailKey(kind, number, stage, self._graph.rank_of(stage, share))
        return self._carrier.take(key, self._number(stage, share))

    def _give_back(self, kind: str, number: int, stage: int, share: int, reader: int) -> None:
        key = MailKey(kind, number, stage, self._graph.rank_of(stage, share))
        self._carrier.give_back(key, self._number(stage, share), reader)

    def _number(self, stage: int, share: int) -> int:
        sent = self._sent[stage]
        return sent[share % len(sent)] + share // len(sent) + 1
