"""One rank's part of updates: REDUCE, STEP and SYNC, whoever has computed the gradients.

A ``parallel.worker`` adds the passes that compute them. Custom loops and custom steps compute
gradients themselves, and hand them in here.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from lockstep.comm.collectives.gradients import Gradients, cut_piece
from lockstep.comm.collectives.piece_memory import storage_key
from lockstep.comm.exchange import Exchange, ShareTotals
from lockstep.errors import ModelError
from lockstep.formatting import first_few
from lockstep.parallel.data_parallel.gradient_rules import GradientJudge, GradientRules
from lockstep.parallel.data_parallel.late_check import LateCheck
from lockstep.parallel.owned_group import OwnedGroup
from lockstep.parallel.sharding.parameter_offload import ParameterOffload
from lockstep.parallel.sharding.residency import Residency
from lockstep.parallel.updater_interface import BoundPiece, Updater
from lockstep.plan.spec import Plan


class UpdateWorker:
    """Updates the pieces of one rank. Made by ``parallel.build``.

    Args:
        plan: the Plan.
        rank: this rank.
        exchange: this rank's end of the exchange.
        groups: the groups of parameters that this rank holds.
        updater: the optimizer; None without training.
        rules: for gradients.
        names: of all parameters, in the model's order.
        counted_elsewhere: see ``GradientJudge``.
        residency: of the parameters, if ranks keep only their parts of them.

    Attributes:
        board: status board of the host's ranks; None for a single rank.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        exchange: Exchange,
        groups: Sequence[OwnedGroup],
        updater: Updater | None,
        rules: GradientRules,
        names: Sequence[str],
        counted_elsewhere: frozenset[str] = frozenset(),
        residency: Residency | None = None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.exchange = exchange
        self.board = exchange.board
        self.updater = updater
        self._residency = residency
        # Numbers of the parameters that no rank has whole between steps.
        self._away = frozenset() if residency is None else residency.memory.numbers
        self._groups = groups
        is_alone = plan.num_ranks == 1 and residency is None
        kept = {} if residency is None else residency.memory.kept
        self._pieces = [group.bound(kept, is_alone=is_alone) for group in groups]
        bound = self.pieces
        self._is_bound_elsewhere = plan.num_ranks > 1 or plan.sharding is not None
        if updater is not None:
            updater.bind(bound)
        # Every rank of a scattered group writes the parameters that other domains update.
        self._changes_weights = bool(bound) or any(group.is_scattered for group in groups)
        if self.board is not None and not self._changes_weights:
            self.board.own_nothing()
        self._rules = rules
        is_whole = plan.tensor is None  # else a rank does not know what others put in its row
        needs_bound = rules.needs_norm and rules.clip_norm is None and is_whole
        exchange.bounds_gradients = needs_bound and bool(groups)
        self._factor = 1.0  # of the sum of the gradients
        self._storages = [storage_key(one) for group in groups for one in group.members]
        blocks = [sizes for group in groups for sizes in group.blocks]
        self._judge = GradientJudge(rules, bound, blocks, names, self.board, counted_elsewhere)

    # --- gradients that the user's code has computed ---------------------------------------------

    def update(self, gradients: Gradients, step: int, turn: int = 0) -> None:
        """Update with the sum of all ranks' gradients.

        Every rank calls it; the Plan has no stages and one share per rank.

        Args:
            gradients: of this rank's share, one for each trained parameter; None for no gradient.
            step: the number of the step.
            turn: see ``StepBatch``.
        """
        assert self.updater is not None
        self.updater.turn = turn
        self.hand_in(gradients, step)
        self.apply(step)
        self.exchange.end_step()

    def hand_in(
        self,
        gradients: Gradients,
        step: int,
        total: float = 0.0,
        weight: float = 1.0,
        **marks: bool,
    ) -> ShareTotals:
        """Write this rank's gradients, and wait for the others'; returns what all have written.

        Args:
            gradients: see ``update``.
            step: likewise.
            total: this and the rest see ``Exchange.write_loss``.
            weight: likewise.
            marks: likewise.
        """
        if self.board is not None:
            self.board.step = step
        self.exchange.begin_pass()
        self.exchange.write(0, self.rank, gradients)
        self.exchange.write_loss(self.rank, total, weight, **marks)
        return self.exchange.collect(self.plan.num_shares)

    def apply(
        self, step: int, factor: float = 1.0, row_factors: Sequence[float] | None = None
    ) -> None:
        """After ``hand_in``: sum the gradients, multiply them by factors, and step.

        Args:
            step: the number of the step.
            factor: of the sum.
            row_factors: of each rank's gradients; None for no factors.
        """
        self.exchange.gradients[0].weigh(row_factors)
        self._sum_gradients(factor)
        self._step(step)

    def check_storages(self) -> None:
        """Check that parameters lie where they did when training began.

        Raises:
            ModelError: a pass has given one other memory, which no update reaches.
        """
        members = [one for group in self._groups for one in group.members]
        moved = [
            name
            for name, one, storage in zip(self.trained_names, members, self._storages, strict=True)
            if storage_key(one) != storage
        ]
        if moved and self._is_bound_elsewhere:
            raise ModelError(
                "A forward or backward pass has given parameters other memory (`p.data = ...`). "
                "Updates go to the memory that all ranks have, so they were lost since then.",
                received=f"{first_few(moved)} on rank {self.rank}",
                fix="Write values with `p.copy_(...)` under torch.no_grad(), in a callback, or in "
                "the model with SingleDeviceStrategy.",
            )

    def drop_gradients(self) -> None:
        """Remove the summed gradients; those of a single rank lie in the user's parameters."""
        for bound in itertools.chain.from_iterable(self._pieces):
            bound.tensor.grad = None

    @property
    def trained_names(self) -> list[str]:
        """Names of the parameters that this rank trains, in the order that ``update`` expects."""
        return [name for group in self._groups for name in group.names]

    @property
    def pieces(self) -> list[BoundPiece]:
        """The pieces that this rank updates."""
        return [bound for pieces in self._pieces for bound in pieces]

    # --- the parts of an update ------------------------------------------------------------------

    def _sum_gradients(self, factor: float, *, is_void: bool = False) -> None:
        """Sum the gradients of all shares for this rank's pieces, and multiply them by a factor."""
        self._factor = factor
        for group, pieces in zip(self._groups, self._pieces, strict=True):
            exchanged = self.exchange.gradients[group.number]
            exchanged.factor = factor
            gradients = [None] * len(pieces) if is_void else exchanged.reduce_scatter(group.pieces)
            used = [gradient for gradient in gradients if gradient is not None]
            if used and factor != 1.0:
                torch._foreach_mul_(used, factor)
            for bound, gradient in zip(pieces, gradients, strict=True):
                bound.tensor.grad = gradient

    def _step(self, step: int) -> bool:
        """Update the pieces, and bring them to the other domains; False to skip the step."""
        if not self._judge.settle(step, abs(self._factor) * self.exchange.gradient_bound):
            return False
        self._update(step)
        return True

    def _update(self, step: int) -> None:
        assert self.updater is not None
        board = self.board if self._changes_weights else None
        self.release_parameters()
        if board is not None:
            board.begin_update(step)
        self.updater.step()
        for group in self._groups:
            exchanged = self.exchange.gradients[group.number]
            exchanged.commit()
            if group.is_scattered:
                parameters = {
                    number: one.detach()
                    for number, one in enumerate(group.members)
                    if number not in self._away
                }
                exchanged.all_gather(parameters, all_pieces=not self.updater.is_known)
        if self._residency is not None:
            self._residency.memory.exchange_copies()
        if board is not None:
            board.end_update(step)

    def _update_if_finite(self, step: int, check: LateCheck, totals: torch.Tensor) -> None:
        """Update the pieces if the device finds all values finite."""
        gradients = [one.tensor.grad for one in itertools.chain.from_iterable(self._pieces)]
        check.look([one for one in gradients if one is not None], totals)
        with check.guarding():
            self._update(step)

    # --- divided parameters ----------------------------------------------------------------------

    def in_trial(self) -> AbstractContextManager[None]:
        """Around passes that are no part of a step; collective."""
        if self._residency is None:
            return nullcontext()
        self.exchange.open()
        self._residency.release()
        return self._residency.by_request()

    def keep_parts(self, names: Collection[str]) -> None:
        """Keep only this rank's parts of parameters that have been set; it has no others."""
        assert self._residency is not None
        self._residency.keep_parts(names)

    def begin_loading(self) -> None:
        """Free all but this rank's parts of parameters, which are to be set; collective."""
        if self._residency is not None:
            self.exchange.open()
            self._residency.release()

    def kept_parts(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Parts of trained parameters that this rank is to have before others get them.

        Gives the parameter's name, the number of the element before which a part begins, and its
        memory, in which it is contiguous.
        """
        here = self.exchange.ranks_here
        if self._residency is not None:
            yield from self._residency.kept_parts()
            away = self._residency.gathered
            whole = [one for group in self._groups for one in self._named(group)]
            yield from ((name, 0, one.detach()) for name, one in whole if name not in away)
            return
        for group, pieces in zip(self._groups, self._pieces, strict=True):
            if self._has_one_copy:
                yield from ((one.name, one.piece.start, one.tensor.detach()) for one in pieces)
            elif self.rank == next(rank for rank in group.spec.ranks if rank in here):
                yield from ((name, 0, one.detach()) for name, one in self._named(group))

    @property
    def _has_one_copy(self) -> bool:
        """True if all ranks of the host that have a parameter have it in the same memory."""
        sharding, plan = self.plan.sharding, self.plan
        is_shared = sharding is not None and sharding.shares_parameters
        return is_shared or (plan.pipeline is not None and plan.engine.shares_memory)

    @staticmethod
    def _named(group: OwnedGroup) -> Iterator[tuple[str, torch.Tensor]]:
        return zip(group.names, group.members, strict=True)

    def stored_parts(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """This rank's parts of stored slots: number of the slot, first element, and memory."""
        stored = [] if self.updater is None else self.updater.stored()
        for number, (name, place) in enumerate(stored):
            for bound in self.pieces:
                if bound.name == name:
                    yield number, bound.piece.start, cut_piece(place.detach(), bound.piece)

    def write_to(self, values: Mapping[str, torch.Tensor]) -> None:
        """Show this rank's parts of parameters in the script's own, given by name."""
        if self._residency is not None:
            self._residency.write_to(values)

    def hold_parameters(self, *, everywhere: bool = False) -> None:
        """Have all parameters in scripts, or on every rank, until the next step; collective."""
        if self._residency is not None:
            self.exchange.open()
            self._residency.free_gradients()
            self._residency.show(everywhere=everywhere)

    def hold_own(self) -> None:
        """Have the parameters in host memory, whole, if they lie there between passes."""
        if isinstance(self._residency, ParameterOffload):
            self._residency.show()

    def setting(self, names: Collection[str]) -> AbstractContextManager[None]:
        """Within the block this rank's model can be given values of parameters."""
        if self._residency is None:
            return nullcontext()
        numbers = {number for number, name in enumerate(self.trained_names) if name in names}
        return self._residency.memory.written(numbers & self._away)

    def release_parameters(self) -> None:
        """Free other ranks' parts of parameters, if they are divided."""
        if self._residency is not None:
            self._residency.release()

    # --- gradients and slots ---------------------------------------------------------------------

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Gradients of the last step, summed over all shares; each is on one rank only."""
        for group, pieces in zip(self._groups, self._pieces, strict=True):
            sums = [bound.tensor.grad for bound in pieces]
            self.exchange.gradients[group.number].gather(group.pieces, sums)
        self.barrier()
        return {
            name: self.exchange.gradients[group.number].summed(index)
            for group in self._groups
            if group.spec.ranks[0] == self.rank
            for index, name in enumerate(group.names)
        }

    @torch.no_grad()
    def copy_slots(self) -> None:
        """Copy the slots of its pieces to its own pages of a copy-on-write store.

        It must be called before any step: until then another rank's changes are visible.
        """
        pieces = [
            (group.names[one.parameter], one) for group in self._groups for one in group.pieces
        ]
        for name, tensor in [] if self.updater is None else self.updater.stored():
            for piece in [piece for parameter, piece in pieces if parameter == name]:
                own = cut_piece(tensor.detach(), piece)
                own.copy_(own.clone())

    def gather_slots(self) -> None:
        """All-gather the stored slots between domains that do not share them; collective."""
        assert self.updater is not None
        if self.plan.sharding is not None:
            self.updater.write_back_slots()
            if self.plan.num_hosts == 1:
                return
        self.exchange.open()  # if no step has opened it
        for group in self._groups:
            numbers = {name: number for number, name in enumerate(group.names)}
            for name, tensor in self.updater.stored() if group.is_scattered else ():
                if name in numbers:
                    self.exchange.gradients[group.number].all_gather(
                        {numbers[name]: tensor.detach()}, all_pieces=True
                    )

    def reload_weights(self) -> None:
        """Take notice of weights that may have been set from outside, while all are here."""
        if self._residency is not None:
            self._residency.memory.keep_pieces()
        if self.updater is not None:
            self.updater.reload_weights()

    def rebind(self) -> None:
        """Reload the state of the front end's optimizer after it has changed."""
        assert self.updater is not None
        self.updater.bind(self.pieces)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.exchange.barrier()
