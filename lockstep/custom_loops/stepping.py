"""What is alike for optimizers of any library that step across replicas: what makes an update.

Weights, accumulation, replicas that have joined. Whose optimizer it is, and how a script hands over
gradients, is for those that build on it (``custom_loops.optimizer``, and a front end's own).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.custom_loops.replica_update import Contribution, ReplicaUpdate
from lockstep.custom_loops.replicas import check_weight
from lockstep.errors import ModelError, OptionError, Problems
from lockstep.options import check_count, check_positive
from lockstep.tracebacks import public_methods


@public_methods
class ReplicaSteps:
    """Counts calls of all replicas, and makes updates of them."""

    # Says that it steps across replicas by itself (``train.optim.optimizer_checks``).
    is_cross_replica = True

    def _begin(self, update: ReplicaUpdate, accumulate: int) -> None:
        """Every replica has made its update."""
        self._update = update
        self._accumulate = accumulate
        self._held = _Held(len(update.trained))
        self._is_holding = False

    def _add(
        self, gradients: Sequence[torch.Tensor | None], weight: float | None, scale: float = 1.0
    ) -> None:
        """Add what a backward pass has left, and update if that is due.

        Args:
            gradients: one per trained parameter.
            weight: see ``step``.
            scale: by what the loss was multiplied.
        """
        if weight is not None:
            check_weight(weight)
        self._check_frozen()
        own = 1.0 if weight is None else float(weight)
        now = Contribution(
            gradients=list(gradients) if own else [None] * len(gradients),
            factor=own / scale,
            weight=own,
            is_given=weight is not None,
        )
        if self._is_holding or self._held.count + 1 < self._accumulate:
            self._held.add(now, self._update.places)
        elif self._held.count:
            self._held.add(now, self._update.places)
            self._update.make(self._taken())
        else:
            self._update.make(now)
        for parameter in self._update.trained:
            parameter.grad = None
        self._look_again()

    def _check_frozen(self) -> None:
        names = [name for name, one in self._update.frozen.items() if one.grad is not None]
        if names:
            raise ModelError(
                "Parameters that were frozen when the optimizer was wrapped take no step.",
                received=f"a gradient of {names[0]!r}",
                fix="Set requires_grad before CrossReplicaOptimizer is made.",
            )

    @property
    def _adds_up(self) -> bool:
        """Whether the next call of ``step`` adds to others."""
        return bool(self._is_holding or self._accumulate > 1 or self._held.count)

    def _look_again(self) -> None:
        """``_adds_up`` may have changed."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block ``step`` adds up gradients; the next one after it updates."""
        before, self._is_holding = self._is_holding, True
        self._look_again()
        try:
            yield
        finally:
            self._is_holding = before
            self._look_again()

    def join(self) -> None:
        """Take part in the updates of others, without samples, until all replicas have joined.

        To be called after a loop that may end earlier on some replicas, on all of them.
        """
        if self._held.count:
            self._update.make(self._taken())
            self._look_again()
        nothing = Contribution(
            gradients=[None] * len(self._update.trained), factor=0.0, weight=0.0, is_given=True
        )
        while self._update.make(nothing, has_joined=True):
            pass

    def _taken(self) -> Contribution:
        """What several calls of ``step`` have added up; the next one begins anew."""
        held, self._held = self._held, _Held(len(self._update.trained))
        return held.total()

    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's state, as if it had stepped alone; every replica calls it."""
        return self._update.whole_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole state, from any number of replicas; every replica loads the same."""
        self._update.take_state(dict(state_dict))


def check_steps(problems: Problems, clip_norm: object, accumulate: object) -> None:
    """Note what cannot be."""
    if clip_norm is not None:
        fix = "Use clip_norm=1.0, or leave it out."
        check_positive("clip_norm", clip_norm, problems, fix=fix, may_be_infinite=True)
    fix = "Use accumulate=4 for an update at every fourth call of `step`."
    check_count("accumulate", accumulate, problems, fix=fix)


class _Held:
    """Gradients of several calls of ``step``, added up: sums over samples."""

    def __init__(self, num_parameters: int) -> None:
        self._sums: list[torch.Tensor | None] = [None] * num_parameters
        self._weight = 0.0
        self._kinds: set[bool] = set()
        self.count = 0

    @torch.no_grad()
    def add(self, more: Contribution, places: Any) -> None:
        """Add a contribution; sums are formed in their places, if there are any."""
        self.count += 1
        self._weight += more.weight
        self._kinds.add(more.is_given)
        if len(self._kinds) > 1:
            raise OptionError(
                "Calls of `step` that make one update must all have a weight, or none of them.",
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
        """All that has been added."""
        (is_given,) = self._kinds
        return Contribution(
            gradients=self._sums, factor=1.0, weight=self._weight, is_given=is_given
        )
