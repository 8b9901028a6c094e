"""Corrections of predictions by what runs on this machine have taken.

For each family of Plans a run's time is taken to be ``factor * predicted + fixed``: the factor is
what the layers' times alone do not show (caches, memory that ranks share), the fixed part what no
batch changes. Both are a ridge regression on relative errors whose prior is the prediction itself:
few runs change little. Memory is corrected by the median of what was lacking.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from lockstep.plan.cost.parts import Memory, PlanCost
from lockstep.plan.spec import Plan

# The prior weighs as much as so many runs whose prediction was right.
_PRIOR_RUNS = 1.0


class RunCost(msgspec.Struct, frozen=True, kw_only=True):
    """What was predicted of a run without corrections, and what it took.

    Attributes:
        family: see ``family_of``.
        seconds: of a step, predicted and measured.
        num_bytes: of all processes at their peak, likewise.
    """

    family: str
    seconds: tuple[float, float]
    num_bytes: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Of one family.

    Attributes:
        factor: of the time.
        fixed: seconds of a step on top.
        num_bytes: of all processes on top.
    """

    factor: float = 1.0
    fixed: float = 0.0
    num_bytes: float = 0.0

    def applied(self, cost: PlanCost) -> PlanCost:
        """The cost, corrected; the fixed part counts as update."""
        step = cost.step.scaled(self.factor)
        each = self.num_bytes / len(cost.memory)
        return replace(
            cost,
            step=replace(step, update=step.update + self.fixed),
            memory=tuple(_with_more(one, each) for one in cost.memory),
        )


Corrections = Mapping[str, Correction]

NONE = Correction()


def family_of(plan: Plan) -> str:
    """``"one device"``, ``"replicas"``, ``"stages"``, ``"sharded"`` or ``"servers"``."""
    if plan.pipeline is not None:
        return "stages"
    if plan.sharding is not None:
        return "sharded"
    if plan.num_servers:
        return "servers"
    return "one device" if plan.num_ranks == 1 else "replicas"


def learned(runs: Iterable[RunCost]) -> dict[str, Correction]:
    """The correction of each family of which there are runs."""
    families: dict[str, list[RunCost]] = {}
    for run in runs:
        if min(*run.seconds, *run.num_bytes) > 0:
            families.setdefault(run.family, []).append(run)
    return {family: _learned(own) for family, own in families.items()}


def _learned(runs: Sequence[RunCost]) -> Correction:
    lacking = statistics.median(after - before for before, after in (r.num_bytes for r in runs))
    factor, fixed = _line([run.seconds for run in runs])
    trust = len(runs) / (len(runs) + _PRIOR_RUNS)
    return Correction(factor=factor, fixed=fixed, num_bytes=trust * lacking)


def _line(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The line through (predicted, measured) whose relative errors are least; it never falls.

    With x and y divided by the measured time, the normal equations of
    ``sum (a x + b y - 1)^2 + prior ((a - 1)^2 + (b / scale)^2)``.
    """
    scale = statistics.median(before for before, _ in pairs)
    rows = [(before / after, scale / after) for before, after in pairs]
    xx = sum(x * x for x, _ in rows) + _PRIOR_RUNS
    xy = sum(x * y for x, y in rows)
    yy = sum(y * y for _, y in rows) + _PRIOR_RUNS
    right = sum(x for x, _ in rows) + _PRIOR_RUNS, sum(y for _, y in rows)
    determinant = xx * yy - xy * xy
    factor = (right[0] * yy - right[1] * xy) / determinant
    fixed = (xx * right[1] - xy * right[0]) / determinant
    if fixed < 0 or factor < 0:  # then a factor alone
        factor, fixed = right[0] / xx, 0.0
    return factor, scale * fixed


def _with_more(memory: Memory, num_bytes: float) -> Memory:
    return replace(memory, base=max(memory.base + num_bytes, 0.0))
