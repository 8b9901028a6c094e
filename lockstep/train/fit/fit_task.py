"""Training: the task that all ranks do together in ``fit``."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import ClassVar, SupportsFloat

import torch

from lockstep.data.iterable.read_ahead import Read
from lockstep.data.map_style.sources import Source
from lockstep.data.order import epoch_batches
from lockstep.data.records.bad_records import CheckedSource
from lockstep.launch.health.failure import ending_with
from lockstep.parallel.batch_run import StepBatch
from lockstep.parallel.data_parallel.forward import modes_of
from lockstep.parallel.debug.module_watch import WatchedSteps
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.loss.share_losses import ONE_LOSS, LossParts
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.transfer.readers import reading_ahead
from lockstep.parallel.update import PieceSlots
from lockstep.parallel.worker import Worker
from lockstep.train.callbacks.driver import Logs, Place, TaskDriver
from lockstep.train.callbacks.rank_sync import RankSync, RestartTask, Resume
from lockstep.train.checkpointing.replica_state import own_replica, replicas_of, set_replica
from lockstep.train.checkpointing.training_state import copied
from lockstep.train.fit.epoch_sums import epoch_sums, results_so_far
from lockstep.train.fit.snapshots import noting, take_snapshot
from lockstep.train.fit.tasks import Task, evaluate, joined_metrics
from lockstep.train.fit.tracing import StepTracer
from lockstep.train.input.bad_record_filter import BadRecordFilter
from lockstep.train.input.stream_broadcast import GlobalBatch, Halt, SharedStream
from lockstep.train.logging.metric_display import MetricShows
from lockstep.train.logging.metrics import Metrics
from lockstep.train.optim.error_feedback import residuals_of_all
from lockstep.train.validation.rank_consistency import check_ranks_agree
from lockstep.train.validation.stage_consistency import check_stages_agree

_FROM_THE_START = Resume()


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a training came to.

    Attributes:
        num_epochs: epochs begun: the last one may have been interrupted.
        num_steps: steps made.
        slots: the pieces of the optimizer's slots, of all ranks; on rank 0 only.
        resume: where to go on, because a callback has changed what the ranks were sent; None at
            the end.
    """

    num_epochs: int
    num_steps: int
    slots: list[PieceSlots]
    resume: Resume | None


@dataclass
class _Progress:
    """How far a training has come."""

    num_epochs: int = 0
    num_steps: int = 0


@dataclass(kw_only=True)
class FitTask(Task):
    """Training.

    Attributes:
        source: the training data.
        validation: evaluated after every epoch, or None.
        epochs: how many there are.
        batch_size: of the global batch, where the data does not come in batches.
        shuffle: a new order every epoch.
        seed: of the order.
        first_epoch: epochs trained before: they have had their orders.
        first_step: steps trained before: they have had their random streams.
        metrics: this rank's metrics of training.
        validation_metrics: those of the validation, where these are others.
        watched: there are callbacks.
        watches_beginnings: callbacks may act where an epoch begins.
        before_steps: callbacks may act before every step.
        after_steps: callbacks may act after every step.
        steps_per_epoch: batches of an epoch; None is a pass over the data.
        traced: numbers of the steps to trace, counted as from ``first_step``; None for none.
        start: where to begin; later than the first epoch where a task goes on for another.
        record: show the driver a Snapshot after every step.
        look: what modules compute to note for the Snapshots, where they are recorded.
        counts_skipped: tell how many steps of an epoch were left out.
        counts_bad: leave bad records out, and tell how many.
        loss_parts: of the loss, where it has some.
        shows_slots: callbacks that act after steps look at the optimizer's slots, too.
        turns: the losses of several functions that take turns with every batch.
        takes_states: a callback may take the training's state after a step, or a backup is.
        is_kept: a callback may.
        proves: all ranks prove first that they compute the same
        (``train.validation.rank_consistency``).
        stops_before_steps: a callback that wants training to stop before a step stops that step,
            too; else training stops after it.
    """

    name: ClassVar[str] = "fit"
    stops_before_steps: ClassVar[bool] = True
    source: Source | SharedStream
    validation: Source | SharedStream | None
    epochs: int
    batch_size: int
    shuffle: bool
    seed: int
    first_epoch: int
    first_step: int
    metrics: Metrics
    watched: bool
    watches_beginnings: bool
    before_steps: bool
    after_steps: bool
    steps_per_epoch: int | None = None
    traced: range | None = None
    start: Resume = _FROM_THE_START
    record: bool = False
    look: WatchedSteps | None = None
    counts_skipped: bool = False
    counts_bad: bool = False
    shows_slots: bool = False
    takes_states: bool = False
    is_kept: bool = False
    validation_metrics: Metrics | None = None
    loss_parts: LossParts = ONE_LOSS
    turns: LossParts = ONE_LOSS
    proves: bool = False

    def sources(self) -> list[Source | SharedStream]:
        return [self.source, *([] if self.validation is None else [self.validation])]

    def run(self, worker: Worker, control: Control, driver: TaskDriver) -> FitResult:
        """Train until the last epoch, or until a callback or Ctrl-C ends it."""
        rank_sync = RankSync(worker=worker, control=control, driver=driver)
        worker.keeps_pace = self._meets_between_steps
        has_more = self.metrics or self.loss_parts or self.turns or self.counts_bad
        worker.goes_on = self.is_kept and not has_more
        progress = _Progress()
        tracer = StepTracer(self.traced)
        resume = None
        driver.hold_interrupts()
        with (
            ending_with(tracer.close),
            modes_of(worker.model, training=True),
            torch.enable_grad(),
            suppress(Halt),
            reading_ahead(self.source, self._reads(worker), worker.passes.device) as source,
        ):
            if self.proves:
                prove = check_ranks_agree if worker.plan.pipeline is None else check_stages_agree
                prove(worker, control, driver.samples)
            replica = own_replica(self.start.replicas, worker)
            if replica is not None:
                set_replica(worker, replica)
            try:
                for epoch in range(self.start.epoch, self.epochs):
                    if self._train_epoch(rank_sync, source, epoch, progress, tracer):
                        break
            except RestartTask as renew:
                resume = renew.resume
            if (
                tracer.is_running
            ):  # training has ended, or goes on anew, before the last of the steps
                rank_sync.show_traces(tracer)
        worker.settle(is_last=True)
        rank_sync.collect_buffers()
        return FitResult(
            num_epochs=progress.num_epochs,
            num_steps=progress.num_steps,
            slots=rank_sync.gathered_slots(),
            resume=resume,
        )

    @property
    def _meets_between_steps(self) -> bool:
        """Whether what goes on between two steps concerns all ranks."""
        is_stream = isinstance(self.source, SharedStream)
        return self.before_steps or self.after_steps or self.record or is_stream

    def _train_epoch(
        self,
        rank_sync: RankSync,
        source: Source | SharedStream,
        epoch: int,
        progress: _Progress,
        tracer: StepTracer,
    ) -> bool:
        """Train an epoch; returns whether to stop after it."""
        driver = rank_sync.driver
        stops = self._begin_epoch(rank_sync, epoch)
        if stops and self.stops_before_steps:
            return True
        begun = replace(self._start_of(epoch), is_begun=True, stops=stops)
        self._begin_apart(rank_sync, begun, progress)
        results = self._begin_sums(rank_sync, epoch)
        batches = self._batches(rank_sync, source, epoch)
        bad_records = self._filter_of(rank_sync, self.source)
        shows = MetricShows(rank_sync, self.metrics)
        for index, batch in enumerate(batches, self._num_done(epoch)):
            if self.before_steps:
                stops = rank_sync.sync_callback(partial(driver.begin_step, index))
                if stops and self.stops_before_steps:
                    break
            results.append(self._make_step(rank_sync, batch, progress, tracer, bad_records))
            results[-2:-1] = [result.settled() for result in results[-2:-1]]  # a step later
            progress.num_epochs = epoch + 1
            shows.end_step()
            if self.takes_states:
                self._record_progress(rank_sync, epoch, index + 1, progress, results)
            if self._end_step(rank_sync, index, results[-1], replace(begun, stops=stops)):
                break
            rank_sync.act(driver.back_up)
        progress.num_epochs = epoch + 1
        return self._end_epoch(rank_sync, epoch, progress, results)

    def _begin_apart(self, rank_sync: RankSync, begun: Resume, progress: _Progress) -> None:
        """Of ranks that train apart, before the first step of an epoch."""
        worker, driver = rank_sync.worker, rank_sync.driver
        if not worker.trains_apart:
            return
        worker.go_on_from(begun.served)
        driver.begin_apart(begun)
        if begun.served is None and self.takes_states and not worker.has_own_optimizer:
            rank_sync.show_slots()  # within the epoch there is no moment at which to take a backup
            begun = Resume(begun.epoch, True, begun.stops)
            rank_sync.act(partial(driver.back_up_at, begun, progress.num_steps))

    def _make_step(
        self,
        rank_sync: RankSync,
        given: GlobalBatch,
        progress: _Progress,
        tracer: StepTracer,
        bad_records: BadRecordFilter | None,
    ) -> StepResult:
        """One step on a batch, and what is looked at after it."""
        worker, (batch, indices) = rank_sync.worker, given
        step, num_taken = self.first_step + progress.num_steps, len(indices)
        observe = self.metrics.update if self.metrics else None
        if bad_records is not None:
            num_turns = max(len(self.turns.names), 1)
            batch, indices = bad_records.filtered(batch, indices, step, num_turns)
        with tracer.step(step), noting(worker, self.look, step) as noted:
            result = self._train_step(rank_sync, StepBatch(batch, indices, step, observe))
        if not worker.trains_apart:  # else at the epoch's end
            self.metrics.settle(rank_sync.control)
        if num_taken > len(indices):
            result = replace(result, num_bad=num_taken - len(indices))
        progress.num_steps += 1
        if tracer.is_due(step + 1):
            rank_sync.show_traces(tracer)
        if worker.leaves_a_rank_idle(len(indices)):
            rank_sync.share_buffers()
        if self.record:
            take_snapshot(rank_sync, step, result, noted)
        return result

    def _end_step(self, rank_sync: RankSync, index: int, result: StepResult, begun: Resume) -> bool:
        """Let callbacks end a step; returns whether to stop."""
        end_step = partial(rank_sync.driver.end_step, index, result)
        if not self.after_steps:
            if index >= begun.num_ended:
                rank_sync.act(end_step)
            rank_sync.check_halt()
            return begun.stops
        if rank_sync.worker.held_names() is not None:  # callbacks may look at the whole model
            rank_sync.collect_buffers()
        if self.shows_slots:
            rank_sync.show_slots()
        return rank_sync.sync_callback(end_step)

    def _end_epoch(
        self,
        rank_sync: RankSync,
        epoch: int,
        progress: _Progress,
        results: list[StepResult],
    ) -> bool:
        """Have all ranks come to an epoch's end; returns whether to stop after it."""
        worker = rank_sync.worker
        worker.settle()
        rank_sync.check_halt()
        results = _of_all(rank_sync, results)
        logs = self._logs(rank_sync, epoch, self._losses(rank_sync, results))
        logs.update(worker.epoch_logs())
        if self.counts_skipped:
            logs["skipped_steps"] = sum(result.is_skipped for result in results)
        if self.counts_bad:
            logs["bad_records"] = sum(result.num_bad for result in results)
        if self.watched:
            self._show_all(rank_sync)
        self._stand(rank_sync, Place(epoch=epoch + 1, batch=0, num_steps=progress.num_steps))
        end = partial(rank_sync.driver.end_epoch, epoch, logs)
        return rank_sync.sync_callback(end, Resume(epoch + 1) if self.watched else None)

    def _show_all(self, rank_sync: RankSync) -> None:
        """Have rank 0 know all of the training."""
        rank_sync.collect_buffers()
        rank_sync.show_slots()
        rank_sync.control.bring_groups()

    def _filter_of(
        self, rank_sync: RankSync, source: Source | SharedStream | None
    ) -> BadRecordFilter | None:
        """What leaves bad records out, if they are to be and there may be some."""
        if not isinstance(source, CheckedSource):
            return None
        tell = rank_sync.driver.note_bad_records
        return BadRecordFilter(source, rank_sync.worker, rank_sync.control, tell)

    def _start_of(self, epoch: int) -> Resume:
        """Where to begin an epoch."""
        return self.start if epoch == self.start.epoch else Resume(epoch)

    def _num_done(self, epoch: int) -> int:
        """Batches of the epoch that were made before this task."""
        return self._start_of(epoch).batch

    def _begin_sums(self, rank_sync: RankSync, epoch: int) -> list[StepResult]:
        """The steps of the epoch so far; metrics are those of these steps."""
        rank_sync.driver.record_position(None)  # until a step is made after which a state is wanted
        self.metrics.reset()
        if not self._num_done(epoch) or self._start_of(epoch).served is not None:
            return []
        worker, control = rank_sync.worker, rank_sync.control
        self.metrics.go_on_from(copied(self.start.so_far["metrics"]), control)
        replica = own_replica(self.start.replicas, worker)
        if replica is not None:
            return results_so_far(replica["steps"], is_told=True)
        if worker.trains_apart and control.rank != 0:
            return []
        return results_so_far(self.start.so_far, is_told=control.rank == 0)

    def _record_progress(
        self,
        rank_sync: RankSync,
        epoch: int,
        batch: int,
        progress: _Progress,
        results: Sequence[StepResult],
    ) -> None:
        """After a step, have rank 0 know all that the training's state says, if it is wanted."""
        driver = rank_sync.driver
        worker, control = rank_sync.worker, rank_sync.control
        meets = self.is_kept or not worker.trains_apart
        is_alike = meets and not worker.is_apart

        def wants_state() -> bool:
            return bool(rank_sync.act(partial(driver.wants_state, batch - 1)))

        if not is_alike or not rank_sync.is_wanted(wants_state()):
            driver.record_position(None)
            return
        self._show_all(rank_sync)
        results = [result.settled() for result in results]
        told = worker.results_of_epoch(results) if worker.has_own_optimizer else results
        sums = epoch_sums(told, self.metrics, control, are_apart=worker.trains_apart)
        num_steps = progress.num_steps
        place = Place(epoch=epoch, batch=batch, num_steps=num_steps, so_far=sums)
        self._stand(rank_sync, place, results)

    def _stand(self, rank_sync: RankSync, place: Place, results: Sequence[StepResult] = ()) -> None:
        worker, plan = rank_sync.worker, rank_sync.worker.plan
        if worker.has_own_optimizer and self.is_kept:
            replicas = replicas_of(worker, results, rank_sync.control)
            place = replace(place, replicas=replicas)
        if plan.compression is not None and self.is_kept:
            place = replace(place, residuals=residuals_of_all(worker, rank_sync.control))
        if isinstance(self.source, SharedStream):
            read = self.source.used
            place = replace(place, read=read, is_lasting=read is not None)
        rank_sync.driver.record_position(place)

    def _begin_epoch(self, rank_sync: RankSync, epoch: int) -> bool:
        """Let callbacks begin an epoch, unless they have; returns whether to stop."""
        if self.start.is_begun and self.start.epoch == epoch:
            rank_sync.driver.rejoin_epoch(epoch)
            return self.start.stops
        return rank_sync.sync_callback(
            partial(rank_sync.driver.begin_epoch, epoch),
            Resume(epoch, True) if self.watches_beginnings else None,
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
        """Of the batches that are still to be made of an epoch."""
        return islice(self._indices(epoch), self._num_done(epoch), None)

    def _indices(self, epoch: int) -> Iterator[torch.Tensor]:
        """Of the batches of an epoch, where the data is read by index."""
        assert not isinstance(self.source, SharedStream)
        return epoch_batches(
            self.seed,
            self.first_epoch + epoch,
            len(self.source),
            self.batch_size,
            shuffle=self.shuffle,
            steps=self.steps_per_epoch,
        )

    def _reads(self, worker: Worker) -> Iterator[list[Read]]:
        """What a rank is going to read in each step, to the last epoch's end."""
        step = self.first_step
        turns = range(max(len(self.turns.names), 1))
        for epoch in range(self.start.epoch, self.epochs):
            for indices in self._rest(epoch):
                yield [read for turn in turns for read in worker.reads(indices, step, turn)]
                step += 1

    def _train_step(self, rank_sync: RankSync, batch: StepBatch) -> StepResult:
        """One step, or one of each function that takes its turn; none where no record is left."""
        worker = rank_sync.worker
        if self.counts_bad and not len(batch.indices):
            return StepResult(total=0.0, weight=0.0, num_samples=0)
        if not self.turns:
            return worker.train_step(batch)
        turns = range(len(self.turns.names))
        results = [worker.train_step(replace(batch, turn=turn)) for turn in turns]
        return _joined(results, is_told=worker.rank == 0)

    def _losses(self, rank_sync: RankSync, results: Sequence[StepResult]) -> Logs:
        """The epoch's loss; of several, whose sums are where their shares were, each one, too."""
        own_parts = self.turns or self.loss_parts
        if not own_parts:
            totals = [result.total for result in results]
            return {"loss": _mean(totals, [result.weight for result in results])}
        parts = [sums for result in results for sums in result.parts]
        gathered = rank_sync.control.gather(parts)
        return own_parts.logs([sums for own in gathered for sums in own])

    def _logs(self, rank_sync: RankSync, epoch: int, losses: Logs) -> Logs:
        logs = {**losses, **joined_metrics(self.metrics, rank_sync.control)}
        if self.validation is None:
            return logs
        rank_sync.act(rank_sync.driver.begin_validation)
        rank_sync.share_buffers()
        validated = evaluate(
            rank_sync,
            self.validation,
            self.batch_size,
            self.validation_metrics or self.metrics,
            self.loss_parts,
            epoch,
            self._filter_of(rank_sync, self.validation),
        )
        rank_sync.act(partial(rank_sync.driver.end_validation, validated))
        return {**logs, **{f"val_{name}": value for name, value in validated.items()}}


def _of_all(rank_sync: RankSync, results: list[StepResult]) -> list[StepResult]:
    """Of ranks that have trained apart: on rank 0 what all of them have done."""
    if not rank_sync.worker.trains_apart:
        return results
    own_results = rank_sync.worker.results_of_epoch(results)
    return [one for own in rank_sync.control.gather(own_results) for one in own]


def _mean(totals: Sequence[SupportsFloat], weights: Sequence[float]) -> float:
    """Exactly rounded sums: the order of ranks cannot matter."""
    weight = math.fsum(weights)
    return math.fsum(totals) / weight if weight else math.nan


def _joined(results: list[StepResult], *, is_told: bool) -> StepResult:
    """Of steps that took turns with a batch: their losses add up, and each is a part.

    All ranks know these losses, so one of them tells.
    """
    sums = tuple((float(result.total), result.weight) for result in results)
    size = results[0].num_samples
    return StepResult(
        total=math.fsum(size * result.loss for result in results if result.weight),
        weight=float(size),
        num_samples=size,
        is_skipped=any(result.is_skipped for result in results),
        parts=[sums] if is_told else [],
    )
