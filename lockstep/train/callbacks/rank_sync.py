"""RankSync: a rank's view of the others, and the broadcast of what rank 0's callbacks change.

Only rank 0 has a driver that does anything. Its changes (options, weights, buffers, an end) are
broadcast before the next step, so that all ranks continue alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from lockstep.parallel.exchange.control import Control
from lockstep.parallel.updater_interface import PieceSlots
from lockstep.parallel.worker import Worker
from lockstep.train.callbacks.driver import TaskDriver
from lockstep.train.callbacks.state_values import set_values
from lockstep.train.checkpointing.fit_position import FitPosition
from lockstep.train.checkpointing.partitioned_state import divides_copies, write_requested
from lockstep.train.fit.step_profiler import StepProfiler
from lockstep.train.input.stream_broadcast import Halt

_T = TypeVar("_T")

_BATCHES_BETWEEN_PAUSES = 4


class RestartTask(Exception):  # noqa: N818  # no error: all ranks leave the loop here, together
    """A callback has changed what the ranks were sent."""

    def __init__(self, resume: FitPosition) -> None:
        super().__init__()
        self.resume = resume


@dataclass(frozen=True)
class CallbackOutcome:
    """What rank 0's callbacks decided: options, unless they are unchanged, and changed values.

    False if they have decided nothing: then nothing is sent.
    """

    stop: bool
    halt: bool
    renew: bool
    options: list[dict[str, Any]] | None
    values: dict[str, torch.Tensor]

    def __bool__(self) -> bool:
        changes = self.stop or self.halt or self.renew or self.values
        return bool(changes) or self.options is not None


_NOTHING = CallbackOutcome(stop=False, halt=False, renew=False, options=None, values={})
_END = replace(_NOTHING, halt=True)


@dataclass(frozen=True, kw_only=True)
class RankSync:
    """One rank: its worker, its control channel to the others, its driver.

    Attributes:
        worker: see above.
        control: see above.
        driver: see above.
        reads_weights: what rank 0 does between steps may read and change weights.
        folder: of this host, into which all hosts write checkpoints together; "" if they do not.
    """

    worker: Worker
    control: Control
    driver: TaskDriver
    reads_weights: bool = True
    folder: str = ""

    def sync_callback(
        self,
        act: Callable[[], None],
        renew_at: FitPosition | None = None,
        *,
        stops_at_once: bool = True,
        is_copied: bool = False,
    ) -> bool:
        """Let rank 0 act, send its changes to all ranks; returns True to stop.

        Args:
            act: what rank 0 does.
            renew_at: between epochs, where to resume if the ranks must be sent everything anew.
            stops_at_once: make no further step if training is to stop.
            is_copied: a copy of the training may be taken here; so it may between epochs.

        Raises:
            Halt: on all ranks, if the user has pressed Ctrl-C.
            RestartTask: on all ranks, if more than values has changed.
        """
        updater, model = self.worker.updater, self.worker.model
        assert updater is not None
        if self.reads_weights:
            self.worker.hold_parameters()
        directive = None
        if self.control.rank == 0:
            decided = self.act(partial(self._directive, act, renew_at))
            directive = _END if decided is None else decided
        if is_copied or renew_at is not None:
            self.write_parts()
        directive = self._tell(directive)
        with self.worker.setting(directive.values):
            set_values(model, directive.values)
        self.worker.reload_weights()
        if not directive:
            return False
        is_over = directive.halt or (directive.stop and stops_at_once)
        if directive.renew and renew_at is not None and not is_over:
            raise RestartTask(replace(renew_at, stops=directive.stop))
        if directive.options is not None:
            updater.set_options(directive.options)
        if directive.halt:
            raise Halt
        return bool(directive.stop)

    def write_parts(self) -> None:
        """If rank 0 has begun a copy of a divided training, have every rank write its parts."""
        plan = self.worker.plan
        if not divides_copies(plan) or (plan.num_hosts > 1 and not self.folder):
            return
        request = None
        if self.control.rank == 0:
            request = self.act(partial(self.driver.begin_parts, self.worker))
        if self.is_wanted(request is not None):
            request = self.control.broadcast(request)
            found = self.control.gather(write_requested(self.worker, request, self.folder))
            if self.control.rank == 0:
                self.act(partial(self.driver.end_parts, found))

    def act(self, act: Callable[[], _T]) -> _T | None:
        """Have rank 0 do something between two steps.

        Its error ends the training as Ctrl-C does, after a step of all ranks; until then rank 0
        does nothing more.
        """
        if self.driver.failure is not None:
            return None
        try:
            return act()
        except Exception as error:
            self.driver.fail(error)
            return None

    def _directive(self, act: Callable[[], None], renew_at: FitPosition | None) -> CallbackOutcome:
        """What rank 0's callbacks decide."""
        driver, updater = self.driver, self.worker.updater
        assert updater is not None
        options = updater.options()
        fingerprint = None if renew_at is None else driver.fingerprint()
        values = driver.watch(act, in_epoch=renew_at is None)
        renew = renew_at is not None and fingerprint != driver.fingerprint()
        changed = updater.options()
        directive = CallbackOutcome(
            stop=driver.stop_training,
            halt=driver.is_interrupted or self.worker.is_halted,
            renew=renew,
            options=changed if changed != options else None,
            values=values,
        )
        decided: CallbackOutcome = driver.decide(directive, renew_at)
        return decided

    def _tell(self, directive: CallbackOutcome | None) -> Any:
        """Rank 0's outcome, on every rank; a message is sent only if it is not empty."""
        is_sent = self.worker.board is None or self.is_wanted(bool(directive))
        return self.control.broadcast(directive) if is_sent else _NOTHING

    def is_wanted(self, is_due: bool) -> bool:
        """The value of rank 0, on every rank."""
        board = self.worker.board
        if board is None:
            return bool(self.control.broadcast(is_due))
        return board.announce(is_due) if self.control.rank == 0 else board.announced()

    def show_slots(self) -> None:
        """Put the optimizer's slots into it, for callbacks to see."""
        self.driver.take_slots(self.gathered_slots())

    def gathered_slots(self) -> list[PieceSlots]:
        """The slots that rank 0 lacks; all hosts have those in stores afterwards."""
        self.worker.gather_slots()
        return self._gathered_counts()

    def _gathered_counts(self) -> list[PieceSlots]:
        """The slots that are in no store."""
        updater = self.worker.updater
        assert updater is not None
        if updater.shares_all:
            return []
        return [part for parts in self.control.gather(self.worker.slots()) for part in parts]

    def show_traces(self, tracer: StepProfiler) -> None:
        """Give the traces of all ranks to the callbacks of rank 0."""
        traces = self.control.gather(tracer.take())
        if self.control.rank == 0:
            self.act(partial(self.driver.take_traces, traces))

    def check_halt(self) -> None:
        """Between two barriers: leave the loop, on all ranks or on none.

        Raises:
            Halt: the user has pressed Ctrl-C.
        """
        alone = self.control.num_ranks == 1 and self.driver.is_interrupted
        if alone or self.worker.is_halted:
            raise Halt

    def begin_validation(self) -> None:
        """Show the weights if they may be read while the model is evaluated, or free them."""
        if self.reads_weights:
            self.worker.show_parameters()
        else:
            self.worker.release_parameters()

    def pause_validation(self, index: int) -> None:
        """Every few batches of the validation: let all ranks stop; nothing else waits there."""
        if index % _BATCHES_BETWEEN_PAUSES == 0:
            self.worker.barrier()
            self.check_halt()

    def collect_rest(self) -> None:
        """Give rank 0 what ranks do not write themselves (``write_parts``)."""
        self._collect_buffers()
        assert self.worker.updater is not None
        self.worker.updater.write_back_slots()
        self.driver.take_slots(self._gathered_counts())

    def collect_buffers(self) -> None:
        """Give rank 0 the buffers and parameters whose current values are on other ranks."""
        self.worker.show_parameters()
        self._collect_buffers()

    def _collect_buffers(self) -> None:
        if self.control.num_ranks > 1 and next(self.worker.model.buffers(), None) is not None:
            own = self.worker.authoritative_buffers()
            for buffers in self.control.gather({} if self.control.rank == 0 else own):
                set_values(self.worker.model, buffers)

    def share_buffers(self) -> None:
        """Give every rank the current values of all buffers."""
        self._collect_buffers()
        model = self.worker.model
        if self.control.num_ranks > 1 and next(model.buffers(), None) is not None:
            set_values(model, self.control.broadcast(dict(model.named_buffers())))
