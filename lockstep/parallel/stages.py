"""A rank of a pipeline: some of the model's layers, and the microbatches that come by.

A training step is the rank's program (``plan.lowering``), action by action:

    1F0     run stage 1 on microbatch 0: receive what it needs, send on what others need
    1B0     backward: receive the gradients of what was sent, send on those of what was received
    1I0     the same without the gradients of large weights, for which
    1W0     follows later, when there is time
    REDUCE  wait for all ranks; sum the gradients of what several ranks hold
    STEP    update the pieces that this rank owns
    SYNC    wait until every rank has updated its own

Values are received when the first instruction needs them, and gradients are sent as soon as they
are complete. So two branches that meet late run at the same time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.comm.board import Board
from lockstep.comm.exchange import ShareTotals, cut_piece
from lockstep.comm.gradient_rows import multiply
from lockstep.data.order import evaluation_seed, seed_streams, share_seed
from lockstep.data.read_ahead import Read
from lockstep.data.sources import Batch, Source
from lockstep.data.trees import Tree, map_tensors
from lockstep.errors import NonFiniteError
from lockstep.parallel.buffers import Buffers
from lockstep.parallel.diagnosis import Diagnosis
from lockstep.parallel.forward import DTYPES, ModelCall, channels_last, narrowed
from lockstep.parallel.gradient_rules import GradientJudge, GradientRules
from lockstep.parallel.linear import LinearLayers
from lockstep.parallel.losses import JointLoss, LossAdapter, ShareLoss, Sums
from lockstep.parallel.partition import Partition
from lockstep.parallel.passage import Passage
from lockstep.parallel.stage_exchange import GroupSpec, StageExchange
from lockstep.parallel.update import BoundPiece, Updater
from lockstep.parallel.worker import (
    Observe,
    StepResult,
    Worker,
    check_used,
    moved,
    plain,
    reads_of_shares,
    refuses,
    span,
    step_result,
)
from lockstep.plan.layout import Piece, block_sizes
from lockstep.plan.lowering import lower_forward, lower_train
from lockstep.plan.program import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Reduce,
    Step,
    Sync,
)
from lockstep.plan.shares import num_filled_shares, share_bounds
from lockstep.plan.spec import Plan

# Elements of a linear layer's weight, from where on its gradient can wait for a pass of its own.
_LARGE_WEIGHT = 1 << 14


@dataclass(frozen=True, kw_only=True)
class OwnedGroup:
    """A group of parameters that this rank has, and what it updates of them.

    Attributes:
        number: the group's.
        spec: the group's trainable parameters.
        pieces: of these, those that this rank updates.
    """

    number: int
    spec: GroupSpec
    pieces: Sequence[Piece]


class StageWorker(Worker):
    """Runs one rank of a Plan with a pipeline.

    Args:
        plan: the Plan.
        rank: this rank.
        model: the model; parameters of other stages may be on the meta device.
        loss: the loss, adapted; None where only predictions are asked for.
        exchange: this rank's end of the exchange.
        updater: the optimizer; None where nothing is trained.
        partitions: of the model, by whether it is in training.
        held: names of the parameters and buffers that this rank has.
        owned: the groups of trainable parameters among them.
        ruled: names of the buffers of which this rank has the values that count.
        rules: for gradients.
        seed: of all random streams.
        device: where the model is.
    """

    board: Board

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        model: nn.Module,
        loss: LossAdapter | None,
        exchange: StageExchange,
        updater: Updater | None,
        partitions: Mapping[bool, Partition],
        held: frozenset[str],
        owned: Sequence[OwnedGroup],
        ruled: frozenset[str],
        rules: GradientRules,
        seed: int,
        device: torch.device,
    ) -> None:
        assert plan.pipeline is not None
        self.plan = plan
        self.rank = rank
        self.model = model
        self.exchange = exchange
        self.board = exchange.board
        self.updater = updater
        self._stages = plan.pipeline.stages
        self._loss = loss
        self._partitions = partitions
        self._held = held
        self._owned = owned
        self._ruled = ruled
        self._seed = seed
        self._device = device
        self._dtype = DTYPES[plan.precision]
        self._call = ModelCall(model, plan, device)
        self._buffers = Buffers(model)
        parameters = dict(model.named_parameters())
        self._parameters = [
            [parameters[tensor.name] for tensor in group.spec.tensors] for group in owned
        ]
        self._trainable = [one for members in self._parameters for one in members]
        self._linears = LinearLayers(self._large_weights())
        self._pieces = self._bind()
        self._judge = GradientJudge(
            rules,
            [piece for pieces in self._pieces for piece in pieces],
            [sizes for group in owned for sizes in _block_sizes(group)],
            list(parameters),
            self.board,
        )
        self._passages: dict[tuple[int, int], Passage] = {}
        self._program = lru_cache(maxsize=8)(lambda size: lower_train(plan, rank, size))

    def _large_weights(self) -> dict[int, torch.Tensor]:
        return {
            number: parameter
            for number, parameter in enumerate(self._trainable)
            if parameter.dim() == 2 and parameter.numel() >= _LARGE_WEIGHT
        }

    def _bind(self) -> list[list[BoundPiece]]:
        """The pieces that this rank updates, by group."""
        bound = [
            [
                BoundPiece(
                    name=group.spec.tensors[piece.parameter].name,
                    piece=piece,
                    tensor=cut_piece(members[piece.parameter].detach(), piece).requires_grad_(),
                )
                for piece in group.pieces
            ]
            for group, members in zip(self._owned, self._parameters, strict=True)
        ]
        if self.updater is not None:
            self.updater.bind([piece for pieces in bound for piece in pieces])
        # What other hosts have updated, every rank of a group writes.
        self._changes_weights = any(bound) or bool(self.exchange.sums)
        if not self._changes_weights:
            self.board.own_nothing()
        return bound

    # --- training --------------------------------------------------------------------------------

    def train_step(
        self,
        source: Source,
        indices: torch.Tensor,
        step: int,
        observe: Observe | None = None,
        turn: int = 0,
    ) -> StepResult:
        assert turn == 0, "stages have no functions of the user's"
        run = self._begin(source, indices, step, observe, training=True)
        self.board.step = step
        self._clear_gradients()
        kept = self._buffers.keep()
        try:
            for action in self._program(len(indices)):
                with span(action):
                    _HANDLERS[type(action)](self, run, action)
        except NonFiniteError:
            self._buffers.restore(kept)
            raise
        if run.is_skipped:
            self._buffers.restore(kept)
        assert run.totals is not None
        return step_result(run.totals, len(indices), run.parts, is_skipped=run.is_skipped)

    def _clear_gradients(self) -> None:
        for parameter in self._trainable:
            parameter.grad = None

    def _forward(self, run: "_Run", action: Forward) -> None:
        stage, share = action.stage, action.microbatch
        seed_streams(share_seed(self._seed, run.step, share))
        batch = self._read(run, stage, share)
        mail = self.exchange.mail[True]
        mail.receive_stream(stage, share)
        passage = self._passages[stage, share] = self._passage(run, stage, share)
        output = self._output(passage, batch, recompute=self._stages[stage].recompute)
        if stage == run.last_stage:
            assert batch is not None
            passage.loss = _settled(run, self._loss_of(output, batch))
            self.exchange.put_loss(share, passage.loss.total, passage.loss.weight)
            if run.observe is not None:
                run.observe(self._shown(output), batch.targets)
        mail.send_stream(stage, share)

    def _backward(self, run: "_Run", action: Backward) -> None:
        passage = self._passages.pop((action.stage, action.microbatch))
        self._go_backward(run, passage)
        passage.end()

    def _backward_input(self, run: "_Run", action: BackwardInput) -> None:
        passage = self._passages[action.stage, action.microbatch]
        with self._linears.taken(lambda *factors: passage.defer(*factors)):
            self._go_backward(run, passage)

    @torch.no_grad()
    def _backward_weight(self, run: "_Run", action: BackwardWeight) -> None:
        passage = self._passages.pop((action.stage, action.microbatch))
        for number, inputs, output_gradients in passage.deferred:
            parameter = self._trainable[number]
            adds = parameter.grad is not None
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            multiply(parameter.grad, output_gradients, inputs, adds=adds)
        passage.end()

    def _go_backward(self, run: "_Run", passage: Passage) -> None:
        # A microbatch that is alone knows the whole weight; among others it divides by the
        # samples, and the sum is corrected once all weights are known.
        denominator = float(run.num_samples)
        if run.num_filled == 1 and passage.loss is not None:
            denominator = passage.loss.weight
        denominator /= self._judge.rules.scale
        with self._linears.applied(), self._call.applied():
            passage.backward(denominator)

    def _reduce(self, run: "_Run", action: Reduce) -> None:
        self._put_rows()
        run.totals = self.exchange.collect(run.num_filled)
        weight = math.fsum(run.totals.weights)
        if weight:
            check_used(run.step, self.exchange.is_any_used())
            run.is_skipped = refuses(
                self._judge.rules.on_nonfinite,
                run.step,
                run.bounds,
                run.totals.totals,
                self._diagnose,
            )
        factor = 1.0 if run.num_filled == 1 or not weight else run.num_samples / weight
        factor /= self._judge.rules.scale
        for index, pieces in enumerate(self._pieces):
            is_void = run.is_skipped or not weight
            gradients = [None] * len(pieces) if is_void else self._reduced(index)
            used = [gradient for gradient in gradients if gradient is not None]
            if used and factor != 1.0:
                torch._foreach_mul_(used, factor)
            for bound, gradient in zip(pieces, gradients, strict=True):
                bound.tensor.grad = gradient

    def _diagnose(self, share: int) -> str:
        """The first weight that is not finite, of all ranks' weights."""
        diagnosis = Diagnosis(self.model)
        told = self.board.tell([diagnosis.of_weights(self._trainable)])
        return diagnosis.text(max(number for (number,) in told))

    def _put_rows(self) -> None:
        """Hand in the gradients of what other ranks have, too."""
        self.exchange.put_used(any(one.grad is not None for one in self._trainable))
        for group, members in zip(self._owned, self._parameters, strict=True):
            rows = self.exchange.rows.get(group.number)
            if rows is not None:
                rows.begin_pass()
                rows.put(group.spec.ranks.index(self.rank), [one.grad for one in members])

    def _reduced(self, index: int) -> list[torch.Tensor | None]:
        """The gradients of a group's pieces, summed over the ranks."""
        group, members = self._owned[index], self._parameters[index]
        rows = self.exchange.rows.get(group.number)
        if rows is None:
            return [members[piece.parameter].grad for piece in group.pieces]
        rows.collect(len(group.spec.ranks))
        sums = self.exchange.sums.get(group.number)
        if sums is None:
            return rows.reduce(group.pieces)
        return sums.reduce(group.pieces, _no_factors)

    def _step(self, run: "_Run", action: Step) -> None:
        assert self.updater is not None
        assert run.totals is not None
        if run.is_skipped or not math.fsum(run.totals.weights):
            return
        run.is_skipped = not self._judge.settle(run.step)
        if run.is_skipped:
            return
        updating = self.board.updating(run.step) if self._changes_weights else nullcontext()
        with updating:
            self.updater.step()
            for group, members in zip(self._owned, self._parameters, strict=True):
                if group.number in self.exchange.sums:
                    tensors = {number: one.detach() for number, one in enumerate(members)}
                    self.exchange.sums[group.number].spread(
                        tensors, all_pieces=not self.updater.is_known
                    )

    def _sync(self, run: "_Run", action: Sync) -> None:
        self.barrier()

    def gradients(self, num_samples: int) -> dict[str, torch.Tensor | None]:
        found = {}
        for group, pieces in zip(self._owned, self._pieces, strict=True):
            if group.number in self.exchange.sums:
                self.exchange.sums[group.number].gather(
                    group.pieces, [bound.tensor.grad for bound in pieces]
                )
        self.barrier()
        for group, members in zip(self._owned, self._parameters, strict=True):
            rows = self.exchange.rows.get(group.number)
            if group.spec.ranks[0] == self.rank:
                for index, tensor in enumerate(group.spec.tensors):
                    own = members[index].grad
                    found[tensor.name] = own if rows is None else self._summed(group, index)
        return found

    def _summed(self, group: OwnedGroup, index: int) -> torch.Tensor | None:
        """The whole gradient of a parameter that several ranks have."""
        rows = self.exchange.rows[group.number]
        if group.number in self.exchange.sums:
            return rows.base(index) if rows.is_used(index) else None
        return rows.summed(index)

    def gather_slots(self) -> None:
        assert self.updater is not None
        stored = self.updater.stored()
        for group in self._owned:
            numbers = {one.name: number for number, one in enumerate(group.spec.tensors)}
            for name, tensor in stored if group.number in self.exchange.sums else ():
                if name in numbers:
                    self.exchange.sums[group.number].spread(
                        {numbers[name]: tensor.detach()}, all_pieces=True
                    )
        if self.plan.num_hosts > 1:
            self.barrier()

    # --- evaluation and prediction ---------------------------------------------------------------

    @torch.no_grad()
    def evaluate_step(
        self, source: Source, indices: torch.Tensor, observe: Observe | None = None
    ) -> list[Sums]:
        losses: list[Sums] = []

        def take(run: "_Run", share: int, batch: Batch, output: Tree) -> None:
            losses.append(self._loss_of(output, batch).sums)
            if observe is not None:
                observe(self._shown(output), batch.targets)

        self._run_forward(source, indices, take)
        return losses

    @torch.no_grad()
    def predict_step(self, source: Source, indices: torch.Tensor) -> list[tuple[int, Tree]]:
        outputs: list[tuple[int, Tree]] = []

        def take(run: "_Run", share: int, batch: Batch, output: Tree) -> None:
            outputs.append((run.bounds[share][0], self._shown(output)))

        self._run_forward(source, indices, take)
        return outputs

    def _run_forward(
        self,
        source: Source,
        indices: torch.Tensor,
        take: Callable[["_Run", int, Batch, Tree], None],
    ) -> None:
        run = self._begin(source, indices, 0, None, training=False)
        mail = self.exchange.mail[False]
        for action in lower_forward(self.plan, self.rank, len(indices)):
            assert isinstance(action, Forward)
            stage, share = action.stage, action.microbatch
            seed_streams(evaluation_seed(self._seed, int(indices[run.bounds[share][0]])))
            batch = self._read(run, stage, share)
            mail.receive_stream(stage, share)
            passage = self._passage(run, stage, share)
            output = self._output(passage, batch, recompute=False)
            if stage == run.last_stage:
                assert batch is not None
                take(run, share, batch, output)
            mail.send_stream(stage, share)
            passage.end()

    # --- shared ----------------------------------------------------------------------------------

    def _begin(
        self,
        source: Source,
        indices: torch.Tensor,
        step: int,
        observe: Observe | None,
        *,
        training: bool,
    ) -> "_Run":
        partition = self._partitions[training]
        run = _Run(source, indices, step, self.plan.num_shares, observe, partition, training)
        torch.clear_autocast_cache()
        self._linears.begin_pass()
        self._passages.clear()
        self.exchange.mail[training].begin_pass(run.num_filled)
        return run

    def _read(self, run: "_Run", stage: int, share: int) -> Batch | None:
        """A microbatch's samples, where the stage has use for them."""
        if not _needs_batch(run.partition, stage):
            return None
        start, stop = run.bounds[share]
        with self.reading:
            batch = run.source.read(run.indices[start:stop], self._dtype)
        return moved(batch, self._device)

    def _passage(self, run: "_Run", stage: int, share: int) -> Passage:
        return Passage(
            stage=stage,
            share=share,
            part=run.partition.parts[stage],
            instructions=run.partition.instructions,
            model=self.model,
            mail=self.exchange.mail[run.training],
        )

    def _output(self, passage: Passage, batch: Batch | None, *, recompute: bool) -> Tree:
        """Run a passage forward; returns the model's output if it has it."""
        inputs = None if batch is None else narrowed(batch.inputs, self.plan.precision)
        if self._call.channels_last:
            inputs = map_tensors(channels_last, inputs)
        with self._linears.applied(), self._call.applied(), self._call.computing():
            if recompute:
                kept = self._buffers.keep()
                output, *_ = checkpoint(
                    passage.forward,
                    inputs,
                    use_reentrant=False,
                    context_fn=lambda: (nullcontext(), self._buffers.as_in(kept)),
                )
            else:
                output, *_ = passage.forward(inputs)
        return self._call.widened(output)

    def _shown(self, output: Tree) -> Tree:
        """What users see of an output, and may keep: copies of what an earlier stage has sent."""

        def show(tensor: torch.Tensor) -> torch.Tensor:
            shown = plain(tensor)
            return shown.clone() if self.exchange.lends(shown) else shown

        return map_tensors(show, output)

    def _loss_of(self, output: Tree, batch: Batch) -> ShareLoss | JointLoss:
        assert self._loss is not None
        return self._loss(
            output, batch.targets, batch.sample_weight, batch.num_samples, batch.inputs
        )

    def reads(self, indices: torch.Tensor, step: int | None = None, turn: int = 0) -> list[Read]:
        partition = self._partitions[step is not None]
        if step is None:
            program = lower_forward(self.plan, self.rank, len(indices))
        else:
            program = self._program(len(indices))
        return reads_of_shares(
            [
                action.microbatch
                for action in program
                if isinstance(action, Forward) and _needs_batch(partition, action.stage)
            ],
            indices,
            num_shares=self.plan.num_shares,
            dtype=self._dtype,
            seed=self._seed,
            step=step,
        )

    def barrier(self) -> None:
        self.board.barrier()

    def close(self) -> None:
        self.exchange.close()

    def abandon(self) -> None:
        self.exchange.abandon()

    def leaves_a_rank_idle(self, num_samples: int) -> bool:
        most = max(len(stage.ranks) for stage in self._stages)
        return num_filled_shares(num_samples, self.plan.num_shares) < most

    def held_names(self) -> frozenset[str]:
        return self._held

    def ruled_buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer for name, buffer in self.model.named_buffers() if name in self._ruled}


def _no_factors() -> None:
    """Stages exchange gradients only, so nobody waits for what other ranks have received."""


def _block_sizes(group: OwnedGroup) -> list[list[int]]:
    return block_sizes(group.spec.gradients.extents, len(group.spec.ranks), group.pieces)


def _settled(run: "_Run", loss: ShareLoss | JointLoss) -> ShareLoss:
    """A microbatch's loss, ready to go backward; of several losses, if that can be."""
    settled = loss
    if isinstance(settled, JointLoss):
        alone = run.num_filled == 1
        settled = settled.settled(settled.weights, run.num_samples) if alone else settled.joined()
    if settled.parts:
        run.parts.append(settled.parts)
    return settled


def _needs_batch(partition: Partition, stage: int) -> bool:
    """Whether a stage has use for a microbatch's samples."""
    part = partition.parts[stage]
    begins_stream = part.draws and part.stream_from is None  # reading may draw, too
    return part.uses_inputs or begins_stream or stage == len(partition.parts) - 1


# By action, and not in the class: a cycle would keep its shared memory until the collector runs.
_HANDLERS: dict[type[Action], Callable[[StageWorker, "_Run", Any], None]] = {
    Forward: StageWorker._forward,
    Backward: StageWorker._backward,
    BackwardInput: StageWorker._backward_input,
    BackwardWeight: StageWorker._backward_weight,
    Reduce: StageWorker._reduce,
    Step: StageWorker._step,
    Sync: StageWorker._sync,
}


class _Run:
    """A batch on its way: its microbatches, and what has come of them so far."""

    def __init__(
        self,
        source: Source,
        indices: torch.Tensor,
        step: int,
        num_shares: int,
        observe: Observe | None,
        partition: Partition,
        training: bool,
    ) -> None:
        self.source = source
        self.indices = indices
        self.step = step
        self.observe = observe
        self.partition = partition
        self.training = training
        self.last_stage = len(partition.parts) - 1
        self.num_samples = len(indices)
        self.bounds = share_bounds(self.num_samples, num_shares)
        self.num_filled = num_filled_shares(self.num_samples, num_shares)
        self.totals: ShareTotals | None = None
        self.is_skipped = False
        self.parts: list[Sums] = []
