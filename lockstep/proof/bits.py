"""Compares runs to the last bit: run to run, and with one device.

Training runs as ``fit`` would run it, in the precision of the job's own model. For each step and
rank, the inputs and outputs of modules, gradients, slots, parameters and buffers are hashed. Two
runs are compared hash by hash, in the order of computation.

``planted`` tests the comparison: it adds one unit in the last place to one value, on one rank and
in one step. The first difference found must be that value.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from lockstep.cluster.place import Reach
from lockstep.parallel.debug.module_watch import (
    GRADIENT,
    INPUT,
    OUTPUT,
    Flip,
    Noted,
    Spot,
    WatchedSteps,
)
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.makers.data_parallel import Maker, Mirrored, SingleDevice
from lockstep.plan.spec import Plan
from lockstep.proof.compare_run import ProofSetup, fit_steps, make_trainer
from lockstep.proof.job import copy_job
from lockstep.train.callbacks.driver import Snapshot
from lockstep.train.runtime.job_context import DEFAULT_TIMEOUT_SECONDS, StrategyLike


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of comparing two runs.

    Attributes:
        name: of the runs: "run to run", "one device, 2 shares", "one device", or "planted in ...".
        is_same: True if all bits are the same; for a planted error, True if it was found.
        is_promised: True if they must be.
        text: the first difference; empty if there is none.
    """

    name: str
    is_same: bool
    is_promised: bool
    text: str

    @property
    def passed(self) -> bool:
        """True if the runs are the same, or need not be."""
        return self.is_same or not self.is_promised

    def __str__(self) -> str:
        if self.name.startswith("planted"):
            return f"{self.name}: {'found' if self.is_same else f'NOT found; {self.text}'}"
        if self.is_same:
            return f"{self.name}: the same bits"
        rest = "" if self.is_promised else " (nothing is promised there)"
        return f"{self.name}: other bits, first in {self.text}{rest}"


@dataclass(frozen=True)
class _Place:
    """The place of a value; ``rank`` is None if it does not depend on how the work is divided."""

    kind: str
    name: str
    step: int
    rank: int | None = None
    call: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        name = repr(self.name) if self.name else "the model"
        what = _DESCRIPTIONS.get(self.kind, f"{self.kind} {{}}").format(name)
        parts = [what, f"step {self.step}"]
        if self.rank is not None:
            parts.insert(1, f"rank {self.rank}")
        return ", ".join(parts)


_Digests = dict[_Place, bytes]

_DESCRIPTIONS = {
    INPUT: "what {} takes",
    OUTPUT: "what {} returns",
    GRADIENT: "the gradient of what {} returns",
    "loss": "the loss",
}


class _Recorder:
    """Hashes of all values of a training, in the order of computation."""

    def __init__(self, watched_steps: WatchedSteps) -> None:
        self.watched_steps = watched_steps
        self.digests: _Digests = {}
        self.values: list[tuple[int, Spot]] = []  # by rank, in the last step
        self._order: dict[str, int] = {}

    def begin(self, plan: Plan) -> None:
        """Note the order of the layers if ranks have different ones."""
        if plan.pipeline is not None:
            self._order = {layer.name: number for number, layer in enumerate(plan.layers)}

    def __call__(self, snapshot: Snapshot) -> None:
        step = snapshot.step
        self.values = []
        for rank, place, value in self._in_order(snapshot.noted, step):
            self.digests[place] = self.digests.get(place, b"") + _digest(value)
            self.values.append((rank, Spot(place.kind, place.name, *place.call)))
        self.digests[_Place("loss", "", step)] = repr(snapshot.loss).encode()
        for name, gradient in sorted(snapshot.gradients.items()):
            if gradient is not None:
                self.digests[_Place("gradient of parameter", name, step)] = _digest(gradient)
        for part in snapshot.slots:
            for slot, value in part.slots.items():
                if isinstance(value, torch.Tensor):
                    place = _Place("slot", f"{part.name} {slot}", step, 0, (part.start, part.stop))
                    self.digests[place] = _digest(value)
        for rank, state in enumerate(snapshot.states):
            for name, value in state.items():
                self.digests[_Place("parameter or buffer", name, step, rank)] = _digest(value)

    def undivided(self) -> _Digests:
        """The values that do not depend on how the work is divided, each once."""
        found: _Digests = {}
        for place, value in self.digests.items():
            if place.kind in ("loss", "gradient of parameter", "parameter or buffer"):
                found.setdefault(_Place(place.kind, place.name, place.step), value)
        return found

    def _in_order(
        self, noted: Sequence[Noted], step: int
    ) -> Iterator[tuple[int, _Place, torch.Tensor]]:
        """Values of modules in the order of their dependencies, not rank by rank."""
        found: list[tuple[tuple[int, int, int], int, _Place, torch.Tensor]] = []
        for rank, shares in enumerate(noted):
            for values in shares.values():
                for number, (spot, value) in enumerate(values):
                    is_gradient = spot.kind == GRADIENT
                    layer = self._layer(spot.module) * (-1 if is_gradient else 1)
                    place = _Place(spot.kind, spot.module, step, rank, (spot.call, spot.part))
                    found.append(((int(is_gradient), layer, number), rank, place, value))
        for _, rank, place, value in sorted(found, key=lambda one: (one[0], one[1])):
            yield rank, place, value

    def _layer(self, module: str) -> int:
        """The index of a module's layer; 0 if every rank has all layers."""
        while module and module not in self._order:
            module = module.rpartition(".")[0]
        return self._order.get(module, 0)


def _digest(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous()
    own = hashlib.blake2b(str(plain.shape).encode(), digest_size=16)
    if plain.numel():
        own.update(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # a buffer
    return own.digest()


@dataclass(eq=False)
class BitsProof:
    """Runs one job several times and compares the bits.

    Attributes:
        setup: the training.
        agreed: returns host 0's value on all hosts.
    """

    setup: ProofSetup
    agreed: Callable[[Any], Any]
    _plan: Plan | None = field(default=None, init=False)

    @cached_property
    def _first(self) -> "_Recorder":
        return self._run(self.setup.strategy)

    def verdicts(self) -> list[Verdict]:
        """Compare with a second run, and with one device."""
        first, again = self._first, self._run(self.setup.strategy)
        found = [_verdict("run to run", first.digests, again.digests, is_promised=True)]
        plan = self._plan
        assert plan is not None
        has_no_single_device_run = isinstance(plan.update, AveragedUpdate) or plan.num_hosts > 1
        if has_no_single_device_run or plan.num_shares == 1:
            return found
        if plan.pipeline is None:
            name = f"one device, {plan.num_shares} shares"
            alone = self._run(_OneDevice(plan.num_shares)).undivided()
            is_promised = plan.tensor is None  # sums of layers divided inside are sums of shards
            found.append(_verdict(name, self._first.undivided(), alone, is_promised=is_promised))
        alone = self._run(_OneDevice(1)).undivided()
        found.append(_verdict("one device", self._first.undivided(), alone, is_promised=False))
        return found

    def planted(self) -> list[Verdict]:
        """Add an error of one unit in the last place on the last rank, and find it."""
        rank = max((rank for rank, _ in self._first.values), default=0)
        own = [spot for one, spot in self._first.values if one == rank and spot.module]
        step = self.setup.steps - 1
        flips = []
        for kind in (OUTPUT, GRADIENT):
            names = list(dict.fromkeys(spot.module for spot in own if spot.kind == kind))
            if names:
                name = names[len(names) // 2]
                flips.append(Flip(kind=kind, name=name, rank=rank, step=step))
        return [self._find(flip) for flip in self.agreed(flips)]

    def _find(self, flip: Flip) -> Verdict:
        digests = self._run(self.setup.strategy, flip).digests
        first = _first_difference(self._first.digests, digests)
        wanted = (flip.kind, flip.name, flip.step, flip.rank)
        place = _Place(flip.kind, flip.name, flip.step, flip.rank)
        is_found = first is not None and (first.kind, first.name, first.step, first.rank) == wanted
        return Verdict(
            name=f"planted in {place}",
            is_same=is_found,
            is_promised=True,
            text="no difference was seen" if first is None else f"the first difference is {first}",
        )

    def _run(self, strategy: StrategyLike, flip: Flip | None = None) -> _Recorder:
        own = copy_job(self.setup.job, in_double=False)
        is_double = all(one.dtype == torch.float64 for one in own.model.parameters())
        precision = "fp64" if is_double else "fp32"
        trainer = make_trainer(own, strategy, precision, self.setup.seed)
        recorder = _Recorder(WatchedSteps(steps=range(self.setup.steps), flip=flip))

        def on_snapshot(snapshot: Snapshot) -> None:
            recorder.begin(trainer.plan)
            recorder(snapshot)

        on_snapshot.look = recorder.watched_steps  # type: ignore[attr-defined]
        try:
            fit_steps(trainer, self.setup.data, self.setup.steps, on_snapshot)
        finally:
            trainer.close()
        self._plan = self._plan or trainer.plan
        return recorder


class _OneDevice:
    """A strategy for one device."""

    timeout_seconds = DEFAULT_TIMEOUT_SECONDS
    reach: Reach = "one process"

    def __init__(self, num_shares: int) -> None:
        self._num_shares = num_shares

    def maker(self, precision: str) -> Maker:
        if self._num_shares == 1:
            return SingleDevice(precision=precision)
        return Mirrored(devices=1, num_shares=self._num_shares, precision=precision)


def _verdict(name: str, one: _Digests, other: _Digests, *, is_promised: bool) -> Verdict:
    first = _first_difference(one, other)
    text = "" if first is None else str(first)
    return Verdict(name=name, is_same=first is None, is_promised=is_promised, text=text)


def _first_difference(one: _Digests, other: _Digests) -> _Place | None:
    return next(
        (place for place in {**one, **other} if one.get(place) != other.get(place)),
        None,
    )
