"""A group of parameters on one of its ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.comm.collectives.gradients import cut_piece
from lockstep.comm.exchange_spec import GroupSpec
from lockstep.parallel.updater_interface import BoundPiece
from lockstep.plan.layout import Piece


@dataclass(frozen=True, kw_only=True)
class OwnedGroup:
    """A group of parameters that this rank holds, and the pieces that it updates.

    Attributes:
        number: of the group.
        spec: its trainable parameters.
        members: these parameters, in order.
        pieces: those that this rank updates.
        divided: those that each of its ranks updates.
        blocks: of each piece, the sizes of the blocks of its norm.
        is_scattered: ranks have it in separate memories.
    """

    number: int
    spec: GroupSpec
    members: Sequence[torch.Tensor]
    pieces: Sequence[Piece]
    divided: Mapping[int, Sequence[Piece]]
    blocks: Sequence[Sequence[int]]
    is_scattered: bool

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return [tensor.name for tensor in self.spec.gradients.tensors]

    def is_sparse(self, parameter: int) -> bool:
        """True if a parameter's gradient is sparse (some rows only)."""
        return self.spec.gradients.is_sparse(parameter)

    def bound(self, kept: Mapping[Piece, torch.Tensor], *, is_alone: bool) -> list[BoundPiece]:
        """The pieces, for an updater.

        Args:
            kept: those that lie elsewhere than in their parameters' memory.
            is_alone: no other rank maps the memory: the parameters themselves are stepped.
        """
        bound = []
        for piece in self.pieces:
            member = self.members[piece.parameter]
            cut = (kept[piece] if piece in kept else cut_piece(member, piece)).detach()
            if self.is_sparse(piece.parameter):
                cut = cut.view(-1, member.shape[1])
            cut.requires_grad_()
            bound.append(
                BoundPiece(
                    name=self.names[piece.parameter],
                    piece=piece,
                    tensor=member if is_alone else cut,
                )
            )
        return bound
