"""The call cache: what ranks keep of a call, so that the next one like it starts faster.

Small calls (``train_on_batch``, ``predict`` of a few samples) take less time than sending a model
to the helpers and building a worker on every rank. If a call has the signature of the last one of
its kind, all ranks cache its assignment and worker. For the calls that follow, rank 0 sends only a
``CallUpdate``: the data, the other fields of the task, buffers, and what the updater changes beside
weights and slots. A call with another signature is sent in full, and clears the cache.
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

# Most shared memory cached between calls, for each kind of call.
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class CallSignature:
    """The parts of a call that must be equal for ranks to reuse what they cached.

    Attributes:
        fingerprint: of the model, the loss and the metrics, by the front end: the same object as
            long as these are unchanged. None if the front end cannot tell.
        values: all else that is compared by value.
        objects: weak references to all else that is compared by identity.
    """

    fingerprint: object
    values: tuple[Any, ...]
    objects: tuple[Callable[[], object], ...]

    @classmethod
    def of(
        cls, assignment: Assignment, fingerprint: object, memory: Sequence[object]
    ) -> "CallSignature":
        """The signature of an assignment.

        Args:
            assignment: the assignment.
            fingerprint: see the class.
            memory: where parameters and slots lie.
        """
        one = assignment
        return cls(
            fingerprint=fingerprint,
            values=(
                *(one.plan, one.seed, one.device, one.settings, one.groups, one.blank),
                *(one.rules, one.functions, type(one.task)),
            ),
            objects=tuple(map(_reference, (one.model, one.updater, *memory))),
        )

    def is_as(self, other: "CallSignature | None") -> bool:
        """True if the other signature is equal."""
        return (
            other is not None
            and self.fingerprint is not None
            and len(self.objects) == len(other.objects)
            and all(map(_is, self.objects, other.objects))
            and self.values == other.values
            and self.fingerprint is other.fingerprint
        )


def _reference(obj: object) -> Callable[[], object]:
    return _none if obj is None else weakref.ref(obj)


def _none() -> object:
    return _none  # is identical only to itself, as a referent is


def _is(one: Callable[[], object], other: Callable[[], object]) -> bool:
    return one() is not None and one() is other()


@dataclass(frozen=True, kw_only=True)
class CallUpdate:
    """What may differ between calls of the same signature, as rank 0 sends it.

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
        """The differences of an assignment from the cached one."""
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
    def hear(self, update: CallUpdate) -> None:
        """On a helper: take over the values that rank 0 has now."""
        assignment = self.assignment
        assignment.task.renew(update.changes)
        for buffer, value in zip(assignment.model.buffers(), update.buffers, strict=True):
            if buffer.shape != value.shape:  # a pass has resized one of them
                buffer.resize_(value.shape)
            buffer.copy_(value)
        if assignment.updater is not None:
            assignment.updater.set_changing(update.changing)


class CallCache:
    """Rank 0's cached calls by name, each with what ``Session`` needs to repeat it.

    It belongs to a runner, which passes it to its session: a finalizer holds the session until the
    interpreter ends, so the session must hold nothing that refers to the runner.
    """

    def __init__(self) -> None:
        self._seen: dict[str, CallSignature] = {}
        self._kept: dict[str, tuple[CallSignature, Any]] = {}

    def find(self, name: str, signature: CallSignature) -> Any:
        """What was cached of a call with this signature; None if nothing was."""
        known, part = self._kept.get(name, (None, None))
        if signature.is_as(known):
            return part
        if known is not None:  # something has changed, and may have for other calls, too
            self._kept.clear()
        return None

    def is_repeated(self, name: str, signature: CallSignature) -> bool:
        """True if the last call of this name had this signature. Call it once per call."""
        known = self._seen.get(name)
        self._seen[name] = signature
        return signature.is_as(known)

    def keep(self, name: str, signature: CallSignature, part: Any) -> None:
        """Cache a call; None removes it."""
        if part is None:
            self._kept.pop(name, None)
        else:
            self._kept[name] = signature, part


def is_cacheable(assignment: Assignment, spec: ExchangeSpec) -> bool:
    """True if a ``CallUpdate`` is all that ranks need for a new call, and the cache is small."""
    updater = assignment.updater
    return (
        len(assignment.plan.domains) == 1
        and assignment.plan.pipeline is None
        and not assignment.functions
        and (updater is None or updater.changing() is not None)
        and spec.num_bytes <= _MOST_BYTES
    )
