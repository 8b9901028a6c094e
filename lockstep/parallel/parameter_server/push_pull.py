"""A worker of parameter servers pushes gradients and pulls weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.comm.collectives.gradients import Gradients, cut_piece
from lockstep.comm.shared_memory.work_queue import WorkQueue
from lockstep.parallel.owned_group import OwnedGroup
from lockstep.parallel.parameter_server.worker_messages import Fresh
from lockstep.parallel.updater_interface import BoundPiece, PieceSlots, Updater
from lockstep.plan.layout import Piece


class Pusher(Updater):
    """The update of a worker: a push of its gradients.

    Attributes:
        push_to: called with the gradients of all trained parameters.
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
    raise AssertionError("no servers yet")


class OwnWeights:
    """A worker's copy of the weights, which must not change between forward and backward.

    Args:
        group: the trained parameters, in shared memory.
        numbers: of the copied ones.
    """

    def __init__(self, group: OwnedGroup, numbers: Sequence[int]) -> None:
        self._members = [group.members[number] for number in numbers]
        self._shared = {number: group.members[number].data for number in numbers}
        self._own = {number: torch.empty_like(one) for number, one in self._shared.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use this copy as the parameters within the block."""
        try:
            for member, own in zip(self._members, self._own.values(), strict=True):
                member.data = own
            yield
        finally:
            for member, shared in zip(self._members, self._shared.values(), strict=True):
                member.data = shared


class PulledWeights(OwnWeights):
    """The weights of a worker on the servers' host.

    Args:
        queue: has the versions of the weights.
        group: the parameters. Sparse ones stay in shared memory: lookups copy the rows that they
            need.
        served: the pieces of them that each server updates.
    """

    def __init__(
        self, queue: WorkQueue, group: OwnedGroup, served: Sequence[Sequence[Piece]]
    ) -> None:
        numbers = [number for number in range(len(group.members)) if not group.is_sparse(number)]
        super().__init__(group, numbers)
        self._queue = queue
        self._pieces = [
            [
                tuple(cut_piece(one[piece.parameter], piece) for one in (self._own, self._shared))
                for piece in pieces
                if piece.parameter in self._own
            ]
            for pieces in served
        ]
        self._versions = [-1 for _ in served]

    def pull(self) -> None:
        """Copy the present weights."""
        for server, pieces in enumerate(self._pieces):
            while self._queue.version(server) != self._versions[server]:
                self._versions[server] = self._queue.settled_version(server)
                if pieces:
                    torch._foreach_copy_([own for own, _ in pieces], [one for _, one in pieces])


class SentWeights(OwnWeights):
    """The weights of a worker on another host than the servers'.

    Args:
        group: the parameters, including sparse ones: each worker has its own rows, because another
            worker of its host may have older ones.
        served: the pieces of them that each server updates.
    """

    def __init__(self, group: OwnedGroup, served: Sequence[Sequence[Piece]]) -> None:
        super().__init__(group, range(len(group.members)))
        self._dense: list[list[torch.Tensor]] = [[] for _ in served]
        self._sparse: list[list[torch.Tensor]] = [[] for _ in served]
        for server, pieces in enumerate(served):
            for piece in pieces:
                own = self._own[piece.parameter]
                cut = cut_piece(own, piece)
                if group.is_sparse(piece.parameter):
                    self._sparse[server].append(cut.view(-1, own.shape[1]))
                else:
                    self._dense[server].append(cut)

    def begin(self) -> None:
        """Copy the weights from this host's memory."""
        torch._foreach_copy_(list(self._own.values()), list(self._shared.values()))

    def take(self, weights: Sequence[Fresh]) -> None:
        """Copy changed weights."""
        for fresh in weights:
            if fresh.dense:
                torch._foreach_copy_(self._dense[fresh.server], fresh.dense)
            for place, rows in zip(self._sparse[fresh.server], fresh.rows, strict=True):
                place[rows.numbers] = rows.values

    def show(self) -> None:
        """Copy this worker's weights to this host's memory."""
        torch._foreach_copy_(list(self._shared.values()), list(self._own.values()))
