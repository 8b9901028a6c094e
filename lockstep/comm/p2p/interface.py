"""Mail between stages: messages of one rank for others, and how they get there.

- ``SharedMail``: in memory that all ranks of a host map, and by a mail thread to other hosts.
- ``GroupMail`` (``comm.p2p.process_group_p2p``): through torch.distributed, to ranks that share no
memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.comm.codec.message_codec import decode, encode
from lockstep.comm.p2p.shm_p2p import Mailbox, MailboxSpec
from lockstep.comm.p2p.tcp_p2p import MailChannels
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.comm.shared_memory.status_board import StatusBoard
from lockstep.data.trees import tensors_of


@dataclass(frozen=True)
class MailKey:
    """One kind of message: what it is, of which stage, sent by which rank.

    Its messages are numbered from 1, in the order in which they are sent.
    """

    kind: str
    number: int  # of the value; of the stage that leaves the stream
    stage: int  # that sends
    sender: int


class MailCarrier(ABC):
    """One rank's end. Tensors that arrive are leaves of autograd's graph."""

    @abstractmethod
    def put(self, key: MailKey, message: int, tree: Any, readers: Sequence[int]) -> None:
        """Send a message; the tree may change afterwards.

        Args:
            key: its kind.
            message: its number.
            tree: tensors and what else it holds.
            readers: the ranks that read it; a rank as often as it has readers.
        """

    @abstractmethod
    def take(self, key: MailKey, message: int) -> Any:
        """Wait for a message for this rank; it is good until ``give_back``."""

    @abstractmethod
    def give_back(self, key: MailKey, message: int, reader: int) -> None:
        """Reader number ``reader`` of this kind of message no longer needs it."""


class SharedMail(MailCarrier):
    """Mailboxes that the ranks of a host share, and channels to other hosts.

    Args:
        boxes: the mailboxes, in the order in which they lie in memory.
        region: where they lie.
        offset_bytes: from where on.
        board: to wait at.
        ranks_here: those of this host.
        mail_channels: to the others; None where there are none.
        first_box: the number of the first mailbox, as mail threads count them.
    """

    def __init__(
        self,
        boxes: Mapping[MailKey, MailboxSpec],
        region: SharedRegion,
        offset_bytes: int,
        board: StatusBoard,
        *,
        ranks_here: range,
        mail_channels: MailChannels | None = None,
        first_box: int = 0,
    ) -> None:
        self._ranks_here = ranks_here
        self._mail_channels = mail_channels
        self._specs = boxes
        self._numbers = {key: number for number, key in enumerate(boxes, first_box)}
        self._boxes: dict[MailKey, Mailbox] = {}
        for key, spec in boxes.items():
            self._boxes[key] = Mailbox(spec, region, offset_bytes, board)
            offset_bytes += spec.num_bytes

    def put(self, key: MailKey, message: int, tree: Any, readers: Sequence[int]) -> None:
        here = [rank if rank in self._ranks_here else None for rank in readers]
        if any(rank is not None for rank in here):
            self._boxes[key].put(message, tree, here)
        elsewhere = [rank for rank in readers if rank not in self._ranks_here]
        if elsewhere:
            payload = encode((tree, [each.requires_grad for each in tensors_of(tree)]))
            self._elsewhere.put(
                self._numbers[key], message, payload, elsewhere, self._specs[key].num_slots
            )

    def take(self, key: MailKey, message: int) -> Any:
        if key.sender in self._ranks_here:
            return self._boxes[key].take(message, key.sender)
        payload = self._elsewhere.take(self._numbers[key], message, key.sender)
        tree, flags = decode(payload)
        for tensor, needs_gradient in zip(tensors_of(tree), flags, strict=True):
            tensor.requires_grad_(needs_gradient)
        return tree

    def is_here(self, key: MailKey, message: int) -> bool:
        """True if a message of this host can be taken without waiting; False for other hosts'."""
        return key.sender in self._ranks_here and self._boxes[key].is_here(message)

    def give_back(self, key: MailKey, message: int, reader: int) -> None:
        if key.sender in self._ranks_here:
            self._boxes[key].give_back(message, reader)
        else:
            self._elsewhere.acknowledge(self._numbers[key], message, key.sender)

    @property
    def _elsewhere(self) -> MailChannels:
        assert self._mail_channels is not None
        return self._mail_channels
