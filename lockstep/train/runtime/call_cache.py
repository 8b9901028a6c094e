"""Standing calls: what ranks keep of a call, so that the next one like it need not begin anew.

Small calls (``train_on_batch``, ``predict`` of a few samples) take less than it takes to send a
model to the helpers and to build a worker on every rank. So when a call stands on the same footing
as the last one of its kind did, all ranks keep its assignment and worker, and from the next on they
are sent only what may be new: the data, the other fields of the task, buffers, and what the updater
changes beside weights and slots. A call on another footing is sent in full, and what was kept is
dropped.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.exchange_spec import ExchangeSpec
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.worker import Worker
from lockstep.train.runtime.assignment import Assignment

# Shared memory that may be kept between calls, for each kind of them.
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class CallSignature:
    """What a call stands on, to be compared with that of another.

    Attributes:
        sight: what the model, the loss and the metrics are, as the front end sees them: the very
            same object where it sees the same. None where it does not see all.
        values: all else that is compared by what it is.
        objects: all else that must be the very same; known of, but not kept.
    """

    sight: object
    values: tuple[Any, ...]
    objects: tuple[Callable[[], object], ...]

    @classmethod
    def of(cls, assignment: Assignment, sight: object, memory: Sequence[object]) -> "CallSignature":
        """The footing of an assignment.

        Args:
            assignment: the assignment.
            sight: see the class.
            memory: where parameters and slots lie.
        """
        one = assignment
        return cls(
            sight=sight,
            values=(
                *(one.plan, one.seed, one.device, one.settings, one.groups, one.blank),
                *(one.rules, one.functions, type(one.task)),
            ),
            objects=tuple(map(_reference, (one.model, one.updater, *memory))),
        )

    def is_as(self, other: "CallSignature | None") -> bool:
        """Whether a call on the other footing can be taken for one on this."""
        return (
            other is not None
            and self.sight is not None
            and len(self.objects) == len(other.objects)
            and all(map(_is, self.objects, other.objects))
            and self.values == other.values
            and self.sight is other.sight
        )


def _reference(obj: object) -> Callable[[], object]:
    return _nobody if obj is None else weakref.ref(obj)


def _nobody() -> object:
    return _nobody  # is only itself, as what is referred to is


def _is(one: Callable[[], object], other: Callable[[], object]) -> bool:
    return one() is not None and one() is other()


@dataclass(frozen=True, kw_only=True)
class CallUpdate:
    """What may differ from one call to the next on the same footing, as every rank is told.

    Attributes:
        name: of the call.
        changes: of the task's fields.
        buffers: the model's, in their order.
        changing: see ``Updater.changing``.
    """

    name: str
    changes: Mapping[str, Any]
    buffers: Sequence[torch.Tensor]
    changing: Any

    @classmethod
    def of(cls, assignment: Assignment, kept: Assignment) -> "CallUpdate":
        """What an assignment says that one like it did not."""
        updater = assignment.updater
        return cls(
            name=assignment.task.name,
            changes=assignment.task.changes_from(kept.task),
            buffers=list(assignment.model.buffers()),
            changing=None if updater is None else updater.changing(),
        )


@dataclass(frozen=True, kw_only=True)
class CachedCall:
    """What a rank keeps of a call."""

    assignment: Assignment
    worker: Worker
    control: Control

    @torch.no_grad()
    def hear(self, news: CallUpdate) -> None:
        """On a helper: go on from what rank 0 has now."""
        assignment = self.assignment
        assignment.task.renew(news.changes)
        for buffer, value in zip(assignment.model.buffers(), news.buffers, strict=True):
            buffer.copy_(value)
        if assignment.updater is not None:
            assignment.updater.set_changing(news.changing)


class CallCache:
    """Rank 0's standing calls by their names, each with what ``Session`` needs to go on with it.

    A runner has them and lends them to its session, which the interpreter knows for as long as it
    runs: it must not hold what knows the runner.
    """

    def __init__(self) -> None:
        self._seen: dict[str, CallSignature] = {}
        self._kept: dict[str, tuple[CallSignature, Any]] = {}

    def find(self, name: str, footing: CallSignature) -> Any:
        """What was kept of a call on this footing; None where nothing was."""
        known, part = self._kept.get(name, (None, None))
        if footing.is_as(known):
            return part
        if known is not None:  # something has changed, and may have for other calls, too
            self._kept.clear()
        return None

    def is_repeated(self, name: str, footing: CallSignature) -> bool:
        """Whether the last call of this name stood on this footing, too. Asked once per call."""
        known = self._seen.get(name)
        self._seen[name] = footing
        return footing.is_as(known)

    def keep(self, name: str, footing: CallSignature, part: Any) -> None:
        """Keep a call, or with None nothing of it."""
        if part is None:
            self._kept.pop(name, None)
        else:
            self._kept[name] = footing, part


def is_cacheable(assignment: Assignment, spec: ExchangeSpec) -> bool:
    """Whether a ``CallUpdate`` holds all that ranks need for a new call, and little is kept."""
    updater = assignment.updater
    return (
        len(assignment.plan.domains) == 1
        and assignment.plan.pipeline is None
        and not assignment.functions
        and (updater is None or updater.changing() is not None)
        and spec.num_bytes <= _MOST_BYTES
    )
