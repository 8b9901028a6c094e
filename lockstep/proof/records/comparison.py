"""Compares two records, or the ranks of one: ``lockstep.compare``.

Step by step, and within a step in the order in which a fault spreads: samples, loss, gradients,
the optimizer's options, its slots, parameters, buffers; tensors in the order of the first forward
pass. All ranks of the first record are compared with the second, which is the reference.
"""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lockstep.errors import DataError
from lockstep.proof.recording.digests import distance, norm
from lockstep.proof.recording.record_frames import BUFFER, GRADIENT, PARAMETER, SLOT, START
from lockstep.proof.records.batches import batch_words, beyond, mean_loss, shared_by_ranks
from lockstep.proof.records.run import Run, Value
from lockstep.proof.records.tolerances import (
    MEAN_OF_AMPLIFIED,
    PART_OF_ALL,
    Tolerance,
    adaptive_bound,
    epsilon_of,
    is_adaptive,
)

SAMPLES, RANDOM, LOSS, OPTION = "samples", "random numbers", "loss", "option"
KINDS = (SAMPLES, RANDOM, LOSS, GRADIENT, OPTION, SLOT, PARAMETER, BUFFER)
# Options that change how an update is computed, and not what it is.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable", "initial_lr")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The comparison of one tensor, or of a step's samples, loss or options.

    Attributes:
        kind: one of ``KINDS``.
        name: of the tensor, or the option; empty for samples and loss.
        step: from 0; -1 is before the first.
        relative: the norm of the difference, in parts of the reference's and a part of that of
            all tensors of its kind; see ``tolerances``.
        units: the same in units of rounding.
        agrees: whether two right runs may differ so much.
        is_amplified: it agrees because the optimizer makes whole steps of rounding.
        remark: the difference in words, if it is not one of size.
        ranks: those that differ; empty for all.
    """

    kind: str
    name: str
    step: int
    relative: float = 0.0
    units: float = 0.0
    agrees: bool = True
    is_amplified: bool = False
    remark: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def has_same_bits(self) -> bool:
        """Whether nothing differs."""
        return self.agrees and self.relative == 0.0

    def __str__(self) -> str:
        where = "before the first step" if self.step == START else f"step {self.step}"
        name = f" {self.name}" if self.name else ""
        ranks = f", rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        size = f"relative {self.relative:.1e}"
        if math.isfinite(self.units) and self.units:
            size += f", {self.units:.2g} units of rounding"
        return f"{self.kind}{name}, {where}{ranks}: {self.remark or size}"


class Pairing:
    """Two records, side by side.

    Attributes:
        run: that is examined.
        reference: that it is held to; itself, if its ranks are compared with each other.
    """

    def __init__(self, run: Run, reference: Run, tolerance: float | None = None) -> None:
        self.run, self.reference = run, reference
        dtypes = {run.computing_dtype, reference.computing_dtype} - {""}
        self.tolerance = Tolerance(max(dtypes, key=epsilon_of, default=""), tolerance)
        self._amplified: dict[int, float] = {}  # by step, the largest distance of a parameter

    @property
    def is_single(self) -> bool:
        """Whether the ranks of one record are compared."""
        return self.run is self.reference

    @cached_property
    def num_steps(self) -> int:
        """Steps that both have."""
        return min(self.run.num_steps, self.reference.num_steps)

    @cached_property
    def differences(self) -> list[Difference]:
        """All comparisons, in the order in which a fault spreads."""
        found: list[Difference] = []
        for step in range(START, self.num_steps):
            if all(step in each.first.steps for each in (self.run, self.reference)):
                found += sorted(self._of_step(step), key=self._position)
        return found

    @cached_property
    def first(self) -> Difference | None:
        """The first that does not agree."""
        return next((each for each in self.differences if not each.agrees), None)

    def of(self, kind: str, step: int) -> list[Difference]:
        """The comparisons of a kind in a step."""
        return [each for each in self.differences if (each.kind, each.step) == (kind, step)]

    def _position(self, one: Difference) -> tuple[int, int]:
        module = module_of(one.name.partition(" ")[0])
        order = self.reference.order
        return KINDS.index(one.kind), order.get(module, len(order))

    def _of_step(self, step: int) -> Iterator[Difference]:
        yield from self._samples(step)
        yield from self._loss(step)
        yield from self._options(step)
        yield from self._tensors(step)

    # --- samples, losses, options ---------------------------------------------------------------

    def _among_ranks(self, step: int) -> Iterator[Difference]:
        """What a record shows without another."""
        shared = shared_by_ranks(self.run, step)
        if shared.size:
            remark = f"ranks have {shared.size} samples in common"
            yield Difference(kind=SAMPLES, name="", step=step, agrees=False, remark=remark)
        drawing = [each.name for each in self.run.first.header.modules if each.share > 0]
        if step == START and drawing and self.run.draws_alike:
            remark = "all ranks draw alike"
            yield Difference(kind=RANDOM, name=drawing[0], step=step, agrees=False, remark=remark)
        if step == self.num_steps - 1:
            yield from self._never_moved(step)

    def _never_moved(self, step: int) -> Iterator[Difference]:
        """Parameters that have gradients, and are at the end what they were at the start."""
        before, after = self.run.values(START), self.run.values(step)
        moving = {
            name
            for each in range(self.num_steps)
            for (kind, name), value in self.run.values(each).items()
            if kind == GRADIENT and value.size > 0
        }
        still = [
            name
            for (kind, name), value in after.items()
            if kind == PARAMETER and name in moving and value.has_same_bits(before[kind, name])
        ]
        if len(still) < len(moving):  # else the learning rate is zero
            for name in still:
                yield Difference(
                    kind=PARAMETER, name=name, step=step, agrees=False, remark="never moved"
                )

    def _samples(self, step: int) -> Iterator[Difference]:
        if self.is_single:
            yield from self._among_ranks(step)
            return
        own, others = (batch_words(run, step) for run in (self.run, self.reference))
        if own is None or others is None:
            return
        same = np.array_equal(np.sort(own), np.sort(others))
        remark = "" if same else f"{len(own)} samples instead of {len(others)}"
        if not same and len(own) == len(others):
            remark = f"{beyond(own, others).size} of {len(own)} are others"
        yield Difference(kind=SAMPLES, name="", step=step, agrees=same, remark=remark)

    def _loss(self, step: int) -> Iterator[Difference]:
        own, other = (mean_loss(run, step) for run in (self.run, self.reference))
        if own is None or other is None or self.is_single:
            return
        size = max(abs(other), 1.0)
        relative = abs(own - other) / size
        epsilon = self.tolerance.epsilon("float32")
        agrees = relative <= self.tolerance.relative("float32", step) or own == other
        if math.isnan(own) and math.isnan(other):
            relative, agrees = 0.0, True
        yield Difference(
            kind=LOSS,
            name="",
            step=step,
            relative=relative,
            units=relative / epsilon,
            agrees=agrees,
            remark="" if agrees else f"{own:.6g} instead of {other:.6g}",
        )

    def _options(self, step: int) -> Iterator[Difference]:
        if step == START:
            return
        reference = next(iter(self.reference.options(step).values()))
        for rank, own in self.run.options(step).items():
            for name in [*reference, *(each for each in own if each not in reference)]:
                yield from self._options_of(step, rank, name, own.get(name), reference.get(name))

    def _options_of(
        self,
        step: int,
        rank: int,
        name: str,
        own: dict[str, object] | None,
        other: dict[str, object] | None,
    ) -> Iterator[Difference]:
        if own is None or other is None:
            if name.startswith("optimizer "):
                return
            remark = "no optimizer has it" if own is None else "the reference's optimizer lacks it"
            yield Difference(kind=OPTION, name=name, step=step, agrees=False, remark=remark)
            return
        for key in own.keys() & other.keys() - set(_IMPLEMENTATION):
            if not _are_close(own[key], other[key]):
                yield Difference(
                    kind=OPTION,
                    name=f"{name} {key}",
                    step=step,
                    agrees=False,
                    remark=f"{own[key]!r} instead of {other[key]!r}",
                    ranks=(rank,) if self.run.world_size > 1 and self.is_single else (),
                )

    # --- tensors --------------------------------------------------------------------------------

    def _tensors(self, step: int) -> Iterator[Difference]:
        own, others = self.run.values(step), self.reference.values(step)
        kinds = {kind for kind, _ in own} & {kind for kind, _ in others}
        sizes = _sizes(others.values())
        for key in dict.fromkeys([*others, *own]):
            if key[0] in kinds:
                yield self._compare(step, own.get(key), others.get(key), sizes)

    def _compare(
        self, step: int, own: Value | None, other: Value | None, sizes: dict[str, float]
    ) -> Difference:
        shown = other or own
        assert shown is not None
        place = {"kind": shown.kind, "name": shown.name, "step": step}
        if own is None or other is None:
            remark = "missing" if own is None else "the reference has none"
            return Difference(**place, relative=math.inf, agrees=False, remark=remark)  # type: ignore[arg-type]
        if own.shape != other.shape:
            remark = f"shape {own.shape} instead of {other.shape}"
            return Difference(**place, relative=math.inf, agrees=False, remark=remark)  # type: ignore[arg-type]
        remark = self._absence(own)
        if remark:
            return Difference(**place, relative=math.inf, agrees=False, remark=remark)  # type: ignore[arg-type]
        if own.has_same_bits(other):
            return Difference(**place)  # type: ignore[arg-type]
        return self._measure(step, own, other, sizes[_group(other)])

    def _measure(self, step: int, own: Value, other: Value, all_sizes: float) -> Difference:
        expected = other.versions[min(other.versions)]
        size = norm(expected)
        distances = {rank: distance(row, expected) for rank, row in own.versions.items()}
        distances = {r: math.inf if math.isnan(d) else d for r, d in distances.items()}
        bound = self._bound(step, own, other, all_sizes)
        wrong = tuple(rank for rank, each in distances.items() if each > bound)
        worst = max(distances.values())
        scale = size + PART_OF_ALL * all_sizes
        relative = worst / scale if scale else (math.inf if worst > bound else 0.0)
        epsilon = self.tolerance.epsilon(other.dtype)
        is_amplified = not wrong and relative > self.tolerance.relative(other.dtype, step)
        if is_amplified and own.kind == PARAMETER:
            self._amplified[step] = max(worst, self._amplified.get(step, 0.0))
        return Difference(
            kind=own.kind,
            name=own.name,
            step=step,
            relative=relative,
            units=relative / epsilon if epsilon else 0.0,
            agrees=not wrong,
            is_amplified=is_amplified,
            ranks=wrong if len(wrong) < len(distances) else (),
        )

    def _absence(self, own: Value) -> str:
        """Whether a rank lacks it that should have it, in words."""
        missing = [rank for rank in self.run.ranks if rank not in own.ranks]
        if missing and not own.is_complete:
            return "parts of it are missing"
        if missing and own.kind == GRADIENT and not own.is_sharded:
            return f"none on rank {', '.join(map(str, missing))}"
        return ""

    def _bound(self, step: int, own: Value, other: Value, all_sizes: float) -> float:
        if epsilon_of(other.dtype) == 0:
            return 0.0
        bound = self.tolerance.bound(other.dtype, step, other.size, all_sizes)
        if step == START or self.tolerance.given is not None or not self._is_adaptive:
            return bound
        relative = self.tolerance.relative(other.dtype, 0)
        amplified = adaptive_bound(self._largest_rate(step), step, other.shape, relative)
        if other.kind == PARAMETER:
            bound += amplified
        elif other.name.endswith("running_mean"):
            before = [size for at, size in self._amplified.items() if at < step]
            bound += min(amplified, MEAN_OF_AMPLIFIED * max(before, default=0.0))
        return bound

    def _largest_rate(self, step: int) -> float:
        options = next(iter(self.reference.options(step).values())).values()
        rates = [each.get("lr") for each in options]
        return max((float(each) for each in rates if isinstance(each, float | int)), default=0.0)

    @cached_property
    def _is_adaptive(self) -> bool:
        values = self.reference.values(self.num_steps - 1) if self.num_steps else {}
        return is_adaptive({name for kind, name in values if kind == SLOT})


def compare_runs(
    run: str | os.PathLike[str],
    reference: str | os.PathLike[str] | None = None,
    tolerance: float | None = None,
) -> Pairing:
    """Read two records, or one.

    Raises:
        DataError: a record cannot be read, or the two are of different models.
    """
    own = Run(run)
    other = own if reference is None else Run(reference)
    names = [
        {name for kind, name in each.values(START) if kind == PARAMETER} for each in (own, other)
    ]
    if not names[0] & names[1]:
        raise DataError(
            "Both records must be of the same model.",
            received=f"parameters {_few(names[0])} and {_few(names[1])}",
            fix="Record the same model twice; wrappers around it may differ.",
        )
    return Pairing(own, other, tolerance)


def module_of(name: str) -> str:
    """The module that a parameter or a buffer belongs to; Keras's names have slashes."""
    return name.rpartition("/" if "/" in name else ".")[0]


# --- parts --------------------------------------------------------------------------------------


def _sizes(values: Iterable[Value]) -> dict[str, float]:
    """The norm of all tensors of each group."""
    squares: dict[str, float] = {}
    for value in values:
        if epsilon_of(value.dtype) and math.isfinite(value.size):
            group = _group(value)
            squares[group] = squares.get(group, 0.0) + value.size**2
        else:
            squares.setdefault(_group(value), 0.0)
    return {group: math.sqrt(each) for group, each in squares.items()}


def _group(value: Value) -> str:
    """Tensors whose sizes are alike: slots and buffers of one name."""
    if value.kind in (SLOT, BUFFER):
        return f"{value.kind} {value.name.replace(' ', '.').rpartition('.')[2]}"
    return value.kind


def _are_close(one: object, other: object) -> bool:
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-15)
    return one == other


def _few(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return f"{shown}, ..." if len(names) > 3 else shown or "none"
