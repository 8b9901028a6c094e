"""Tasks: what all ranks of a team do together, in the same order.

A task is shipped to every rank and run there against its Worker. Only rank 0 has a conductor that
does anything: callbacks, progress, the user's metrics. Whatever it changes is told to the others
before the next step.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import nn

from lockstep.data.order import batch_bounds, epoch_batches
from lockstep.data.read_ahead import Read
from lockstep.data.sources import Source
from lockstep.data.trees import Tree, map_tensors
from lockstep.parallel.control import Control
from lockstep.parallel.losses import ONE_LOSS, LossParts, Sums
from lockstep.parallel.readers import reading_ahead
from lockstep.parallel.update import PieceSlots, Updater
from lockstep.parallel.worker import Observe, StepResult, Worker, modes_of
from lockstep.train.feeding import GlobalBatch, Halt, SharedStream, all_batches
from lockstep.train.metrics import Metrics
from lockstep.train.tracing import StepTracer

Logs = dict[str, Any]

_BATCHES_BETWEEN_PAUSES = 4


class Conductor:
    """What rank 0 does between steps. This base does nothing, as on every other rank."""

    stop_training = False
    is_interrupted = False
    updater: Updater | None = None
    """Of the training that is conducted."""

    def hold_interrupts(self) -> None:
        """Steps begin: Ctrl-C must not cut one in half, but set ``is_interrupted``."""

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins."""

    def begin_step(self, index: int) -> None:
        """Step number ``index`` of the epoch begins."""

    def end_step(self, index: int, result: StepResult) -> None:
        """A step is done."""

    def watched(self, source: Source) -> Source:
        """The training data, as rank 0 sees how long it takes to come."""
        return source

    def awaited(self, batches: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
        """Batches that are read one after the other, as rank 0 sees how long they take to come."""
        return batches

    def begin_validation(self) -> None:
        """Validation begins."""

    def end_validation(self, logs: Logs) -> None:
        """Validation is done."""

    def end_epoch(self, epoch: int, logs: Logs) -> None:
        """An epoch is done."""

    def take_traces(self, traces: list[bytes]) -> None:
        """The traced steps are over: all ranks' traces."""

    def observe_state(self, snapshot: "Snapshot") -> None:
        """The state after a step, where the task records it."""

    def take_slots(self, slots: list[PieceSlots]) -> None:
        """Let callbacks see the optimizer's slots, put together from those of all ranks."""

    def fingerprint(self) -> object:
        """What the other ranks were sent: where it has changed, they must be sent it anew."""
        return None

    def watch(self, act: Callable[[], None], *, in_epoch: bool) -> dict[str, torch.Tensor]:
        """Act, and see what has changed of the model.

        Parameters whose memory was exchanged are brought back to where all ranks see them.

        Args:
            act: what rank 0 does.
            in_epoch: in the midst of an epoch, where only values may change.

        Returns:
            What the others cannot see that has changed of buffers and parameters, by name.
        """
        act()
        return {}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything a step left behind: for proofs, not for training.

    Attributes:
        step: the step's number, from 0.
        loss: of the global batch.
        weight: its weight; 0 means that nothing was updated.
        gradients: by parameter name; None where the parameter was not used.
        states: what each rank has of the model's ``state_dict``.
        slots: pieces of the optimizer's slots, of all ranks.
        is_divided: ranks have parts of the model only.
    """

    step: int
    loss: float
    weight: float
    gradients: dict[str, torch.Tensor | None]
    states: list[dict[str, torch.Tensor]]
    slots: list[PieceSlots]
    is_divided: bool = False


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
    resume: "Resume | None"


@dataclass(frozen=True)
class Resume:
    """Where a training goes on.

    Attributes:
        epoch: the epoch's number.
        is_begun: its ``on_epoch_begin`` has been called.
        stops: a callback wanted training to stop there, and a step is still to be made.
    """

    epoch: int = 0
    is_begun: bool = False
    stops: bool = False


@dataclass
class _Progress:
    """How far a training has come."""

    num_epochs: int = 0
    num_steps: int = 0


class _Renew(Exception):  # noqa: N818  # no error: all ranks leave the loop here, together
    """A callback has changed what the ranks were sent."""

    def __init__(self, resume: Resume) -> None:
        super().__init__()
        self.resume = resume


@dataclass(frozen=True)
class _Directive:
    """What rank 0's callbacks decided: options, unless they are unchanged, and changed values.

    False where they have decided nothing: then the others need not be told.
    """

    stop: bool
    halt: bool
    renew: bool
    options: list[dict[str, Any]] | None
    values: dict[str, torch.Tensor]

    def __bool__(self) -> bool:
        changes = self.stop or self.halt or self.renew or self.values
        return bool(changes) or self.options is not None


_NOTHING = _Directive(stop=False, halt=False, renew=False, options=None, values={})


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """A rank among all: its worker, its line to the others, its conductor."""

    worker: Worker
    control: Control
    conductor: Conductor

    def consult(
        self,
        act: Callable[[], None],
        renew_at: Resume | None = None,
        *,
        stops_at_once: bool = True,
    ) -> bool:
        """Let rank 0 act, bring what it changed to all ranks; returns whether to stop.

        Args:
            act: what rank 0 does.
            renew_at: between epochs, where to go on if the ranks must be sent everything anew.
            stops_at_once: no step is made any more if training is to stop.

        Raises:
            Halt: on all ranks, if the user wants out.
            _Renew: on all ranks, if more has changed than values.
        """
        updater, model = self.worker.updater, self.worker.model
        assert updater is not None
        directive = None
        if self.control.rank == 0:
            options = updater.options()
            fingerprint = None if renew_at is None else self.conductor.fingerprint()
            values = self.conductor.watch(act, in_epoch=renew_at is None)
            renew = renew_at is not None and fingerprint != self.conductor.fingerprint()
            changed = updater.options()
            directive = _Directive(
                stop=self.conductor.stop_training,
                halt=self.conductor.is_interrupted or self._is_halted,
                renew=renew,
                options=changed if changed != options else None,
                values=values,
            )
        directive = self._tell(directive)
        _set_values(model, directive.values)
        updater.look_again()
        if not directive:
            return False
        is_over = directive.halt or (directive.stop and stops_at_once)
        if directive.renew and renew_at is not None and not is_over:
            raise _Renew(replace(renew_at, stops=directive.stop))
        if directive.options is not None:
            updater.set_options(directive.options)
        if directive.halt:
            raise Halt
        return bool(directive.stop)

    def _tell(self, directive: _Directive | None) -> Any:
        """Rank 0's directive, on every rank; a message is sent only if it says anything."""
        board = self.worker.board
        if board is None:
            return self.control.broadcast(directive)
        leads = self.control.rank == 0
        if board.announce(bool(directive)) if leads else board.announced():
            return self.control.broadcast(directive)
        return _NOTHING

    def show_slots(self) -> None:
        """Callbacks find the optimizer's slots where they look for them."""
        assert self.worker.updater is not None
        self.worker.gather_slots()
        gathered = self.control.gather(self.worker.updater.slots())
        self.conductor.take_slots([part for parts in gathered for part in parts])

    def show_traces(self, tracer: StepTracer) -> None:
        """Whoever has asked for traces gets those of all ranks."""
        traces = self.control.gather(tracer.take())
        if self.control.rank == 0:
            self.conductor.take_traces(traces)

    def check_halt(self) -> None:
        """Between two barriers: leave the loop, on all ranks or on none.

        Raises:
            Halt: the user wants out.
        """
        alone = self.control.num_ranks == 1 and self.conductor.is_interrupted
        if alone or self._is_halted:
            raise Halt

    @property
    def _is_halted(self) -> bool:
        board = self.worker.board
        return board is not None and board.is_halted

    def pause_validation(self, index: int) -> None:
        """After a batch of the validation: nothing waits there otherwise, so not at each."""
        if index % _BATCHES_BETWEEN_PAUSES == 0:
            self.worker.barrier()
            self.check_halt()

    def collect_buffers(self) -> None:
        """Give rank 0 the buffers of which other ranks have the values that count."""
        if self.control.num_ranks > 1 and next(self.worker.model.buffers(), None) is not None:
            own = self.worker.ruled_buffers()
            for buffers in self.control.gather({} if self.control.rank == 0 else own):
                _set_values(self.worker.model, buffers)

    def share_buffers(self) -> None:
        """Give every rank the values of all buffers that count."""
        self.collect_buffers()
        model = self.worker.model
        if self.control.num_ranks > 1 and next(model.buffers(), None) is not None:
            _set_values(model, self.control.broadcast(dict(model.named_buffers())))


class Task(ABC):
    """Something that all ranks do together.

    Attributes:
        name: of the call that it is, for messages.
        source: the data that it runs the model on.
    """

    name: ClassVar[str]
    source: Source | SharedStream

    @abstractmethod
    def run(self, worker: Worker, control: Control, conductor: Conductor) -> Any:
        """Do it; what rank 0 returns is the result."""


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
        metrics: this rank's metrics.
        watched: there are callbacks.
        watches_beginnings: callbacks may act where an epoch begins.
        before_steps: callbacks may act before every step.
        after_steps: callbacks may act after every step.
        steps_per_epoch: batches of an epoch; None is a pass over the data.
        traced: numbers of the steps to trace, counted as from ``first_step``; None for none.
        start: where to begin; later than the first epoch where a task goes on for another.
        record: show the conductor a Snapshot after every step.
        counts_skipped: tell how many steps of an epoch were left out.
        loss_parts: of the loss, where it has some.
        shows_slots: callbacks that act after steps look at the optimizer's slots, too.
        turns: the losses of several functions that take turns with every batch.
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
    start: Resume = Resume()
    record: bool = False
    counts_skipped: bool = False
    shows_slots: bool = False
    loss_parts: LossParts = ONE_LOSS
    turns: LossParts = ONE_LOSS

    def run(self, worker: Worker, control: Control, conductor: Conductor) -> FitResult:
        """Train until the last epoch, or until a callback or Ctrl-C ends it."""
        ensemble = Ensemble(worker=worker, control=control, conductor=conductor)
        progress = _Progress()
        tracer = StepTracer(self.traced)
        resume = None
        conductor.hold_interrupts()
        with (
            closing(tracer),
            modes_of(worker.model, training=True),
            torch.enable_grad(),
            suppress(Halt),
            reading_ahead(self.source, self._reads(worker)) as source,
        ):
            try:
                for epoch in range(self.start.epoch, self.epochs):
                    if self._train_epoch(ensemble, source, epoch, progress, tracer):
                        break
            except _Renew as renew:
                resume = renew.resume
            if (
                tracer.is_running
            ):  # training has ended, or goes on anew, before the last of the steps
                ensemble.show_traces(tracer)
        ensemble.collect_buffers()
        assert worker.updater is not None
        worker.gather_slots()
        gathered = control.gather(worker.updater.slots())
        return FitResult(
            num_epochs=progress.num_epochs,
            num_steps=progress.num_steps,
            slots=[part for parts in gathered for part in parts],
            resume=resume,
        )

    def _train_epoch(
        self,
        ensemble: Ensemble,
        source: Source | SharedStream,
        epoch: int,
        progress: _Progress,
        tracer: StepTracer,
    ) -> bool:
        """Train an epoch; returns whether to stop after it."""
        worker, conductor = ensemble.worker, ensemble.conductor
        stops = self._begin_epoch(ensemble, epoch)
        if stops and self.stops_before_steps:
            return True
        self.metrics.reset()
        observe = self.metrics.update if self.metrics else None
        results: list[StepResult] = []
        for index, (batch, indices) in enumerate(self._batches(ensemble, source, epoch)):
            if self.before_steps:
                stops = ensemble.consult(partial(conductor.begin_step, index))
                if stops and self.stops_before_steps:
                    break
            step = self.first_step + progress.num_steps
            with tracer.step(step):
                result = self._train_step(ensemble, batch, indices, step, observe)
            progress.num_epochs, progress.num_steps = epoch + 1, progress.num_steps + 1
            if tracer.is_due(step + 1):
                ensemble.show_traces(tracer)
            results.append(result)
            if worker.leaves_a_rank_idle(len(indices)):
                ensemble.share_buffers()
            if self.record:
                _record(ensemble, step, result)
            end_step = partial(conductor.end_step, index, result)
            if self.after_steps:
                if worker.held_names() is not None:  # callbacks may look at the whole model
                    ensemble.collect_buffers()
                if self.shows_slots:
                    ensemble.show_slots()
                if ensemble.consult(end_step):
                    break
            else:
                end_step()
                ensemble.check_halt()
                if stops:
                    break
        progress.num_epochs = epoch + 1
        losses = self._losses(ensemble, results)
        logs = self._logs(ensemble, epoch, losses)
        if self.counts_skipped:
            logs["skipped_steps"] = sum(result.is_skipped for result in results)
        if self.watched:
            ensemble.collect_buffers()
            ensemble.show_slots()
        end = partial(conductor.end_epoch, epoch, logs)
        return ensemble.consult(end, Resume(epoch + 1) if self.watched else None)

    def _begin_epoch(self, ensemble: Ensemble, epoch: int) -> bool:
        """Let callbacks begin an epoch, unless they have; returns whether to stop."""
        if self.start.is_begun and self.start.epoch == epoch:
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
                training=True,
            )
            return conductor.awaited(batches)
        watched = conductor.watched(source)
        return ((watched, indices) for indices in self._indices(epoch))

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
            for indices in self._indices(epoch):
                yield [read for turn in turns for read in worker.reads(indices, step, turn)]
                step += 1

    def _train_step(
        self,
        ensemble: Ensemble,
        source: Source,
        indices: torch.Tensor,
        step: int,
        observe: Observe | None,
    ) -> StepResult:
        """One step, or one of each function that takes its turn."""
        worker = ensemble.worker
        if not self.turns:
            return worker.train_step(source, indices, step, observe)
        results = [
            worker.train_step(source, indices, step, observe, turn)
            for turn in range(len(self.turns.names))
        ]
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
        logs = {**losses, **_joined_metrics(self.metrics, ensemble.control)}
        if self.validation is None:
            return logs
        ensemble.conductor.begin_validation()
        ensemble.share_buffers()
        validated = _evaluate(
            ensemble.worker,
            ensemble.control,
            self.validation,
            self.batch_size,
            self.metrics,
            self.loss_parts,
            epoch,
            ensemble.pause_validation,
            lambda: ensemble.conductor.is_interrupted,
        )
        ensemble.conductor.end_validation(validated)
        return {**logs, **{f"val_{name}": value for name, value in validated.items()}}


@dataclass(kw_only=True)
class EvaluateTask(Task):
    """Loss and metrics over a source, every sample once."""

    name: ClassVar[str] = "evaluate"
    source: Source | SharedStream
    batch_size: int
    metrics: Metrics
    loss_parts: LossParts = ONE_LOSS

    def run(self, worker: Worker, control: Control, conductor: Conductor) -> Logs:
        """Evaluate; rank 0 returns the values."""
        return _evaluate(
            worker, control, self.source, self.batch_size, self.metrics, self.loss_parts
        )


# Outputs, with the number of their first sample.
Part = tuple[int, Tree]


@dataclass(kw_only=True)
class PredictTask(Task):
    """Outputs for a source, every sample once.

    Attributes:
        source: the data.
        batch_size: of the global batch, where the data does not come in batches.
        steps: the most batches; None for all.
    """

    name: ClassVar[str] = "predict"
    source: Source | SharedStream
    batch_size: int
    steps: int | None = None

    def run(self, worker: Worker, control: Control, conductor: Conductor) -> list[Tree]:
        """Predict; rank 0 returns the outputs of all shares in the order of their samples."""
        parts: list[Part] = []
        start = 0
        reads = islice(_reads_in_order(worker, self.source, self.batch_size), self.steps)
        with modes_of(worker.model, training=False), reading_ahead(self.source, reads) as ahead:
            batches = all_batches(ahead, worker, control, self.batch_size)
            for index, (source, indices) in enumerate(islice(batches, self.steps)):
                self._begin_batch(index, conductor)
                own = [
                    (start + position, map_tensors(torch.Tensor.cpu, output))
                    for position, output in worker.predict_step(source, indices)
                ]
                parts += own
                start += len(indices)
                if self._end_batch(index, own, control, conductor):
                    break
        return in_order(control.gather(parts))

    def _begin_batch(self, index: int, conductor: Conductor) -> None:
        """Before a batch."""

    def _end_batch(
        self, index: int, own: list[Part], control: Control, conductor: Conductor
    ) -> bool:
        """After a batch, with this rank's outputs; returns, on all ranks, whether to stop."""
        return False


def in_order(ranks: Sequence[Sequence[Part]]) -> list[Tree]:
    """The outputs of all ranks, in the order of their samples."""
    gathered = [part for parts in ranks for part in parts]
    return [output for _, output in sorted(gathered, key=lambda part: part[0])]


def _evaluate(
    worker: Worker,
    control: Control,
    source: Source | SharedStream,
    batch_size: int,
    metrics: Metrics,
    loss_parts: LossParts,
    epoch: int = 0,
    pause: Callable[[int], None] = lambda index: None,
    gives_up: Callable[[], bool] = lambda: False,
) -> Logs:
    metrics.reset()
    observe = metrics.update if metrics else None
    losses: list[Sums] = []
    reads = _reads_in_order(worker, source, batch_size)
    with modes_of(worker.model, training=False), reading_ahead(source, reads) as ahead:
        batches = all_batches(ahead, worker, control, batch_size, epoch, gives_up)
        for index, (part, indices) in enumerate(batches):
            losses += worker.evaluate_step(part, indices, observe)
            pause(index)
    gathered = [loss for losses in control.gather(losses) for loss in losses]
    return {**loss_parts.logs(gathered), **_joined_metrics(metrics, control)}


def _reads_in_order(
    worker: Worker, source: Source | SharedStream, batch_size: int
) -> Iterator[list[Read]]:
    """What a rank is going to read of each batch, without training."""
    assert not isinstance(source, SharedStream)
    for start, stop in batch_bounds(len(source), batch_size):
        yield worker.reads(torch.arange(start, stop))


def _joined_metrics(metrics: Metrics, control: Control) -> Logs:
    if not metrics:
        return {}
    states = control.gather(metrics.states())
    if control.rank != 0:
        return {}
    metrics.merge(states)
    return metrics.values()


def _mean(totals: Sequence[float], weights: Sequence[float]) -> float:
    """Exactly rounded sums: the order of ranks cannot matter."""
    weight = math.fsum(weights)
    return math.fsum(totals) / weight if weight else math.nan


def _joined(results: list[StepResult], *, is_told: bool) -> StepResult:
    """Of steps that took turns with a batch: their losses add up, and each is a part.

    All ranks know these losses, so one of them tells.
    """
    sums = tuple((result.total, result.weight) for result in results)
    size = results[0].num_samples
    return StepResult(
        total=math.fsum(size * result.loss for result in results if result.weight),
        weight=float(size),
        num_samples=size,
        is_skipped=any(result.is_skipped for result in results),
        parts=[sums] if is_told else [],
    )


def _record(ensemble: Ensemble, step: int, result: StepResult) -> None:
    worker, control = ensemble.worker, ensemble.control
    assert worker.updater is not None
    gradients = worker.gradients(result.num_samples) if result.weight else {}
    ranks = control.gather(
        (_state(worker), worker.updater.slots(with_stored=True), dict(gradients))
    )
    if control.rank == 0:
        ensemble.conductor.observe_state(
            Snapshot(
                step=step,
                loss=result.loss,
                weight=result.weight,
                gradients={
                    name: None if gradient is None else gradient.clone()
                    for _, _, own in ranks
                    for name, gradient in own.items()
                },
                states=[state for state, _, _ in ranks],
                slots=[part for _, parts, _ in ranks for part in parts],
                is_divided=worker.held_names() is not None,
            )
        )
    worker.barrier()  # the next step overwrites the gradients


def _state(worker: Worker) -> dict[str, torch.Tensor]:
    """What this rank has of the model's ``state_dict``, a tied tensor under each of its names."""
    held, model = worker.held_names(), worker.model
    firsts = {
        id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    all_names = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    elsewhere = {
        name for name, tensor in all_names if held is not None and firsts[id(tensor)] not in held
    }
    return {
        name: value.clone()
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)  # a module's extra state may be anything
        and name not in elsewhere
    }


@torch.no_grad()
def _set_values(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Set parameters and buffers; ranks that share a parameter all write the same."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        value = values.get(name, tensor)
        if value is not tensor:
            tensor.copy_(value)
