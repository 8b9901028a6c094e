"""Rank 0's part between steps: callbacks, progress, history."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from lockstep.data.sources import Source
from lockstep.errors import OptionError, WorkerError
from lockstep.parallel.update import PieceSlots
from lockstep.parallel.worker import StepResult
from lockstep.plan.averaging import AveragedUpdate
from lockstep.train.backups import Backups, Journal
from lockstep.train.callbacks import Callback, acting
from lockstep.train.changes import ChangeWatch, SettingsWatch, fingerprint
from lockstep.train.conductor import Conductor, Place, Snapshot
from lockstep.train.ensemble import Directive, Resume
from lockstep.train.feeding import GlobalBatch
from lockstep.train.history import History
from lockstep.train.interrupt import Interrupt
from lockstep.train.optimizers import each_optimizer
from lockstep.train.progress import ProgressDisplay
from lockstep.train.recipe import AnyUpdater
from lockstep.train.trainer_protocol import TrainerProtocol
from lockstep.train.training_state import copied
from lockstep.train.waiting import ClockedSource, InputClock

_OF_MODULES = frozenset(vars(nn.Module()))


def _after(step: int) -> str:
    return f"after step {step}" if step >= 0 else "the beginning"


def _modules_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name or "the model": one for name, one in model.named_modules()}


class FollowingConductor(Conductor):
    """Of a host that host 0 leads: callbacks and progress are there.

    Args:
        interrupt: what has become of Ctrl-C here, which ends the training on all hosts.
    """

    def __init__(self, interrupt: Interrupt) -> None:
        self.history = History()
        self.updater: AnyUpdater | None = None
        self._interrupt = interrupt

    @property
    def is_interrupted(self) -> bool:  # type: ignore[override]  # an attribute in the base
        """Whether the user wants training to end."""
        return self._interrupt.is_requested

    def hold_interrupts(self) -> None:
        self._interrupt.hold()

    def begin_train(self) -> None:
        """Before the first epoch."""

    def end_train(self) -> None:
        """After the last epoch."""

    def take_slots(self, slots: list[PieceSlots]) -> None:
        assert self.updater is not None
        self.updater.take_slots(slots)

    def close(self) -> None:
        """Nothing is shown here."""


class FitConductor(FollowingConductor):
    """Conducts a ``fit``.

    Args:
        trainer: whose ``stop_training`` callbacks set.
        callbacks: the user's.
        display: the progress display, or None to be silent.
        readopt: brings parameters that a callback moved back to where all ranks see them.
        on_snapshot: gets every Snapshot where the task records them.
        interrupt: what has become of Ctrl-C.
        backups: of this ``fit``; None without.
    """

    def __init__(
        self,
        trainer: TrainerProtocol,
        callbacks: Sequence[Callback],
        display: ProgressDisplay | None,
        readopt: Callable[[], None],
        on_snapshot: Callable[[Snapshot], None] | None,
        interrupt: Interrupt,
        backups: Backups | None = None,
    ) -> None:
        super().__init__(interrupt)
        self._backups = backups
        self._journal = Journal(is_kept=False) if backups is None else backups.journal
        self._is_due = False  # a backup, after this step
        self._is_asked = False  # for the state, by a callback after this step
        self._trainer = trainer
        self._schedule = trainer.schedule
        self._callbacks = callbacks
        self._display = display
        self._on_snapshot = on_snapshot
        self._clock = InputClock()
        self._step_beginners = acting(callbacks, "on_train_batch_begin")
        self._step_enders = acting(callbacks, "on_train_batch_end")
        # What callbacks do to weights must be known to be done again.
        self._watch = ChangeWatch(trainer.model, readopt, sees_weights=self._journal.is_kept)
        self._settings = SettingsWatch(partial(_modules_of, trainer.model), _OF_MODULES)

    @property
    def stop_training(self) -> bool:  # type: ignore[override]  # an attribute in the base
        """Whether a callback wants training to end."""
        return self._trainer.stop_training

    def announce(self, doing: str) -> None:
        if self._display is not None:
            self._display.announce(doing)

    def begin_train(self) -> None:
        """Before the first epoch."""
        for callback in self._callbacks:
            callback.set_trainer(self._trainer)
            callback.on_train_begin()

    def end_train(self) -> None:
        """After the last epoch, with the trained weights in place."""
        logs = {name: values[-1] for name, values in self.history.history.items()}
        for callback in self._callbacks:
            callback.on_train_end(logs)

    def watched(self, source: Source) -> Source:
        return ClockedSource(source, self._clock)

    def awaited(self, batches: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
        return self._clock.awaited(batches)

    def begin_epoch(self, epoch: int) -> None:
        self._journal.once(partial(self._show_epoch_begin, epoch))
        self._settings.begin_epoch()
        self._clock.begin()

    def _show_epoch_begin(self, epoch: int) -> None:
        for callback in self._callbacks:
            callback.on_epoch_begin(epoch)
        if self._display is not None:
            self._display.begin_epoch(epoch)

    def begin_step(self, index: int) -> None:
        self._journal.once(partial(self._show_step_begin, index))

    def _show_step_begin(self, index: int) -> None:
        for callback in self._step_beginners:
            callback.on_train_batch_begin(index)

    def end_step(self, index: int, result: StepResult) -> None:
        self._clock.end_step()
        if self._schedule is not None:
            self._schedule.end_step(is_update=result.weight > 0 and not result.is_skipped)
            self._publish_options()
        self._journal.once(partial(self._show_step, index, result))

    def _show_step(self, index: int, result: StepResult) -> None:
        if self._display is not None:
            self._display.end_step(index, result.total, result.weight, result.num_samples)
        for callback in self._step_enders:
            callback.on_train_batch_end(index, {"loss": result.loss, "size": result.num_samples})

    def wants_state(self, index: int) -> bool:
        wishes = self._journal.once(
            lambda: [callback.takes_state(index) for callback in self._step_enders]  # all are asked
        )
        self._is_asked = any(wishes)
        self._is_due = self._backups is not None and self._backups.is_due
        return self._is_asked or self._is_due

    def stand_at(self, place: Place | None) -> None:
        if place is not None and place.batch and not self._is_asked:
            place = replace(place, is_lasting=False)  # for nobody but us
        self._trainer.stand_at(place, self.history)

    def begin_run(self, start: Resume) -> None:
        plan = self._trainer.plan
        if self._backups is None or self._journal.is_read:
            return
        if plan.num_ranks == 1:
            return  # there is nobody to be lost
        if plan.is_stale and not self._backups.restarts:
            return
        if isinstance(plan.update, AveragedUpdate):
            if self._backups.restarts:
                raise OptionError(
                    "Replicas that train apart are lost with their process.",
                    received=f"restarts={self._backups.restarts} under {plan.strategy}",
                    fix="Leave it out, or use MirroredStrategy.",
                )
            return
        if plan.pipeline is not None and not self._backups.restarts:
            self._backups.wait()  # this process need not have room for what others train
            return
        place = Place(epoch=start.epoch, batch=start.batch, num_steps=0, so_far=start.so_far)
        self.stand_at(place)
        self._backups.take(start)
        self.stand_at(None)

    def back_up(self) -> None:
        if self._is_due and self._backups is not None and not self.stop_training:
            self._backups.take()
        self._is_due = False

    def back_up_at(self, resume: Resume, num_steps: int) -> None:
        if self._backups is not None and self._backups.restarts and not self._journal.is_read:
            self.stand_at(Place(epoch=resume.epoch, batch=0, num_steps=num_steps))
            self._backups.take(resume)
            self.stand_at(None)

    def put_back(self) -> int | None:
        backup = None if self._backups is None else self._backups.put_back()
        return None if backup is None else backup.last_step

    def resume_after(self, error: WorkerError) -> Resume | None:
        if self._backups is None or not error.is_loss:
            return None
        backup = self._backups.restart()
        if backup is None:
            if self._backups.restarts:
                error.add_note(
                    f"All {self._backups.restarts} restarts are used up, or what callbacks have "
                    "changed since the last copy of the training is not known."
                )
            return None
        place = copied(backup.state.position["fit"])
        restarts = [*self.history.restarts, f"{error}".partition("\n")[0]]
        self.history = History(place["history"], place["epochs"], restarts)
        if self._display is not None:
            self._display.notice(
                f"{restarts[-1]} Restart {len(restarts)} of {self._backups.restarts}: "
                f"going on from {_after(backup.last_step)}, to the same result."
            )
        return backup.resume

    def begin_validation(self) -> None:
        self._journal.once(self._show_validation_begin)

    def _show_validation_begin(self) -> None:
        if self._display is not None:
            self._display.say("validating")
        for callback in self._callbacks:
            callback.on_test_begin()

    def end_validation(self, logs: dict[str, Any]) -> None:
        self._journal.once(partial(self._show_validation, logs))

    def _show_validation(self, logs: dict[str, Any]) -> None:
        for callback in self._callbacks:
            callback.on_test_end(logs)

    def end_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        if self._schedule is not None:
            logs.update(self._schedule.end_epoch(logs))
        self.history.add(epoch, logs)
        self._journal.once(partial(self._show_epoch, epoch, logs))
        self._clock.end_epoch()

    def _show_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        if self._display is not None:
            self._display.end_epoch(logs, input_wait=self._clock.share)
        for callback in self._callbacks:
            callback.on_epoch_end(epoch, logs)

    def take_traces(self, traces: list[bytes]) -> None:
        self._journal.once(partial(self._show_traces, traces))

    def _show_traces(self, traces: list[bytes]) -> None:
        for callback in self._callbacks:
            if callback.traced_steps is not None:
                callback.on_train_trace(traces)

    def observe_state(self, snapshot: Snapshot) -> None:
        if self._on_snapshot is not None:
            self._journal.once(partial(self._on_snapshot, snapshot))

    def decide(self, directive: Directive) -> Directive:
        if directive.renew and self._backups is not None:
            self._backups.drop()  # of what was changed it knows nothing
        if not self._journal.is_kept:
            return directive
        was_made = self._journal.is_read
        decided = self._journal.once(lambda: replace(directive, values=copied(directive.values)))
        if was_made and decided.options is not None:
            groups = (one.param_groups for one in each_optimizer(self._trainer.optimizer))
            for group, options in zip(chain(*groups), decided.options, strict=True):
                group.update(options)
        return replace(decided, halt=directive.halt)

    def fingerprint(self) -> object:
        return fingerprint(self._trainer.model, self._trainer.optimizer, self._trainer.plan)

    def watch(self, act: Callable[[], None], *, in_epoch: bool) -> dict[str, torch.Tensor]:
        plan = self._trainer.plan
        if in_epoch and plan.num_ranks > 1 and (self._step_beginners or self._step_enders):
            act = partial(self._settings.over, act)
        watched = plan if self._callbacks else None
        changed = self._watch.over(act, in_epoch=in_epoch, plan=watched)
        self._publish_options()
        return changed

    def _publish_options(self) -> None:
        assert self.updater is not None
        self.updater.publish_options()

    def close(self) -> None:
        """Leave the screen in order, whatever happened."""
        if self._display is not None:
            self._display.close()
