"""Passes of a rank that holds the whole model, over its shares of each batch.

    0F0     read share 0, run the model and the loss on it
    0B0     backward; write the share's gradients to the exchange

If a layer needs the whole batch (BatchNorm), a rank's shares run together, layer by layer.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lockstep.capture.layers import FrontEndModel
from lockstep.comm.exchange_spec import GroupSpec
from lockstep.data.map_style.sources import Batch
from lockstep.data.order import StreamStates, restore_streams, stream_states
from lockstep.data.trees import Tree
from lockstep.parallel.batch_run import Run, Take
from lockstep.parallel.data_parallel.batch_norm import GlobalStatistics
from lockstep.parallel.data_parallel.buffers import Buffers, Kept
from lockstep.parallel.data_parallel.interleave import Interleaver
from lockstep.parallel.data_parallel.passes import Passes
from lockstep.parallel.data_parallel.post_accumulate_hooks import on_grad_ready
from lockstep.parallel.data_parallel.staging import moved
from lockstep.parallel.debug.diagnosis import Diagnosis
from lockstep.parallel.independence.reduction_trial import LossOf, check_added, check_mean
from lockstep.parallel.independence.sample_independence import check_sample_independence
from lockstep.parallel.independence.split_trial import NUM_INFERRED, rows_of
from lockstep.parallel.loss.share_losses import JointLoss, LossAdapter, ShareLoss, nothing
from lockstep.parallel.loss.whole_batch import SharePart
from lockstep.parallel.sharding.recomputation import Recomputation
from lockstep.parallel.training_step import TrainingStep
from lockstep.parallel.workload import Workload
from lockstep.plan.decision import LocalUpdate
from lockstep.plan.program.lowering import grouped, lower_forward, lower_train, microbatches_of
from lockstep.plan.program.rank_program import Action, Forward

# The only group of a Plan without stages.
_GROUP = 0


class ModelPasses(Passes):
    """Passes over the whole model.

    Args:
        work: common to all ranks.
        group: of all parameters.
        options: see ``Passes``.
    """

    def __init__(self, work: Workload, *, group: GroupSpec, **options: Any) -> None:
        super().__init__(work, **options)
        self._group = group
        per_row = max(group.shares_per_row, 1)
        self._row_of = [share // per_row for share in range(self._plan.num_shares)]
        self._mine = self._plan.shares_of_rank(self._rank)
        self.has_turns = bool(work.functions)
        self._hands_over = self._exchange.gradients[_GROUP].is_early
        self._functions = work.functions
        self._interleaver = Interleaver(
            partial(_keep_own, self._buffers), partial(_restore_own, self._buffers), self.device
        )
        self._recomputation = Recomputation.of(work, self._linears.applied)
        self._losses: dict[int, ShareLoss] = {}
        self._joint: dict[int, JointLoss] = {}  # they wait for the weights of all shares
        self._apart: dict[int, SharePart] = {}  # they wait for the outputs of all shares
        self._refused: dict[int, bool] = {}  # the Plan's memory format, by share
        # If this rank has several shares of a batch, each starts from the same buffers.
        self._isolates_buffers = False
        self._left_buffers: dict[int, Kept] = {}

    def _lowered(self, num_samples: int) -> Sequence[tuple[Action, ...]]:
        return grouped(
            lower_train(self._plan, self._rank, num_samples),
            interleaved=self._plan.interleaved,
            forward_first=self._goes_forward_first,
        )

    @property
    def _goes_forward_first(self) -> bool:
        """True if no share goes backward before the losses of all shares are known."""
        return self._loss is not None and (bool(self._loss.parts) or self._uses_whole_batch)

    @property
    def _forms_gradients(self) -> bool:
        # Compiled code has its own backward, and a single rank would save nothing.
        return not (isinstance(self._plan.update, LocalUpdate) or self._plan.compiled)

    # --- training --------------------------------------------------------------------------------

    # Whether the exchange may send a gradient as soon as this rank's last share has computed it.
    _completes_gradients = True

    def in_turn(self, turn: int) -> AbstractContextManager[Any]:
        return self._functions[turn].training(self._model)

    def begin(self, run: Run) -> None:
        super().begin(run)
        self._isolates_buffers = (
            self._has_buffers
            and run.is_training
            and self._mine.start + 1 < min(self._mine.stop, run.num_filled)
        )
        self._left_buffers = {}

    @property
    def _offers_rows(self) -> bool:
        return super()._offers_rows or self._norms.use_batch_statistics

    def bound(self, actions: Sequence[Action]) -> Callable[[TrainingStep], None]:
        shares = microbatches_of(actions)
        is_forward = isinstance(actions[0], Forward)
        return partial(self._go_forward if is_forward else self._go_backward, shares)

    def _go_forward(self, shares: list[int], now: TrainingStep) -> None:
        if self._recomputation is None:
            self._run_together(now.batch, shares, self._forward)
            return
        with self._recomputation.applied():
            self._run_together(now.batch, shares, self._forward)

    def _go_backward(self, shares: list[int], now: TrainingStep) -> None:
        if self._joint or self._apart:
            self._settle_weights(now.batch)
        if not self._has_linears:
            self._backward(now.batch, shares)
            return
        self._linears.taker = partial(self._put_product, shares)
        try:
            self._backward(now.batch, shares)
        finally:
            self._linears.taker = None

    def _forward(self, run: Run, share: int) -> None:
        self._seed_streams(run, share)
        body = self._compute_by_function if self._functions else self._compute
        if self.call.channels_last:
            self._refused[share] = self.call.attempt(partial(body, run, share))
        else:
            body(run, share)
        if self.side_effects.is_due:
            self.side_effects.note()

    def _compute_by_function(self, run: Run, share: int) -> None:
        batch = self._read(run, share)
        with self.call.computing():
            if run.is_tried:
                self._try_on_halves(run, batch)
            self._losses[share] = self._loss_by_function(run, batch)

    def _compute(self, run: Run, share: int) -> None:
        batch, output = self._output(run, share)
        if run.is_observed:
            run.show(share, self.shown(output), batch)
        assert self._loss is not None
        if run.num_filled > 1 and self._loss.uses_whole_batch:
            self._apart[share] = SharePart(output=output, batch=batch)
            return
        loss = self.loss_of(output, batch)
        if loss.is_guess:
            loss = replace(nothing(output), is_guess=True)
        if isinstance(loss, JointLoss):
            self._joint[share] = loss
        else:
            self._losses[share] = loss

    def _settle_weights(self, run: Run) -> None:
        """Compute the loss of each share that needs the weights or outputs of all shares."""
        if self._apart:
            self._losses |= self._divided(run, self._apart)
            self._apart = {}
        if not self._joint:
            return
        mine, joint = sorted(self._joint), self._joint
        rows = [joint[share].weights for share in mine]
        if run.num_filled > 1:
            for share, row in zip(mine, rows, strict=True):
                weights = torch.tensor(row, dtype=torch.float64)
                self._exchange.offer(share, weights, last=share == mine[-1])
            rows = self._exchange.offered(mine[-1], len(rows[0]), run.num_filled).tolist()
        weights_of_all = [math.fsum(column) for column in zip(*rows, strict=True)]
        for share in mine:
            self._losses[share] = joint[share].settled(weights_of_all, run.num_samples)
        self._joint = {}

    def _put_product(
        self, shares: list[int], number: int, inputs: torch.Tensor, gradients: torch.Tensor
    ) -> None:
        row = self._row_of[shares[self._interleaver.current]]
        self._exchange.write_product(_GROUP, row, number, inputs, gradients)

    def _backward(self, run: Run, shares: list[int]) -> None:
        for share in shares:
            self._put_loss(share)
        if len(shares) == 1:
            if self._hands_over:
                with self._handing_over(run, shares[0]):
                    self._run_together(run, shares, self._backward_of)
            else:
                self._run_together(run, shares, self._backward_of)
            self._put(run, shares[0], [parameter.grad for parameter in self._trainable])
            return
        taken: dict[int, list[torch.Tensor | None]] = {
            share: [None] * len(self._trainable) for share in shares
        }
        with self._taking_gradients(lambda: taken[shares[self._interleaver.current]]):
            self._run_together(run, shares, self._backward_of)
        for share in shares:
            self._put(run, share, taken[share])

    def _handing_over(self, run: Run, share: int) -> AbstractContextManager[Any]:
        """Within the block the exchange gets each gradient once complete.

        Those of this rank's last share; of all shares if the exchange takes them.
        """
        is_last = share + 1 == min(self._mine.stop, run.num_filled)
        if not (is_last or self._exchange.gradients[_GROUP].takes_all):
            return nullcontext()
        completes = is_last and self._completes_gradients

        def take(number: int) -> None:
            parameter = self._trainable[number]
            gradient, parameter.grad = parameter.grad, None
            row = self._row_of[share]
            self._exchange.arrive(_GROUP, row, number, gradient, is_last=completes)

        return on_grad_ready(self._trainable, take)

    def _backward_of(self, run: Run, share: int) -> None:
        loss = self._losses[share]
        self.call.go_backward(loss, self._denominator(run, loss))

    def _put_loss(self, share: int) -> None:
        loss, refused = self._losses[share], self._refused.pop(share, False)
        self._exchange.write_loss(
            share, loss.total, loss.weight, is_refused=refused, is_guess=loss.is_guess
        )

    def _put(self, run: Run, share: int, gradients: list[torch.Tensor | None]) -> None:
        loss = self._losses.pop(share)
        if loss.parts:
            run.parts.append(loss.parts)
        self._exchange.write(_GROUP, self._row_of[share], gradients)
        if self._plan.num_shares > 1:
            self._clear_gradients()

    @contextmanager
    def _taking_gradients(self, taken: Callable[[], list[torch.Tensor | None]]) -> Iterator[None]:
        """Within the block, each gradient is added to the list of ``taken`` once computed."""

        def take(index: int, parameter: torch.Tensor) -> None:
            # Once per share, except for reentrant checkpoints, which go backward in parts.
            own, gradient = taken(), parameter.grad
            if gradient is None:  # given to the exchange as factors
                return
            before = own[index]
            own[index] = gradient if before is None else before + gradient
            parameter.grad = None

        with ExitStack() as hooks:
            for index, parameter in enumerate(self._trainable):
                if parameter.requires_grad:  # others train in another turn
                    hook = parameter.register_post_accumulate_grad_hook(partial(take, index))
                    hooks.callback(hook.remove)
            yield

    def settle_buffers(self) -> None:
        if self._isolates_buffers:  # keep those of the first share
            self._buffers.restore(self._left_buffers[min(self._left_buffers)])

    def diagnose(self, run: Run, share: int) -> str:
        """Run the share again on its rank to find the place."""
        diagnosis, place = Diagnosis(self._model), Diagnosis.nothing
        if share in self._mine:
            self._seed_streams(run, share)
            place = diagnosis.of(partial(self._read, run, share), partial(self._try, run))
            self.restore_buffers()
        return diagnosis.shared(place, self._exchange.board)

    def losses_alone(self, batch: Batch) -> list[ShareLoss | JointLoss]:
        batch = moved(batch, self.device)
        with self.call.applied():
            if not self._functions:
                assert self._loss is not None
                self._loss.begin(batch.num_samples, 1)
                with self._loss.watching():
                    output = self.call(batch.inputs)
                return [self.loss_of(output, batch)]
            with self.call.computing():
                size = batch.num_samples
                return [one.loss_of(self._model, batch, size) for one in self._functions]

    def _try(self, run: Run, batch: Batch) -> object:
        """Run the model again, for a diagnosis."""
        if self._functions:
            return self._loss_by_function(run, batch)
        return self.call(batch.inputs)

    # --- code that runs the model itself ---------------------------------------------------------

    @contextmanager
    def on_share(self, run: Run, share: int, part: float = 1.0) -> Iterator[Batch]:
        """Within the block the caller computes this rank's only share, as ``GlobalStatistics``."""
        self._seed_streams(run, share)
        batch = self._read(run, share)
        with self._global_statistics(run, share, is_last=True, part=part):
            yield batch

    # --- evaluation and prediction ---------------------------------------------------------------

    def infer(self, run: Run, take: Take) -> None:
        actions = lower_forward(self._plan, self._rank, run.num_samples)
        for group in grouped(actions, interleaved=self._plan.interleaved):
            self._infer_together(run, microbatches_of(group), take)

    def _infer_together(self, run: Run, shares: list[int], take: Take) -> None:
        self._run_together(run, shares, partial(self._infer_share, take))

    def _infer_share(self, take: Take, run: Run, share: int) -> None:
        self._seed_streams(run, share)
        if self.call.attempt(lambda: take(share, *self._output(run, share))):
            self.call.give_up_format()

    def shares_read(self, num_samples: int, *, training: bool) -> Iterable[int]:
        return microbatches_of(lower_forward(self._plan, self._rank, num_samples))

    # --- shared ----------------------------------------------------------------------------------

    def _run_together(self, run: Run, shares: list[int], body: Callable[[Run, int], None]) -> None:
        """Run ``body`` for shares at once: BatchNorm sees the whole batch, buffers change once."""
        needs_others = self._has_norms and run.num_filled > 1
        if len(shares) > 1 or needs_others or self._isolates_buffers or self.call.is_redirected:
            self._interleaver.run([partial(self._run_share, run, shares, body, n) for n in shares])
            return
        self._interleaver.current = 0
        if self._has_linears:
            with self._linears.applied():
                body(run, shares[0])
        else:
            body(run, shares[0])

    def _run_share(
        self, run: Run, shares: list[int], body: Callable[[Run, int], None], share: int
    ) -> None:
        statistics = self._global_statistics(run, share, is_last=share == shares[-1])
        with statistics, self._linears.applied(), self.call.applied():
            if not self._isolates_buffers:
                body(run, share)
                return
            self.restore_buffers(self._left_buffers.get(share))
            body(run, share)
            self._left_buffers[share] = self._buffers.keep()

    def _global_statistics(
        self, run: Run, share: int, *, is_last: bool, part: float = 1.0
    ) -> AbstractContextManager[Any]:
        if run.num_filled == 1 or not self._norms:
            return nullcontext()

        def gather(row: torch.Tensor) -> torch.Tensor:
            if is_last:
                self._before_statistics(row)
            self._exchange.offer(share, row, last=is_last)
            self._interleaver.meet()
            return self._exchange.offered(share, len(row), run.num_filled)

        return GlobalStatistics(self._norms, gather, part).applied(is_compiled=self._plan.compiled)

    def _before_statistics(self, row: torch.Tensor) -> None:
        """This rank waits next for all others, at the BatchNorm of this row."""

    def _output(self, run: Run, share: int) -> tuple[Batch, Tree]:
        """A share's samples and outputs."""
        batch = self._read(run, share)
        if run.is_tried:
            self._try_on_halves(run, batch)
        output = self._watched_call(batch)
        if self._loss is not None and run.num_filled > 1 and self._loss.newly_adds(output):
            self._check_added(self._loss, batch)
        return batch, output

    def _check_added(self, loss: LossAdapter, batch: Batch) -> None:
        check_added(self._model, loss, self.call, batch)

    def _watched_call(self, batch: Batch) -> Tree:
        if self._loss is None or not self._loss.is_inside:
            return self.call(batch.inputs)
        with self._loss.watching():
            return self.call(batch.inputs)

    def _loss_by_function(self, run: Run, batch: Batch) -> ShareLoss:
        return self._functions[run.turn].loss_of(self._model, batch, run.batch_size)

    def _try_on_halves(self, run: Run, batch: Batch) -> None:
        """Test a loss computed inside the model, else whether outputs mix samples."""
        if self.watch is not None or run.num_filled == 1:
            return
        if not run.is_training:
            if isinstance(self._model, FrontEndModel):  # its front end has tested it
                return
            batch = rows_of(batch, slice(0, min(NUM_INFERRED, batch.num_samples)))
        loss_of = self._inner_loss(run)
        if loss_of is not None:
            self.is_linear &= check_mean(self._model, loss_of, batch, is_low=self.call.is_low)
            return
        self.is_linear &= check_sample_independence(
            self._model, self.call, batch, is_low=self.call.is_low
        )
        if self._loss is not None and run.is_training:
            self._check_added(self._loss, batch)

    def _inner_loss(self, run: Run) -> LossOf | None:
        """The loss that the model or a function computes; None if a loss function does."""
        if self._functions and run.is_training:
            return partial(self._loss_by_function, run)
        if self._loss is None or not self._loss.is_inside:
            return None
        return lambda part: self.loss_of(self._watched_call(part), part)


def _keep_own(buffers: Buffers) -> tuple[StreamStates, Kept]:
    """The own state of each of the shares that run together."""
    return stream_states(), buffers.keep()


def _restore_own(buffers: Buffers, kept: tuple[StreamStates, Kept]) -> None:
    restore_streams(kept[0])
    buffers.restore(kept[1])
