"""The Worker of a rank with parameter servers, where workers may be some steps apart.

A worker takes a part of a batch, brings its copy of the weights up to date, and has a Worker of a
Plan with one rank compute, whose update is to push: the gradients go to this worker's row in shared
memory, and servers come for their pieces. A server adds up what comes of a batch, weighted by
samples, and when all parts have come it steps. So every batch is one update, of all its samples,
whoever has computed what; batches may be finished in another order than they were begun.

Where something goes on between steps that concerns all ranks, they train synchronously
(``keeps_pace``); so does a Plan whose staleness is 0, without any of this.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lockstep.comm.exchange import ExchangeSpec
from lockstep.comm.gradient_rows import GradientRows
from lockstep.comm.gradients import Gradients, added, cut_piece
from lockstep.comm.shared_memory import SharedRegion
from lockstep.comm.work_queue import Part, Push, WorkQueue
from lockstep.data.read_ahead import Read
from lockstep.data.sources import Source
from lockstep.errors import NonFiniteError
from lockstep.launch.failure import add_note
from lockstep.parallel.build import build_worker, divided_pieces
from lockstep.parallel.exchange_layout import exchange_spec
from lockstep.parallel.groups import parameter_groups
from lockstep.parallel.local_worker import replica_of_plan
from lockstep.parallel.owned_group import OwnedGroup
from lockstep.parallel.passes import Observe
from lockstep.parallel.update import BoundPiece, PieceSlots, Updater
from lockstep.parallel.worker import StepResult, Worker
from lockstep.plan.decision import ServedUpdate
from lockstep.plan.layout import Piece
from lockstep.plan.shares import num_filled_shares, share_bounds
from lockstep.plan.spec import Plan

# The only group of a Plan without stages.
_GROUP = 0


class ServedWorker(Worker):
    """One rank, be it a worker or a server; see the module, and ``build_served_worker``.

    Args:
        region: where the table of work lies, and
        offset: where it begins there.
        served: the pieces of each server.
        alone: computes a worker's parts, with a ``Pusher``; None on a server.
        options: see ``Worker``.
    """

    def __init__(
        self,
        *,
        region: SharedRegion,
        offset: int,
        served: Sequence[Sequence[Piece]],
        alone: Worker | None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        update = self.plan.update
        assert isinstance(update, ServedUpdate)
        assert self.board is not None
        num_workers = self.plan.num_ranks - self.plan.num_servers
        self._queue = WorkQueue(region, offset, self.board, num_workers, update.staleness)
        self._alone = alone
        if alone is not None:
            assert isinstance(alone.updater, Pusher)
            alone.updater.push_to = partial(self.exchange.put, _GROUP, self.rank)
            self._pulled = PulledWeights(self._queue, self._groups[_GROUP], served)
        self._opened: dict[int, tuple[Source, torch.Tensor]] = {}  # batches that may have parts
        self._sums: dict[int, _Sum] = {}  # of batches that are not complete, on a server
        self._num_steps = 0  # since all ranks have met
        self._num_settled = 0
        self._is_over = False

    @property
    def trains_apart(self) -> bool:  # type: ignore[override]  # of any other Worker it is fixed
        return not self.keeps_pace

    def train_step(
        self,
        source: Source,
        indices: torch.Tensor,
        step: int,
        observe: Observe | None = None,
        turn: int = 0,
    ) -> StepResult:
        """What this rank can do of a batch, or is left to do of older ones; the result tells."""
        if self.keeps_pace:
            return super().train_step(source, indices, step, observe, turn)
        assert self.board is not None
        self.board.step = step
        if not self._num_steps:
            self._begin(step)
        self._num_steps += 1
        if self._alone is None:
            self._serve(lambda: self._queue.is_applied(step) or self.is_halted)
            return _joined([])
        oldest = self._queue.oldest_open(step)
        self._opened = {number: one for number, one in self._opened.items() if number >= oldest}
        self._opened[step] = source, indices
        return _joined(list(self._worked_off(step, observe)))

    def _begin(self, step: int) -> None:
        """All ranks are here."""
        if self.rank == 0:
            self._queue.begin(step)
        self.barrier()

    # --- workers ---------------------------------------------------------------------------------

    def _worked_off(self, step: int, observe: Observe | None) -> Iterator[StepResult]:
        """Compute parts until there is nothing left of the batch that nobody has taken."""
        num_parts = self._num_parts(len(self._opened[step][1]))
        while not self.is_halted:
            part = self._queue.take(step, num_parts)
            if part is not None:
                yield self._compute(part, observe)
            elif self._queue.is_opened(step):
                return
            else:
                self._queue.wait(lambda: self._queue.may_take(step) or self.is_halted)

    def _work_off_what_is_open(self) -> None:
        """After a halt: what was begun of a batch is brought to its end."""
        for step, (_, indices) in sorted(self._opened.items()):
            while self._queue.is_opened(step):
                part = self._queue.take(step, self._num_parts(len(indices)))
                if part is None:
                    break
                self._compute(part, None)

    def _num_parts(self, num_samples: int) -> int:
        """Parts that are not empty: those of the replicas."""
        filled = num_filled_shares(num_samples, self.plan.num_shares)
        return -(-filled // self.plan.shares_per_row)

    def _compute(self, part: Part, observe: Observe | None) -> StepResult:
        assert self._alone is not None
        self._queue.wait(self._queue.is_taken)
        source, indices = self._opened[part.step]
        shares = self.plan.shares_of(part.number)
        bounds = share_bounds(len(indices), self.plan.num_shares)
        start, stop = bounds[shares[0]][0], bounds[shares[-1]][1]
        alone = self._alone
        alone.passes.reading = self.passes.reading
        alone.first_share, alone.batch_size = shares[0], len(indices)
        # No pass of the exchange, of which all ranks make as many; parts go to whoever is free.
        self.exchange.gradients[_GROUP].begin_pass()
        try:
            with self._pulled.in_place():
                result = alone.train_step(source, indices[start:stop], part.step, observe)
        except NonFiniteError as error:
            add_note(
                error,
                f"Shares and samples are counted within a worker's part of the batch: samples "
                f"{start} to {stop - 1}. Other parts of it, and other batches, may be under way.",
            )
            raise
        weight = 0.0 if result.is_skipped else result.weight
        self._queue.push(Push(part, self._num_parts(len(indices)), weight))
        return result

    # --- servers ---------------------------------------------------------------------------------

    def _serve(self, is_over: Callable[[], bool]) -> None:
        """Take what workers push until it is over."""
        while not is_over():
            found = self._queue.next_push()
            if found is None:
                self._queue.wait(lambda: is_over() or self._queue.next_push() is not None)
                continue
            worker, push = found
            total = self._sums.setdefault(push.part.step, _Sum(missing=push.num_parts))
            if push.weight:
                total.add(self._put_up(worker), push.weight)
            self._queue.note_taken(worker)
            total.missing -= 1
            if not total.missing:
                self._apply(push.part.step, self._sums.pop(push.part.step))

    def _put_up(self, worker: int) -> list[torch.Tensor | None]:
        """A worker's gradients of this server's pieces."""
        rows = self.exchange.gradients[_GROUP]
        assert isinstance(rows, GradientRows)
        return [rows.put_up(worker, piece) for piece in self._groups[_GROUP].pieces]

    def _apply(self, step: int, total: "_Sum") -> None:
        assert self.updater is not None
        with self._queue.updating(step):
            if total.weight:
                for bound, gradient in zip(self._pieces[_GROUP], total.means(), strict=True):
                    bound.tensor.grad = gradient
                self.updater.step()

    # --- together --------------------------------------------------------------------------------

    def settle(self, *, is_last: bool = False) -> None:
        """Have all that was begun come to the weights, on all ranks."""
        if self._is_over or not self._num_steps:
            return
        self._num_settled += 1
        if self._alone is not None:
            self._work_off_what_is_open()
            self._queue.settle(self._num_settled)
            self._queue.wait(self._queue.is_over)
        else:
            self._serve(lambda: self._queue.are_settled(self._num_settled))
        assert self.board is not None
        self._is_over = any(last for (last,) in self.board.tell([is_last]))
        self._opened.clear()
        self._num_steps = 0

    @property
    def is_apart(self) -> bool:  # type: ignore[override]  # as above
        return self._num_steps > 0

    @property
    def is_halted(self) -> bool:
        if self._num_steps:  # others are wherever they are
            return self.board is not None and self.board.wants_end()
        return super().is_halted

    def epoch_logs(self) -> dict[str, float]:
        return {"staleness": 0 if self.keeps_pace else self._queue.longest_lead()}

    def reads(self, indices: torch.Tensor, step: int | None = None, turn: int = 0) -> list[Read]:
        """In training nobody knows before who reads what."""
        return super().reads(indices, step, turn) if step is None or self.keeps_pace else []

    def leaves_a_rank_idle(self, num_samples: int) -> bool:
        """The first worker's buffers count."""
        return self.keeps_pace and super().leaves_a_rank_idle(num_samples)


def _joined(results: Sequence[StepResult]) -> StepResult:
    """What a rank has computed of some parts, as one step."""
    return StepResult(
        total=math.fsum(result.total for result in results),
        weight=math.fsum(result.weight for result in results),
        num_samples=sum(result.num_samples for result in results),
        is_skipped=any(result.is_skipped for result in results),
        parts=[sums for result in results for sums in result.parts],
    )


@dataclass
class _Sum:
    """What a server has of a batch.

    Attributes:
        missing: parts that are still to come.
        weight: of those that have come.
        gradients: of the server's pieces, each part's mean times its weight, added up.
    """

    missing: int
    weight: float = 0.0
    gradients: list[torch.Tensor | None] = field(default_factory=list)

    def add(self, means: Gradients, weight: float) -> None:
        weighted = [None if mean is None else mean * weight for mean in means]
        self.gradients = added(self.gradients, weighted) if self.gradients else weighted
        self.weight += weight

    def means(self) -> list[torch.Tensor | None]:
        """The gradients of the batch's mean."""
        return [None if total is None else total.div_(self.weight) for total in self.gradients]


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


def build_served_worker(
    plan: Plan,
    spec: ExchangeSpec,
    region: SharedRegion,
    *,
    rank: int,
    updater: Updater,
    **parts: Any,
) -> Worker:
    """Put the parts of a rank that trains together; for the arguments see ``build_worker``."""
    alone = None
    if not plan.is_server(rank):
        own, pusher = replica_of_plan(plan, rank), Pusher()
        model, groups = parts["model"], parameter_groups(own, parts["model"], [])
        alone = build_worker(
            own,
            exchange_spec(own, model, pusher, groups, {}, parts["loss"]),
            None,
            rank=0,
            updater=pusher,
            groups=groups,
            partitions={},
            **parts,
        )
    return build_worker(
        plan,
        spec,
        region,
        rank=rank,
        updater=updater,
        groups=parameter_groups(plan, parts["model"], []),
        partitions={},
        make=partial(
            ServedWorker,
            region=region,
            offset=spec.mail_offsets[0],
            served=[
                pieces
                for owner, pieces in divided_pieces(plan, spec.groups[_GROUP], updater).items()
                if plan.is_server(owner)
            ],
            alone=alone,
        ),
        **parts,
    )
