"""Training: the task that all ranks do together in ``fit``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import ClassVar

import torch

from lockstep.data.iterable.read_ahead import Read
from lockstep.data.map_style.sources import Source
from lockstep.data.order import BatchOrder, held_streams
from lockstep.data.records.bad_records import CheckedSource
from lockstep.launch.health.failure import ending_with
from lockstep.parallel.batch_run import Observe, StepBatch
from lockstep.parallel.data_parallel.forward import modes_of
from lockstep.parallel.debug.module_watch import Noted
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.loss.share_losses import ONE_LOSS, LossParts
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.transfer.readers import reading_ahead
from lockstep.parallel.updater_interface import PieceSlots
from lockstep.parallel.worker import Worker
from lockstep.train.callbacks.driver import Logs, TaskDriver
from lockstep.train.callbacks.rank_sync import RankSync, RestartTask
from lockstep.train.checkpointing.fit_position import FitPosition
from lockstep.train.checkpointing.replica_state import own_replica, set_replica
from lockstep.train.checkpointing.training_state import copied
from lockstep.train.fit.epoch_sums import joined_turns, mean_loss, results_of_ranks, results_so_far
from lockstep.train.fit.fit_hooks import FitHooks
from lockstep.train.fit.position_recorder import PositionRecorder
from lockstep.train.fit.snapshots import Snapshots
from lockstep.train.fit.step_profiler import StepProfiler
from lockstep.train.fit.tasks import (
    Evaluation,
    MeansOfSamples,
    Task,
    Validation,
    evaluate,
    joined_results,
)
from lockstep.train.input.bad_record_filter import BadRecordFilter, filter_of
from lockstep.train.input.stream_broadcast import GlobalBatch, Halt, SharedStream
from lockstep.train.logging.metric_display import Reports
from lockstep.train.logging.metrics import Metrics
from lockstep.train.validation.rank_consistency import check_ranks_agree
from lockstep.train.validation.stage_consistency import check_stages_agree

_FROM_THE_START = FitPosition()


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The result of a training.

    Attributes:
        num_epochs: epochs begun: the last one may have been interrupted.
        num_steps: steps made.
        slots: the pieces of the optimizer's slots, of all ranks; on rank 0 only.
        resume: where to resume, after a callback changed what the ranks were sent; None at the end.
    """

    num_epochs: int
    num_steps: int
    slots: list[PieceSlots]
    resume: FitPosition | None


@dataclass(kw_only=True)
class _FitRun:
    """A rank's run of a task.

    Attributes:
        rank_sync: the ranks.
        source: the training data, read ahead.
        tracer: traces the steps that are due.
        recorder: records the positions at which states are taken.
        observe: gets every share's outputs; None without metrics.
        num_epochs: epochs begun.
        num_steps: steps made.
        is_taken: the training's state is taken after this step.
    """

    rank_sync: RankSync
    source: Source | SharedStream
    tracer: StepProfiler
    recorder: PositionRecorder
    observe: Observe | None
    num_epochs: int = 0
    num_steps: int = 0
    is_taken: bool = False


@dataclass(kw_only=True)
class FitTask(Task):
    """Training.

    Attributes:
        source: the training data.
        order: of its batches, if it does not come in batches.
        validation: the evaluation after epochs, or None.
        epochs: the number of epochs.
        first_step: steps trained before; the random streams continue from there.
        metrics: this rank's metrics of training.
        hooks: what runs on rank 0 between steps.
        traced: numbers of the steps to trace, counted from ``first_step``; None for none.
        start: the first batch of this task; later than the first epoch's if it follows another.
        snapshots: given to the driver after every step; None for none.
        counts_skipped: log the number of skipped steps of an epoch.
        loss_parts: the parts of the loss, if it has several.
        turns: the losses of several functions that take turns with every batch.
        proves: the ranks first check that they compute the same
            (``train.validation.rank_consistency``).
        folder: of this host, into which all hosts write checkpoints together; "" if they do not.
        stops_before_steps: a callback that stops training before a step prevents that step; else
            training stops after it.
    """

    name: ClassVar[str] = "fit"
    stops_before_steps: ClassVar[bool] = True
    source: Source | SharedStream
    order: BatchOrder
    validation: Validation | None
    epochs: int
    first_step: int
    metrics: Metrics
    hooks: FitHooks
    traced: range | None = None
    start: FitPosition = _FROM_THE_START
    snapshots: Snapshots | None = None
    counts_skipped: bool = False
    loss_parts: LossParts = ONE_LOSS
    turns: LossParts = ONE_LOSS
    proves: bool = False
    folder: str = ""

    def sources(self) -> list[Source | SharedStream]:
        return [self.source, *([] if self.validation is None else [self.validation.data.source])]

    def run(self, worker: Worker, control: Control, driver: TaskDriver) -> FitResult:
        """Train until the last epoch, or until a callback or Ctrl-C ends it."""
        rank_sync = RankSync(
            worker=worker,
            control=control,
            driver=driver,
            reads_weights=self.hooks.callbacks and not self.hooks.only_parts,
            folder=self.folder,
        )
        has_more = self.metrics or self.loss_parts or self.turns or self._skips_bad_records
        worker.begin_training(
            is_synchronous=self._is_watched or isinstance(self.source, SharedStream),
            is_watched=self._is_watched,
            is_restartable=self.hooks.full_state and not has_more,
        )
        recorder = PositionRecorder(
            rank_sync=rank_sync, hooks=self.hooks, metrics=self.metrics, source=self.source
        )
        tracer = StepProfiler(self.traced)
        resume = None
        driver.hold_interrupts()
        run = _FitRun(
            rank_sync=rank_sync,
            source=self.source,
            tracer=tracer,
            recorder=recorder,
            observe=self.metrics.update if self.metrics else None,
        )
        with (
            ending_with(tracer.close),
            modes_of(worker.model, training=True),
            torch.enable_grad(),
            suppress(Halt),
            reading_ahead(self.source, self._reads(worker), worker.passes.device) as run.source,
        ):
            resume = self._train(run)
        worker.synchronise(is_last=True)
        rank_sync.collect_buffers()
        return FitResult(
            num_epochs=run.num_epochs,
            num_steps=run.num_steps,
            # Before a restart rank 0 has all slots, with the changes of its callbacks.
            slots=[] if resume is not None else rank_sync.gathered_slots(),
            resume=resume,
        )

    def _train(self, run: _FitRun) -> FitPosition | None:
        """Train all epochs; returns where to resume if the ranks must be sent everything anew."""
        worker, control, driver = run.rank_sync.worker, run.rank_sync.control, run.rank_sync.driver
        if self.proves:
            prove = check_ranks_agree if worker.plan.pipeline is None else check_stages_agree
            with held_streams, worker.trial_memory():
                prove(worker, control, driver.samples)
        replica = own_replica(self.start.replicas, worker)
        if replica is not None:
            set_replica(worker, replica)
        run.rank_sync.write_parts()
        resume = None
        try:
            for epoch in range(self.start.epoch, self.epochs):
                if self._train_epoch(run, epoch):
                    break
        except RestartTask as restart:
            resume = restart.resume
        if run.tracer.is_running:  # training ends or restarts before the last step to trace
            run.rank_sync.show_traces(run.tracer)
        return resume

    @property
    def _is_watched(self) -> bool:
        """True if callbacks act, or snapshots are taken, between two steps."""
        return self.hooks.step_begin or self.hooks.step_end or self.snapshots is not None

    @property
    def _skips_bad_records(self) -> bool:
        """True if bad records are left out, and counted."""
        return isinstance(self.source, CheckedSource)

    def _train_epoch(self, run: _FitRun, epoch: int) -> bool:
        """Train an epoch; returns True to stop after it."""
        rank_sync, driver = run.rank_sync, run.rank_sync.driver
        stops = self._begin_epoch(rank_sync, epoch)
        if stops and self.stops_before_steps:
            return True
        begun = replace(self._start_of(epoch), is_begun=True, stops=stops)
        run.recorder.begin_epoch(begun, run.num_steps)
        results = self._begin_sums(rank_sync, epoch)
        batches = self._batches(rank_sync, run.source, epoch)
        bad_records = filter_of(rank_sync, self.source)
        reports = self._reports(rank_sync)
        keeps_states = self.hooks.keeps_states(rank_sync.worker.plan.num_ranks)
        for index, batch in enumerate(batches, self._start_of(epoch).batch):
            if self.hooks.step_begin:
                stops = rank_sync.sync_callback(partial(driver.begin_step, index))
                if stops and self.stops_before_steps:
                    break
            results.append(self._make_step(run, batch, bad_records))
            if len(results) > 1 and not isinstance(results[-2].total, float):
                results[-2] = results[-2].settled()  # a device has computed it by now
            run.num_epochs = epoch + 1
            if reports.are_wanted:
                reports.end_batch(partial(self._report, rank_sync, results))
            run.is_taken = keeps_states and run.recorder.end_step(
                FitPosition(epoch, True, batch=index + 1, num_steps=run.num_steps), results
            )
            begun = begun if stops == begun.stops else replace(begun, stops=stops)
            if self._end_step(run, index, results[-1], begun):
                break
        run.num_epochs = epoch + 1
        return self._end_epoch(run, epoch, results)

    def _reports(self, rank_sync: RankSync) -> Reports:
        """The steps of an epoch after which values are reported."""
        seconds = 0.0
        if self.metrics and rank_sync.worker.local_steps is None:  # they meet at an epoch's end
            seconds = rank_sync.control.broadcast(rank_sync.driver.seconds_between_metrics)
        return Reports(self.metrics, rank_sync.control, "timed", seconds)

    def _report(self, rank_sync: RankSync, results: Sequence[StepResult]) -> None:
        """Report the values of the epoch's steps so far."""
        if rank_sync.control.rank == 0:
            rank_sync.driver.show_metrics(self.metrics.values_so_far())

    def _make_step(
        self, run: _FitRun, given: GlobalBatch, bad_records: BadRecordFilter | None
    ) -> StepResult:
        """One step on a batch, and its Snapshot."""
        rank_sync = run.rank_sync
        worker, (batch, indices) = rank_sync.worker, given
        step, num_taken = self.first_step + run.num_steps, indices.shape[0]
        if bad_records is not None:
            num_turns = max(len(self.turns.names), 1)
            batch, indices = bad_records.filtered(batch, indices, step, num_turns)
        now = StepBatch(batch, indices, step, run.observe)
        noted: Noted = {}
        with held_streams:
            if self.snapshots is None and self.traced is None:
                result = self._train_step(rank_sync, now)
            else:
                result, noted = self._watch_step(run, now)
        if run.observe is not None and worker.local_steps is None:  # else at the epoch's end
            self.metrics.settle(rank_sync.control)
        num_samples = indices.shape[0]
        if num_taken > num_samples:
            result = replace(result, num_bad=num_taken - num_samples)
        run.num_steps += 1
        if rank_sync.control.num_ranks > 1 and worker.leaves_a_rank_idle(num_samples):
            rank_sync.share_buffers()
        if self.snapshots is not None:
            self.snapshots.take(rank_sync, step, result, noted)
        return result

    def _watch_step(self, run: _FitRun, now: StepBatch) -> tuple[StepResult, Noted]:
        """The step with its trace, and what modules have computed in it."""
        rank_sync, tracer = run.rank_sync, run.tracer
        snapshots = self.snapshots or Snapshots()
        with tracer.step(now.step), snapshots.noting(rank_sync.worker, now.step) as noted:
            result = self._train_step(rank_sync, now)
        if tracer.is_due(now.step + 1):
            rank_sync.show_traces(tracer)
        return result, noted

    def _end_step(self, run: _FitRun, index: int, result: StepResult, begun: FitPosition) -> bool:
        """Let callbacks end a step; returns True to stop."""
        rank_sync = run.rank_sync
        end_step = partial(rank_sync.driver.end_step, index, result)
        if not self.hooks.step_end:
            if index >= begun.num_ended and rank_sync.control.rank == 0:
                rank_sync.act(end_step)
            if run.is_taken:
                rank_sync.act(rank_sync.driver.take_copies)
                rank_sync.write_parts()
            rank_sync.check_halt()
            return begun.stops
        if rank_sync.worker.local_names() is not None:  # callbacks may read the whole model
            rank_sync.collect_buffers()
        if self.hooks.slots:
            rank_sync.show_slots()
        return rank_sync.sync_callback(end_step, is_copied=run.is_taken)

    def _end_epoch(self, run: _FitRun, epoch: int, results: list[StepResult]) -> bool:
        """Wait for all ranks at an epoch's end; returns True to stop after it."""
        rank_sync, worker = run.rank_sync, run.rank_sync.worker
        worker.synchronise()
        rank_sync.check_halt()
        results = results_of_ranks(worker, rank_sync.control, results)
        logs = self._logs(rank_sync, epoch, self._losses(rank_sync, results))
        logs.update(worker.epoch_logs())
        if self.counts_skipped:
            logs["skipped_steps"] = sum(result.is_skipped for result in results)
        if self._skips_bad_records:
            logs["bad_records"] = sum(result.num_bad for result in results)
        if self.hooks.callbacks:
            run.recorder.show_all()
        run.recorder.record(FitPosition(epoch + 1, num_steps=run.num_steps))
        renew_at = FitPosition(epoch + 1) if self.hooks.callbacks else None
        return rank_sync.sync_callback(partial(rank_sync.driver.end_epoch, epoch, logs), renew_at)

    def _start_of(self, epoch: int) -> FitPosition:
        """Where to begin an epoch: in the first one, some batches may have been trained before."""
        return self.start if epoch == self.start.epoch else FitPosition(epoch)

    def _begin_sums(self, rank_sync: RankSync, epoch: int) -> list[StepResult]:
        """The steps of the epoch so far; metrics are those of these steps."""
        rank_sync.driver.record_position(None)  # until a step after which a state is taken
        self.metrics.reset()
        start = self._start_of(epoch)
        if not start.batch or start.served is not None:
            return []
        worker, control = rank_sync.worker, rank_sync.control
        self.metrics.go_on_from(copied(self.start.so_far["metrics"]), control)
        replica = own_replica(self.start.replicas, worker)
        if replica is not None:
            return results_so_far(replica["steps"], has_parts=True)
        if worker.local_steps is not None and control.rank != 0:
            return []
        return results_so_far(self.start.so_far, has_parts=control.rank == 0)

    def _begin_epoch(self, rank_sync: RankSync, epoch: int) -> bool:
        """Let callbacks begin an epoch, unless they have; returns True to stop."""
        if self.start.is_begun and self.start.epoch == epoch:
            rank_sync.driver.rejoin_epoch(epoch)
            return self.start.stops
        return rank_sync.sync_callback(
            partial(rank_sync.driver.begin_epoch, epoch),
            FitPosition(epoch, True) if self.hooks.epoch_begin else None,
            stops_at_once=self.stops_before_steps,
        )

    def _batches(
        self, rank_sync: RankSync, source: Source | SharedStream, epoch: int
    ) -> Iterator[GlobalBatch]:
        driver = rank_sync.driver
        if isinstance(source, SharedStream):
            batches = source.batches(
                rank_sync.worker,
                rank_sync.control,
                epoch,
                gives_up=lambda: driver.is_interrupted,
                fails=driver.fail,
                training=True,
            )
            return driver.awaited(batches)
        watched = driver.watched(source)
        return ((watched, indices) for indices in self._rest(epoch))

    def _rest(self, epoch: int) -> Iterator[torch.Tensor]:
        """The indices of an epoch's remaining batches."""
        assert not isinstance(self.source, SharedStream)
        indices = self.order.indices(epoch, len(self.source))
        return islice(indices, self._start_of(epoch).batch, None)

    def _reads(self, worker: Worker) -> Iterator[list[Read]]:
        """The reads of a rank in each step, to the last epoch's end."""
        step = self.first_step
        turns = range(max(len(self.turns.names), 1))
        for epoch in range(self.start.epoch, self.epochs):
            for indices in self._rest(epoch):
                yield [read for turn in turns for read in worker.reads(indices, step, turn)]
                step += 1

    def _train_step(self, rank_sync: RankSync, batch: StepBatch) -> StepResult:
        """One step, or one of each function in turn; none if no record is left."""
        worker = rank_sync.worker
        if not batch.indices.shape[0] and self._skips_bad_records:
            return StepResult(total=0.0, weight=0.0, num_samples=0)
        if not self.turns.names:
            return worker.train_step(batch)
        turns = range(len(self.turns.names))
        results = [worker.train_step(replace(batch, turn=turn)) for turn in turns]
        return joined_turns(results, has_parts=worker.rank == 0)

    def _losses(self, rank_sync: RankSync, results: Sequence[StepResult]) -> Logs:
        """The epoch's loss; of several, each one, too, gathered from the ranks of their shares."""
        own_parts = self.turns or self.loss_parts
        if not own_parts:
            return {"loss": mean_loss(results)}
        gathered = rank_sync.control.gather([sums for result in results for sums in result.parts])
        return own_parts.logs([sums for own in gathered for sums in own])

    def _logs(self, rank_sync: RankSync, epoch: int, losses: Logs) -> Logs:
        logs = joined_results(rank_sync, self.metrics, losses)
        if self.validation is None or not self.validation.is_after(epoch):
            return logs
        driver = rank_sync.driver
        if self.hooks.validation:  # a callback may swap weights for their averages
            rank_sync.show_slots()
        self._around_validation(rank_sync, driver.begin_validation)
        rank_sync.share_buffers()
        rank_sync.begin_validation()
        validated = self._validated(rank_sync, self.validation, epoch)
        self._around_validation(rank_sync, partial(driver.end_validation, validated))
        return {**logs, **{f"val_{name}": value for name, value in validated.items()}}

    def _validated(self, rank_sync: RankSync, validation: Validation, epoch: int) -> Logs:
        data, metrics = validation.data, validation.metrics or self.metrics
        bad_records = filter_of(rank_sync, data.source)
        return evaluate(rank_sync, data, metrics, self._evaluation(), epoch, bad_records)

    def _evaluation(self) -> Evaluation:
        return MeansOfSamples(self.loss_parts)

    def _around_validation(self, rank_sync: RankSync, act: Callable[[], None]) -> None:
        """Call callbacks; if they may act, all ranks get their changes of the model."""
        (rank_sync.sync_callback if self.hooks.validation else rank_sync.act)(act)
