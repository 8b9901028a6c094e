"""Rank 0's part between steps: callbacks, progress, history."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from lockstep.data.map_style.sources import Source
from lockstep.parallel.training_step import StepResult
from lockstep.plan.makers.data_parallel import PlanTrials
from lockstep.train.callbacks.callback import Callback, acting
from lockstep.train.callbacks.change_detection import (
    ChangeWatch,
    SettingsWatch,
    fingerprint,
    kept_slots,
)
from lockstep.train.callbacks.driver import Logs, Snapshot
from lockstep.train.callbacks.hidden_slots import hidden_slots
from lockstep.train.callbacks.interrupt import Interrupt
from lockstep.train.fault_tolerance.restarting import RestartingDriver
from lockstep.train.input.input_wait import ClockedSource, InputClock
from lockstep.train.input.stream_broadcast import GlobalBatch
from lockstep.train.logging.progress import ProgressDisplay
from lockstep.train.optim.optimizers import each_optimizer
from lockstep.train.resume.fit_checkpoints import FitCheckpoints
from lockstep.train.trainer_protocol import TrainerProtocol

# The most bad records that the display names; all are counted.
_MOST_BAD_SHOWN = 10
_OF_MODULES = frozenset(vars(nn.Module()))


def _modules_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name or "the model": one for name, one in model.named_modules()}


class FitDriver(RestartingDriver):
    """Does the work of rank 0 in a ``fit``.

    Args:
        trainer: the one that callbacks get.
        checkpoints: of the training.
        callbacks: the user's.
        interrupt: the handler of Ctrl-C.
        display: the progress display, or None to be silent.
        on_snapshot: gets every Snapshot, if the task records them.
        plan_trials: see ``TaskDriver``.
    """

    def __init__(
        self,
        trainer: TrainerProtocol,
        checkpoints: FitCheckpoints,
        callbacks: Sequence[Callback],
        interrupt: Interrupt,
        *,
        display: ProgressDisplay | None = None,
        on_snapshot: Callable[[Snapshot], None] | None = None,
        plan_trials: PlanTrials | None = None,
    ) -> None:
        super().__init__(interrupt, checkpoints)
        self.plan_trials = plan_trials
        self._num_bad_shown = 0
        self._trainer = trainer
        self._front_end = self._runner.front_end
        self._schedule = self._front_end.schedule
        self._callbacks = callbacks
        self._display = display
        self._on_snapshot = on_snapshot
        self._clock = InputClock()
        self._step_beginners = acting(callbacks, "on_train_batch_begin")
        self._step_enders = acting(callbacks, "on_train_batch_end")
        # To replay steps, the journal needs the changes that callbacks make to weights.
        model = self._runner.model
        readopt = partial(self._runner.session.stores.readopt, model)
        self._watch = ChangeWatch(model, readopt, sees_weights=self._journal.is_kept)
        self._settings = self._settings_watch()

    def _settings_watch(self) -> SettingsWatch:
        """Detects changes of settings that other ranks get only between epochs."""
        return SettingsWatch(partial(_modules_of, self._runner.model), _OF_MODULES)

    @property
    def stop_training(self) -> bool:  # type: ignore[override]  # an attribute in the base
        """True if a callback wants training to end."""
        return self._front_end.stop_training

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
        self._record.begin_epoch(epoch)
        self._journal.once(partial(self._show_epoch_begin, epoch))
        self._settings.begin_epoch()
        self._clock.begin()

    def _show_epoch_begin(self, epoch: int) -> None:
        for callback in self._callbacks:
            callback.on_epoch_begin(epoch)
        if self._display is not None:
            self._display.begin_epoch(epoch)

    def rejoin_epoch(self, epoch: int) -> None:
        if self._display is not None and not self._journal.is_replaying:
            self._display.begin_epoch(epoch)

    def begin_step(self, index: int) -> None:
        self._journal.once(partial(self._show_step_begin, index))

    def _show_step_begin(self, index: int) -> None:
        with self._hiding_slots():
            for callback in self._step_beginners:
                callback.on_train_batch_begin(index)

    def end_step(self, index: int, result: StepResult) -> None:
        self._clock.end_step()
        self._record.end_step(index)
        if self._schedule is not None:
            self._schedule.end_step(is_update=result.weight > 0 and not result.is_skipped)
            self.updater.publish_options()
        if self._display is not None or self._step_enders:
            self._journal.once(partial(self._show_step, index, result))

    def _show_step(self, index: int, result: StepResult) -> None:
        if self._display is not None:
            self._display.end_step(index, result.total, result.weight, result.num_samples)
        is_shown = self._state.recorded is not None
        with self._keeping_slots() if is_shown else self._hiding_slots():
            for callback in self._step_enders:
                callback.on_train_batch_end(index, self._step_logs(result))

    def _hiding_slots(self) -> AbstractContextManager[None]:
        """Around callbacks in an epoch: other ranks have slots, or newer ones."""
        if self._steps_alone:
            return nullcontext()
        return hidden_slots(self._front_end.torch_optimizers)

    def _keeping_slots(self) -> AbstractContextManager[None]:
        """Around callbacks in an epoch that see all slots."""
        if self._steps_alone:
            return nullcontext()
        return kept_slots(self._front_end.torch_optimizers, self._runner.plan)

    @property
    def _steps_alone(self) -> bool:
        """True if this process alone makes updates, with the user's optimizer."""
        plan = self._runner.plan
        return (plan.num_ranks == 1 and plan.sharding is None) or not self.updater.is_known

    def _step_logs(self, result: StepResult) -> Logs:
        """The logs of a step for callbacks."""
        return {"loss": result.loss, "size": result.num_samples}

    @property
    def seconds_between_metrics(self) -> float:  # type: ignore[override]  # fixed in the base
        return 0.0 if self._display is None else self._display.seconds_between_values

    def show_metrics(self, values: Logs) -> None:
        if self._display is not None:
            self._display.note_values(values)

    def _asks_for_state(self, index: int) -> bool:
        wishes = [callback.takes_state(index) for callback in self._step_enders]  # all are asked
        return any(wishes)

    def _notice(self, text: str) -> None:
        if self._display is not None:
            self._display.notice(text)

    def note_bad_records(self, bad: Mapping[int, str]) -> None:
        for index in sorted(bad):
            self._journal.once(partial(self._show_bad_record, index, bad[index]))

    def _show_bad_record(self, index: int, reason: str) -> None:
        self._num_bad_shown += 1
        self._record.note_bad_record(index, reason)
        if self._display is not None and self._num_bad_shown <= _MOST_BAD_SHOWN:
            self._display.notice(f"Skipped sample {index}: {reason}")

    def begin_validation(self) -> None:
        self._journal.once(self._show_validation_begin)

    def _show_validation_begin(self) -> None:
        if self._display is not None:
            self._display.say("validating")
        self._call_in_epoch("on_test_begin")

    def end_validation(self, logs: Logs) -> None:
        self._journal.once(partial(self._show_validation, logs))

    def _show_validation(self, logs: Logs) -> None:
        self._call_in_epoch("on_test_end", logs)

    def _call_in_epoch(self, method: str, *arguments: Any) -> None:
        """Call the callbacks that have a method, which see the optimizer's slots."""
        if having := acting(self._callbacks, method):
            with self._keeping_slots():
                for callback in having:
                    getattr(callback, method)(*arguments)

    def end_epoch(self, epoch: int, logs: Logs) -> None:
        if self._schedule is not None:
            logs.update(self._schedule.end_epoch(logs))
        self.history.add(epoch, logs)
        self._journal.once(partial(self._show_epoch, epoch, logs))
        super().end_epoch(epoch, logs)
        self._clock.end_epoch()

    def _show_epoch(self, epoch: int, logs: Logs) -> None:
        self._record.end_epoch(epoch, logs)
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

    def _set_options(self, options: list[dict[str, Any]]) -> None:
        groups = (one.param_groups for one in each_optimizer(self._front_end.optimizer))
        for group, own in zip(chain(*groups), options, strict=True):
            group.update(own)

    def fingerprint(self) -> object:
        return fingerprint(self._runner.model, self._front_end.optimizer, self._runner.plan)

    def watch(self, act: Callable[[], None], *, in_epoch: bool) -> dict[str, torch.Tensor]:
        plan = self._runner.plan
        if in_epoch and plan.num_ranks > 1 and (self._step_beginners or self._step_enders):
            act = partial(self._settings.over, act)
        watched = plan if self._callbacks else None
        changed = self._watch.over(act, in_epoch=in_epoch, plan=watched)
        self.updater.publish_options()
        return changed

    def close(self) -> None:
        """Close the display, also after an error."""
        if self._display is not None:
            self._display.close()
