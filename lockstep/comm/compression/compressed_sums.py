"""Sums over memory domains whose messages are compressed (``comm.compression.compressors``).

Every domain sends all others what it makes of its own sums, understands what all have sent, and
updates all of the parameters: so no parameter travels. All understand the same numbers in the same
order, and stay equal to the last bit. What a domain has not been able to send, its *residual*, it
adds to what it sends at the next step.

Of each tensor one rank of a domain speaks for it, with the rank of the same place in each other
domain. What it has understood lies in the row that all ranks of the domain read.
"""

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
    """What a domain keeps of a tensor from step to step.

    Attributes:
        error: what is still to be sent, as part of a sum that has been multiplied by its factor;
            in float32 at least.
        basis: what the compressor keeps; None for nothing.
        count: of steps that it has been sent for, shape (1,); None where that makes no difference.
    """

    error: torch.Tensor
    basis: torch.Tensor | None = None
    count: torch.Tensor | None = None

    def copy(self, error: torch.Tensor) -> "Residual":
        """For a step that may not be committed, with its own error."""
        basis, count = (None if one is None else one.clone() for one in (self.basis, self.count))
        return Residual(error=error, basis=basis, count=count)

    def become(self, other: "Residual") -> None:
        """Take over what such a copy has come to."""
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
        num_speakers = min(map(len, self._domains))
        spoken_for = whole_parameters([tensor.extent for tensor in tensors], num_speakers)
        self._own = spoken_for[place] if place < num_speakers else []
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
        for number, (own, whole) in self._conversed(begun).items():
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

    def summed(self, parameter: int) -> torch.Tensor | None:
        return self._rows.base(parameter) if self._rows.is_used(parameter) else None

    def _begin(self, piece: Piece) -> Conversation:
        """Speak of this domain's sum of a parameter, and of what was left of those before."""
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
        """Have the sum be where it is read, and what others have not understood be left over."""
        base = self._rows.base(number).copy_(whole)
        if number in self._uncommitted:
            self._uncommitted[number].error.sub_(own)
            base.div_(self.factor)

    def _conversed(self, begun: Mapping[int, Conversation]) -> dict[int, Understood]:
        """Hold conversations to their ends, message by message, those of all parameters at once."""
        ended: dict[int, Understood] = {}
        heard: dict[int, list[Message]] = {}
        while len(ended) < len(begun):
            said: dict[int, Message] = {}
            for number in (each for each in begun if each not in ended):
                try:
                    said[number] = (
                        begun[number].send(heard[number]) if heard else next(begun[number])
                    )
                except StopIteration as end:
                    ended[number] = end.value
            heard = self._all_said(said)
        return ended

    def _all_said(self, said: Mapping[int, Message]) -> dict[int, list[Message]]:
        """The messages of all domains, in their order."""
        heard: dict[int, list[Message]] = {number: [] for number in said}
        receives: dict[int, list[torch.Tensor]] = {}
        for domain, peer in enumerate(self._peers):
            for number, message in said.items():
                is_own = domain == self._domain
                there = message if is_own else [torch.empty_like(each) for each in message]
                heard[number].append(there)
                if not is_own:
                    receives.setdefault(peer, []).extend(there)
        sends = [each for message in said.values() for each in message]
        self._transport.transfer(dict.fromkeys(receives, sends), receives)
        return heard
