"""What a worker says to servers on another host, and what it is told there.

Three mailboxes for each worker: it asks for parts, is given them with what is new of the weights,
and hands in what it has computed. So all of these can be on their way while it computes.
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

# Messages of a mailbox that may be on their way.
_NUM_SLOTS = 2


@dataclass(frozen=True)
class Ask:
    """A worker is going to have time for a part of a batch, or of an older one.

    Attributes:
        step: the batch's number.
        num_parts: of this batch.
        opens: else only a part of a batch that was begun, and without waiting.
    """

    step: int
    num_parts: int
    opens: bool


@dataclass(frozen=True)
class Fresh:
    """What is new of a server's weights.

    Attributes:
        server: which.
        dense: its pieces of parameters that are not sparse.
        rows: of its pieces of sparse ones, numbered within each.
    """

    server: int
    dense: list[torch.Tensor]
    rows: list[SparseRows]


@dataclass(frozen=True)
class Grant:
    """The answer to ``Ask``, and to ``Done``.

    Attributes:
        part: to compute; None where there is none.
        has_more: there is another one that is free.
        oldest: the oldest batch that is not in the weights.
        is_halted: all are to come to an end.
        weights: what has changed since the last grant that had any.
    """

    part: WorkItem | None
    has_more: bool
    oldest: int
    is_halted: bool
    weights: list[Fresh]


@dataclass(frozen=True)
class HandedIn:
    """What a worker has computed of a part.

    Attributes:
        push: what it has come to.
        gradients: of all parameters; empty where the part was left out.
    """

    push: Push
    gradients: list[torch.Tensor | SparseRows | None]


@dataclass(frozen=True)
class Done:
    """A worker has done all that there is to do in an epoch; ``times``: how often so far."""

    times: int


@dataclass(frozen=True)
class Halted:
    """All are to come to an end."""


class Outbox:
    """The end of a worker's mailbox that is written to.

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
        """Send a message, once the one before the last was read."""
        self._number += 1
        self._mail.put(self._box, self._number, encode(message), [self._reader], _NUM_SLOTS)


class Inbox:
    """The end of a worker's mailbox that is read; for the arguments see ``Outbox``."""

    def __init__(self, mail: MailChannels, worker: int, use: Use, sender: int) -> None:
        self._mail = mail
        self._box = worker * len(_USES) + _USES.index(use)
        self._sender = sender
        self._number = 0

    def take(self, *kinds: type) -> Any:
        """Wait for the next message, which is one of some kinds.

        Raises:
            HostError: it is none of these, or the other host is gone.
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
