"""Messages between a worker and servers on another host.

Each worker has three mailboxes: its requests for parts, the granted parts with changed weights, and
its gradients. So all three can be in transit while it computes.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from lockstep.comm.codec.message_codec import decode, encode
from lockstep.comm.p2p.tcp_p2p import MailChannels
from lockstep.comm.shared_memory.work_queue import Push, WorkItem
from lockstep.comm.sparse.sparse_rows import SparseRows
from lockstep.errors import HostError

Use = Literal["asks", "grants", "pushes"]
_USES: tuple[Use, ...] = ("asks", "grants", "pushes")

# Messages of a mailbox that may be in transit.
_NUM_SLOTS = 2


@dataclass(frozen=True)
class Ask:
    """A request for a part of a batch, or of an older one.

    Attributes:
        step: of the batch.
        num_parts: of this batch.
        opens: it may begin the batch, and wait for that; else only parts of begun batches.
    """

    step: int
    num_parts: int
    opens: bool


@dataclass(frozen=True)
class Fresh:
    """Changed weights of a server.

    Attributes:
        server: its number.
        dense: its pieces of dense parameters.
        rows: changed rows of its pieces of sparse parameters, numbered within each piece.
    """

    server: int
    dense: list[torch.Tensor]
    rows: list[SparseRows]


@dataclass(frozen=True)
class Grant:
    """The answer to ``Ask``, and to ``Done``.

    Attributes:
        part: to compute; or None.
        has_more: another part is free.
        oldest: the oldest batch that is not in the weights.
        is_halted: all ranks must stop.
        weights: changed since the last grant with weights.
    """

    part: WorkItem | None
    has_more: bool
    oldest: int
    is_halted: bool
    weights: list[Fresh]


@dataclass(frozen=True)
class HandedIn:
    """A worker's result of a part.

    Attributes:
        push: its weight and losses.
        gradients: of all parameters; empty if the part was skipped.
    """

    push: Push
    gradients: list[torch.Tensor | SparseRows | None]


@dataclass(frozen=True)
class Done:
    """A worker has finished an epoch; ``times``: how many so far."""

    times: int


@dataclass(frozen=True)
class Halted:
    """All ranks must stop."""


class Outbox:
    """The sending end of a worker's mailbox.

    Args:
        mail: of this rank.
        worker: the worker's rank.
        use: of the mailbox.
        reader: the rank that reads it.
    """

    def __init__(self, mail: MailChannels, worker: int, use: Use, reader: int) -> None:
        self._mail = mail
        self._box = worker * len(_USES) + _USES.index(use)
        self._reader = reader
        self._number = 0

    def put(self, message: object) -> None:
        """Send a message, after the one before the last was read."""
        self._number += 1
        self._mail.put(self._box, self._number, encode(message), [self._reader], _NUM_SLOTS)


class Inbox:
    """The receiving end of a worker's mailbox; for the arguments see ``Outbox``."""

    def __init__(self, mail: MailChannels, worker: int, use: Use, sender: int) -> None:
        self._mail = mail
        self._box = worker * len(_USES) + _USES.index(use)
        self._sender = sender
        self._number = 0

    def take(self, *kinds: type) -> Any:
        """Wait for the next message, which must be of one of these classes.

        Raises:
            HostError: it is not, or the other host is gone.
        """
        self._number += 1
        message = decode(self._mail.take(self._box, self._number, self._sender))
        self._mail.acknowledge(self._box, self._number, self._sender)
        if not isinstance(message, kinds):
            raise HostError(
                "Another host sent an unexpected message.",
                received=f"a {type(message).__name__}",
                fix="Run the same version of Lockstep on every host.",
            )
        return message
