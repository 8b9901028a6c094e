"""Checkpoints of a ``fit``: copies of it (``train.fault_tolerance.copies``) in a folder.

A checkpoint is the training's whole state (``train.checkpointing.training_state``), the position in
the ``fit``, and the facts on which its result depends. Training waits for the copy in memory only:
a thread writes it.
"""

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from lockstep.channel.background import Background
from lockstep.checkpoint.generations import PartitionedGeneration, writing_alone
from lockstep.checkpoint.reading import (
    DamagedCheckpointWarning,
    DamagedPartError,
    damaged,
    read_newest,
)
from lockstep.checkpoint.saved import Saved
from lockstep.checkpoint.storage import Folder, Url, folder_of
from lockstep.checkpoint.trees import Tensors
from lockstep.errors import OptionError, PlanError, Problems, level_of_user
from lockstep.options import check_choice, check_count
from lockstep.plan.spec import Plan
from lockstep.tracebacks import public_methods
from lockstep.train.callbacks.interrupt import (
    PATIENCE_SECONDS,
    STATUS_OF_SIGTERM,
    Interrupt,
    Termination,
)
from lockstep.train.checkpointing.checkpoint_files import PartitionedCheckpoint, saved_of, write_one
from lockstep.train.checkpointing.partitioned_state import (
    FailedWrite,
    PartitionedCopy,
    Write,
    divides_copies,
    whole_tensors,
)
from lockstep.train.checkpointing.shared_folder import SharedFolder
from lockstep.train.checkpointing.trainer_state import TrainerState
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.history import History
from lockstep.train.resume.differences import ON_DIFFERENCE, OnDifference
from lockstep.train.resume.fit_record import End, FitRecord, FitState, at_end

_EVERY = re.compile(r"(?P<steps>\d+) steps?|(?P<epoch>epoch)|(?P<seconds>\d+(\.\d+)?) ?s")


@public_methods
class Checkpoint:
    """Where and how often ``fit`` writes checkpoints, for ``fit(..., checkpoint=...)``.

    The same script started again resumes at the very next batch, with the bits that it would have
    had; a ``fit`` that had ended trains nothing and returns the same history. Each ``fit`` has a
    folder of its own. On several hosts host 0 reads and writes; of a sharded training each host its
    part, if all share the folder.

    Args:
        directory: the folder, which need not exist yet; or a URL that fsspec opens, as in
            ``s3://bucket/run``.
        every: ``"epoch"``, ``"100 steps"`` or ``"60s"``. The end of a ``fit`` is always written.
        keep: how many checkpoints are kept, the newest.
        on_difference: what to do if the script has changed in a way that changes the result
            (options of the optimizer, the schedule, loss, clipping, data, ...): ``"error"`` raises
            a CheckpointError that names all that differs; ``"take new"`` resumes with the values of
            the script; ``"keep"`` with the optimizer's options and the schedule of the checkpoint.
            Changes by schedules and callbacks during training are no difference.

    Raises:
        OptionError: an argument is invalid.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: str = "epoch",
        keep: int = 3,
        on_difference: OnDifference = "error",
    ) -> None:
        found = _EVERY.fullmatch(every) if isinstance(every, str) else None
        problems = Problems()
        if found is None or not any(found.groups()) or _number(found) == 0:
            problems.add(
                '`every` of a Checkpoint must be like "epoch", "100 steps" or "60s".',
                received=f"every={every!r}",
                fix="Give one of these forms, with a number above 0.",
            )
        check_count("keep", keep, problems, fix="Leave it out for 3.")
        fix = "Leave it out to raise an error where the script has changed."
        check_choice("on_difference", on_difference, ON_DIFFERENCE, problems, fix=fix)
        problems.raise_if_any(OptionError)
        self.directory = folder_of(directory)
        self.every = every
        self.keep = keep
        self.on_difference = on_difference
        assert found is not None
        self.is_by_epoch = found["epoch"] is not None
        self.num_steps = int(found["steps"]) if found["steps"] else None
        self.num_seconds = float(found["seconds"]) if found["seconds"] else None

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.directory)!r}, every={self.every!r}, keep={self.keep})"


def as_checkpoint(checkpoint: Any) -> Any:
    """The argument of ``fit``, a Checkpoint for a folder."""
    return Checkpoint(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint


def check_places(checkpoint: object, record: object) -> None:
    """Check the arguments ``checkpoint`` and ``record`` of ``fit``.

    Raises:
        OptionError: one is invalid.
    """
    if not isinstance(checkpoint, Checkpoint | None):
        raise OptionError(
            "`checkpoint` must be a folder or a lockstep.Checkpoint.",
            received=f"checkpoint={checkpoint!r}",
            fix='Pass checkpoint="run", for example.',
        )
    is_path = isinstance(record, str | os.PathLike) and not isinstance(folder_of(record), Url)
    if record is not None and not is_path:
        raise OptionError(
            "`record` must be the path of a folder on this machine.",
            received=f"record={record!r}",
            fix='Pass record="run", for example.',
        )


def _plan_of(saved: Saved) -> Plan | None:
    """The Plan that a checkpoint was trained by; None if this version cannot read it."""
    try:
        return Plan.from_json(msgspec.json.encode(saved.manifest.plan))
    except PlanError:
        return None


def _number(found: re.Match[str]) -> float:
    return 1 if found["epoch"] else float(found["steps"] or found["seconds"])


# After Ctrl-C on another host: longest wait for host 0, which was likely sent it too, to write.
_PATIENCE_FOR_HOST_0_SECONDS = 2.0


class CheckpointWriter:
    """Writes the checkpoints of one ``fit``: a destination of its copies.

    Args:
        checkpoint: where, and how often.
        termination: the state of SIGTERM, after which a last one is written.
        state: of the training.
        epochs: of the ``fit``.
        show_line: shows a line to the user.

    Attributes:
        checkpoint, show_line: those given.
        record: of the ``fit``; set before training.
        found: the checkpoint from which all hosts resume; None afterwards, and without one.
        shared: the folder, if all hosts write there together, each its part of a divided training;
            None if this host writes alone, or none does.
        is_divided: ranks divide the training; they check the hashes of parts that they read.
        only_parts: see ``FitHooks``.
        last_steps: steps made, those before the ``fit`` included, when one was last written.
        interrupt: the state of Ctrl-C, after which a last one is written; set before training.
        has_last: that one is taken.
    """

    record: FitRecord
    found: FitState | None = None
    shared: SharedFolder | None = None
    last_steps = 0
    interrupt = Interrupt()
    is_divided = only_parts = has_last = False
    _is_last = _is_open = False
    _writing: "Future[Folder] | None" = None
    _end: End | None = None
    """The state at the end of the last epoch."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        termination: Termination,
        state: TrainerState,
        epochs: int,
        show_line: Callable[[str], None],
    ) -> None:
        self.checkpoint = checkpoint
        self._termination = termination
        self._state = state
        self._epochs = epochs
        self.show_line = show_line
        self._background = Background("lockstep: checkpoints")
        self._last_seconds = time.monotonic()
        self._damaged: set[str] = set()  # names of checkpoints

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the folder within the block.

        Raises:
            CheckpointError: another process writes there.
            OSError: the folder, or the last checkpoint, cannot be written.
        """
        with ExitStack() as stack:
            stack.enter_context(writing_alone(self.checkpoint.directory))
            stack.callback(self._background.close)
            self._is_open = True
            try:
                yield
            except BaseException as error:
                self._wait_after(error)
                raise
            self.wait()

    def newest(self) -> FitState | None:
        """The newest checkpoint; one from before the end, if the ``fit`` now has more epochs.

        The last one includes changes by callbacks at the end, such as restored best weights.

        Raises:
            CheckpointError: no checkpoint is complete.
        """
        if self.shared is not None:
            read = partial(self.shared.newest, without=self._damaged)
        else:
            folder, checks = self.checkpoint.directory, not self.is_divided
            read = partial(read_newest, folder, without=self._damaged, checks_parts=checks)
        saved = read()
        if saved is None:
            return None
        found = FitState.of(saved.tree(), saved.place)
        if found.record.is_finished and found.record.reaches(self._epochs):
            saved = read(is_finished=False) or saved
            found = FitState.of(saved.tree(), saved.place)
        return replace(found, plan=_plan_of(saved))

    def older(self, found: FitState, error: DamagedPartError) -> FitState:
        """The checkpoint before one of which a part is damaged.

        Raises:
            CheckpointError: there is none.
        """
        damage = damaged(found.place, error)
        warnings.warn(str(damage), DamagedCheckpointWarning, stacklevel=level_of_user())
        self._damaged.add(Path(found.place).name)
        older = self.newest()
        if older is None:
            raise damage
        return older

    # --- between the steps -----------------------------------------------------------------------

    def is_due(self, num_steps: int) -> bool:
        """True if it is time for another; see ``Destination``."""
        every = self.checkpoint
        self._is_last = self._termination.is_requested
        self.has_last = self.interrupt.is_requested
        is_time = False
        if every.num_steps is not None:  # it may not be called after every step
            last, now = (
                (steps - self.record.steps) // every.num_steps
                for steps in (self.last_steps, num_steps)
            )
            is_time = now > last
        elif every.num_seconds is not None:
            is_time = time.monotonic() - self._last_seconds >= every.num_seconds
        return is_time or self._is_last or self.has_last

    def end_epoch(self, epoch: int) -> bool:
        """Note the end of an epoch, after callbacks; True if it is time for another."""
        if epoch + 1 == self._epochs:
            self._end = at_end(self._state, may_change=not self.only_parts)
        return self.checkpoint.is_by_epoch

    def lets_end(self) -> bool:
        """True if Ctrl-C may end training: a checkpoint is taken, or none was within a time."""
        patience = PATIENCE_SECONDS if self._is_open else _PATIENCE_FOR_HOST_0_SECONDS
        return self.has_last or time.monotonic() - self.interrupt.requested_seconds > patience

    def record_under(self, plan: Plan) -> FitRecord:
        """The record, within a training by a Plan."""
        self.record = msgspec.structs.replace(self.record, num_shares=plan.num_shares)
        return self.record

    # --- writing ---------------------------------------------------------------------------------

    def keep(self, copy: FitState, began: float) -> "Future[Folder]":
        """Write a copy in the background; see ``Destination``.

        Raises:
            OSError: it, or the one before, could not be written.
            SystemExit: after SIGTERM, when it is written.
        """
        writing = self._write(copy)
        if self.has_last or self._is_last:
            self.wait()
        self.note_written(copy)
        return writing

    def note_written(self, copy: FitState) -> None:
        """A copy is written, or will be.

        Raises:
            SystemExit: after SIGTERM.
        """
        self._last_seconds = time.monotonic()
        self.last_steps = copy.state.position["steps"]
        if self._is_last:
            raise SystemExit(STATUS_OF_SIGTERM)

    def partitioned(self, copy: FitState, tensors: Tensors) -> PartitionedCheckpoint:
        """Files for a copy that ranks write together.

        Args:
            copy: the training.
            tensors: that ranks divide, by name.
        """
        assert isinstance(self.checkpoint.directory, Path)
        saved = saved_of(copy, self._state.runner.model)
        generation = PartitionedGeneration(self.checkpoint.directory, saved, tensors)
        return PartitionedCheckpoint(generation, self.checkpoint.keep)

    def finish(self, state: TrainingState, history: History) -> None:
        """Write the last checkpoint, after training: its state, and the whole ``fit``'s history.

        Args:
            state: a copy; the present one if processes write it together.
            history: of the ``fit``.
        """
        record = msgspec.structs.replace(
            self.record,
            history=history.history,
            epoch=history.epoch,
            is_finished=True,
            is_stopped=self._state.stop_training,
            end=None if self._end is None else self._end.unless_changed(self._state),
        )
        runner = self._state.runner
        copy = FitState(state=state, record=record, plan=runner.last_plan)
        if self.writes_together:
            partitioned = PartitionedCopy(
                state, partial(self.partitioned, copy), lambda written: None
            )
            write: Write = runner.session.write_stored
            if self.shared is not None:
                write = partial(self.shared.write, runner.session)
            partitioned.write_all(write)
        else:
            self._write(copy)

    def help_finish(self, state: TrainingState) -> None:
        """On another host than 0: write this host's part of the last checkpoint.

        Raises:
            OSError: a host cannot write.
        """
        if self.shared is not None and self.writes_together:
            folder, tensors = str(self.shared.path), whole_tensors(state)
            found = self.shared.write(self._state.runner.session, (), folder, tensors)
            if isinstance(found, FailedWrite):
                raise found.error()

    @property
    def writes_together(self) -> bool:
        """True if all processes write checkpoints, each its part."""
        plan = self._state.runner.last_plan
        return plan is not None and divides_copies(plan) and self.reaches_all

    @property
    def reaches_all(self) -> bool:
        """True if all processes can write into the folder."""
        if self._state.runner.job_context.num_hosts > 1:
            return self.shared is not None
        return isinstance(self.checkpoint.directory, Path)

    def _write(self, copy: FitState) -> "Future[Folder]":
        """Write a copy in the background, after the one before.

        Raises:
            OSError: the one before could not be written.
        """
        saved = saved_of(copy, self._state.runner.model)
        self.wait()
        folder, keep = self.checkpoint.directory, self.checkpoint.keep
        self._writing = self._background.submit(partial(write_one, folder, saved, keep))
        return self._writing

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
            OSError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _wait_after(self, error: BaseException) -> None:
        """After an error of training, add a failure to write as a note."""
        try:
            self.wait()
        except Exception as other:
            error.add_note(f"The last checkpoint was not written: {other}")
