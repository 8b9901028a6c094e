"""Gives rank 0 the training's position and state, for the callbacks and copies that take them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from lockstep.data.map_style.sources import Source
from lockstep.parallel.training_step import StepResult
from lockstep.train.callbacks.rank_sync import RankSync
from lockstep.train.checkpointing.fit_position import FitPosition
from lockstep.train.checkpointing.replica_state import replicas_of
from lockstep.train.fit.epoch_sums import epoch_sums
from lockstep.train.fit.fit_hooks import FitHooks
from lockstep.train.input.stream_broadcast import SharedStream
from lockstep.train.logging.metrics import Metrics
from lockstep.train.optim.error_feedback import residuals_of_all


@dataclass(frozen=True, kw_only=True)
class PositionRecorder:
    """Records positions from which training can resume; every rank calls each method.

    Attributes:
        rank_sync: the ranks.
        hooks: the callbacks and copies that take states.
        metrics: this rank's metrics of training.
        source: the training data.
    """

    rank_sync: RankSync
    hooks: FitHooks
    metrics: Metrics
    source: Source | SharedStream

    def begin_epoch(self, begun: FitPosition, num_steps: int) -> None:
        """Before the first step of an epoch: ranks with local steps resume from there."""
        local, driver = self.rank_sync.worker.local_steps, self.rank_sync.driver
        if local is None:
            return
        local.resume_from(begun.served)
        driver.begin_apart(begun)
        if begun.served is None and self.hooks.state and not local.has_own_optimizer:
            self.rank_sync.show_slots()  # no copy can be taken within the epoch
            position = FitPosition(begun.epoch, True, begun.stops, num_steps=num_steps)
            self.rank_sync.act(partial(driver.copy_at, position))

    def end_step(self, position: FitPosition, results: Sequence[StepResult]) -> bool:
        """After a step: record the position if rank 0 takes the state there; True if it does.

        Args:
            position: without the ranks' own parts.
            results: of this rank's steps in the epoch so far.
        """
        rank_sync, local = self.rank_sync, self.rank_sync.worker.local_steps
        may_be_taken = local is None or (self.hooks.full_state and not local.has_diverged)
        if not may_be_taken or not self._is_wanted(position):
            rank_sync.driver.record_position(None)
            return False
        rank_sync.worker.settle()
        self.show_all()
        results = [result.settled() for result in results]
        own = results
        if local is not None and local.has_own_optimizer:
            own = local.results_of_epoch(results)
        sums = epoch_sums(own, self.metrics, rank_sync.control, are_apart=local is not None)
        self.record(replace(position, so_far=sums), results)
        return True

    def _is_wanted(self, position: FitPosition) -> bool:
        """True, on all ranks, if rank 0 takes the state after a step."""
        is_due = self.rank_sync.act(partial(self.rank_sync.driver.wants_state, position))
        return self.rank_sync.is_wanted(bool(is_due))

    def record(self, position: FitPosition, results: Sequence[StepResult] = ()) -> None:
        """Record a position, with the ranks' own parts of the state."""
        worker, control = self.rank_sync.worker, self.rank_sync.control
        local = worker.local_steps
        if local is not None and local.has_own_optimizer and self.hooks.full_state:
            position = replace(position, replicas=replicas_of(worker, results, control))
        if worker.plan.compression is not None and self.hooks.full_state:
            position = replace(position, residuals=residuals_of_all(worker, control))
        if isinstance(self.source, SharedStream):
            read = self.source.used
            position = replace(position, read=read, is_lasting=read is not None)
        self.rank_sync.driver.record_position(position)

    def show_all(self) -> None:
        """Bring the state of the training to rank 0: the whole, or what ranks do not write."""
        every = self.rank_sync.worker.model.parameters()
        # Parts of memory in another order (channels last) are no parts of a tensor in a file.
        if self.hooks.only_parts and all(one.is_contiguous() for one in every):
            self.rank_sync.collect_rest()
            return
        self.rank_sync.collect_buffers()
        self.rank_sync.show_slots()
        self.rank_sync.control.bring_groups()
