"""Sums over memory domains whose messages are compressed (``comm.compression.compressors``).

Every domain sends its compressed sums to all others, decompresses those of all, and updates all
parameters, so no parameter is sent. All add the same numbers in the same order, and stay equal to
the last bit. A domain adds its compression error, the *residual*, to the sum of the next step
(error feedback).

One rank of a domain exchanges a tensor, with the rank of the same place in each other domain. It
writes the result into the row that all ranks of the domain read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.collectives.gradients import TensorSpec, add_up, cut_piece
from lockstep.comm.collectives.reduce_scatter import ReduceScatter
from lockstep.comm.compression.compressors import (
    Conversation,
    Message,
    Understood,
    as_it_is,
    conversation,
)
from lockstep.plan.layout import Piece, whole_parameters
from lockstep.plan.program.compression import Compression, warm_up


@dataclass(frozen=True, kw_only=True)
class Residual:
    """A domain's state of a tensor from step to step.

    Attributes:
        error: the part of the sums, multiplied by their factor, that is not sent yet; in float32
            at least.
        basis: the compressor's state; None if it has none.
        count: of steps that it was sent for, shape (1,); None where it does not matter.
    """

    error: torch.Tensor
    basis: torch.Tensor | None = None
    count: torch.Tensor | None = None

    def copy(self, error: torch.Tensor) -> "Residual":
        """For a step that may not be committed, with its own error."""
        basis, count = (None if one is None else one.clone() for one in (self.basis, self.count))
        return Residual(error=error, basis=basis, count=count)

    def become(self, other: "Residual") -> None:
        """Take over the values of such a copy."""
        for mine, new in zip(vars(self).values(), vars(other).values(), strict=True):
            if mine is not None:
                mine.copy_(new)


class CompressedSums(ReduceScatter):
    """One rank's end.

    Args:
        tensors: the parameters.
        compressions: of each; None where it is sent as it is.
        residuals: of this domain, by the number of the parameter; changed by ``commit``.
        options: see ``ReduceScatter``.
    """

    def bound(self) -> float:
        return math.inf  # residuals are added

    def __init__(
        self,
        *args: Any,
        tensors: Sequence[TensorSpec],
        compressions: Sequence[Compression | None],
        residuals: Mapping[int, Residual],
        **options: Any,
    ) -> None:
        super().__init__(*args, is_everywhere=[True] * len(tensors), **options)
        self._compressions = compressions
        self._residuals = residuals
        self._uncommitted: dict[int, Residual] = {}
        place = self._domains[self._domain].index(self._rank)
        num_senders = min(map(len, self._domains))
        sent_by = whole_parameters([tensor.extent for tensor in tensors], num_senders)
        self._own = sent_by[place] if place < num_senders else []
        self._peers = [ranks[place] for ranks in self._domains] if self._own else []

    @torch.no_grad()
    def reduce_scatter(self, pieces: Sequence[Piece]) -> list[torch.Tensor | None]:
        self._uncommitted.clear()
        self._rows.sum_rows(self._own)
        begun = {
            piece.parameter: self._begin(piece)
            for piece in self._own
            if self._rows.is_used(piece.parameter)
        }
        for number, (own, whole) in self._converse(begun).items():
            self._take(number, own, whole)
        self._meet_here()
        return [
            cut_piece(self._rows.base(piece.parameter), piece)
            if self._rows.is_used(piece.parameter)
            else None
            for piece in pieces
        ]

    def commit(self) -> None:
        for number, new in self._uncommitted.items():
            self._residuals[number].become(new)
        self._uncommitted.clear()

    def gather(self, pieces: Sequence[Piece], sums: Sequence[torch.Tensor | None]) -> None:
        return  # the sums lie there

    def _begin(self, piece: Piece) -> Conversation:
        """Begin to send this domain's sum of a parameter, with the residual."""
        number = piece.parameter
        sums = self._rows.subtree_sums(piece)
        total = add_up([sums])[0] if sums else torch.zeros_like(self._rows.base(number))
        compression = self._compressions[number]
        if compression is None:
            return as_it_is(total)
        old = self._residuals[number]
        wanted = torch.add(old.error, total, alpha=self.factor, out=torch.empty_like(old.error))
        self._uncommitted[number] = new = old.copy(wanted)
        if new.count is not None and new.count.add_(1) <= warm_up(compression):
            return as_it_is(wanted)
        return conversation(compression, wanted, new.basis)

    def _take(self, number: int, own: torch.Tensor, whole: torch.Tensor) -> None:
        """Write the sum to the base row, and the compression error to the residual."""
        base = self._rows.base(number).copy_(whole)
        if number in self._uncommitted:
            self._uncommitted[number].error.sub_(own)
            base.div_(self.factor)

    def _converse(self, begun: Mapping[int, Conversation]) -> dict[int, Understood]:
        """Run conversations to their ends, message by message, those of all parameters at once."""
        ended: dict[int, Understood] = {}
        received: dict[int, list[Message]] = {}
        while len(ended) < len(begun):
            sent: dict[int, Message] = {}
            for number in (each for each in begun if each not in ended):
                try:
                    sent[number] = (
                        begun[number].send(received[number]) if received else next(begun[number])
                    )
                except StopIteration as end:
                    ended[number] = end.value
            received = self._exchange(sent)
        return ended

    def _exchange(self, sent: Mapping[int, Message]) -> dict[int, list[Message]]:
        """The messages of all domains, in their order."""
        received: dict[int, list[Message]] = {number: [] for number in sent}
        receives: dict[int, list[torch.Tensor]] = {}
        for domain, peer in enumerate(self._peers):
            for number, message in sent.items():
                is_own = domain == self._domain
                there = message if is_own else [torch.empty_like(each) for each in message]
                received[number].append(there)
                if not is_own:
                    receives.setdefault(peer, []).extend(there)
        sends = [each for message in sent.values() for each in message]
        self._transport.transfer(dict.fromkeys(receives, sends), receives)
        return received
