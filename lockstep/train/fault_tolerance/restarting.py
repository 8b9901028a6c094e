"""Base classes of training drivers: Ctrl-C, copies, restarts after lost ranks, and a record."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from lockstep.errors import WorkerError
from lockstep.launch.health.failure import add_note
from lockstep.launch.workers.team import Team
from lockstep.parallel.parameter_server.async_worker import ServerProgress
from lockstep.parallel.transfer.readers import reader_death
from lockstep.parallel.updater_interface import PieceSlots
from lockstep.parallel.worker import Worker
from lockstep.plan.averaging import AveragedUpdate
from lockstep.train.callbacks.driver import Logs, TaskDriver
from lockstep.train.callbacks.interrupt import Interrupt
from lockstep.train.callbacks.rank_sync import CallbackOutcome
from lockstep.train.checkpointing.fit_position import FitPosition
from lockstep.train.checkpointing.partitioned_state import Found, WriteRequest
from lockstep.train.checkpointing.training_state import copied
from lockstep.train.fault_tolerance.rank_states import RankState
from lockstep.train.history import History
from lockstep.train.resume.fit_checkpoints import FitCheckpoints

# Free restarts from one place: if there are more, what is done there kills processes.
_MAX_FREE = 100


class FollowerDriver(TaskDriver):
    """The driver of a host other than host 0, which has the callbacks and shows progress.

    Args:
        interrupt: the state of Ctrl-C here, which ends the training on all hosts.
        writer: writes checkpoints, one after Ctrl-C, too; None without.
    """

    updater: Any = None

    def __init__(self, interrupt: Interrupt, writer: Any = None) -> None:
        self.history = History()
        self._interrupt, self._writer = interrupt, writer
        if writer is not None:
            writer.interrupt = interrupt

    @property
    def is_interrupted(self) -> bool:  # type: ignore[override]  # an attribute in the base
        """True if training must end: after Ctrl-C, or after a failure between steps."""
        if self.failure is not None:
            return True
        if self._writer is not None and not self._writer.lets_end():
            return False
        return self._interrupt.is_requested

    def fail(self, error: Exception) -> None:
        self.failure = reader_death(error)

    @contextmanager
    def raising_failure(self, state: Callable[[], str]) -> Iterator[None]:
        """After the block, a training, raise the error that has occurred between its steps.

        Args:
            state: describes the weights that the training has left.
        """
        try:
            yield
        except Exception as error:
            if self.failure is None:
                raise
            raise self.failure from error
        if self.failure is not None:
            if note := state():
                add_note(self.failure, note)
            raise self.failure

    def hold_interrupts(self) -> None:
        self._interrupt.hold()

    def begin_train(self) -> None:
        """Before the first epoch."""

    def end_train(self) -> None:
        """After the last epoch."""

    def take_slots(self, slots: list[PieceSlots]) -> None:
        self.updater.take_slots(slots)

    def close(self) -> None:
        """Nothing is shown here."""


class RestartingDriver(FollowerDriver):
    """A driver that has copies taken, and resumes from them after the loss of a rank.

    Args:
        interrupt: the state of Ctrl-C.
        checkpoints: of the training.
    """

    _async_start = FitPosition()
    """The start of the last epoch in which ranks did not wait for each other."""
    _progress: ServerProgress | None = None
    """Their progress in it when a process was lost."""
    _is_state_taken = False
    """True if a callback may take the state after this step."""
    _num_free = 0
    """Free restarts from the place of the last one."""
    _last_free_place: object = None

    def __init__(self, interrupt: Interrupt, checkpoints: FitCheckpoints) -> None:
        super().__init__(interrupt, checkpoints.writer)
        self._state = checkpoints.state
        self._runner = self._state.runner
        assert checkpoints.copies is not None
        self._copies = checkpoints.copies
        self._restarts_left = self._copies.restarts
        self._record = checkpoints.record
        self._journal = self._copies.journal

    def end_epoch(self, epoch: int, logs: Logs) -> None:
        self._copies.end_epoch(epoch)

    def _notice(self, text: str) -> None:
        """Show a line to the user."""

    def _set_options(self, options: list[dict[str, Any]]) -> None:
        """Set the user's own optimizer to options that callbacks had decided before."""

    def _asks_for_state(self, index: int) -> bool:
        """True if a callback takes the training's state after this step."""
        return False

    def wants_state(self, position: FitPosition) -> bool:
        is_asked = self._journal.once(partial(self._asks_for_state, position.batch - 1))
        is_due = self._copies.is_due(self._runner.steps_trained + position.num_steps)
        self._is_state_taken = is_asked or self._copies.is_whole
        return is_asked or is_due

    def record_position(self, position: FitPosition | None) -> None:
        if position is not None and position.batch and not self._is_state_taken:
            position = replace(position, is_lasting=False)  # for this process only
        self._state.record_position(position, self.history)

    def note_failure(self, error: BaseException, states: list[RankState], team: Team) -> None:
        self._record.note_failure(error, states, team)

    def begin_run(self, start: FitPosition, look: Callable[[], list[RankState]]) -> None:
        self._record.begin_run(look)
        self._copies.clear_due()
        if text := self._state.note_shares():
            self._notice(text)
        self._copies.take_first(replace(start, num_steps=0))
        plan = self._runner.plan
        if self._journal.is_replaying or start.served is not None:
            return
        if plan.num_ranks == 1 or not self._copies.are_local:
            return  # no other rank can be lost, or there are other hosts
        if plan.is_stale and not self._copies.is_required:
            return  # workers would have to synchronise for it
        if isinstance(plan.update, AveragedUpdate) and not self._copies.is_required:
            return  # replicas would have to synchronise for it
        if plan.sharding is not None and not self._copies.is_required:
            return  # it is divided because it is large
        self._copies.is_begun = True
        if plan.pipeline is None or self._copies.is_required:
            # Else the first is taken after a step: this process may lack memory for other stages.
            self._copy_at(replace(start, num_steps=0))

    def _copy_at(self, position: FitPosition) -> None:
        self.record_position(position)
        self._copies.take(position)
        self.record_position(None)

    def take_copies(self) -> None:
        self._copies.take_due(self._state.recorded)

    def begin_parts(self, worker: Worker) -> WriteRequest | None:
        return self._copies.begin_parts(worker)

    def end_parts(self, found: Sequence[Found]) -> None:
        self._copies.end_parts(found)

    def copy_at(self, position: FitPosition) -> None:
        if self._copies.is_required and not self._journal.is_replaying:
            self._copy_at(position)

    def begin_apart(self, begun: FitPosition) -> None:
        self._async_start = begun

    def record_progress(self, progress: ServerProgress | None) -> None:
        self._progress = progress
        if progress is not None:
            self.take_slots([part for parts in progress.slots for part in parts])

    def put_back(self) -> int | None:
        return self._copies.put_back()

    def resume_after(self, error: WorkerError) -> FitPosition | None:
        if not error.is_loss or self.failure is not None:
            return None
        progress, self._progress = self._progress, None
        place = self._copies.last_step if progress is None else progress.table
        if not self._spend(place, is_free=self._is_replicated_server(error)):
            self._note_no_restart(error)
            return None
        restarts = [*self.history.restarts, f"{error}".partition("\n")[0]]
        if progress is not None:
            self.history.restarts = restarts
            self._report_restart(error, "no sample is counted twice, and none left out")
            return self._first_batch_left(progress)
        copy = self._copies.restart()
        if copy is None:
            self._note_no_restart(error)
            return None
        fit = copied(copy.state.position["fit"])
        self.history = History(fit["history"], fit["epochs"], restarts)
        result = "" if self._runner.plan.is_stale else ", to the same result"
        last_step = copy.state.position["steps"] - 1
        self._report_restart(error, f"resuming {_after(last_step)}{result}")
        return copy.resume

    def _spend(self, place: object, *, is_free: bool) -> bool:
        """Use up a restart; False if none is left.

        Args:
            place: where training will resume.
            is_free: the lost process had a replica, so the restart does not count.
        """
        if is_free:
            self._num_free = self._num_free + 1 if place == self._last_free_place else 1
            self._last_free_place = place
            return self._num_free <= _MAX_FREE
        self._restarts_left -= 1
        return self._restarts_left >= 0

    def _is_replicated_server(self, error: WorkerError) -> bool:
        """True if the lost process is a server whose parameters another server has, too."""
        plan = self._runner.plan
        return plan.outlives_servers and error.rank is not None and plan.is_server(error.rank)

    def _first_batch_left(self, progress: ServerProgress) -> FitPosition:
        """Where workers and servers resume an epoch: at the first batch that is not done."""
        start = self._async_start
        return replace(
            start,
            batch=start.batch + progress.num_past,
            served=progress,
            num_ended=max(start.num_ended, start.batch + progress.num_ended),
        )

    def _note_no_restart(self, error: WorkerError) -> None:
        if self._copies.restarts:
            error.add_note(
                f"All {self._copies.restarts} restarts are used up, or callbacks have changed "
                "the training since its last copy in a way that cannot be repeated."
            )

    def _report_restart(self, error: WorkerError, then: str) -> None:
        restarts = self._copies.restarts
        made = restarts - self._restarts_left
        number = "" if self._is_replicated_server(error) else f" {made} of {restarts}"
        then = f"Restart{number}: {then}."
        self._record.note_restart(error, then)
        self._notice(f"{self.history.restarts[-1]} {then}")

    def decide(
        self, directive: CallbackOutcome, renew_at: FitPosition | None = None
    ) -> CallbackOutcome:
        if directive.renew and renew_at is not None:
            self._copy_changes(replace(renew_at, stops=directive.stop))
            return directive
        if self._journal.is_kept:
            is_repeated = self._journal.is_replaying
            decided = self._journal.once(
                lambda: replace(directive, values=copied(directive.values))
            )
            if is_repeated and decided.options is not None:
                self._set_options(decided.options)
            directive = replace(decided, halt=directive.halt)
        self.take_copies()
        return directive

    def _copy_changes(self, resume: FitPosition) -> None:
        """Take a copy after changes by callbacks that a journal cannot repeat.

        This process has the whole training while callbacks are called, so it can be copied here.
        """
        if self._copies.is_required and self._state.recorded is not None:
            self._copies.take(resume)
        else:
            self._copies.drop()
            self._copies.take_due(resume)


def _after(step: int) -> str:
    return f"after step {step}" if step >= 0 else "from the beginning"
