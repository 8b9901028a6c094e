"""The common base of optimizers that step across replicas: weights, accumulation, and ``join``.

Subclasses wrap one library's optimizer, and get the gradients from the script
(``custom_loops.optimizer``, and a front end's).
"""

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from lockstep.custom_loops.replica_update import Contribution, ReplicaUpdate
from lockstep.custom_loops.replicas import check_weight
from lockstep.errors import ModelError, OptionError, Problems
from lockstep.options import check_count, check_positive
from lockstep.tracebacks import public_methods


@public_methods
class ReplicaSteps:
    """Accumulates gradients over calls, and makes updates with all replicas."""

    # Marks an optimizer that steps across replicas (``train.optim.optimizer_checks``).
    is_cross_replica = True

    def _begin(self, update: ReplicaUpdate, accumulate: int) -> None:
        """Start with this replica's ``ReplicaUpdate``."""
        self._update = update
        self._accumulate = accumulate
        self._pending = _PendingGradients(len(update.trained))
        self._is_accumulating = False
        self._has_stepped = False

    def _add(
        self,
        gradients: Sequence[torch.Tensor | None],
        weight: float | None,
        *,
        scale: float = 1.0,
        is_finite: bool = True,
    ) -> None:
        """Add the gradients of a backward pass, and update if that is due.

        Args:
            gradients: one per trained parameter.
            weight: see ``step``.
            scale: the factor by which the loss was multiplied.
            is_finite: False if gradients have overflowed: no replica updates.
        """
        if weight is not None:
            check_weight(weight)
        self._check_frozen()
        if not self._has_stepped:
            _check_summed_once(self._update.trained)
            self._has_stepped = True
        own = 1.0 if weight is None else float(weight)
        counts = bool(own and is_finite)
        now = Contribution(
            gradients=list(gradients) if counts else [None] * len(gradients),
            factor=own / scale if counts or not own else math.nan,
            weight=own,
            is_given=weight is not None,
        )
        if self._is_accumulating or self._pending.count + 1 < self._accumulate:
            self._pending.add(now, self._update.places)
        elif self._pending.count:
            self._pending.add(now, self._update.places)
            self._update.make(self._take_pending())
        else:
            self._update.make(now)
        for parameter in self._update.trained:
            parameter.grad = None
        self._update_places()

    def _check_frozen(self) -> None:
        names = [name for name, one in self._update.frozen.items() if one.grad is not None]
        if names:
            raise ModelError(
                "Parameters that were frozen when the optimizer was wrapped must have no gradient.",
                received=f"a gradient of {names[0]!r}",
                fix="Set requires_grad before CrossReplicaOptimizer is made.",
            )

    @property
    def _will_accumulate(self) -> bool:
        """True if the next call of ``step`` adds to earlier gradients."""
        return bool(self._is_accumulating or self._accumulate > 1 or self._pending.count)

    def _update_places(self) -> None:
        """Called when ``_will_accumulate`` may have changed."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block ``step`` accumulates gradients; the next one after it updates."""
        before, self._is_accumulating = self._is_accumulating, True
        self._update_places()
        try:
            yield
        finally:
            self._is_accumulating = before
            self._update_places()

    def join(self) -> None:
        """Take part in the others' updates, without samples, until all replicas have joined.

        Call it on all replicas after a loop that may end earlier on some.
        """
        if self._pending.count:
            self._update.make(self._take_pending())
            self._update_places()
        nothing = Contribution(
            gradients=[None] * len(self._update.trained), factor=0.0, weight=0.0, is_given=True
        )
        while self._update.make(nothing, has_joined=True):
            pass

    def _take_pending(self) -> Contribution:
        """Remove and return the accumulated gradients."""
        pending, self._pending = self._pending, _PendingGradients(len(self._update.trained))
        return pending.total()

    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's state, as if it had stepped alone; every replica calls it."""
        return self._update.whole_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole state, saved on any number of replicas; every replica loads the same."""
        self._update.take_state(dict(state_dict))


def check_steps(problems: Problems, clip_norm: object, accumulate: object) -> None:
    """Note invalid arguments."""
    if clip_norm is not None:
        fix = "Use clip_norm=1.0, or leave it out."
        check_positive("clip_norm", clip_norm, problems, fix=fix, may_be_infinite=True)
    fix = "Use accumulate=4 for an update at every fourth call of `step`."
    check_count("accumulate", accumulate, problems, fix=fix)


def _check_summed_once(trained: Sequence[torch.Tensor]) -> None:
    """Refuse gradients that DistributedDataParallel averages, too: without the weights of ``step``.

    Raises:
        ModelError: it does.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return
    own = {id(one) for one in trained}
    if not _are_wrapped(own):
        return
    gc.collect()  # a wrapper that the script has deleted may be a part of a cycle
    if _are_wrapped(own):
        raise ModelError(
            "Gradients must be summed over the replicas once, by CrossReplicaOptimizer.",
            received="a model in DistributedDataParallel, which averages them, too",
            fix="Make no DistributedDataParallel of the model, or delete it; with Accelerate, "
            "leave the model out of `prepare`.",
        )


def _are_wrapped(parameters: set[int]) -> bool:
    """True if a DistributedDataParallel of several processes has one of these, given by ``id``.

    The script may have made it before or after the optimizer: all objects are looked at.
    """
    return any(
        issubclass(type(one), DistributedDataParallel)
        and one.process_group.size() > 1
        and any(id(parameter) in parameters for parameter in one.parameters())
        for one in gc.get_objects()
    )


class _PendingGradients:
    """Accumulated gradients of several calls of ``step``: sums over samples."""

    def __init__(self, num_parameters: int) -> None:
        self._sums: list[torch.Tensor | None] = [None] * num_parameters
        self._weight, self._factor = 0.0, 1.0
        self._kinds: set[bool] = set()
        self.count = 0

    @torch.no_grad()
    def add(self, more: Contribution, places: Any) -> None:
        """Add a contribution, in the gradients' places if there are any."""
        self.count += 1
        self._weight += more.weight
        if math.isnan(more.factor):
            self._factor = math.nan
        self._kinds.add(more.is_given)
        if len(self._kinds) > 1:
            raise OptionError(
                "All calls of `step` for one update must have a weight, or none of them.",
                received="both",
                fix="Use step(weight=len(inputs)) everywhere.",
            )
        for number, gradient in enumerate(more.gradients):
            if gradient is None:
                continue
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            before = self._sums[number]
            if before is not None:
                before.add_(dense, alpha=more.factor)
            elif places is None:
                self._sums[number] = dense * more.factor
            else:
                self._sums[number] = torch.mul(dense, more.factor, out=places[number])

    def total(self) -> Contribution:
        """The sum of all contributions."""
        (is_given,) = self._kinds
        return Contribution(
            gradients=self._sums, factor=self._factor, weight=self._weight, is_given=is_given
        )
