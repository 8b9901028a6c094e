"""The checkpoints of a ``fit``, its copies in memory, and the record that it keeps."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from lockstep.checkpoint.reading import DamagedPartError, check_parts
from lockstep.checkpoint.storage import Folder, folder_of
from lockstep.errors import OptionError
from lockstep.events import LOGGER
from lockstep.plan.averaging import AveragedUpdate
from lockstep.train.callbacks.interrupt import held_termination
from lockstep.train.checkpointing.checkpoints import Checkpoint, CheckpointWriter
from lockstep.train.checkpointing.memory_checkpoints import MemoryCheckpoints
from lockstep.train.checkpointing.partitioned_state import may_divide_copies
from lockstep.train.checkpointing.run_state import check_tensors
from lockstep.train.checkpointing.trainer_state import TrainerState
from lockstep.train.checkpointing.training_state import TrainingState, copied
from lockstep.train.fault_tolerance.copies import Copies
from lockstep.train.fault_tolerance.lost_hosts import check_host_restarts, resumed_from_newest
from lockstep.train.fault_tolerance.run_record import VARIABLE, RunRecord, checked_folder
from lockstep.train.fit.fit_task import FitTask
from lockstep.train.history import History
from lockstep.train.input.stream_broadcast import SharedStream
from lockstep.train.logging.progress import OutputConsole
from lockstep.train.resume.differences import Difference, describe, differences, resolve
from lockstep.train.resume.fit_facts import Facts
from lockstep.train.resume.fit_record import FitRecord, FitState
from lockstep.train.resume.part_loading import PartLoading
from lockstep.train.runtime.helper_watchdog import STATE_OF_AVERAGE, what_is_left


class FitCheckpoints:
    """The copies of a training, in memory and in a folder, from which it resumes, and its record.

    Args:
        state: of the training.

    Attributes:
        state: likewise.
        memory: the copy of the ``fit`` under way that is in this process's memory.
        writer: writes its checkpoints; None without.
        copies: of its training; None outside of one.
        record: of the ``fit``.
    """

    def __init__(self, state: TrainerState) -> None:
        self.state = state
        self._runner = state.runner
        self.memory = MemoryCheckpoints()
        self.writer: CheckpointWriter | None = None
        self.copies: Copies | None = None
        self.record = RunRecord(None)
        self._begun: dict[str, Any] | None = None  # the schedule before that fit
        self._first: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "memory": MemoryCheckpoints(), "writer": None, "copies": None}

    @contextmanager
    def kept(
        self,
        checkpoint: Checkpoint | None,
        record: str | os.PathLike[str] | None,
        memory: MemoryCheckpoints,
        epochs: int,
        restarts: int,
        *,
        shows: object,
    ) -> Iterator[CheckpointWriter | None]:
        """Within the block, a ``fit``, checkpoints and a record are kept; gives their writer.

        Args:
            checkpoint: where they are written; None for none.
            record: see ``_record_in``.
            memory: the copy of the ``fit`` in this process's memory.
            epochs: of the ``fit``.
            restarts: allowed after the loss of a host.
            shows: False to be silent.

        Raises:
            CheckpointError: no checkpoint is complete.
            OptionError: training could not be resumed after the loss of a host.
        """
        context, is_chief = self._runner.job_context, self._runner.is_chief
        has_checkpoint, hosts = checkpoint is not None, context.hosts
        around = self.memory, self.writer, self.record  # of a ``fit`` whose callback makes this one
        self.memory, self.writer = memory, None
        self.record = self._record_in(record, None if checkpoint is None else checkpoint.directory)
        self.record.planned = self._runner.planned
        try:
            with ExitStack() as stack:
                stack.enter_context(self.record.kept(self._runner.strategy))
                check_host_restarts(hosts, restarts, has_checkpoint, context.reach)
                if checkpoint is not None:
                    show_line = OutputConsole(quiet=not (shows and is_chief)).show_line
                    termination = stack.enter_context(held_termination())
                    self.writer = writer = CheckpointWriter(
                        checkpoint, termination, self.state, epochs, show_line
                    )
                    newest = resumed_from_newest(
                        writer,
                        memory,
                        hosts,
                        restarts,
                        is_chief=is_chief,
                        is_divided=may_divide_copies(self._runner.maker(), context.num_hosts),
                    )
                    stack.enter_context(newest)
                    memory.destinations.append(writer)
                yield self.writer
            if checkpoint is not None and hosts is not None:
                hosts.wait()  # until the last one is written
        finally:
            memory.destinations.clear()
            self.memory, self.writer, self.record = around

    def resume_found(
        self,
        writer: CheckpointWriter,
        make_facts: Callable[[], Facts],
        epochs: int,
        steps: int,
        loading: PartLoading | None = None,
    ) -> History | None:
        """Resume from the checkpoint that was found, if any; the history if the ``fit`` had ended.

        Args:
            writer: has found it.
            make_facts: returns the facts of the script, unless the ``fit`` was begun before.
            epochs: trained before the ``fit``.
            steps: made before it.
            loading: has ranks read their parts of a divided training; None if this process reads.

        Raises:
            CheckpointError: it is of another ``fit``, or the script has changed.
        """
        memory = self.memory
        if memory.facts is None:
            schedule = self._runner.front_end.schedule
            begun = None if schedule is None else copied(schedule.state_dict())
            memory.facts = make_facts(), begun
        asked, self._begun = memory.facts
        asked = self._runner.job_context.from_chief(asked)
        writer.record = FitRecord(epochs=epochs, steps=steps, asked=asked)
        writer.last_steps = steps
        while writer.found is not None:
            found, writer.found = writer.found, None
            try:
                return self._resume_from(writer, found, loading)
            except DamagedPartError as error:
                writer.found = writer.older(found, error)
        return None

    def _resume_from(
        self, writer: CheckpointWriter, found: FitState, loading: PartLoading | None
    ) -> History | None:
        """See ``resume_found``.

        Raises:
            DamagedPartError: a part of the training is damaged.
        """
        check_tensors(found.state, self._runner.forms())
        waiting: frozenset[str] = frozenset()
        if writer.is_divided and found.place:
            state, waiting = _prepared(found, loading)
            found = replace(found, state=state)
        found.record.check_beginning(writer.record)
        asked, now = found.record.asked, writer.record.asked
        found = found.reaching(now["epochs"])
        differing = differences(asked, now)
        taken = resolve(
            differing,
            writer.checkpoint.on_difference,
            place=found.name,
            epochs=(asked["epochs"], now["epochs"]),
            in_epoch=found.position["batch"] > 0,
        )
        # The next checkpoint records the values that are kept.
        kept = {one.name: asked[one.name] for one in differing if one not in taken}
        writer.record = msgspec.structs.replace(writer.record, asked={**now, **kept})
        self._resume_changed(found, writer.record.asked, taken)
        if waiting and loading is not None:
            self.state.load = partial(loading.load, found.place, waiting)
            self.state.load()
        if self._runner.is_chief and not found.place:  # in an empty folder, after a restart
            writer.keep(found, time.monotonic())
            writer.wait()  # training may change its tensors
        line = _resume_message(found, str(writer.checkpoint.directory), taken)
        writer.show_line(line)
        if self._runner.is_chief:
            LOGGER.info("%s", line)
        if found.record.is_finished:
            return History(found.record.history, found.record.epoch)
        self.state.num_shares_before = found.record.num_shares
        writer.last_steps = found.state.position["steps"]
        return None

    def _resume_changed(self, found: FitState, asked: Facts, taken: Sequence[Difference]) -> None:
        """Resume from a checkpoint, with the script's new values.

        Args:
            found: the checkpoint.
            asked: the facts of the script.
            taken: the differences for which the script's value is used.

        Raises:
            CheckpointError: it does not fit; nothing is changed then.
        """
        front_end, state = self._runner.front_end, found.state
        schedule = front_end.schedule
        if any(one.is_of_schedule for one in taken):  # the state's cannot be used
            own = None if schedule is None else schedule.state_dict()
            state = replace(state, schedule=own)
        self.state.resume_from(state)
        if not taken:
            return
        front_end.set_new_options(self._begun, found, asked, taken)
        self._runner.seed = asked["seed"]
        if self.state.resumed is not None:
            now, position = self._runner.state(), self.state.resumed.position
            place = {**position["fit"], "batch_size": asked["batch_size"]}
            self.state.resumed = replace(
                self.state.resumed,
                position={**position, "fit": place},
                options=copied(now.options),
                own=copied(now.own),
                random=now.random,
                schedule=None if schedule is None else copied(schedule.state_dict()),
            )

    def state_after_failure(self) -> str:
        """The weights that a training has left that ended between two steps; "" with one rank."""
        if self._runner.plan.num_ranks == 1:
            return ""
        is_averaged = isinstance(self._runner.plan.update, AveragedUpdate)
        return STATE_OF_AVERAGE if is_averaged else what_is_left(self._runner.steps_trained - 1)

    def keep_beginning(self) -> None:
        """On several hosts, write a checkpoint before the first step, to resume after any loss."""
        hosts = self._runner.job_context.hosts
        if self.writer is not None and self.writer.shared is not None:
            self._first = self.state.position()  # all hosts write it within the call
        elif self.writer is not None and hosts is not None and not hosts.is_one_process:
            state = self.state.copied()
            if self._runner.is_chief:
                copy = FitState(state=state, record=self.writer.record)
                self.memory.keep(copy, self.memory.destinations, time.monotonic())

    def finish(self, history: History) -> None:
        """Write the last checkpoint, if any are written."""
        if self.writer is not None:
            state = self.state.whole() if self.writer.writes_together else self.state.copied()
            if self._runner.is_chief:
                self.writer.finish(state, history)
            else:
                self.writer.help_finish(state)
            self._runner.session.stores.release_pages()

    @contextmanager
    def copied(self, task: FitTask, restarts: int) -> Iterator[None]:
        """Within the block, the training of a ``fit``, copies are taken."""
        around, is_required = self.copies, self._needs_local(restarts)
        streams = [source for source in task.sources() if isinstance(source, SharedStream)]
        self.copies = copies = Copies(self.state, self.memory, self.writer, streams, restarts)
        copies.first, self._first = self._first, None
        if is_required is not None:
            copies.take_local(is_required=is_required)
            full = task.hooks.full_state or is_required
            task.hooks = task.hooks._replace(state=True, full_state=full)
        try:
            yield
        finally:
            copies.drop()
            self.copies = around

    def _needs_local(self, restarts: int) -> bool | None:
        """True if this process needs copies in memory, None if it takes none.

        With several scripts there are none. A copy of what is divided between ranks, because it is
        large, is taken only if it is needed.
        """
        hosts, traits = self._runner.job_context.hosts, self._runner.maker().traits
        if hosts is None or hosts.is_one_process:
            is_required = restarts > 0 or traits.outlives_servers
            return None if traits.divides_state and not is_required else is_required
        if traits.outlives_servers:
            raise OptionError(
                "Only their launcher can restart the processes that it has started.",
                received=f"replicas=2 under {hosts.place.launcher}",
                fix="Start the script once, or leave `replicas` out and use a checkpoint.",
            )
        return None

    def _record_in(
        self, asked: str | os.PathLike[str] | None, checkpoints: Folder | None
    ) -> RunRecord:
        """The record of a ``fit``: in the folder given, beside checkpoints, or in the default one.

        A remote store keeps none, since nothing can be appended to a file there. Host 0 keeps it; a
        ``fit`` within a callback of another keeps none of its own.

        Raises:
            OptionError: the user has not named a folder.
        """
        beside = checkpoints if isinstance(checkpoints, Path) else None
        if not self._runner.is_chief or self._runner.job_context.is_nested:
            return RunRecord(None)
        if asked is None and beside is not None:
            return RunRecord(beside, logs=True)
        named = asked or os.environ.get(VARIABLE)
        return RunRecord(checked_folder(named) if named else None, logs=True)


def _prepared(found: FitState, loading: PartLoading | None) -> tuple[TrainingState, frozenset[str]]:
    """See ``PartLoading``."""
    if loading is not None:
        return loading.prepared(found.place, found.state)
    check_parts(folder_of(found.place))
    return found.state, frozenset()


def _resume_message(found: FitState, directory: str, taken: Sequence[Difference]) -> str:
    """The line that says where training resumes."""
    record = found.record
    if record.is_finished:
        num, asked = record.num_trained, record.asked["epochs"]
        epochs = f"{num} epoch{'s' if num != 1 else ''}"
        stopped = f" of {asked}, where a callback has ended it" if num < asked else ""
        return f"{directory} is complete ({epochs}{stopped}): nothing to do"
    epoch, step = found.position["epoch"] + 1, found.state.position["steps"] + 1
    new = f", with what is new: {describe(taken)}" if taken else ""
    return f"Resuming from {found.name}: epoch {epoch}, step {step}{new}"
