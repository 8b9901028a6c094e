"""Passes: the forward and backward passes of a rank; the Worker does the rest of a step.

``parallel.data_parallel.model_passes`` runs the whole model on the rank's shares of each batch;
``parallel.pipeline.stage_passes`` runs some of its layers on microbatches.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lockstep import accelerators
from lockstep.comm.exchange import Exchange
from lockstep.comm.shared_memory.gathering import gather_bytes
from lockstep.data.iterable.read_ahead import Read
from lockstep.data.map_style.sources import Batch
from lockstep.data.order import seed_streams
from lockstep.data.trees import Tree, map_tensors
from lockstep.errors import BadRecordError, LossError
from lockstep.launch.health.failure import add_note
from lockstep.parallel.batch_run import Run, Take
from lockstep.parallel.data_parallel.batch_norm import BatchNorms
from lockstep.parallel.data_parallel.buffers import Buffers, Kept
from lockstep.parallel.data_parallel.forward import DTYPES, ModelCall
from lockstep.parallel.data_parallel.linear import LinearLayers
from lockstep.parallel.data_parallel.side_effects import SideEffects
from lockstep.parallel.data_parallel.staging import moved
from lockstep.parallel.debug.module_watch import ModuleWatch
from lockstep.parallel.loss.share_losses import JointLoss, ShareLoss, Sums
from lockstep.parallel.loss.whole_batch import SharePart, WholeBatch
from lockstep.parallel.training_step import TrainingStep
from lockstep.parallel.workload import Workload
from lockstep.plan.program.rank_program import Action

# Elements of a linear layer's weight from which its gradient is computed outside of autograd. For
# smaller ones the extra calls cost more than a copy.
LARGE_WEIGHT = 1 << 14

# Batch sizes whose programs are cached.
_MOST_PROGRAMS = 8


class Passes(ABC):
    """A rank's passes.

    Args:
        work: common to all ranks.
        rank: this rank.
        exchange: this rank's end of the exchange.
        trainable: the parameters that this rank trains, in order.
        device: of the model.

    Attributes:
        device: of the model.
        call: calls the model.
        reading: entered around every read of samples.
        is_linear: gradients are linear in the loss, as far as was tried.
        watch: records what modules compute in this step; or None.
        leads: this rank gives the results of its shares, which others may compute as well.
        side_effects: checks the model's state in a step.
    """

    leads: bool = True
    reading: AbstractContextManager[object] = nullcontext()
    watch: ModuleWatch | None = None

    def __init__(
        self,
        work: Workload,
        *,
        rank: int,
        exchange: Exchange,
        trainable: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        self._plan = plan = work.plan
        self._rank = rank
        self._model = model = work.model
        self.call = ModelCall(model, plan, device, work.dims)
        self._parameters = list(model.parameters())
        self._loss = work.loss
        self.is_linear = work.loss is None or work.loss.is_linear
        self._exchange = exchange
        self._trainable = trainable
        self._rules = work.rules
        self._seed = work.seed
        self.device = device
        self._dtype = DTYPES[plan.precision]
        self._buffers = Buffers(model)
        self.first_buffers: Kept | None = None  # at the beginning of the step
        self._norms = BatchNorms(model)
        self._has_buffers, self._has_norms = bool(self._buffers), bool(self._norms)
        holders = [plan.num_ranks]
        if plan.pipeline is not None:
            holders = [len(stage.ranks) for stage in plan.pipeline.stages]
        is_shared = max(holders) > 1
        self.side_effects = SideEffects(model, self._norms.buffer_names, is_shared=is_shared)
        self._programs: dict[int, Sequence[tuple[Action, ...]]] = {}
        self._linears = LinearLayers(
            {
                number: parameter
                for number, parameter in enumerate(trainable)
                if parameter.dim() == 2
                and parameter.numel() >= LARGE_WEIGHT
                and self._forms_gradients
            }
        )
        self._has_linears = bool(self._linears)

    @property
    def _forms_gradients(self) -> bool:
        """True if gradients of linear layers are computed outside of autograd."""
        return True

    # --- training --------------------------------------------------------------------------------

    def program(self, num_samples: int) -> Sequence[tuple[Action, ...]]:
        """This rank's program for a batch; a tuple has actions that run together."""
        if num_samples not in self._programs:
            if len(self._programs) == _MOST_PROGRAMS:
                self._programs.clear()
            self._programs[num_samples] = self._lowered(num_samples)
        return self._programs[num_samples]

    @abstractmethod
    def _lowered(self, num_samples: int) -> Sequence[tuple[Action, ...]]:
        """The program."""

    @abstractmethod
    def bound(self, actions: Sequence[Action]) -> Callable[[TrainingStep], None]:
        """What runs these passes in a step; made once for a program."""

    def reseed(self, seed: int) -> None:
        """Change the seed of the random streams."""
        self._seed = seed

    has_turns = False
    """True if ``in_turn`` does something."""

    def in_turn(self, turn: int) -> AbstractContextManager[Any]:
        """Entered around the step of one of several train_step functions."""
        return nullcontext()

    def begin(self, run: Run) -> None:
        """Begin a batch."""
        # Autocast caches cast weights until its outermost block ends, which may be the caller's.
        if not run.is_training and self._offers_rows:
            self._exchange.barrier()  # other ranks may still read rows of the last pass
        torch.clear_autocast_cache()
        if self._has_linears:
            self._linears.begin_pass()
        self._exchange.begin_pass(run.num_filled if run.is_training else 0)
        if self._loss is not None:
            is_part = run.batch_size > run.num_samples
            self._loss.begin(run.batch_size, run.num_filled, is_part=is_part)
        if run.is_training:
            self._exchange.expect(run.num_filled)
            if self._has_buffers:
                self.first_buffers = self._buffers.keep(self.first_buffers)
            self.side_effects.begin(is_divided=run.num_filled > 1)
            self._clear_gradients()

    @property
    def _offers_rows(self) -> bool:
        """True if shares exchange rows in evaluation."""
        return self._loss is not None and not self._loss.is_certain

    def hand_in(self) -> None:
        """After all passes: give the exchange the gradients that it does not have yet."""
        return

    def restore_buffers(self, kept: Kept | None = None) -> None:
        """The step is skipped: restore the buffers from its beginning, or ``kept`` ones."""
        kept = kept or self.first_buffers
        if kept is not None:
            self._buffers.restore(kept)

    def settle_buffers(self) -> None:
        """The step is taken: set the buffers as one pass over the whole batch leaves them."""
        return

    @abstractmethod
    def diagnose(self, run: Run, share: int) -> str:
        """The place where a share's values stop being finite; every rank calls it."""

    def losses_alone(self, batch: Batch) -> list[ShareLoss | JointLoss]:
        """The losses of samples outside of training: one, or one for each train_step function.

        Raises:
            NotImplementedError: this rank does not have the whole model.
        """
        raise NotImplementedError

    def user_losses(self) -> list[Any]:
        """The user's losses."""
        return [] if self._loss is None else self._loss.user_losses()

    # --- evaluation and prediction ---------------------------------------------------------------

    @abstractmethod
    def infer(self, run: Run, take: Take) -> None:
        """Run the model forward on a batch; ``take`` gets this rank's outputs."""

    @abstractmethod
    def shares_read(self, num_samples: int, *, training: bool) -> Iterable[int]:
        """The shares whose samples this rank reads, in order."""

    def reads(self, run: Run) -> list[Read]:
        """The reads that this rank will make of a batch, in order."""
        return [
            Read(
                indices=run.indices_of(share),
                dtype=self._dtype,
                seed=run.seed_of(share, self._seed),
            )
            for share in self.shares_read(run.num_samples, training=run.is_training)
        ]

    def close(self) -> None:
        """End a task; every rank calls it."""
        self._exchange.close()

    def abandon(self) -> None:
        """End a failed task; any rank may call it."""
        self._exchange.abandon()

    # --- parts -----------------------------------------------------------------------------------

    def loss_of(self, output: Tree, batch: Batch) -> ShareLoss | JointLoss:
        """The loss of a share."""
        assert self._loss is not None
        return self._loss(output, batch)

    def shown(self, output: Tree) -> Tree:
        """An output as users see it: detached, in torch's own memory format."""
        return map_tensors(_plain, output)

    # --- losses of whole batches -----------------------------------------------------------------

    def use_whole_batch(self) -> None:
        """Compute losses on whole batches from now on, because their reduction is unknown."""
        assert self._loss is not None
        self._loss.uses_whole_batch = True
        self._programs.clear()

    @property
    def _uses_whole_batch(self) -> bool:
        return self._loss is not None and self._loss.uses_whole_batch

    def _divided(self, run: Run, own: Mapping[int, SharePart]) -> dict[int, ShareLoss]:
        """This rank's shares of the loss of a whole batch."""
        assert self._loss is not None
        whole = self._whole(run, own)
        return whole.divided(whole.loss(self._loss), self._trainable)

    def losses_of(self, run: Run, own: Mapping[int, SharePart]) -> list[Sums]:
        """The loss sums of this rank's shares, in evaluation."""
        assert self._loss is not None
        has_turns = bool(own) or self._exchange.relays(run.num_filled)
        if not has_turns or (not own and run.num_filled == 1):
            return []
        losses, is_known = {}, run.num_filled == 1 or self._loss.is_certain
        if is_known or not self._uses_whole_batch:
            losses = {share: self.loss_of(part.output, part.batch) for share, part in own.items()}
        if is_known:
            return [loss.sums for loss in losses.values()]
        if not self._uses_whole_batch:
            guesses = {share: b"?" * loss.is_guess for share, loss in losses.items()}
            if not any(gather_bytes(self._exchange, guesses, run.num_filled)):
                return [loss.sums for loss in losses.values()]
            self.use_whole_batch()
            self._loss.begin(run.num_samples, run.num_filled)
        if not own:
            gather_bytes(self._exchange, {}, run.num_filled)
            return []
        loss = self._whole(run, own).loss(self._loss)
        return [loss.sums] if 0 in own else []

    def _whole(self, run: Run, own: Mapping[int, SharePart]) -> WholeBatch:
        assert self._loss is not None
        try:
            whole = WholeBatch(self._exchange, own, run.num_filled, self.device)
        except LossError as error:
            if self._loss.failure:
                add_note(
                    error, f"The loss failed first on a share of the batch: {self._loss.failure}"
                )
            raise
        self._loss.gathered_bytes = max(self._loss.gathered_bytes, whole.num_bytes)
        seed_streams(run.seed_of_batch(self._seed))
        return whole

    def held(self, output: Tree) -> Tree:
        """An output that no later share of the batch changes."""
        return output

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _seed_streams(self, run: Run, share: int) -> None:
        """Let the share's random numbers follow from its number, and from nothing before it."""
        if self.watch is not None:
            self.watch.begin(share)
        seed_streams(run.seed_of(share, self._seed))

    def _read(self, run: Run, share: int) -> Batch:
        assert run.source is not None
        board = self._exchange.board
        if board is not None:
            board.note("reading")
        with self.reading:
            try:
                batch = run.source.read(run.indices_of(share), self._dtype)
            except BadRecordError as error:
                error.name_rank(self._rank)
                raise
        if board is not None:
            board.note("forward")
        return batch if self.device.type == "cpu" else moved(batch, self.device)

    def _denominator(self, run: Run, loss: ShareLoss | None) -> torch.Tensor | float:
        """The denominator of a share's loss before backward; 0 for a batch of weight 0.

        A single share has the whole weight. One of several divides by the samples, and the sum
        over the shares is corrected when all weights are known.
        """
        weight: torch.Tensor | float = float(run.num_samples)
        if loss is not None and run.num_filled == 1:
            weight = loss.weight
            if isinstance(weight, torch.Tensor):  # with weight 0 gradients are 0 and unused
                is_late = accelerators.computes(weight)
                weight = weight.where(weight > 0, math.inf) if is_late else float(weight)
        return weight if self._rules.loss_scale is None else weight / self._rules.scale


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()
