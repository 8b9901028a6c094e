"""Training: the task that all ranks do together in ``fit``."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import ClassVar, SupportsFloat

import torch

from lockstep.data.bad_records import CheckedSource
from lockstep.data.order import epoch_batches
from lockstep.data.read_ahead import Read
from lockstep.data.sources import Source
from lockstep.launch.failure import ending_with
from lockstep.parallel.control import Control
from lockstep.parallel.losses import ONE_LOSS, LossParts
from lockstep.parallel.module_watch import Look
from lockstep.parallel.passes import StepBatch
from lockstep.parallel.readers import reading_ahead
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.update import PieceSlots
from lockstep.parallel.worker import Worker, modes_of
from lockstep.train.bad_record_filter import BadRecordFilter
from lockstep.train.conductor import Conductor, Logs, Place
from lockstep.train.ensemble import Ensemble, Renew, Resume
from lockstep.train.epoch_sums import epoch_sums, results_so_far
from lockstep.train.feeding import GlobalBatch, Halt, SharedStream
from lockstep.train.metric_shows import MetricShows
from lockstep.train.metrics import Metrics
from lockstep.train.rank_proof import prove_alike
from lockstep.train.replicas import own_replica, replicas_of, set_replica
from lockstep.train.residuals import residuals_of_all
from lockstep.train.snapshots import noting, take_snapshot
from lockstep.train.stage_proof import prove_stages
from lockstep.train.tasks import Task, evaluate, joined_metrics
from lockstep.train.tracing import StepTracer
from lockstep.train.training_state import copied

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
        record: show the conductor a Snapshot after every step.
        look: what modules compute to note for the Snapshots, where they are recorded.
        counts_skipped: tell how many steps of an epoch were left out.
        counts_bad: leave bad records out, and tell how many.
        loss_parts: of the loss, where it has some.
        shows_slots: callbacks that act after steps look at the optimizer's slots, too.
        turns: the losses of several functions that take turns with every batch.
        takes_states: a callback may take the training's state after a step, or a backup is.
        is_kept: a callback may.
        proves: all ranks prove first that they compute the same (``train.rank_proof``).
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
    look: Look | None = None
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

    def run(self, worker: Worker, control: Control, conductor: Conductor) -> FitResult:
        """Train until the last epoch, or until a callback or Ctrl-C ends it."""
        ensemble = Ensemble(worker=worker, control=control, conductor=conductor)
        worker.keeps_pace = self._meets_between_steps
        has_more = self.metrics or self.loss_parts or self.turns or self.counts_bad
        worker.goes_on = self.is_kept and not has_more
        progress = _Progress()
        tracer = StepTracer(self.traced)
        resume = None
        conductor.hold_interrupts()
        with (
            ending_with(tracer.close),
            modes_of(worker.model, training=True),
            torch.enable_grad(),
            suppress(Halt),
            reading_ahead(self.source, self._reads(worker), worker.passes.device) as source,
        ):
            if self.proves:
                prove = prove_alike if worker.plan.pipeline is None else prove_stages
                prove(worker, control, conductor.samples)
            replica = own_replica(self.start.replicas, worker)
            if replica is not None:
                set_replica(worker, replica)
            try:
                for epoch in range(self.start.epoch, self.epochs):
                    if self._train_epoch(ensemble, source, epoch, progress, tracer):
                        break
            except Renew as renew:
                resume = renew.resume
            if (
                tracer.is_running
            ):  # training has ended, or goes on anew, before the last of the steps
                ensemble.show_traces(tracer)
        worker.settle(is_last=True)
        ensemble.collect_buffers()
        return FitResult(
            num_epochs=progress.num_epochs,
            num_steps=progress.num_steps,
            slots=ensemble.gathered_slots(),
            resume=resume,
        )

    @property
    def _meets_between_steps(self) -> bool:
        """Whether what goes on between two steps concerns all ranks."""
        is_stream = isinstance(self.source, SharedStream)
        return self.before_steps or self.after_steps or self.record or is_stream

    def _train_epoch(
        self,
        ensemble: Ensemble,
        source: Source | SharedStream,
        epoch: int,
        progress: _Progress,
        tracer: StepTracer,
    ) -> bool:
        """Train an epoch; returns whether to stop after it."""
        conductor = ensemble.conductor
        stops = self._begin_epoch(ensemble, epoch)
        if stops and self.stops_before_steps:
            return True
        begun = replace(self._start_of(epoch), is_begun=True, stops=stops)
        self._begin_apart(ensemble, begun, progress)
        results = self._begin_sums(ensemble, epoch)
        batches = self._batches(ensemble, source, epoch)
        bad_records = self._filter_of(ensemble, self.source)
        shows = MetricShows(ensemble, self.metrics)
        for index, batch in enumerate(batches, self._num_done(epoch)):
            if self.before_steps:
                stops = ensemble.consult(partial(conductor.begin_step, index))
                if stops and self.stops_before_steps:
                    break
            results.append(self._make_step(ensemble, batch, progress, tracer, bad_records))
            results[-2:-1] = [result.settled() for result in results[-2:-1]]  # a step later
            progress.num_epochs = epoch + 1
            shows.end_step()
            if self.takes_states:
                self._take_stand(ensemble, epoch, index + 1, progress, results)
            if self._end_step(ensemble, index, results[-1], replace(begun, stops=stops)):
                break
            ensemble.act(conductor.back_up)
        progress.num_epochs = epoch + 1
        return self._end_epoch(ensemble, epoch, progress, results)

    def _begin_apart(self, ensemble: Ensemble, begun: Resume, progress: _Progress) -> None:
        """Of ranks that train apart, before the first step of an epoch."""
        worker, conductor = ensemble.worker, ensemble.conductor
        if not worker.trains_apart:
            return
        worker.go_on_from(begun.served)
        conductor.begin_apart(begun)
        if begun.served is None and self.takes_states and not worker.has_own_optimizer:
            ensemble.show_slots()  # within the epoch there is no moment at which to take a backup
            begun = Resume(begun.epoch, True, begun.stops)
            ensemble.act(partial(conductor.back_up_at, begun, progress.num_steps))

    def _make_step(
        self,
        ensemble: Ensemble,
        given: GlobalBatch,
        progress: _Progress,
        tracer: StepTracer,
        bad_records: BadRecordFilter | None,
    ) -> StepResult:
        """One step on a batch, and what is looked at after it."""
        worker, (batch, indices) = ensemble.worker, given
        step, num_taken = self.first_step + progress.num_steps, len(indices)
        observe = self.metrics.update if self.metrics else None
        if bad_records is not None:
            num_turns = max(len(self.turns.names), 1)
            batch, indices = bad_records.filtered(batch, indices, step, num_turns)
        with tracer.step(step), noting(worker, self.look, step) as noted:
            result = self._train_step(ensemble, StepBatch(batch, indices, step, observe))
        if not worker.trains_apart:  # else at the epoch's end
            self.metrics.settle(ensemble.control)
        if num_taken > len(indices):
            result = replace(result, num_bad=num_taken - len(indices))
        progress.num_steps += 1
        if tracer.is_due(step + 1):
            ensemble.show_traces(tracer)
        if worker.leaves_a_rank_idle(len(indices)):
            ensemble.share_buffers()
        if self.record:
            take_snapshot(ensemble, step, result, noted)
        return result

    def _end_step(self, ensemble: Ensemble, index: int, result: StepResult, begun: Resume) -> bool:
        """Let callbacks end a step; returns whether to stop."""
        end_step = partial(ensemble.conductor.end_step, index, result)
        if not self.after_steps:
            if index >= begun.num_ended:
                ensemble.act(end_step)
            ensemble.check_halt()
            return begun.stops
        if ensemble.worker.held_names() is not None:  # callbacks may look at the whole model
            ensemble.collect_buffers()
        if self.shows_slots:
            ensemble.show_slots()
        return ensemble.consult(end_step)

    def _end_epoch(
        self,
        ensemble: Ensemble,
        epoch: int,
        progress: _Progress,
        results: list[StepResult],
    ) -> bool:
        """Have all ranks come to an epoch's end; returns whether to stop after it."""
        worker = ensemble.worker
        worker.settle()
        ensemble.check_halt()
        results = _of_all(ensemble, results)
        logs = self._logs(ensemble, epoch, self._losses(ensemble, results))
        logs.update(worker.epoch_logs())
        if self.counts_skipped:
            logs["skipped_steps"] = sum(result.is_skipped for result in results)
        if self.counts_bad:
            logs["bad_records"] = sum(result.num_bad for result in results)
        if self.watched:
            self._show_all(ensemble)
        self._stand(ensemble, Place(epoch=epoch + 1, batch=0, num_steps=progress.num_steps))
        end = partial(ensemble.conductor.end_epoch, epoch, logs)
        return ensemble.consult(end, Resume(epoch + 1) if self.watched else None)

    def _show_all(self, ensemble: Ensemble) -> None:
        """Have rank 0 know all of the training."""
        ensemble.collect_buffers()
        ensemble.show_slots()
        ensemble.control.bring_groups()

    def _filter_of(
        self, ensemble: Ensemble, source: Source | SharedStream | None
    ) -> BadRecordFilter | None:
        """What leaves bad records out, if they are to be and there may be some."""
        if not isinstance(source, CheckedSource):
            return None
        tell = ensemble.conductor.note_bad_records
        return BadRecordFilter(source, ensemble.worker, ensemble.control, tell)

    def _start_of(self, epoch: int) -> Resume:
        """Where to begin an epoch."""
        return self.start if epoch == self.start.epoch else Resume(epoch)

    def _num_done(self, epoch: int) -> int:
        """Batches of the epoch that were made before this task."""
        return self._start_of(epoch).batch

    def _begin_sums(self, ensemble: Ensemble, epoch: int) -> list[StepResult]:
        """The steps of the epoch so far; metrics are those of these steps."""
        ensemble.conductor.stand_at(None)  # until a step is made after which a state is wanted
        self.metrics.reset()
        if not self._num_done(epoch) or self._start_of(epoch).served is not None:
            return []
        worker, control = ensemble.worker, ensemble.control
        self.metrics.go_on_from(copied(self.start.so_far["metrics"]), control)
        replica = own_replica(self.start.replicas, worker)
        if replica is not None:
            return results_so_far(replica["steps"], is_told=True)
        if worker.trains_apart and control.rank != 0:
            return []
        return results_so_far(self.start.so_far, is_told=control.rank == 0)

    def _take_stand(
        self,
        ensemble: Ensemble,
        epoch: int,
        batch: int,
        progress: _Progress,
        results: Sequence[StepResult],
    ) -> None:
        """After a step, have rank 0 know all that the training's state says, if it is wanted."""
        conductor = ensemble.conductor
        worker, control = ensemble.worker, ensemble.control
        meets = self.is_kept or not worker.trains_apart
        is_alike = meets and not worker.is_apart

        def wants_state() -> bool:
            return bool(ensemble.act(partial(conductor.wants_state, batch - 1)))

        if not is_alike or not ensemble.is_wanted(wants_state()):
            conductor.stand_at(None)
            return
        self._show_all(ensemble)
        results = [result.settled() for result in results]
        told = worker.results_of_epoch(results) if worker.has_own_optimizer else results
        sums = epoch_sums(told, self.metrics, control, are_apart=worker.trains_apart)
        num_steps = progress.num_steps
        place = Place(epoch=epoch, batch=batch, num_steps=num_steps, so_far=sums)
        self._stand(ensemble, place, results)

    def _stand(self, ensemble: Ensemble, place: Place, results: Sequence[StepResult] = ()) -> None:
        worker, plan = ensemble.worker, ensemble.worker.plan
        if worker.has_own_optimizer and self.is_kept:
            replicas = replicas_of(worker, results, ensemble.control)
            place = replace(place, replicas=replicas)
        if plan.compression is not None and self.is_kept:
            place = replace(place, residuals=residuals_of_all(worker, ensemble.control))
        if isinstance(self.source, SharedStream):
            read = self.source.used
            place = replace(place, read=read, is_lasting=read is not None)
        ensemble.conductor.stand_at(place)

    def _begin_epoch(self, ensemble: Ensemble, epoch: int) -> bool:
        """Let callbacks begin an epoch, unless they have; returns whether to stop."""
        if self.start.is_begun and self.start.epoch == epoch:
            ensemble.conductor.rejoin_epoch(epoch)
            return self.start.stops
        return ensemble.consult(
            partial(ensemble.conductor.begin_epoch, epoch),
            Resume(epoch, True) if self.watches_beginnings else None,
            stops_at_once=self.stops_before_steps,
        )

    def _batches(
        self, ensemble: Ensemble, source: Source | SharedStream, epoch: int
    ) -> Iterator[GlobalBatch]:
        conductor = ensemble.conductor
        if isinstance(source, SharedStream):
            batches = source.batches(
                ensemble.worker,
                ensemble.control,
                epoch,
                gives_up=lambda: conductor.is_interrupted,
                fails=conductor.fail,
                training=True,
            )
            return conductor.awaited(batches)
        watched = conductor.watched(source)
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

    def _train_step(self, ensemble: Ensemble, batch: StepBatch) -> StepResult:
        """One step, or one of each function that takes its turn; none where no record is left."""
        worker = ensemble.worker
        if self.counts_bad and not len(batch.indices):
            return StepResult(total=0.0, weight=0.0, num_samples=0)
        if not self.turns:
            return worker.train_step(batch)
        turns = range(len(self.turns.names))
        results = [worker.train_step(replace(batch, turn=turn)) for turn in turns]
        return _joined(results, is_told=worker.rank == 0)

    def _losses(self, ensemble: Ensemble, results: Sequence[StepResult]) -> Logs:
        """The epoch's loss; of several, whose sums are where their shares were, each one, too."""
        own_parts = self.turns or self.loss_parts
        if not own_parts:
            totals = [result.total for result in results]
            return {"loss": _mean(totals, [result.weight for result in results])}
        parts = [sums for result in results for sums in result.parts]
        gathered = ensemble.control.gather(parts)
        return own_parts.logs([sums for own in gathered for sums in own])

    def _logs(self, ensemble: Ensemble, epoch: int, losses: Logs) -> Logs:
        logs = {**losses, **joined_metrics(self.metrics, ensemble.control)}
        if self.validation is None:
            return logs
        ensemble.act(ensemble.conductor.begin_validation)
        ensemble.share_buffers()
        validated = evaluate(
            ensemble,
            self.validation,
            self.batch_size,
            self.validation_metrics or self.metrics,
            self.loss_parts,
            epoch,
            self._filter_of(ensemble, self.validation),
        )
        ensemble.act(partial(ensemble.conductor.end_validation, validated))
        return {**logs, **{f"val_{name}": value for name, value in validated.items()}}


def _of_all(ensemble: Ensemble, results: list[StepResult]) -> list[StepResult]:
    """Of ranks that have trained apart: on rank 0 what all of them have done."""
    if not ensemble.worker.trains_apart:
        return results
    own_results = ensemble.worker.results_of_epoch(results)
    return [one for own in ensemble.control.gather(own_results) for one in own]


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
