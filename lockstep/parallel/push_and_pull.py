"""How a worker deals with parameter servers: it pushes gradients, and pulls weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.comm.gradients import Gradients, cut_piece
from lockstep.comm.work_queue import WorkQueue
from lockstep.parallel.owned_group import OwnedGroup
from lockstep.parallel.update import BoundPiece, PieceSlots, Updater
from lockstep.plan.layout import Piece


class Pusher(Updater):
    """The update of a worker: to hand its gradients on.

    Attributes:
        push_to: gets the gradients of all parameters that are trained.
    """

    is_known = True
    hands_on = True

    def __init__(self) -> None:
        self.push_to: Callable[[Gradients], None] = _nowhere
        self._pieces: list[BoundPiece] = []

    def bind(self, pieces: Sequence[BoundPiece]) -> None:
        self._pieces = list(pieces)

    def step(self) -> None:
        self.push_to([bound.tensor.grad for bound in self._pieces])

    def slots(self, *, with_stored: bool = False) -> list[PieceSlots]:
        return []

    def options(self) -> list[dict[str, Any]]:
        return []

    def set_options(self, options: list[dict[str, Any]]) -> None:
        assert not options


def _nowhere(gradients: Gradients) -> None:
    raise AssertionError("nobody takes them yet")


class PulledWeights:
    """A worker's copy of the weights: they must not change between forward and backward.

    Args:
        queue: knows when a server changes them.
        group: the parameters that are trained, which lie in shared memory. Sparse ones stay there:
            lookups copy the rows that they touch, and nothing else is needed of them.
        served: the pieces of them that each server updates.
    """

    def __init__(
        self, queue: WorkQueue, group: OwnedGroup, served: Sequence[Sequence[Piece]]
    ) -> None:
        self._queue = queue
        numbers = [number for number in range(len(group.members)) if not group.is_sparse(number)]
        self._members = [group.members[number] for number in numbers]
        self._shared = {number: group.members[number].data for number in numbers}
        self._own = {number: torch.empty_like(one) for number, one in self._shared.items()}
        self._pieces = [
            [
                tuple(cut_piece(one[piece.parameter], piece) for one in (self._own, self._shared))
                for piece in pieces
                if piece.parameter in self._own
            ]
            for pieces in served
        ]
        self._versions = [-1 for _ in served]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the parameters are a copy of the weights as they are now."""
        for server, pieces in enumerate(self._pieces):
            while self._queue.version(server) != self._versions[server]:
                self._versions[server] = self._queue.settled_version(server)
                if pieces:
                    torch._foreach_copy_([own for own, _ in pieces], [one for _, one in pieces])
        try:
            for member, own in zip(self._members, self._own.values(), strict=True):
                member.data = own
            yield
        finally:
            for member, shared in zip(self._members, self._shared.values(), strict=True):
                member.data = shared
