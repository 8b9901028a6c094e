"""Copies of a training, taken between its steps: one for all that are due for one.

- **This process's memory** has the newest. A process that is killed while it updates its slice
  leaves weights of which some slices are a step ahead. Then, and if a lost process alone had a part
  of the state, the training is restored from the copy. With ``fit(restarts=N)`` it resumes from
  there: it repeats the steps since, on the same batches, with the same random numbers. Callbacks
  are not called for them again; a journal has their decisions, which are repeated.
- **Another host's memory** (``train.checkpointing.state_transfer``), in case this host is lost.
- **A folder** (``train.checkpointing.checkpoints``), in case this process is lost.

The first process of a host maps the whole training, or gathers it, and copies it alone: between two
steps nothing changes until this process reaches the next update. So a copy needs no protocol: while
it is taken the training itself is consistent. Where ranks divide a training, all write the copy,
each its parts (``train.checkpointing.partitioned_state``), and the one before stays until that is
done.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from lockstep.checkpoint.trees import Tensors
from lockstep.cluster.memory_limits import free_memory
from lockstep.data.trees import tensors_of
from lockstep.errors import CheckpointError, DeviceError
from lockstep.formatting import format_bytes
from lockstep.parallel.worker import Worker
from lockstep.train.checkpointing.checkpoints import CheckpointWriter
from lockstep.train.checkpointing.fit_position import FitPosition
from lockstep.train.checkpointing.memory_checkpoints import Destination, MemoryCheckpoints
from lockstep.train.checkpointing.partitioned_state import (
    Found,
    MemoryTarget,
    PartitionedCopy,
    Target,
    WriteRequest,
    divides_copies,
)
from lockstep.train.checkpointing.trainer_state import TrainerState
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.fault_tolerance.overhead_budget import OverheadBudget
from lockstep.train.input.stream_broadcast import SharedStream
from lockstep.train.resume.fit_record import FitState

_T = TypeVar("_T")

# Part of the free memory that a copy may take if the user did not ask for restarts.
_OPTIONAL_MEMORY_PART = 0.5
# Batches of a stream to keep for repetition before the next copy is taken.
_MAX_KEPT_BYTES = 1 << 28


@dataclass
class Journal:
    """The answers of callbacks since the last copy, to repeat them after a restart.

    Attributes:
        is_kept: True to keep answers; else callbacks are asked each time.
    """

    is_kept: bool
    _answers: list[Any] = field(default_factory=list)
    _next: int = 0

    @property
    def is_replaying(self) -> bool:
        """True if the next answer is a repetition."""
        return self._next < len(self._answers)

    def once(self, ask: Callable[[], _T]) -> _T:
        """The answer given here before, or else that of ``ask``."""
        if not self.is_kept:
            return ask()
        if not self.is_replaying:
            self._answers.append(ask())
        self._next += 1
        answer: _T = self._answers[self._next - 1]
        return answer

    def clear(self) -> None:
        """Drop all answers: a copy is taken here."""
        self._answers.clear()
        self._next = 0

    def rewind(self) -> None:
        """Repeat the answers from the copy on."""
        self._next = 0


class Copies:
    """Takes the copies of one training, and restores it from the newest.

    Args:
        state: of the training.
        memory: keeps the newest, and has the other host to which copies go.
        writer: writes checkpoints; None without.
        streams: that the training reads.
        restarts: allowed after the loss of a process.

    Attributes:
        restarts: see above.
        are_local: copies are taken for this process, too.
        is_required: training must be able to resume from these.
        is_begun: copies for this process are due from time to time.
        journal: of callbacks, since the newest copy.
        first: the training's progress before the first step, at which a checkpoint is due; None
            without.
    """

    are_local = is_required = False
    is_begun = False
    first: dict[str, Any] | None = None
    _is_local_due = False
    _began = 0.0
    _partitioned: PartitionedCopy | None = None
    """Begun, and not written yet."""

    def __init__(
        self,
        state: TrainerState,
        memory: MemoryCheckpoints,
        writer: CheckpointWriter | None = None,
        streams: Sequence[SharedStream] = (),
        restarts: int = 0,
    ) -> None:
        self._state = state
        self._memory = memory
        self._writer = writer
        self._streams = streams
        self.restarts = restarts
        self._budget = OverheadBudget()
        self._due: list[Destination] = []
        self.journal = Journal(is_kept=False)

    def take_local(self, *, is_required: bool) -> None:
        """Before training: take copies for this process, too; for the argument see the class."""
        self.are_local, self.is_required = True, is_required
        self.journal.is_kept = is_required
        if is_required:
            for stream in self._streams:
                stream.keep()

    def clear_due(self) -> None:
        """Take no copy until ``is_due`` says so: a process was lost, or it is taken."""
        self._due, self._is_local_due = [], False

    @property
    def is_whole(self) -> bool:
        """True if a copy is due from which another process can resume."""
        return bool(self._due)

    def is_due(self, num_steps: int) -> bool:
        """Decide whether ``take_due`` takes a copy after the step just made; True if it does.

        Args:
            num_steps: made so far, those before the ``fit`` included.
        """
        self._began = time.monotonic()
        if self.journal.is_kept and self.journal.is_replaying:
            return False
        destinations, streams = self._memory.destinations, self._streams
        self._due = [one for one in destinations if one.is_due(num_steps)] if destinations else []
        kept_bytes = sum(stream.kept_bytes for stream in streams) if streams else 0
        is_time = self._budget.is_due or kept_bytes > _MAX_KEPT_BYTES
        self._is_local_due = self.is_begun and is_time
        return self._is_local_due or bool(self._due)

    def end_epoch(self, epoch: int) -> None:
        """At the end of an epoch, after callbacks: a copy may be due."""
        if self._writer is not None and self._writer.end_epoch(epoch):
            self._began = time.monotonic()
            self._due = [self._writer]

    def take_due(self, resume: FitPosition | None) -> None:
        """After callbacks: take the copy that is due, if any; see ``take``."""
        if (self._is_local_due or self._due) and not self._state.stop_training:
            assert resume is not None
            self.take(resume, self._began)
        self.clear_due()

    def take_first(self, resume: FitPosition) -> None:
        """Before the first step: begin the checkpoint that is due there, if any."""
        first, self.first = self.first, None
        if first is not None and self._writer is not None:
            self._begin_partitioned(
                self._state.whole(first), resume, [self._writer], time.monotonic()
            )

    def take(self, resume: FitPosition, began: float | None = None) -> None:
        """Copy the training as it is now, for this process and all that are due.

        Args:
            resume: where to resume.
            began: when ranks began to wait for it, by ``time.monotonic()``; None is now.

        Raises:
            CheckpointError, DeviceError: a part of the state cannot be copied, or does not fit into
                memory, and the copy is required.
            OptionError: another process is to resume from the copy, and weights are averaged.
            OSError: the checkpoint before could not be written.
            SystemExit: after SIGTERM, when the last one is written.
        """
        due, self._due = self._due, []
        if due:
            self._state.check_not_averaged("state_dict")
        if self._writer in due:
            self._writer.wait()  # it may write from the memory that is written to next
        taken = time.monotonic()
        try:
            now = self._state.whole() if due else self._state.in_fit()
        except CheckpointError:
            if due or self.is_required:
                raise
            return  # the error of a fault will say what is lost
        plan = self._state.runner.plan
        is_divided, sharding = divides_copies(plan), plan.sharding
        # A divided copy stays until all have written the next one.
        before = None if is_divided else self._memory.reusable
        is_on_disk = is_divided and sharding is not None and sharding.directory
        if not (due or is_on_disk or self._has_memory_for(now, before)):
            return
        is_remote = bool(due) and self._writer is not None and not self._writer.writes_together
        if is_divided and not is_remote:
            self._begin_partitioned(now, resume, due, taken)
            return
        self._memory.forget()
        copy = FitState(state=self._state.copied(now, before), plan=plan, resume=resume)
        self._keep(copy, due, taken, taken if began is None else began)

    def _keep(self, copy: FitState, due: Sequence[Destination], taken: float, began: float) -> None:
        if self._writer is not None:
            assert copy.plan is not None
            copy = replace(copy, record=self._writer.record_under(copy.plan))
        self.journal.clear()
        for stream in self._streams:
            stream.mark()
        self._budget.note(taken)
        self._memory.keep(copy, due, began)

    # --- that ranks write together ---------------------------------------------------------------

    def _begin_partitioned(
        self, state: TrainingState, resume: FitPosition, due: Sequence[Destination], taken: float
    ) -> None:
        """Begin a copy: all ranks write it before the next step; until then the newest stays."""
        plan, writer = self._state.runner.plan, self._writer if due else None
        copy = FitState(state=state, plan=plan, resume=resume)
        directory = None if plan.sharding is None else plan.sharding.directory
        make_target: Callable[[Tensors], Target] = partial(MemoryTarget, directory=directory)
        if writer is not None:
            make_target = partial(
                writer.partitioned, replace(copy, record=writer.record_under(plan))
            )

        def take(partitioned: TrainingState) -> None:
            self._keep(replace(copy, state=partitioned), [], taken, taken)
            if writer is not None:
                writer.note_written(copy)

        self._partitioned = PartitionedCopy(state, make_target, take)

    def begin_parts(self, worker: Worker) -> WriteRequest | None:
        """What all ranks are to write of the copy that has begun; None without."""
        return None if self._partitioned is None else self._partitioned.begin(worker)

    def end_parts(self, found: Sequence[Found]) -> None:
        """All ranks have written: that copy is the newest now.

        Raises:
            OSError, CheckpointError: it could not be written.
            SystemExit: after SIGTERM, when the last one is written.
        """
        partitioned, self._partitioned = self._partitioned, None
        assert partitioned is not None
        partitioned.end(found)

    def _has_memory_for(self, state: TrainingState, before: TrainingState | None) -> bool:
        needed = _num_bytes(state) - (0 if before is None else _num_bytes(before))
        free = free_memory() if needed > 0 else None
        part = 1 if self.is_required else _OPTIONAL_MEMORY_PART
        if free is None or needed <= free.num_bytes * part:
            return True
        if self.is_required:
            raise DeviceError(
                f"restarts={self.restarts} needs {format_bytes(needed)} of memory for a copy of "
                "the training.",
                received=free,
                fix="Free so much memory, raise the limit, or pass restarts=0.",
            )
        return False

    # --- restoring -------------------------------------------------------------------------------

    @property
    def _newest(self) -> FitState | None:
        return self._memory.newest() if self.are_local else None

    @property
    def last_step(self) -> int | None:
        """Number of the last step in the newest; -1 for none made, None without a copy."""
        newest = self._newest
        return None if newest is None else newest.state.position["steps"] - 1

    def put_back(self) -> int | None:
        """Restore all but the callbacks from the newest; returns its last step, as above."""
        self._give_up_begun()
        newest = self._newest
        if newest is not None:
            self._state.set_all_but_callbacks(newest.state)
        return self.last_step

    def _give_up_begun(self) -> None:
        """Leave out a copy that not all ranks have written: one of them was lost."""
        begun, self._partitioned = self._partitioned, None
        if begun is not None:
            begun.give_up(OSError("a process was lost while it wrote"))

    def restart(self) -> FitState | None:
        """Restore everything, to resume from the newest; None if there is none."""
        if self.put_back() is None:
            return None
        self.journal.rewind()
        for stream in self._streams:
            stream.rewind()
        return self._newest

    def drop(self) -> None:
        """Forget the newest: the training has changed in a way that it cannot restore."""
        self.is_begun = False
        if self.are_local:
            self._memory.forget()


def _num_bytes(state: TrainingState) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(state.parts()))
