"""The Worker: one rank's part of a Plan, run on real tensors.

A training step is the rank's program (``plan.program.lowering``), action by action: passes over
shares of the batch, which ``parallel.data_parallel.passes`` runs, and then

    REDUCE  wait for all ranks; sum the gradients of the pieces that this rank updates
    STEP    update these pieces
    SYNC    wait until every rank has updated its own

What trains, evaluates and predicts with a Worker (``train.fit.fit_task``, ``train.fit.tasks``)
knows nothing of how the Plan divides the model.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from lockstep.comm.collectives.gradients import Gradients, cut_piece
from lockstep.comm.exchange import Exchange
from lockstep.data.iterable.read_ahead import Read
from lockstep.data.map_style.sources import Batch, Source
from lockstep.data.trees import Tree
from lockstep.errors import NonFiniteError
from lockstep.parallel.batch_run import Observe, Run, StepBatch, Take
from lockstep.parallel.data_parallel.gradient_rules import GradientJudge
from lockstep.parallel.data_parallel.passes import Passes
from lockstep.parallel.loss.loss_rules import check_used, refuses, unequal_scale
from lockstep.parallel.loss.share_losses import Sums
from lockstep.parallel.loss.whole_batch import SharePart
from lockstep.parallel.owned_group import OwnedGroup
from lockstep.parallel.storage.device_store import Mirror, Mirrors
from lockstep.parallel.storage.store import copy_to_views
from lockstep.parallel.training_step import StepResult, TrainingStep, span
from lockstep.parallel.update import PieceSlots
from lockstep.parallel.workload import Workload
from lockstep.plan.devices import is_cpu
from lockstep.plan.program.lowering import leaves_a_rank_idle
from lockstep.plan.program.rank_program import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Reduce,
    Step,
    Sync,
)

# What a rank says of itself meanwhile.
_PHASES: dict[type[Action], str] = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "backward",
    BackwardWeight: "backward",
    Reduce: "exchange",
    Step: "update",
    Sync: "sync",
}


class Worker:
    """Runs one rank of a Plan. Made by ``parallel.build``.

    Args:
        work: what all ranks work on, with the model as far as this one has it.
        rank: this rank.
        exchange: this rank's end of the exchange.
        passes: how it goes forward and backward.
        groups: of parameters, those that this rank holds.
        told_elsewhere: see ``GradientJudge``.
        held: names of the parameters and buffers that this rank has; None for all.
        ruled: names of the buffers of which this rank has the values that count.

    Attributes:
        board: where the ranks of the host wait for each other; None where there is one alone.
        trains_apart: a step is one on this rank's part of the batch, on parameters of its own.
        keeps_pace: such steps end together all the same, for what goes on between them.
        is_apart: the weights of the ranks differ.
        goes_on: where a rank dies the epoch may be gone on with: nothing else is kept of its steps
            than what their results tell in sum.
        first_share: see ``Run``.
        batch_size: samples of the batches that it trains on parts of; 0 where they are whole.
        has_own_optimizer: it steps parameters of its own, with slots that no other rank has.
        mirrors: what rank 0 is shown of what this rank alone has on its device.
    """

    trains_apart = False
    keeps_pace = False
    is_apart = False
    first_share = 0
    batch_size = 0
    goes_on = False
    has_own_optimizer = False
    mirrors: Mirrors = ((), ())

    def __init__(
        self,
        work: Workload,
        *,
        rank: int,
        exchange: Exchange,
        passes: Passes,
        groups: Sequence[OwnedGroup],
        told_elsewhere: frozenset[str] = frozenset(),
        held: frozenset[str] | None = None,
        ruled: frozenset[str] = frozenset(),
    ) -> None:
        self.plan = work.plan
        self.rank = rank
        self.model = work.model
        self.exchange = exchange
        self.board = exchange.board
        self.passes = passes
        self.updater = work.updater
        self._groups = groups
        self._held = held
        self._ruled = ruled
        self._pieces = [group.bound(is_alone=self.plan.num_ranks == 1) for group in groups]
        bound = [piece for pieces in self._pieces for piece in pieces]
        if self.updater is not None:
            self.updater.bind(bound)
        # What other domains have updated, every rank of a group writes.
        self._changes_weights = bool(bound) or any(group.is_scattered for group in groups)
        if self.board is not None and not self._changes_weights:
            self.board.own_nothing()
        self._rules = work.rules
        self._judge = GradientJudge(
            self._rules,
            bound,
            [sizes for group in groups for sizes in group.blocks],
            [name for name, _ in self.model.named_parameters()],
            self.board,
            told_elsewhere,
        )

    # --- training --------------------------------------------------------------------------------

    def train_step(self, batch: StepBatch) -> StepResult:
        """One step on a global batch; every rank calls it with the same.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite; nothing has been updated.
            LossError: the loss function broke its contract.
        """
        if self.updater is not None:
            self.updater.turn = batch.turn
        if self.board is not None:
            self.board.step = batch.step
        with self.passes.in_turn(batch.turn):
            try:
                return self._train(self._begun(batch))
            except _UnknownReductionError:
                self.passes.restore_buffers()
                self.passes.take_whole()
                self.exchange.end_step()  # all have seen it
                return self._train(self._begun(batch))

    def _begun(self, batch: StepBatch) -> TrainingStep:
        part = {"first_share": self.first_share, "batch_size": self.batch_size}
        return TrainingStep(Run.of_step(batch, self.plan.num_shares, **part), batch.step)

    def _train(self, now: TrainingStep) -> StepResult:
        self.passes.begin(now.batch)
        try:
            for actions in self.passes.program(now.batch.num_samples):
                with span(*actions):
                    self._run(now, actions)
        except NonFiniteError:
            self.passes.restore_buffers()
            raise
        if now.is_skipped:
            self.passes.restore_buffers()
        else:
            self.passes.settle_buffers()
        return now.result()

    def _run(self, now: TrainingStep, actions: Sequence[Action]) -> None:
        if self.board is not None:
            self.board.note(_PHASES[type(actions[0])])
        match actions[0]:
            case Reduce():
                self._reduce(now)
            case Step():
                self._step(now)
            case Sync():
                self.exchange.end_step()
            case _:
                self.passes.run(now.batch, actions)

    def _reduce(self, now: TrainingStep) -> None:
        batch = now.batch
        self.passes.hand_in()
        needs_totals = self._rules.on_nonfinite != "ignore"
        now.totals = self.exchange.collect(batch.num_filled, needs_totals=needs_totals)
        if now.totals.is_guess:
            raise _UnknownReductionError
        self.passes.check_side_effects()
        batch.end_observing()
        if now.totals.is_refused:
            self.passes.call.give_up_format()
        if now.weight:
            check_used(now.step, self.exchange.is_any_used())
            now.is_skipped = refuses(
                self._rules.on_nonfinite,
                now.step,
                batch.bounds,
                now.totals.totals,
                lambda share: self.passes.diagnose(batch, share),
            )
        factor = 1.0 if batch.num_filled == 1 or not now.weight else batch.num_samples / now.weight
        if factor != 1.0 and not self.passes.is_linear:
            raise unequal_scale(now.step)
        self._sum_gradients(now, factor / self._rules.scale)

    def _sum_gradients(self, now: TrainingStep, factor: float) -> None:
        """Give the pieces that this rank updates the gradients of all shares, times a factor."""
        for group, pieces in zip(self._groups, self._pieces, strict=True):
            self.exchange.gradients[group.number].factor = factor
            gradients = [None] * len(pieces) if now.is_void else self._reduced(group)
            used = [gradient for gradient in gradients if gradient is not None]
            if used and factor != 1.0:
                torch._foreach_mul_(used, factor)
            for bound, gradient in zip(pieces, gradients, strict=True):
                bound.tensor.grad = gradient

    def _reduced(self, group: OwnedGroup) -> list[torch.Tensor | None]:
        return self.exchange.gradients[group.number].reduce_scatter(group.pieces)

    def _step(self, now: TrainingStep) -> None:
        assert self.updater is not None
        if now.is_void:
            return
        now.is_skipped = not self._judge.settle(now.step)
        if now.is_skipped:
            return
        board = self.board if self._changes_weights else None
        with nullcontext() if board is None else board.updating(now.step):
            self.updater.step()
            for group in self._groups:
                self.exchange.gradients[group.number].commit()
                self.exchange.gradients[group.number].all_gather(
                    {number: one.detach() for number, one in enumerate(group.members)},
                    all_pieces=not self.updater.is_known,
                )

    def update(self, gradients: Gradients, run: Run, step: int, turn: int = 0) -> None:
        """Make an update by itself, with gradients that code of the user's has computed.

        Every rank of a Plan without stages calls it, which has a share of the batch each.

        Args:
            gradients: what this rank adds to those of the batch, one for each parameter that is
                trained; None where it adds nothing.
            run: the batch.
            step: the number of the step.
            turn: see ``StepBatch``.
        """
        assert self.updater is not None
        self.updater.turn = turn
        if self.board is not None:
            self.board.step = step
        now = TrainingStep(run, step)
        self.exchange.begin_pass()
        self.exchange.write(0, self.rank, gradients)
        self.exchange.write_loss(self.rank, 0.0, 1.0)
        now.totals = self.exchange.collect(self.plan.num_shares)
        self._sum_gradients(now, 1.0)
        self._step(now)
        self.exchange.end_step()

    @property
    def trained_names(self) -> list[str]:
        """Names of the parameters that this rank trains, in the order of ``update``."""
        return [name for group in self._groups for name in group.names]

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Gradients of the last step, summed over all shares; every name on one rank only."""
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
    def take_slots(self) -> None:
        """Have the slots of its pieces in pages of its own, of a store that is copied on write.

        Before any step: where pages are still those of another rank, its changes would be seen.
        """
        pieces = [
            (group.names[one.parameter], one) for group in self._groups for one in group.pieces
        ]
        for name, tensor in [] if self.updater is None else self.updater.stored():
            for piece in [piece for parameter, piece in pieces if parameter == name]:
                own = cut_piece(tensor.detach(), piece)
                own.copy_(own.clone())

    def show_parameters(self) -> None:
        """Have rank 0 know the parameters that it has not; every rank calls it."""
        self._show(self.mirrors[0])

    def _show(self, mirrors: Sequence[Mirror]) -> None:
        if self.plan.pipeline is None or is_cpu(self.plan.devices):
            return
        for views, values in mirrors:
            copy_to_views(views, values)
        self.barrier()

    def gather_slots(self) -> None:
        """Bring what lies in the stores of slots to all domains; every rank calls it."""
        if len(self.plan.domains) == 1:
            return
        assert self.updater is not None
        self.exchange.open()  # perhaps no step was made
        for group in self._groups:
            numbers = {name: number for number, name in enumerate(group.names)}
            for name, tensor in self.updater.stored() if group.is_scattered else ():
                if name in numbers:
                    self.exchange.gradients[group.number].all_gather(
                        {numbers[name]: tensor.detach()}, all_pieces=True
                    )
        self._show(self.mirrors[1])
        self.barrier()

    # --- evaluation and prediction ---------------------------------------------------------------

    @torch.no_grad()
    def evaluate_step(
        self, source: Source, indices: torch.Tensor, observe: Observe | None = None
    ) -> list[Sums]:
        """The sums of the shares of the batch at ``indices`` whose loss is known here."""
        parts: dict[int, SharePart] = {}

        def take(share: int, batch: Batch, output: Tree) -> None:
            parts[share] = SharePart(output=self.passes.held(output), batch=batch)
            if run.is_observed:
                run.show(share, self.passes.shown(output), batch)

        run = Run(source, indices, self.plan.num_shares, observe=observe)
        self._infer(run, take)
        run.end_observing()
        return self.passes.losses_of(run, parts)

    @torch.no_grad()
    def predict_step(self, source: Source, indices: torch.Tensor) -> list[tuple[int, Tree]]:
        """(position in the batch, output) of the shares whose output is known here."""
        outputs: list[tuple[int, Tree]] = []
        run = Run(source, indices, self.plan.num_shares)

        def take(share: int, batch: Batch, output: Tree) -> None:
            outputs.append((run.bounds[share][0], self.passes.shown(output)))

        self._infer(run, take)
        return outputs

    def _infer(self, run: Run, take: Take) -> None:
        self.passes.begin(run)
        self.passes.infer(run, take)

    # --- what a rank has and reads ---------------------------------------------------------------

    def reads(self, indices: torch.Tensor, step: int | None = None, turn: int = 0) -> list[Read]:
        """What this rank is going to read of the batch at ``indices``, in this order.

        Args:
            indices: of the global batch.
            step: of training; None in evaluation and prediction.
            turn: see ``StepBatch``.
        """
        run = Run(
            None,
            indices,
            self.plan.num_shares,
            step=step,
            turn=turn,
            first_share=self.first_share,
        )
        return self.passes.reads(run)

    def settle(self, *, is_last: bool = False) -> None:
        """All steps of an epoch, or with ``is_last`` of the task, are made: have ranks be alike."""
        return

    def results_of_epoch(self, own: list[StepResult]) -> list[StepResult]:
        """Of an epoch's steps, what this rank tells where each has made steps of its own."""
        return own

    def go_on_from(self, stand: Any) -> None:
        """Of ranks that train apart: the epoch begins there, or at its beginning if None."""
        return

    def hold(self) -> None:
        """On rank 0, when a process has died, before the others are ended."""
        return

    def epoch_logs(self) -> dict[str, float]:
        """What is to be told of an epoch, beside losses; all ranks have settled."""
        return {}

    @property
    def is_halted(self) -> bool:
        """Whether to stop here: on all ranks or on none."""
        return self.board is not None and self.board.is_halted

    def slots(self, *, with_stored: bool = False) -> list[PieceSlots]:
        """What this rank has of the optimizer's slots that count; see ``Updater.slots``."""
        assert self.updater is not None
        return self.updater.slots(with_stored=with_stored)

    def bind_again(self) -> None:
        """Somebody has changed what the front end's optimizer knows: step on with that."""
        assert self.updater is not None
        self.updater.bind([piece for pieces in self._pieces for piece in pieces])

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.exchange.barrier()

    def held_names(self) -> frozenset[str] | None:
        """Names of the parameters and buffers that this rank has; None for all of the model's."""
        return self._held

    def ruled_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of which this rank has the values that count."""
        return {name: buffer for name, buffer in self.model.named_buffers() if name in self._ruled}

    def leaves_a_rank_idle(self, num_samples: int) -> bool:
        """Whether some rank works on no share of such a batch, and sees no buffer change."""
        return leaves_a_rank_idle(self.plan, num_samples)

    def close(self) -> None:
        """A task is done; every rank calls it."""
        self.passes.close()

    def abandon(self) -> None:
        """A task has failed; whoever notices it calls this."""
        self.passes.abandon()


class _UnknownReductionError(Exception):
    """What a share's loss weighs, nobody knows: the step is made once more, otherwise."""
