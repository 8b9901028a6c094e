"""A replica: a rank that holds the whole model, and works on its shares of each batch.

A training step is the rank's program (``plan.lowering``), action by action:

    0F0     read share 0, run the model and the loss on it
    0B0     backward; hand the share's gradients to the exchange
    REDUCE  wait for all shares; sum the gradients of the pieces this rank owns
    STEP    update these pieces
    SYNC    wait until every rank has updated its own
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from lockstep.comm.exchange import Exchange, ShareTotals, cut_piece
from lockstep.data.order import (
    StreamStates,
    evaluation_seed,
    restore_streams,
    seed_streams,
    share_seed,
    stream_states,
)
from lockstep.data.read_ahead import Read
from lockstep.data.sources import Batch, Source
from lockstep.data.trees import Tree, map_tensors
from lockstep.errors import NonFiniteError
from lockstep.parallel.batch_norm import BatchNorms, GlobalStatistics
from lockstep.parallel.buffers import Buffers, Kept
from lockstep.parallel.diagnosis import Diagnosis
from lockstep.parallel.forward import DTYPES, ModelCall
from lockstep.parallel.gradient_rules import GradientJudge, GradientRules
from lockstep.parallel.interleave import Interleaver
from lockstep.parallel.linear import LinearLayers
from lockstep.parallel.losses import JointLoss, LossAdapter, ShareLoss, Sums
from lockstep.parallel.step_functions import StepFunction
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
from lockstep.plan.layout import Piece
from lockstep.plan.lowering import lower_forward, lower_train
from lockstep.plan.program import Action, Backward, Forward, RankProgram, Reduce, Step, Sync
from lockstep.plan.shares import num_filled_shares, share_bounds
from lockstep.plan.spec import LocalUpdate, Plan

# Elements of a linear layer's weight, from where on its gradient is formed in shared memory: below,
# the calls that this takes cost more than a copy.
_LARGE_WEIGHT = 1 << 14


class Replica(Worker):
    """Runs one rank of a data parallel Plan, or the only rank.

    Args:
        plan: the Plan.
        rank: this rank.
        model: this rank's model; its parameters may lie in memory shared with other ranks.
        loss: the loss, adapted; None where only predictions are asked for.
        exchange: this rank's end of the exchange.
        updater: the optimizer; None where nothing is trained.
        owned: the pieces of trainable parameters that this rank updates.
        told_elsewhere: see ``GradientJudge``.
        blocks: of each of them, the sizes of the blocks that its norm is taken of.
        rules: for gradients.
        functions: the user's own training steps, in the order of their turns, if there are any.
        seed: of all random streams.
        device: where the model is.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        model: nn.Module,
        loss: LossAdapter | None,
        exchange: Exchange,
        updater: Updater | None,
        owned: list[Piece],
        blocks: list[list[int]],
        rules: GradientRules,
        functions: Sequence[StepFunction],
        seed: int,
        device: torch.device,
        told_elsewhere: frozenset[str] = frozenset(),
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.model = model
        self.exchange = exchange
        self.board = exchange.board
        self.updater = updater
        self._loss = loss
        self._functions = functions
        self._seed = seed
        self._device = device
        self._dtype = DTYPES[plan.precision]
        self._call = ModelCall(model, plan, device)
        self._is_alone = isinstance(plan.update, LocalUpdate)
        self._parameters = list(model.parameters())
        self._trainable = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        self._norms = BatchNorms(model)
        self._linears = LinearLayers(self._large_weights())
        self._buffers = Buffers(model)
        self._pieces = self._bind(owned)
        self._judge = GradientJudge(
            rules,
            self._pieces,
            blocks,
            [name for name, _ in self._trainable],
            self.board,
            told_elsewhere,
        )
        self._interleaver = Interleaver(
            partial(_keep_own, self._buffers), partial(_restore_own, self._buffers)
        )
        is_joint = loss is not None and bool(loss.parts)
        self._program = lru_cache(maxsize=8)(
            lambda size: _grouped(plan, lower_train(plan, rank, size), forward_first=is_joint)
        )

    def _bind(self, owned: list[Piece]) -> list[BoundPiece]:
        pieces = []
        for piece in owned:
            name, parameter = self._trainable[piece.parameter]
            # Alone, the parameters themselves are stepped: nobody else maps their memory.
            cut = cut_piece(parameter.detach(), piece).requires_grad_()
            tensor = parameter if self.plan.num_ranks == 1 else cut
            pieces.append(BoundPiece(name=name, piece=piece, tensor=tensor))
        if self.updater is not None:
            self.updater.bind(pieces)
        # What other hosts have updated, every rank writes.
        self._changes_weights = bool(pieces) or self.plan.num_hosts > 1
        if self.board is not None and not self._changes_weights:
            self.board.own_nothing()
        return pieces

    def _large_weights(self) -> dict[int, torch.Tensor]:
        """Weights of linear layers for which it pays to form the gradient in shared memory."""
        if self._is_alone or self.plan.compiled:  # what is compiled has its own backward
            return {}
        return {
            number: parameter
            for number, (_, parameter) in enumerate(self._trainable)
            if parameter.dim() == 2 and parameter.numel() >= _LARGE_WEIGHT
        }

    # --- training --------------------------------------------------------------------------------

    def train_step(
        self,
        source: Source,
        indices: torch.Tensor,
        step: int,
        observe: Observe | None = None,
        turn: int = 0,
    ) -> StepResult:
        run = _Step(source, indices, step, self.plan.num_shares, observe, turn)
        if self.updater is not None:
            self.updater.turn = turn
        function = self._functions[turn] if self._functions else None
        with nullcontext() if function is None else function.training(self.model):
            return self._train(run)

    def _train(self, run: "_Step") -> StepResult:
        if self.board is not None:
            self.board.step = run.step
        self._begin_pass()
        self._clear_gradients()
        run.first_buffers = self._buffers.keep()
        self._isolate_buffers(run)
        try:
            for kind, shares in self._program(run.num_samples):
                with span(kind.__name__):
                    _HANDLERS[kind](self, run, shares)
        except NonFiniteError:
            self._buffers.restore(run.first_buffers)
            raise
        self._settle_buffers(run)
        assert run.totals is not None
        return step_result(run.totals, run.num_samples, run.parts, is_skipped=run.is_skipped)

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _forward(self, run: "_Step", shares: list[int]) -> None:
        def forward(share: int) -> None:
            seed_streams(share_seed(self._seed, run.step, share, run.turn))
            body = compute_by_function if self._functions else compute
            run.refused[share] = self._call.attempt(partial(body, share))

        def compute_by_function(share: int) -> None:
            batch = self._read(run, share)
            with self._call.computing():
                run.losses[share] = self._functions[run.turn].loss_of(self.model, batch)

        def compute(share: int) -> None:
            batch, output = self._output(run, share)
            loss = self._loss_of(output, batch)
            if isinstance(loss, JointLoss):
                run.joint[share] = loss
            else:
                run.losses[share] = loss
            if run.observe is not None:
                run.observe(map_tensors(plain, output), batch.targets)

        self._run_together(run, shares, forward)

    def _backward(self, run: "_Step", shares: list[int]) -> None:
        self._settle(run)
        with self._linears.taken(partial(self._put_product, shares)):
            self._take_gradients(run, shares)

    def _settle(self, run: "_Step") -> None:
        """Several losses: all shares' weights are known now, and with them what each share adds."""
        if not run.joint:
            return
        mine, joint = sorted(run.joint), run.joint
        rows = [joint[share].weights for share in mine]
        if run.num_filled > 1:
            for share, row in zip(mine, rows, strict=True):
                weights = torch.tensor(row, dtype=torch.float64)
                self.exchange.offer(share, weights, last=share == mine[-1])
            rows = self.exchange.offered(mine[-1], len(rows[0]), run.num_filled).tolist()
        weights_of_all = [math.fsum(column) for column in zip(*rows, strict=True)]
        for share in mine:
            run.losses[share] = joint[share].settled(weights_of_all, run.num_samples)
        run.joint = {}

    def _put_product(
        self, shares: list[int], number: int, inputs: torch.Tensor, gradients: torch.Tensor
    ) -> None:
        self.exchange.put_product(shares[self._interleaver.current], number, inputs, gradients)

    def _take_gradients(self, run: "_Step", shares: list[int]) -> None:
        backward = partial(self._backward_of, run)
        if len(shares) == 1:
            self._run_together(run, shares, backward)
            self._put(run, shares[0], [parameter.grad for _, parameter in self._trainable])
            return
        taken: dict[int, list[torch.Tensor | None]] = {
            share: [None] * len(self._trainable) for share in shares
        }
        with self._taking_gradients(lambda: taken[shares[self._interleaver.current]]):
            self._run_together(run, shares, backward)
        for share in shares:
            self._put(run, share, taken[share])

    def _backward_of(self, run: "_Step", share: int) -> None:
        # Alone, a share knows the whole weight; among others it divides by the samples, and the
        # sum over the shares is corrected once all weights are known.
        loss = run.losses[share]
        denominator = loss.weight if run.num_filled == 1 else float(run.num_samples)
        if denominator > 0:
            loss.backward(denominator / self._judge.rules.scale)

    def _put(self, run: "_Step", share: int, gradients: list[torch.Tensor | None]) -> None:
        loss = run.losses.pop(share)
        if loss.parts:
            run.parts.append(loss.parts)
        refused = run.refused.pop(share)
        self.exchange.put(share, gradients, loss.total, loss.weight, refused)
        if self.plan.num_shares > 1:
            self._clear_gradients()

    @contextmanager
    def _taking_gradients(self, taken: Callable[[], list[torch.Tensor | None]]) -> Iterator[None]:
        """Within the block, gradients go where ``taken`` says as soon as they are there."""

        def take(index: int, parameter: torch.Tensor) -> None:
            # Once per share, but for reentrant checkpoints, which go backward bit by bit.
            own, gradient = taken(), parameter.grad
            if gradient is None:  # handed to the exchange as factors
                return
            before = own[index]
            own[index] = gradient if before is None else before + gradient
            parameter.grad = None

        handles = [
            parameter.register_post_accumulate_grad_hook(partial(take, index))
            for index, (_, parameter) in enumerate(self._trainable)
            if parameter.requires_grad  # others have their turn later
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _reduce(self, run: "_Step", shares: list[int]) -> None:
        weight = self._collect(run)
        gradients: list[torch.Tensor | None] = [None] * len(self._pieces)
        if weight and not run.is_skipped:
            gradients = self.exchange.reduce(
                [bound.piece for bound in self._pieces], run.num_filled
            )
        factor = 1.0 if run.num_filled == 1 or not weight else run.num_samples / weight
        factor /= self._judge.rules.scale
        used = [gradient for gradient in gradients if gradient is not None]
        if used and factor != 1.0:
            torch._foreach_mul_(used, factor)
        for bound, gradient in zip(self._pieces, gradients, strict=True):
            bound.tensor.grad = gradient

    def _step(self, run: "_Step", shares: list[int]) -> None:
        weight = self._collect(run)
        assert self.updater is not None
        if not weight or run.is_skipped:
            return
        run.is_skipped = not self._judge.settle(run.step)
        if run.is_skipped:
            return
        board = self.board if self._changes_weights else None
        with nullcontext() if board is None else board.updating(run.step):
            self.updater.step()
            self.exchange.spread(
                {number: one.detach() for number, (_, one) in enumerate(self._trainable)},
                all_pieces=not self.updater.is_known,
            )

    def _sync(self, run: "_Step", shares: list[int]) -> None:
        self.exchange.end_step()

    def _collect(self, run: "_Step") -> float:
        """Everyone's losses, once per step; returns their weight."""
        if run.totals is not None:
            return math.fsum(run.totals.weights)
        run.totals = self.exchange.collect(run.num_filled)
        if run.totals.is_refused:
            self._call.give_up_format()
        weight = math.fsum(run.totals.weights)
        if weight:
            check_used(run.step, self.exchange.is_any_used())
            run.is_skipped = refuses(
                self._judge.rules.on_nonfinite,
                run.step,
                run.bounds,
                run.totals.totals,
                partial(self._diagnose, run),
            )
        return weight

    def _diagnose(self, run: "_Step", share: int) -> str:
        """Where a share's values cease to be finite, found by the rank that works on it."""
        place = Diagnosis.nothing
        if share in self.plan.shares_of(self.rank):
            seed_streams(share_seed(self._seed, run.step, share, run.turn))
            place = Diagnosis(self.model).of(
                partial(self._read, run, share), partial(self._try, run)
            )
            self._buffers.restore(run.first_buffers)
        told = [[place]] if self.board is None else self.board.tell([place])
        return Diagnosis(self.model).text(max(number for (number,) in told))

    def _try(self, run: "_Step", batch: Batch) -> object:
        """Run the model once more, to look at it."""
        if self._functions:
            return self._functions[run.turn].loss_of(self.model, batch)
        return self._call(batch.inputs)

    def gradients(self, num_samples: int) -> dict[str, torch.Tensor | None]:
        self.exchange.gather_sums(
            [bound.piece for bound in self._pieces], [bound.tensor.grad for bound in self._pieces]
        )
        if self.rank != 0:
            return {}
        filled = num_filled_shares(num_samples, self.plan.num_shares)
        return {
            name: self.exchange.summed(index, filled)
            for index, (name, _) in enumerate(self._trainable)
        }

    def gather_slots(self) -> None:
        if self.plan.num_hosts == 1:
            return
        assert self.updater is not None
        numbers = {name: number for number, (name, _) in enumerate(self._trainable)}
        for name, tensor in self.updater.stored():
            if name in numbers:
                self.exchange.spread({numbers[name]: tensor.detach()}, all_pieces=True)
        self.exchange.barrier()

    # --- evaluation and prediction ---------------------------------------------------------------

    @torch.no_grad()
    def evaluate_step(
        self, source: Source, indices: torch.Tensor, observe: Observe | None = None
    ) -> list[Sums]:
        run = self._begin(source, indices)
        losses: list[Sums] = []

        def evaluate(share: int) -> None:
            batch, output = self._output(run, share)
            losses.append(self._loss_of(output, batch).sums)
            if observe is not None:
                observe(map_tensors(plain, output), batch.targets)

        self._run_forward(run, evaluate)
        return losses

    @torch.no_grad()
    def predict_step(self, source: Source, indices: torch.Tensor) -> list[tuple[int, Tree]]:
        run = self._begin(source, indices)
        outputs: list[tuple[int, Tree]] = []

        def predict(share: int) -> None:
            output = map_tensors(plain, self._output(run, share)[1])
            outputs.append((run.bounds[share][0], output))

        self._run_forward(run, predict)
        return outputs

    def _begin(self, source: Source, indices: torch.Tensor) -> "_Step":
        if self._norms.use_batch_statistics:
            self.exchange.barrier()  # rows of the last pass may still be read
        self._begin_pass()
        return _Step(source, indices, 0, self.plan.num_shares, None)

    def _run_forward(self, run: "_Step", body: Callable[[int], None]) -> None:
        actions = lower_forward(self.plan, self.rank, run.num_samples)
        for _, shares in _grouped(self.plan, actions):
            self._run_together(run, shares, partial(self._attempt, run, body))

    def _attempt(self, run: "_Step", body: Callable[[int], None], share: int) -> None:
        seed_streams(evaluation_seed(self._seed, int(run.indices[run.bounds[share][0]])))
        if self._call.attempt(partial(body, share)):
            self._call.give_up_format()

    def _begin_pass(self) -> None:
        # Autocast keeps cast weights until its outermost block ends, and that may be around us.
        torch.clear_autocast_cache()
        self._linears.begin_pass()
        self.exchange.begin_pass()

    def reads(self, indices: torch.Tensor, step: int | None = None, turn: int = 0) -> list[Read]:
        actions = lower_forward(self.plan, self.rank, len(indices))
        return reads_of_shares(
            [action.microbatch for action in actions if isinstance(action, Forward)],
            indices,
            num_shares=self.plan.num_shares,
            dtype=self._dtype,
            seed=self._seed,
            step=step,
            turn=turn,
        )

    def barrier(self) -> None:
        self.exchange.barrier()

    def held_names(self) -> None:
        return None

    def ruled_buffers(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_buffers()) if self.rank == 0 else {}

    def leaves_a_rank_idle(self, num_samples: int) -> bool:
        filled = num_filled_shares(num_samples, self.plan.num_shares)
        return self.plan.shares_of(self.plan.num_replicas - 1).start >= filled

    # --- shared ----------------------------------------------------------------------------------

    def _run_together(self, run: "_Step", shares: list[int], body: Callable[[int], None]) -> None:
        """Run ``body`` for shares at once: BatchNorm sees the whole batch, buffers change once."""

        def run_share(share: int) -> None:
            statistics = self._global_statistics(run, share, is_last=share == shares[-1])
            with statistics, self._linears.applied(), self._call.applied():
                if not run.isolates_buffers:
                    body(share)
                    return
                self._buffers.restore(run.buffers.get(share, run.first_buffers))
                body(share)
                run.buffers[share] = self._buffers.keep()

        self._interleaver.run([partial(run_share, share) for share in shares])

    def _isolate_buffers(self, run: "_Step") -> None:
        """Where this rank has several shares of the batch, each starts from the same buffers."""
        mine = self.plan.shares_of(self.rank)
        if mine.start + 1 < min(mine.stop, run.num_filled) and self._buffers:
            run.isolates_buffers = True

    def _settle_buffers(self, run: "_Step") -> None:
        """A step that was left out has changed none; else those of the first share count."""
        if run.is_skipped:
            self._buffers.restore(run.first_buffers)
        elif run.isolates_buffers:
            self._buffers.restore(run.buffers[min(run.buffers)])

    def _global_statistics(
        self, run: "_Step", share: int, *, is_last: bool
    ) -> AbstractContextManager[Any]:
        if run.num_filled == 1 or not self._norms:
            return nullcontext()

        def gather(row: torch.Tensor) -> torch.Tensor:
            self.exchange.offer(share, row, last=is_last)
            self._interleaver.meet()
            return self.exchange.offered(share, len(row), run.num_filled)

        return GlobalStatistics(self._norms, gather).applied(is_compiled=self.plan.compiled)

    def _output(self, run: "_Step", share: int) -> tuple[Batch, Tree]:
        """A share's samples, and what the model makes of them."""
        batch = self._read(run, share)
        return batch, self._call(batch.inputs)

    def _read(self, run: "_Step", share: int) -> Batch:
        start, stop = run.bounds[share]
        with self.reading:
            batch = run.source.read(run.indices[start:stop], self._dtype)
        return moved(batch, self._device)

    def _loss_of(self, output: Tree, batch: Batch) -> ShareLoss | JointLoss:
        assert self._loss is not None
        return self._loss(
            output, batch.targets, batch.sample_weight, batch.num_samples, batch.inputs
        )


def _keep_own(buffers: Buffers) -> tuple[StreamStates, Kept]:
    """What each of the shares that run together has for itself."""
    return stream_states(), buffers.keep()


def _restore_own(buffers: Buffers, kept: tuple[StreamStates, Kept]) -> None:
    restore_streams(kept[0])
    buffers.restore(kept[1])


def _grouped(
    plan: Plan, program: RankProgram, *, forward_first: bool = False
) -> list[tuple[type[Action], list[int]]]:
    """A program as (kind of action, shares that it runs together).

    Args:
        plan: the Plan.
        program: of this rank.
        forward_first: no share goes backward before the losses of all shares are known.
    """
    groups: list[tuple[type[Action], list[int]]] = []
    for action in program:
        shares = [action.microbatch] if isinstance(action, Forward | Backward) else []
        if plan.interleaved and shares and groups and groups[-1][0] is type(action):
            groups[-1][1].extend(shares)
        else:
            groups.append((type(action), shares))
    return sorted(groups, key=lambda group: forward_first and group[0] is not Forward)


# By action, and not in the class: a cycle would keep its shared memory until the collector runs.
_HANDLERS: dict[type[Action], Callable[[Replica, "_Step", list[int]], None]] = {
    Forward: Replica._forward,
    Backward: Replica._backward,
    Reduce: Replica._reduce,
    Step: Replica._step,
    Sync: Replica._sync,
}


class _Step:
    """One step on its way: the batch, its shares, and what has come of them so far."""

    def __init__(
        self,
        source: Source,
        indices: torch.Tensor,
        step: int,
        num_shares: int,
        observe: Observe | None,
        turn: int = 0,
    ) -> None:
        self.source = source
        self.indices = indices
        self.step = step
        self.observe = observe
        self.turn = turn
        self.num_samples = len(indices)
        self.bounds = share_bounds(self.num_samples, num_shares)
        self.num_filled = num_filled_shares(self.num_samples, num_shares)
        self.losses: dict[int, ShareLoss] = {}
        self.joint: dict[int, JointLoss] = {}  # losses that wait for the weights of all shares
        self.parts: list[Sums] = []
        self.refused: dict[int, bool] = {}  # the Plan's memory format, by share
        self.totals: ShareTotals | None = None
        self.is_skipped = False
        self.isolates_buffers = False
        self.first_buffers = Kept([], [])
        self.buffers: dict[int, Kept] = {}
