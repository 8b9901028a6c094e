"""A checkpoint's record of its ``fit``, and whether another ``fit`` can resume from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import msgspec

from lockstep.checkpoint.trees import Tree
from lockstep.errors import CheckpointError
from lockstep.plan.spec import Plan
from lockstep.train.checkpointing.fit_position import FitPosition
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.resume.stable_descriptions import digest

# Without callbacks: nothing changes afterwards, and the weights may be divided.
_UNCHANGED = ""


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the last epoch, from which more epochs may be trained.

    Attributes:
        sight: a digest of weights and options; empty if nothing can change them afterwards.
        read: see ``train.checkpointing.fit_position``.
        is_whole: the training's state has all that the next epoch needs.
    """

    sight: str
    read: list[int] | None
    is_whole: bool

    def unless_changed(self, state: Any) -> "End | None":
        """This, if callbacks have changed nothing since; else None."""
        may_change = self.sight != _UNCHANGED
        return self if self.is_whole and (not may_change or self.sight == _sight(state)) else None


def at_end(state: Any, *, may_change: bool) -> End:
    """The end of the last epoch, from a ``TrainerState``.

    Args:
        state: the state.
        may_change: callbacks may change weights or options afterwards.
    """
    position = state.recorded
    is_whole = position.replicas is None
    sight = _sight(state) if is_whole and may_change else _UNCHANGED
    return End(sight=sight, read=position.read, is_whole=is_whole)


def _sight(state: Any) -> str:
    now = state.present()
    values = digest([*now.parameters.values(), *now.buffers.values()]).hex()
    return f"{values} {now.options}"


class FitRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint's record of its ``fit``, beside the training's state.

    Attributes:
        epochs: trained before it.
        steps: made before it.
        asked: the facts on which its result depends (``train.resume.fit_facts``).
        history: at its end; empty before.
        epoch: numbers of the epochs in the history.
        is_finished: it has ended.
        is_stopped: a callback has ended it.
        end: of the last epoch, if a ``fit`` that has ended can be continued with more epochs; else
            None.
        num_shares: of its steps; None before the first.
    """

    epochs: int
    steps: int
    asked: dict[str, Any]
    history: dict[str, list[Any]] = {}
    epoch: list[int] = []
    is_finished: bool = False
    is_stopped: bool = False
    end: End | None = None
    num_shares: int | None = None

    def tree(self) -> dict[str, Tree]:
        """This record as a part of a checkpoint."""
        end = None if self.end is None else msgspec.structs.asdict(self.end)
        return {**msgspec.structs.asdict(self), "end": end}

    @property
    def num_trained(self) -> int:
        """For a ``fit`` that has ended, the number of the epoch after the last one."""
        return self.epoch[-1] + 1 if self.epoch else int(self.asked.get("initial_epoch", 0))

    @property
    def was_stopped(self) -> bool:
        """True if a callback has ended it, or it ended before its last epoch."""
        return self.is_stopped or self.num_trained < self.asked["epochs"]

    def reaches(self, epochs: object) -> bool:
        """True if a ``fit`` that has ended can train further, up to more epochs."""
        return isinstance(epochs, int) and not self.was_stopped and epochs > self.num_trained

    def check_beginning(self, other: "FitRecord") -> None:
        """Check that another ``fit`` begins after the same number of steps.

        Raises:
            CheckpointError: it does not.
        """
        if (self.epochs, self.steps) != (other.epochs, other.steps):
            raise CheckpointError(
                f"The checkpoints are of a fit that began after {self.steps} steps.",
                received=f"a fit that begins after {other.steps}",
                fix="Give each fit a folder of its own, and make the same calls before it.",
            )


@dataclass(frozen=True, kw_only=True)
class FitState:
    """A copy of a training within a ``fit``, which is kept in memory, on another host, or on disk.

    Attributes:
        state: of the training.
        record: of the ``fit``; an empty one without checkpoints.
        plan: by which it was trained; None if unknown.
        resume: where this process resumes; None for another.
        place: the folder that it was read from; "" for a copy in memory.
    """

    state: TrainingState
    record: FitRecord = field(default_factory=partial(FitRecord, epochs=0, steps=0, asked={}))
    plan: Plan | None = None
    resume: FitPosition | None = None
    place: str = ""

    @classmethod
    def of(cls, tree: Mapping[str, Tree], place: str = "") -> Self:
        """The inverse of ``tree``, for one read from a place.

        Raises:
            CheckpointError: its format is invalid.
        """
        parts = dict(tree)
        try:
            record = msgspec.convert(parts.pop("fit", None), FitRecord)
        except msgspec.ValidationError as error:
            raise CheckpointError(
                "A checkpoint must have a record of its fit.",
                received=error,
                fix="Use one that fit(checkpoint=...) has written.",
            ) from error
        return cls(state=TrainingState.of(parts), record=record, place=place)

    def tree(self) -> dict[str, Tree]:
        """The parts of the state, and the record."""
        return {**self.state.parts(), "fit": self.record.tree()}

    @property
    def progress(self) -> tuple[int, bool, int, int]:
        """The training's progress, in an order that compares."""
        place, steps = self.position, self.state.position["steps"]
        return steps, self.record.is_finished, place["epoch"], place["batch"]

    @property
    def name(self) -> str:
        """For messages."""
        return self.place or "the newest copy of the training"

    @property
    def size(self) -> int:
        """The batch size."""
        return int(self.record.asked["batch_size"])

    @property
    def position(self) -> dict[str, Any]:
        """The position in the ``fit``."""
        first = int(self.record.asked.get("initial_epoch", 0))
        return self.state.position["fit"] or {"epoch": first, "batch": 0}

    def reaching(self, epochs: int) -> "FitState":
        """This copy, to resume from it up to a number of epochs.

        If a ``fit`` has ended, and more epochs are now asked for, it is no longer finished.

        Raises:
            CheckpointError: it is past these epochs, or a ``fit`` that has ended cannot be
                continued.
        """
        record, place = self.record, self.position
        reached = place["epoch"] + (place["batch"] > 0)
        if record.is_finished:
            reached = record.num_trained
        if reached > epochs:
            raise CheckpointError(
                f"{self.name} has reached epoch {reached}, and fit must not end before.",
                received=f"epochs={epochs}",
                fix=f"Ask for {reached} epochs or more, or use another folder to begin anew.",
            )
        if not record.is_finished or not record.reaches(epochs):
            return self
        if record.end is None:
            raise CheckpointError(
                f"{self.name} was written after the end of {reached} epochs, and lacks a part of "
                "the state that another epoch needs: callbacks have changed weights or options in "
                "on_train_end, or each replica has an optimizer of its own. There is no older "
                "checkpoint.",
                received=f"epochs={epochs}",
                fix="Begin anew in another folder; with keep=3 older checkpoints are kept.",
            )
        place = {
            **FitPosition(reached, read=record.end.read).tree(),
            "batch_size": self.size,
            "history": record.history,
            "epochs": record.epoch,
        }
        position = {**self.state.position, "epochs": record.epochs, "fit": place}
        begun = {"is_finished": False, "history": {}, "epoch": [], "end": None}
        return replace(
            self,
            state=replace(self.state, position=position),
            record=msgspec.structs.replace(record, **begun),
        )
