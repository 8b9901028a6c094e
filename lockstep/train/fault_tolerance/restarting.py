"""What drivers of a training have in common: Ctrl-C, backups to return to, and a record."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from lockstep.errors import WorkerError
from lockstep.launch.health.failure import add_note
from lockstep.launch.workers.team import Team
from lockstep.parallel.parameter_server.async_worker import ServerProgress
from lockstep.parallel.update import PieceSlots
from lockstep.plan.makers.averaging import AveragedUpdate
from lockstep.train.callbacks.driver import Place, TaskDriver
from lockstep.train.callbacks.interrupt import Interrupt
from lockstep.train.callbacks.rank_sync import CallbackOutcome, Resume
from lockstep.train.checkpointing.training_state import copied
from lockstep.train.fault_tolerance.backups import Backups, Journal
from lockstep.train.fault_tolerance.rank_states import RankState
from lockstep.train.fault_tolerance.run_record import RunRecord
from lockstep.train.history import History


class FollowerDriver(TaskDriver):
    """Of a host that host 0 leads: callbacks and progress are there.

    Args:
        interrupt: what has become of Ctrl-C here, which ends the training on all hosts.
        keeper: writes checkpoints, one after Ctrl-C, too; None without.
    """

    updater: Any = None

    def __init__(self, interrupt: Interrupt, keeper: Any = None) -> None:
        self.history = History()
        self._interrupt, self._keeper = interrupt, keeper
        if keeper is not None:
            keeper.interrupt = interrupt

    @property
    def is_interrupted(self) -> bool:  # type: ignore[override]  # an attribute in the base
        """Whether training is to end: by the user, or since something between steps has failed."""
        if self.failure is not None:
            return True
        if self._keeper is not None and not self._keeper.lets_end():
            return False
        return self._interrupt.is_requested

    def fail(self, error: Exception) -> None:
        self.failure = error

    @contextmanager
    def raising_failure(self, state: Callable[[], str]) -> Iterator[None]:
        """After the block, a training, raise what has failed between its steps.

        Args:
            state: tells what the training has left.
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
    """A driver whose training can be put back, and gone on with after the loss of a rank.

    Args:
        interrupt: what has become of Ctrl-C.
        runner: whose training it is.
        backups: of it; None without.
        record: of it; None to keep none.
    """

    _is_due = False
    """A backup, after this step."""
    _begun = Resume()
    """The last epoch in which ranks were apart."""
    _stand: ServerProgress | None = None
    """How far they were in it when a process was lost."""
    _is_asked = False
    """For the state, by a callback after this step."""

    def __init__(
        self,
        interrupt: Interrupt,
        runner: Any,
        backups: Backups | None,
        record: RunRecord | None,
    ) -> None:
        super().__init__(interrupt, runner.keeper)
        self._runner = runner
        self._backups = backups
        self._record = record or RunRecord(None)
        self._journal = Journal(is_kept=False) if backups is None else backups.journal

    def _asks_for_state(self, index: int) -> bool:
        """Whether a callback takes the training's state after this step."""
        return False

    def _notice(self, text: str) -> None:
        """Show what has happened."""

    def _set_options(self, options: list[dict[str, Any]]) -> None:
        """Have the user's own optimizer get what callbacks had decided before."""

    def wants_state(self, index: int) -> bool:
        self._is_asked = self._journal.once(partial(self._asks_for_state, index))
        self._is_due = self._backups is not None and self._backups.is_due
        return self._is_asked or self._is_due

    def record_position(self, place: Place | None) -> None:
        if place is not None and place.batch and not self._is_asked:
            place = replace(place, is_lasting=False)  # for nobody but us
        self._runner.record_position(place, self.history)

    def note_failure(self, error: BaseException, states: list[RankState], team: Team) -> None:
        self._record.note_failure(error, states, team)

    def begin_run(self, start: Resume, look: Callable[[], list[RankState]]) -> None:
        self._record.begin_run(look)
        if text := self._runner.note_shares():
            self._notice(text)
        plan = self._runner.plan
        if self._backups is None or self._journal.is_read or start.served is not None:
            return
        if plan.num_ranks == 1:
            return  # there is nobody to be lost
        if plan.is_stale and not self._backups.is_asked:
            return  # workers would have to meet for it
        if isinstance(plan.update, AveragedUpdate) and not self._backups.is_asked:
            return  # replicas would have to meet for it
        if plan.pipeline is not None and not self._backups.is_asked:
            self._backups.wait()  # this process need not have room for what others train
            return
        place = Place(
            epoch=start.epoch,
            batch=start.batch,
            num_steps=0,
            so_far=start.so_far,
            replicas=start.replicas,
        )
        self.record_position(place)
        self._backups.take(start)
        self.record_position(None)

    def back_up(self) -> None:
        if self._is_due and self._backups is not None and not self.stop_training:
            self._backups.take()
        self._is_due = False

    def back_up_at(self, resume: Resume, num_steps: int) -> None:
        if self._backups is not None and self._backups.is_asked and not self._journal.is_read:
            self.record_position(Place(epoch=resume.epoch, batch=0, num_steps=num_steps))
            self._backups.take(resume)
            self.record_position(None)

    def begin_apart(self, begun: Resume) -> None:
        self._begun = begun

    def record_progress(self, stand: ServerProgress | None) -> None:
        self._stand = stand
        if stand is not None:
            self.take_slots([part for parts in stand.slots for part in parts])

    def put_back(self) -> int | None:
        backup = None if self._backups is None else self._backups.put_back()
        return None if backup is None else backup.last_step

    def resume_after(self, error: WorkerError) -> Resume | None:
        if self._backups is None or not error.is_loss or self.failure is not None:
            return None
        stand, self._stand = self._stand, None
        place = self._backups.last_step if stand is None else stand.table
        if not self._backups.spend(place, is_free=self._is_spare(error)):
            self._note_end(error)
            return None
        restarts = [*self.history.restarts, f"{error}".partition("\n")[0]]
        if stand is not None:
            self.history.restarts = restarts
            self._tell_restart(error, "no sample is counted twice, and none left out")
            return self._after_all_done(stand)
        backup = self._backups.restart()
        if backup is None:
            self._note_end(error)
            return None
        then = copied(backup.state.position["fit"])
        self.history = History(then["history"], then["epochs"], restarts)
        result = "" if self._runner.plan.is_stale else ", to the same result"
        self._tell_restart(error, f"going on from {_after(backup.last_step)}{result}")
        return backup.resume

    def _is_spare(self, error: WorkerError) -> bool:
        """Whether what was lost is a server, of whose parameters there is a second copy."""
        plan = self._runner.plan
        return plan.outlives_servers and error.rank is not None and plan.is_server(error.rank)

    def _after_all_done(self, stand: ServerProgress) -> Resume:
        """Where workers and servers go on with an epoch: from the first batch that is not done."""
        begun = self._begun
        return replace(
            begun,
            batch=begun.batch + stand.num_past,
            served=stand,
            num_ended=max(begun.num_ended, begun.batch + stand.num_ended),
        )

    def _note_end(self, error: WorkerError) -> None:
        assert self._backups is not None
        if self._backups.restarts:
            error.add_note(
                f"All {self._backups.restarts} restarts are used up, or what callbacks have "
                "changed since the last copy of the training is not known."
            )

    def _tell_restart(self, error: WorkerError, then: str) -> None:
        assert self._backups is not None
        made = self._backups.restarts - self._backups.restarts_left
        number = "" if self._is_spare(error) else f" {made} of {self._backups.restarts}"
        then = f"Restart{number}: {then}."
        self._record.note_restart(error, then)
        self._notice(f"{self.history.restarts[-1]} {then}")

    def decide(self, directive: CallbackOutcome, renew_at: Resume | None = None) -> CallbackOutcome:
        if directive.renew and renew_at is not None and self._backups is not None:
            self._back_up_changes(replace(renew_at, stops=directive.stop))
            return directive
        if not self._journal.is_kept:
            return directive
        was_made = self._journal.is_read
        decided = self._journal.once(lambda: replace(directive, values=copied(directive.values)))
        if was_made and decided.options is not None:
            self._set_options(decided.options)
        return replace(decided, halt=directive.halt)

    def _back_up_changes(self, resume: Resume) -> None:
        """Callbacks have changed what no journal can tell again: the last copy knows none of it.

        This process has all of the training while they are called, so a copy can be taken here.
        """
        assert self._backups is not None
        self._backups.drop()
        if self._backups.is_asked and self._runner.is_placed:
            self._backups.take(resume)


def _after(step: int) -> str:
    return f"after step {step}" if step >= 0 else "the beginning"
