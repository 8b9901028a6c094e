"""The Worker: one rank's part of a Plan, run on real tensors.

A training step runs the rank's program (``plan.program.lowering``): first the passes over shares of
the batch (``parallel.data_parallel.passes``), then

    REDUCE  wait for all ranks; sum the gradients of the pieces that this rank updates
    STEP    update these pieces
    SYNC    wait until every rank has updated its own

Tasks (``train.fit.fit_task``, ``train.fit.tasks``) call a Worker and do not depend on how the Plan
divides the model.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from lockstep.data.iterable.read_ahead import Read
from lockstep.data.map_style.sources import Batch, Source
from lockstep.data.trees import Tree
from lockstep.errors import NonFiniteError
from lockstep.parallel.batch_run import Observe, Run, StepBatch, Take
from lockstep.parallel.data_parallel.late_check import LateCheck, LateStep
from lockstep.parallel.data_parallel.passes import Passes
from lockstep.parallel.independence.split_trial import is_tried
from lockstep.parallel.local_steps import LocalSteps
from lockstep.parallel.loss.loss_checks import refuses, unequal_scale, unused
from lockstep.parallel.loss.share_losses import Sums
from lockstep.parallel.loss.whole_batch import SharePart
from lockstep.parallel.storage.allocator import temporary_memory
from lockstep.parallel.storage.device_store import Mirror, Mirrors
from lockstep.parallel.storage.store import copy_to_views
from lockstep.parallel.training_step import StepResult, TrainingStep, is_traced, span
from lockstep.parallel.update_worker import UpdateWorker
from lockstep.parallel.updater_interface import PieceSlots
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

# Phases that a rank reports on the status board.
_PHASES: dict[type[Action], str] = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "backward",
    BackwardWeight: "backward",
    Reduce: "exchange",
    Step: "update",
    Sync: "sync",
}


class Worker(UpdateWorker):
    """Runs one rank of a Plan. Made by ``parallel.build``.

    Args:
        work: common to all ranks; its model has only the layers that this rank holds.
        passes: runs forward and backward passes.
        local_names: names of the parameters and buffers that this rank has; None for all.
        authoritative: names of the buffers whose values are taken from this rank.
        options: the rest for ``UpdateWorker``.

    Attributes:
        mirrors: host copies of values that only this rank has on its device.
    """

    mirrors: Mirrors = ((), ())

    def __init__(
        self,
        work: Workload,
        *,
        passes: Passes,
        local_names: frozenset[str] | None = None,
        authoritative: frozenset[str] = frozenset(),
        **options: Any,
    ) -> None:
        names = [name for name, _ in work.model.named_parameters()]
        super().__init__(
            plan=work.plan, updater=work.updater, rules=work.rules, names=names, **options
        )
        self.model = work.model
        self.passes = passes
        self._local_names = local_names
        self._authoritative = authoritative
        self._program: object = None
        self._calls: list[_Call] = []
        self._idle_sizes: dict[int, bool] = {}
        self._check: LateCheck | None = None  # of the present fit
        self._has_inferred = False
        self._unsettled: LateStep | None = None
        self._may_be_late = False

    # --- training --------------------------------------------------------------------------------

    def begin_training(
        self, *, is_synchronous: bool, is_restartable: bool, is_watched: bool
    ) -> None:
        """A ``fit`` begins.

        Args:
            is_synchronous: all ranks take part in what happens after every step.
            is_restartable: if a rank dies, the epoch may continue: only sums of its steps' results
                are kept.
            is_watched: callbacks act after every step.
        """
        self._check = self._unsettled = None
        is_alone = self.plan.num_ranks == self.plan.num_shares == 1 and self.board is None
        self._may_be_late = is_alone and not is_watched and self.passes.device.type != "cpu"

    @property
    def local_steps(self) -> LocalSteps | None:
        """What is particular to local steps; None if ranks wait for each other in every step."""
        return None

    def train_step(self, batch: StepBatch) -> StepResult:
        """Train on a global batch; every rank calls it with the same batch.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite; nothing has been updated.
            LossError: the loss function broke its contract.
        """
        if self.updater is not None:
            self.updater.turn = batch.turn
        if self.board is not None:
            self.board.step = batch.step
        if self.passes.has_turns:
            with self.passes.in_turn(batch.turn), self.trial_memory(batch.step):
                return self._train_once_or_twice(batch)
        if self.plan.sharding is not None:
            with self.trial_memory(batch.step):
                return self._train_once_or_twice(batch)
        return self._train_once_or_twice(batch)

    def trial_memory(self, step: int = 0) -> AbstractContextManager[None]:
        """Around trials of the model, before or in a step: sharded ranks free their memory at once.

        In every step they do where parts of gradients are brought together before they are summed.

        Args:
            step: the training step.
        """
        is_scarce = self.plan.sharding is not None and (is_tried(step) or bool(self.plan.tensor))
        return temporary_memory() if is_scarce else nullcontext()

    def _train_once_or_twice(self, batch: StepBatch) -> StepResult:
        check = self._check_of(batch) if self._may_be_late else None
        if check is None:
            if self._unsettled is not None:
                self.settle()
            return self._train_checked(batch)
        now = TrainingStep(batch, self.plan.num_shares, check)
        try:
            result = self._train(now)
        except _RepeatStepError:
            self._end_repeated()
            self._may_be_late = False
            return self._train_once_or_twice(batch)
        previous = self._unsettled
        self._unsettled = LateStep(batch, now.batch, self.passes.first_buffers, check)
        if previous is not None and not previous.settle():
            return self._train_again(previous, self._unsettled)
        self.passes.first_buffers = None if previous is None else previous.buffers  # to reuse
        return result

    def _check_of(self, batch: StepBatch) -> LateCheck | None:
        """The check of a step whose verdict the host may learn later; None if it must wait."""
        if is_tried(batch.step) or is_traced() or self.passes.has_turns:
            return None
        if self._check is None and self.updater is not None:
            self._check = LateCheck.of(self.updater, self._rules, self.passes.device)
        return self._check

    def _train_again(self, *steps: LateStep) -> StepResult:
        """Make the last steps again, since the device has refused the first of them."""
        self._unsettled, self._may_be_late = None, False
        self.passes.restore_buffers(steps[0].buffers)
        for step in steps:
            with step.as_then():
                result = self._train_checked(step.batch)
        return result

    def _train_checked(self, batch: StepBatch) -> StepResult:
        try:
            return self._train(TrainingStep(batch, self.plan.num_shares))
        except _UnknownReductionError:
            self._end_repeated()  # all ranks know it
            self.passes.use_whole_batch()
            return self._train(TrainingStep(batch, self.plan.num_shares))

    def _end_repeated(self) -> None:
        """End a step that is made again, before its update."""
        self.passes.restore_buffers()
        self.exchange.end_step()

    def _train(self, now: TrainingStep) -> StepResult:
        self.passes.begin(now.batch)
        program = self.passes.program(now.batch.num_samples)
        if program is not self._program:
            self._program = program
            self._calls = [self._bound(actions) for actions in program]
        try:
            for call in self._calls:
                if self.board is not None:
                    self.board.note(call.phase)
                if is_traced():
                    with span(*call.actions):
                        self._run(now, call)
                else:
                    self._run(now, call)
        except NonFiniteError:  # on all ranks
            self.passes.restore_buffers()
            self.hold_parameters()
            raise
        if now.is_skipped:
            self.passes.restore_buffers()
        else:
            self.passes.settle_buffers()
        return now.result()

    def _bound(self, actions: tuple[Action, ...]) -> "_Call":
        # No method of this object: a cycle would keep shared memory until garbage collection.
        is_collective = isinstance(actions[0], Reduce | Step | Sync)
        run = None if is_collective else self.passes.bound(actions)
        return _Call(_PHASES[type(actions[0])], actions, run)

    def _run(self, now: TrainingStep, call: "_Call") -> None:
        if call.run is not None:
            call.run(now)
            return
        match call.actions[0]:
            case Reduce():
                self._reduce(now)
            case Step():
                late = now.totals.late
                if now.is_void:
                    return
                if now.late is not None and late is not None:
                    self._update_if_finite(now.step, now.late, late.values)
                else:
                    now.is_skipped = not self._step(now.step)
            case Sync():
                self.exchange.end_step()

    def _reduce(self, now: TrainingStep) -> None:
        batch = now.batch
        self.passes.hand_in()
        needs_totals = self._rules.on_nonfinite != "ignore" and now.late is None
        totals = now.totals = self.exchange.collect(batch.num_filled, needs_totals=needs_totals)
        now.weight = math.fsum(totals.weights)
        if totals.is_guess:
            raise _UnknownReductionError
        if now.late is not None and totals.late is None:
            raise _RepeatStepError  # the weight of the loss must be read from the device
        self.passes.side_effects.settle(self.board)
        if batch.is_observed and now.late is None:
            batch.end_observing()
        if totals.is_refused:
            self.passes.call.give_up_format()
        if now.weight and not self.exchange.gradient_bound:
            raise unused(now.step)
        if now.weight and now.late is None and not math.isfinite(sum(totals.totals)):
            now.is_skipped = refuses(
                self._rules.on_nonfinite,
                now.step,
                batch.bounds,
                totals.totals,
                lambda share: self.passes.diagnose(batch, share),
            )
        now.is_void = now.is_skipped or not now.weight
        factor = 1.0 if batch.num_filled == 1 or not now.weight else batch.num_samples / now.weight
        if factor != 1.0 and not self.passes.is_linear:
            raise unequal_scale(now.step)
        if self._rules.loss_scale is not None:
            factor /= self._rules.scale
        self._sum_gradients(factor, is_void=now.is_void)

    def show_parameters(self) -> None:
        """Bring parameters of other ranks to where rank 0 reads them; collective."""
        self.hold_parameters()
        self._show(self.mirrors[0])

    def _show(self, mirrors: Sequence[Mirror]) -> None:
        if self.plan.pipeline is None or is_cpu(self.plan.devices):
            return
        for views, values in mirrors:
            copy_to_views(views, values)
        self.barrier()

    def gather_slots(self) -> None:
        if len(self.plan.domains) > 1:
            super().gather_slots()
            self._show(self.mirrors[1])
            self.barrier()
        elif self.updater is not None:
            self.updater.write_back_slots()

    # --- evaluation and prediction ---------------------------------------------------------------

    @torch.no_grad()
    def evaluate_step(
        self, source: Source, indices: torch.Tensor, observe: Observe | None = None
    ) -> list[Sums]:
        """Loss sums of the shares of a batch whose loss this rank computes."""
        parts: dict[int, SharePart] = {}

        def take(share: int, batch: Batch, output: Tree) -> None:
            parts[share] = SharePart(output=self.passes.held(output), batch=batch)
            if run.is_observed:
                run.show(share, self.passes.shown(output), batch)

        run = Run(source, indices, self.plan.num_shares, observe=observe)
        self._infer(run, take)
        run.end_observing()
        losses = self.passes.losses_of(run, parts)
        return losses if self.passes.leads else []

    @torch.no_grad()
    def predict_step(self, source: Source, indices: torch.Tensor) -> list[tuple[int, Tree]]:
        """(position in the batch, output) of the shares whose output this rank computes."""
        outputs: list[tuple[int, Tree]] = []
        run = Run(source, indices, self.plan.num_shares)

        def take(share: int, batch: Batch, output: Tree) -> None:
            outputs.append((run.bounds[share][0], self.passes.shown(output)))

        self._infer(run, take)
        return outputs if self.passes.leads else []

    def _infer(self, run: Run, take: Take) -> None:
        run.is_tried, self._has_inferred = not self._has_inferred, True
        self.passes.begin(run)
        self.passes.infer(run, take)

    # --- data and state of this rank -------------------------------------------------------------

    def reads(
        self, indices: torch.Tensor, step: int | None = None, turn: int = 0, first_share: int = 0
    ) -> list[Read]:
        """The reads that this rank will make of a batch, in order.

        Args:
            indices: of the global batch.
            step: of training; None in evaluation and prediction.
            turn: see ``StepBatch``.
            first_share: likewise.
        """
        num_shares = self.plan.num_shares
        run = Run(None, indices, num_shares, step=step, turn=turn, first_share=first_share)
        return self.passes.reads(run)

    def synchronise(self, *, is_last: bool = False) -> None:
        """Make the weights of all ranks equal, after an epoch or, with ``is_last``, the task.

        A rank alone learns the verdict on its last step.

        Raises:
            ModelError: a pass has given a parameter other memory.
        """
        self.settle()
        self.check_storages()

    def settle(self) -> None:
        """Know that the last step is complete, before its weights are read."""
        step, self._unsettled = self._unsettled, None
        if step is not None and not step.settle():
            self._train_again(step)

    def epoch_logs(self) -> dict[str, float]:
        """Values for an epoch's logs, beside losses; ranks are synchronised."""
        return {}

    @property
    def is_halted(self) -> bool:
        """True if training must stop here; the same on all ranks."""
        return self.board is not None and self.board.is_halted

    def slots(self, *, with_stored: bool = False) -> list[PieceSlots]:
        """This rank's slots of the optimizer's state; see ``Updater.slots``."""
        assert self.updater is not None
        return self.updater.slots(with_stored=with_stored)

    def local_names(self) -> frozenset[str] | None:
        """Names of the parameters and buffers that this rank has; None for all."""
        return self._local_names

    def authoritative_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers whose values are taken from this rank."""
        own, buffers = self._authoritative, self.model.named_buffers()
        return {name: buffer for name, buffer in buffers if name in own}

    def leaves_a_rank_idle(self, num_samples: int) -> bool:
        """True if some rank has no share of such a batch, and sees no buffer change."""
        if num_samples not in self._idle_sizes:
            self._idle_sizes[num_samples] = leaves_a_rank_idle(self.plan, num_samples)
        return self._idle_sizes[num_samples]

    def close(self) -> None:
        """End a task; every rank calls it."""
        self.passes.close()
        self.hold_own()

    def abandon(self) -> None:
        """End a failed task; any rank may call it."""
        self.passes.abandon()

    def mark_lost(self) -> bool:
        """After a failure: put NaN where other ranks had their parts of parameters, if they had."""
        return self._residency is not None and self._residency.memory.mark_lost()


class _Call(NamedTuple):
    """Some actions of a program that run together, bound to what runs them.

    Attributes:
        phase: for the status board.
        actions: for traces.
        run: makes passes; None for a collective action, which the Worker makes.
    """

    phase: str
    actions: tuple[Action, ...]
    run: Callable[[TrainingStep], None] | None


class _RepeatStepError(Exception):
    """The step must be made again, and the host must wait for its values before the update."""


class _UnknownReductionError(_RepeatStepError):
    """The loss's reduction is unknown: repeat the step with the loss of the whole batch."""
