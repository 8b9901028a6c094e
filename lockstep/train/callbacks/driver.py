"""The driver: the work of rank 0 between the steps of a task."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.data.map_style.sources import Source
from lockstep.data.trees import Tree
from lockstep.errors import WorkerError
from lockstep.launch.workers.team import Team
from lockstep.parallel.debug.module_watch import Noted
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.updater_interface import PieceSlots, Updater
from lockstep.plan.makers.data_parallel import PlanTrials
from lockstep.train.checkpointing.fit_position import FitPosition
from lockstep.train.fault_tolerance.rank_states import RankState
from lockstep.train.history import History
from lockstep.train.input.stream_broadcast import GlobalBatch

Logs = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of all ranks after a step: for proofs, not for training.

    Attributes:
        step: the step's number, from 0.
        loss: of the global batch.
        weight: its weight; 0 if nothing was updated.
        gradients: by parameter name; None if the parameter was not used.
        states: each rank's part of the model's ``state_dict``.
        slots: pieces of the optimizer's slots, of all ranks.
        is_divided: ranks have only parts of the model.
        weights: with local steps, the weights that each replica has trained on. Loss, gradients
            and slots are then those of the first.
        num_samples: of the global batch.
        noted: values that each rank's modules have computed, in the steps that note them.
    """

    step: int
    loss: float
    weight: float
    gradients: dict[str, torch.Tensor | None]
    states: list[dict[str, torch.Tensor]]
    slots: list[PieceSlots]
    is_divided: bool = False
    weights: tuple[float, ...] = ()
    num_samples: int = 0
    noted: Sequence[Noted] = ()


class TaskDriver:
    """What rank 0 does between steps. This base does nothing, as on every other rank."""

    stop_training = False
    is_interrupted = False
    updater: Updater | None = None
    """The updater of the training under way."""
    history: History
    """The history of the training under way."""
    failure: Exception | None = None
    """An error of a callback, or of a stream read here; it ends the training as Ctrl-C does."""
    plan_trials: PlanTrials | None = None
    """Tries plans of the training before one is chosen; None where plans are not tried."""
    samples: Any = None
    """A few, on which all ranks must compute the same (``train.validation.rank_consistency``)."""

    def fail(self, error: Exception) -> None:
        """An action between two steps has failed."""
        raise error

    def announce(self, doing: str) -> None:
        """An action before the first step begins."""

    def hold_interrupts(self) -> None:
        """Steps begin: Ctrl-C must not cut one in half, but set ``is_interrupted``."""

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins."""

    def rejoin_epoch(self, epoch: int) -> None:
        """An epoch that began before continues."""

    def begin_step(self, index: int) -> None:
        """Step number ``index`` of the epoch begins."""

    def end_step(self, index: int, result: StepResult) -> None:
        """A step is done."""

    seconds_between_metrics: float = 0.0
    """How often metrics are shown within an epoch; 0 is never."""

    def show_metrics(self, values: Logs) -> None:
        """The metrics of the epoch so far."""

    def watched(self, source: Source) -> Source:
        """The training data, with a clock on rank 0 around its reads."""
        return source

    def awaited(self, batches: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
        """The batches of a stream, with a clock on rank 0 around its reads."""
        return batches

    def wants_state(self, position: FitPosition) -> bool:
        """True if the training's state is taken after the step before this position."""
        return False

    def record_position(self, position: FitPosition | None) -> None:
        """Callbacks are called at this position next; None if training cannot resume from it."""

    def begin_run(self, start: FitPosition, look: Callable[[], list[RankState]]) -> None:
        """All ranks begin to train.

        Args:
            start: the position.
            look: returns the ranks' states.
        """

    def note_failure(self, error: BaseException, states: list[RankState], team: Team) -> None:
        """Training has failed: the states of all ranks, before the helpers are ended."""

    def take_copies(self) -> None:
        """After a step and its callbacks: copy the training, if that is due."""

    def begin_parts(self, worker: Any) -> Any:
        """The ``WriteRequest`` of the copy that has begun, given rank 0's Worker; None without."""
        return None

    def end_parts(self, found: Sequence[Any]) -> None:
        """All ranks have written their parts of it: what each has returned."""

    def copy_at(self, position: FitPosition) -> None:
        """An epoch begins in which ranks differ by some steps: copy the training now."""

    def begin_apart(self, begun: FitPosition) -> None:
        """Ranks with local steps begin the steps of an epoch, from a position on."""

    def record_progress(self, stand: Any) -> None:
        """After the loss of a process: the ``ServerProgress``; None if unknown."""

    def put_back(self) -> int | None:
        """After a failure: restore the last copy of the training.

        Returns:
            The number of the last step in the copy; None if there is no copy.
        """
        return None

    def resume_after(self, error: WorkerError) -> FitPosition | None:
        """Where to resume after the loss of a process; None if training ends."""
        return None

    def decide(self, directive: Any, renew_at: Any = None) -> Any:
        """The decision of the callbacks: now, or when this step was made before.

        Args:
            directive: their decision.
            renew_at: where ranks resume if they are sent everything anew; None within an epoch.
        """
        return directive

    wants_to_stop = False
    """True if a callback has ended the evaluation or prediction."""

    def begin_batch(self, index: int) -> None:
        """A batch of an evaluation or prediction begins."""

    def end_batch(self, index: int, losses: Logs | None) -> None:
        """Such a batch has ended; losses so far, or None if they are not reported now."""

    def report_outputs(self, outputs: Tree) -> None:
        """The outputs of the batch that has just been predicted, if they are reported."""

    def report_losses(self, batches: Sequence[Any]) -> None:
        """The losses of the steps since the last report, if they are reported."""

    def report_logs(self, logs: Logs) -> None:
        """The logs that a step of a model's own has returned for a batch."""

    def results(self, values: Logs) -> Logs:
        """Losses and metrics as the logs of an epoch or an evaluation."""
        return values

    def note_bad_records(self, bad: Mapping[int, str]) -> None:
        """Bad records that are left out: the reason by index."""

    def begin_validation(self) -> None:
        """Validation begins."""

    def end_validation(self, logs: Logs) -> None:
        """Validation is done."""

    def end_epoch(self, epoch: int, logs: Logs) -> None:
        """An epoch is done."""

    def take_traces(self, traces: list[bytes]) -> None:
        """The traced steps are over: all ranks' traces."""

    def observe_state(self, snapshot: Snapshot) -> None:
        """The state after a step, if the task records it."""

    def take_slots(self, slots: list[PieceSlots]) -> None:
        """Let callbacks see the optimizer's slots, assembled from all ranks."""

    def fingerprint(self) -> object:
        """A fingerprint of what the other ranks were sent; if it changes, it is sent anew."""
        return None

    def watch(self, act: Callable[[], None], *, in_epoch: bool) -> dict[str, torch.Tensor]:
        """Act, and detect changes of the model.

        Parameters whose memory was replaced are moved back to the shared memory.

        Args:
            act: what rank 0 does.
            in_epoch: True within an epoch, where only values may change.

        Returns:
            Changed buffers and parameters that the other ranks do not see, by name.
        """
        act()
        return {}
