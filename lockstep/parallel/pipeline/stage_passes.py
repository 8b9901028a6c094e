"""Passes of a rank that holds some of the model's layers, over the microbatches of a batch.

    1F0     run stage 1 on microbatch 0: receive the values it needs, send those others need
    1B0     backward: receive the gradients of sent values, send those of received values
    1I0     the same without the gradients of large weights, which
    1W0     computes later, when the rank would be idle

Values are received when the first instruction needs them, and gradients are sent as soon as they
are complete. So two branches that join late run at the same time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.comm.collectives.matrix_products import multiply
from lockstep.comm.p2p.tcp_p2p import MailChannels
from lockstep.comm.shared_memory.gathering import gather_bytes
from lockstep.data.map_style.sources import Batch
from lockstep.data.trees import Tree, map_tensors
from lockstep.parallel.batch_run import Run, Take
from lockstep.parallel.data_parallel.buffers import Buffers, ChangedOnce
from lockstep.parallel.data_parallel.forward import ModelCall, channels_last
from lockstep.parallel.data_parallel.passes import Passes
from lockstep.parallel.debug.diagnosis import Diagnosis
from lockstep.parallel.loss.share_losses import JointLoss, LossAdapter, ShareLoss, nothing
from lockstep.parallel.loss.whole_batch import SharePart
from lockstep.parallel.owned_group import OwnedGroup
from lockstep.parallel.pipeline.compiled_stages import compiled_stages
from lockstep.parallel.pipeline.microbatch_run import MicrobatchRun
from lockstep.parallel.pipeline.partition import Partition
from lockstep.parallel.pipeline.stage_mail import StageMail
from lockstep.parallel.training_step import TrainingStep
from lockstep.parallel.workload import Workload
from lockstep.plan.program.lowering import lower_forward, lower_train
from lockstep.plan.program.rank_program import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
)


@dataclass(frozen=True, kw_only=True)
class StageTools:
    """The objects that run stages in training, without batches."""

    model: nn.Module
    partition: Partition
    call: ModelCall
    loss: LossAdapter


class StagePasses(Passes):
    """Passes over stages.

    Args:
        work: common to all ranks.
        mail: from and to other stages, by training mode.
        mail_channels: carries mail to other hosts; None without any.
        groups: the parameter groups that this rank holds.
        options: see ``Passes``.
    """

    _run_of = MicrobatchRun

    def __init__(
        self,
        work: Workload,
        *,
        mail: Mapping[bool, StageMail],
        mail_channels: MailChannels | None,
        groups: Sequence[OwnedGroup],
        **options: Any,
    ) -> None:
        super().__init__(work, **options)
        assert work.plan.pipeline is not None
        self._stages = work.plan.pipeline.stages
        self._traced = self._partitions = work.partitions
        if work.plan.compiled:
            self._partitions = self._compiled()
        self._mail = mail
        self._mail_channels = mail_channels
        self._groups = groups
        self._microbatch_runs: dict[tuple[int, int], MicrobatchRun] = {}
        self._stage_buffers = [
            ChangedOnce(Buffers(self._model, {*part.buffers} - self._norms.buffer_names))
            for part in self._partitions[True].parts
        ]
        self._apart: dict[int, SharePart] = {}  # they wait for the outputs of all microbatches
        self._is_settled = False

    def _compiled(self) -> dict[bool, Partition]:
        """The partitions with this rank's stages compiled."""
        own = [number for number, one in enumerate(self._stages) if self._rank in one.ranks]
        return {
            training: compiled_stages(one, self._model, own, training=training)
            for training, one in self._traced.items()
        }

    @property
    def _forms_gradients(self) -> bool:
        return not self._plan.compiled  # compiled code has its own backward

    def tools(self) -> StageTools:
        """The tools to run a stage without batches."""
        assert self._loss is not None
        return StageTools(
            model=self._model,
            partition=self._traced[True],
            call=self.call,
            loss=self._loss,
        )

    def _lowered(self, num_samples: int) -> Sequence[tuple[Action, ...]]:
        program = lower_train(self._plan, self._rank, num_samples)
        if self._uses_whole_batch:  # no microbatch goes backward before all have gone forward
            program = tuple(sorted(program, key=lambda action: not isinstance(action, Forward)))
        return [(action,) for action in program]

    # --- training --------------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        super().begin(run)
        self._microbatch_runs.clear()
        for buffers in self._stage_buffers:
            buffers.begin()
        self._mail[run.is_training].begin_pass(run.num_filled)
        self._apart.clear()
        self._is_settled = not self._uses_whole_batch or run.num_filled == 1

    def bound(self, actions: Sequence[Action]) -> Callable[[TrainingStep], None]:
        (action,) = actions
        return partial(self._run, _HANDLERS[type(action)], action)

    def _run(
        self, handler: Callable[[Any, Run, Any], None], action: Action, now: TrainingStep
    ) -> None:
        if not (self._is_settled or isinstance(action, Forward)):
            self._settle(now.batch)
        handler(self, now.batch, action)

    def _forward(self, run: Run, action: Forward) -> None:
        stage, share = action.stage, action.microbatch
        self._seed_streams(run, share)
        batch = self._read_for(run, stage, share)
        mail = self._mail[True]
        mail.receive_stream(stage, share)
        microbatch_run = self._microbatch_runs[stage, share] = self._microbatch_run(
            run, stage, share
        )
        with self._stage_buffers[stage].in_microbatch():
            output = self._output(microbatch_run, batch, recompute=self._stages[stage].recompute)
            self.side_effects.note(self._partitions[True].parts[stage].buffers)
        if stage == self._last_stage:
            assert batch is not None
            if self._is_settled:
                self._set_loss(share, _settled(run, self.loss_of(output, batch), output))
            else:
                self._apart[share] = SharePart(output=output, batch=batch)
            if run.is_observed:
                run.show(share, self.shown(output), batch)
        mail.send_stream(stage, share)

    def _settle(self, run: Run) -> None:
        """Compute each microbatch's loss after the forward passes of all microbatches."""
        self._is_settled = True
        if self._apart:
            for share, loss in self._divided(run, self._apart).items():
                if loss.parts:
                    run.parts.append(loss.parts)
                self._set_loss(share, loss)
            self._apart.clear()
        elif self._exchange.relays(run.num_filled):
            gather_bytes(self._exchange, {}, run.num_filled)

    def _set_loss(self, share: int, loss: ShareLoss) -> None:
        self._microbatch_runs[self._last_stage, share].loss = loss
        self._write_loss(share, loss)

    def _write_loss(self, share: int, loss: ShareLoss) -> None:
        self._exchange.write_loss(share, loss.total, loss.weight, is_guess=loss.is_guess)

    def _backward(self, run: Run, action: Backward) -> None:
        microbatch_run = self._microbatch_runs.pop((action.stage, action.microbatch))
        with self._linears.taken(self._add_product):
            self._go_backward(run, microbatch_run)
        microbatch_run.end()

    def _backward_input(self, run: Run, action: BackwardInput) -> None:
        microbatch_run = self._microbatch_runs[action.stage, action.microbatch]
        with self._linears.taken(microbatch_run.defer):
            self._go_backward(run, microbatch_run)

    def _backward_weight(self, run: Run, action: BackwardWeight) -> None:
        microbatch_run = self._microbatch_runs.pop((action.stage, action.microbatch))
        for factors in microbatch_run.deferred:
            self._add_product(*factors)
        microbatch_run.end()

    @torch.no_grad()
    def _add_product(
        self, number: int, inputs: torch.Tensor, output_gradients: torch.Tensor
    ) -> None:
        """Add to a weight's gradient where it lies: autograd would have one of each microbatch."""
        parameter = self._trainable[number]
        adds = parameter.grad is not None
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        multiply(parameter.grad, output_gradients, inputs, adds=adds)

    def _go_backward(self, run: Run, microbatch_run: MicrobatchRun) -> None:
        with self._linears.applied(), self.call.applied():
            microbatch_run.backward(self._denominator(run, microbatch_run.loss))

    def hand_in(self) -> None:
        for group in self._groups:
            row = group.spec.ranks.index(self._rank)
            self._exchange.write(group.number, row, [one.grad for one in group.members])

    def diagnose(self, run: Run, share: int) -> str:
        """Name the first of all ranks' weights that is not finite."""
        diagnosis = Diagnosis(self._model)
        return diagnosis.shared(diagnosis.of_weights(self._trainable), self._exchange.board)

    # --- evaluation and prediction ---------------------------------------------------------------

    def infer(self, run: Run, take: Take) -> None:
        mail = self._mail[False]
        for action in lower_forward(self._plan, self._rank, run.num_samples):
            assert isinstance(action, Forward)
            stage, share = action.stage, action.microbatch
            self._seed_streams(run, share)
            batch = self._read_for(run, stage, share)
            mail.receive_stream(stage, share)
            microbatch_run = self._microbatch_run(run, stage, share)
            output = self._output(microbatch_run, batch, recompute=False)
            if stage == self._last_stage:
                assert batch is not None
                take(share, batch, output)
            mail.send_stream(stage, share)
            microbatch_run.end()

    def shares_read(self, num_samples: int, *, training: bool) -> Iterable[int]:
        program: Sequence[Action] = lower_forward(self._plan, self._rank, num_samples)
        if training:
            program = [action for actions in self.program(num_samples) for action in actions]
        return [
            action.microbatch
            for action in program
            if isinstance(action, Forward) and self._needs_batch(action.stage, training=training)
        ]

    def close(self) -> None:
        super().close()
        if self._mail_channels is not None:
            self._mail_channels.close()

    def abandon(self) -> None:
        super().abandon()
        if self._mail_channels is not None:
            self._mail_channels.abandon()

    # --- shared ----------------------------------------------------------------------------------

    @property
    def _last_stage(self) -> int:
        return len(self._stages) - 1

    def _needs_batch(self, stage: int, *, training: bool) -> bool:
        """True if a stage needs a microbatch's samples."""
        part = self._partitions[training].parts[stage]
        begins_stream = part.draws and part.stream_from is None  # reading may draw, too
        return part.uses_inputs or begins_stream or stage == self._last_stage

    def _read_for(self, run: Run, stage: int, share: int) -> Batch | None:
        """A microbatch's samples, if the stage needs them."""
        is_needed = self._needs_batch(stage, training=run.is_training)
        return self._read(run, share) if is_needed else None

    def _microbatch_run(self, run: Run, stage: int, share: int) -> MicrobatchRun:
        partition = self._partitions[run.is_training]
        return self._run_of(
            stage=stage,
            share=share,
            part=partition.parts[stage],
            instructions=partition.instructions,
            model=self._model,
            mail=self._mail[run.is_training],
        )

    def _output(
        self, microbatch_run: MicrobatchRun, batch: Batch | None, *, recompute: bool
    ) -> Tree:
        """Run a microbatch run forward; returns the model's output if it has it."""
        forward: Callable[[Tree], list[Any]] = microbatch_run.forward
        if recompute:
            kept = self._buffers.keep()
            forward = partial(
                checkpoint,
                microbatch_run.forward,
                use_reentrant=False,
                context_fn=lambda: (nullcontext(), self._buffers.as_in(kept)),
            )
        with self._linears.applied():
            return stage_output(self.call, self._loss, forward, batch)

    def shown(self, output: Tree) -> Tree:
        """An output that users may keep: a copy, because an earlier stage may have sent it."""
        return self.held(super().shown(output))

    def held(self, output: Tree) -> Tree:
        def hold(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if self._exchange.lends(tensor) else tensor

        return map_tensors(hold, output)


def stage_output(
    call: ModelCall,
    loss: LossAdapter | None,
    forward: Callable[[Tree], list[Any]],
    batch: Batch | None,
) -> Tree:
    """Run a stage forward; returns the model's output, if it has that.

    Args:
        call: calls the model.
        loss: may watch the forward pass.
        forward: of a ``MicrobatchRun``.
        batch: the samples, if the stage needs them.
    """
    inputs = None if batch is None else call.given(batch.inputs)
    if call.channels_last:
        inputs = map_tensors(channels_last, inputs)
    watching = nullcontext() if loss is None else loss.watching()
    with call.applied(), call.computing(), watching:
        output, *_ = forward(inputs)
        output = call.widened(output)
    return output if batch is None else call.rows(output, batch.inputs)


def _settled(run: Run, loss: ShareLoss | JointLoss, output: Tree) -> ShareLoss:
    """A microbatch's loss for backward; a guess if it requires the other microbatches' losses."""
    is_alone = run.num_filled == 1
    is_uneven = isinstance(loss, JointLoss) and not (is_alone or loss.is_even)
    if loss.is_guess or is_uneven:
        return replace(nothing(output), is_guess=True)
    if isinstance(loss, JointLoss):
        loss = loss.settled(loss.weights, run.num_samples) if is_alone else loss.joined()
    if loss.parts:
        run.parts.append(loss.parts)
    return loss


# Outside of the class: a reference cycle would keep its shared memory until garbage collection.
_HANDLERS: dict[type[Action], Callable[[StagePasses, Run, Any], None]] = {
    Forward: StagePasses._forward,
    Backward: StagePasses._backward,
    BackwardInput: StagePasses._backward_input,
    BackwardWeight: StagePasses._backward_weight,
}
