"""The costs of every run of units at once, as arrays: row ``start``, column ``stop``.

They are the formulas of ``plan.cost.staged``; runs of no unit, and runs that do not fit into
memory, take infinitely long.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.plan.cost.breakdown import usable
from lockstep.plan.cost.placement import Place, PlacedDevice, Placement
from lockstep.plan.cost.profile import Costs, Profile
from lockstep.plan.cost.rates import (
    backward_seconds,
    forward_seconds,
    send_seconds,
    sum_seconds,
    update_seconds,
)
from lockstep.plan.cost.staged import exposed, in_flight, kept_bytes, replica_memory, tried_bytes

Matrix = NDArray[np.float64]

# Bytes of matrices that are kept for stages of the same kind.
_MOST_KEPT_BYTES = 64 << 20


class RunCosts(NamedTuple):
    """Seconds of every run of units as a stage.

    Attributes:
        turn: of a microbatch.
        rest: see ``StageCost.rest``.
    """

    turn: Matrix
    rest: Matrix


class Intervals:
    """The costs of all runs of a model's units.

    Args:
        profile: of the model.
        placement: of the devices.
        batch_size: of the global batch.
    """

    def __init__(self, profile: Profile, placement: Placement, batch_size: int) -> None:
        self._profile = profile
        self._placement = placement
        self._batch_size = batch_size
        sums: dict[str, Any] = {
            name: _differences(np.array(values)) for name, values in profile.sums.items()
        }
        self._costs = Costs(**sums)
        self._received, self._sent = _traffic(profile)
        self._known: OrderedDict[_Stage, RunCosts] = OrderedDict()
        self._empty = np.tri(profile.num_units + 1, dtype=bool)  # stop <= start

    def of(self, behind: int, replicas: int, shares: int, *, recompute: bool) -> RunCosts:
        """Each run as a stage of ``replicas``, with ``behind`` ranks in later stages."""
        stage = self._stage(behind, replicas, shares, recompute=recompute)
        found = self._known.pop(stage, None)
        if found is None:
            found = self._made(stage)
        self._known[stage] = found
        while len(self._known) > max(_MOST_KEPT_BYTES // (2 * found.turn.nbytes), 1):
            self._known.popitem(last=False)
        return found

    def _stage(self, behind: int, replicas: int, shares: int, *, recompute: bool) -> "_Stage":
        place, turns = self._placement.place(behind, replicas), -(-shares // replicas)
        return _Stage(
            place=place,
            samples=-(-self._batch_size // shares),
            turns=turns,
            at_once=in_flight(behind, replicas, turns) if place.limit else 0,
            recompute=recompute,
        )

    def least_turn(self, shares: int, *, recompute: bool) -> float:
        """The seconds of all units in one stage on the fastest device; no layout needs less."""
        samples = -(-self._batch_size // shares)
        kinds = {
            (placed.device.operations_per_second, placed.speed): placed
            for placed in self._placement.all
        }
        return min(self._whole_turn(samples, placed, recompute) for placed in kinds.values())

    def _whole_turn(self, samples: int, placed: PlacedDevice, recompute: bool) -> float:
        whole = self._profile.whole
        forward = (1 + recompute) * forward_seconds(whole, samples, placed)
        return float(forward + backward_seconds(whole, samples, placed))

    def _made(self, stage: "_Stage") -> RunCosts:
        costs, place = self._costs, stage.place
        placed, group = place.placed, place.group
        received, sent = stage.samples * self._received, stage.samples * self._sent
        forward = forward_seconds(costs, stage.samples, placed)
        backward = backward_seconds(costs, stage.samples, placed) + stage.recompute * forward
        turn = forward + backward
        turn += send_seconds(received, stage.place.before) + send_seconds(sent, stage.place.after)
        exchange = sum_seconds(
            costs.trainable_bytes, stage.place.group, shares_memory=placed.shares_memory
        )
        rest = (stage.turns - 1) * turn + exposed(exchange, backward, placed)
        rest += update_seconds(costs.trainable / group.size, self._profile.optimizer, placed)
        if place.limit:
            turn[self._needed_bytes(stage, received, sent) > usable(place.limit)] = np.inf
        turn[self._empty] = np.inf
        rest[turn == np.inf] = np.inf
        return RunCosts(turn, rest)

    def _needed_bytes(self, stage: "_Stage", received: Matrix, sent: Matrix) -> Matrix:
        activations = kept_bytes(
            stage.samples * self._costs.activation_bytes,
            received,
            stage.at_once,
            recompute=stage.recompute,
        )
        activations = activations + stage.samples * self._profile.gradient_bytes
        slots, messages = self._profile.optimizer.slots, 2 * (received + sent)
        place, whole = stage.place, self._profile.whole.trainable_bytes
        tried = np.zeros_like(received)
        if stage.samples < self._batch_size:
            tried[0, :-1] = tried_bytes(self._profile, self._batch_size)
        memory = replica_memory(
            self._costs, slots, place.placed, place.group, activations, messages, whole, tried
        )
        return np.asarray(memory.sum)


class _Stage(NamedTuple):
    """All that the costs of runs as a stage depend on."""

    place: Place
    samples: int
    turns: int
    at_once: int
    recompute: bool


def _differences(sums: Matrix) -> Matrix:
    return sums[None, :] - sums[:, None]


def _traffic(profile: Profile) -> tuple[Matrix, Matrix]:
    """Bytes of a sample that each run receives, and sends, in a forward pass."""
    size = profile.num_units + 1
    received, sent = np.zeros((size, size)), np.zeros((size, size))
    for flow in profile.flows:
        num_bytes = flow.num_bytes / profile.samples
        sent[: flow.source + 1, flow.source + 1 : flow.users[-1] + 1] += num_bytes
        holder = flow.source
        for user in sorted(set(flow.users)):
            received[holder + 1 : user + 1, user + 1 :] += num_bytes
            holder = user
    return received, sent
