"""Corrections of predictions by what runs on this machine have taken.

For each family of Plans a run's time is taken to be ``factor * predicted + fixed``: the factor is
what the layers' times alone do not show (caches, memory that ranks share), the fixed part what no
batch changes. Both are a ridge regression on relative errors whose prior is the prediction itself:
few runs change little. Memory is corrected by the median of what was lacking.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from lockstep.cluster.topology import Cluster, Correction
from lockstep.plan.cost.breakdown import PlanCost
from lockstep.plan.spec import Plan

# The prior weighs as much as so many runs whose prediction was right.
_PRIOR_RUNS = 1.0

# The prior of the fixed part, in seconds: runs of long steps alone say nothing about it.
_FIXED_SECONDS = 3e-3


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


def corrected(cost: PlanCost, cluster: Cluster, family: str) -> PlanCost:
    """A cost with the correction of its family that is known of the first host."""
    known = [one for one in cluster.hosts[0].corrections if one.family == family]
    return with_correction(cost, known[0]) if known else cost


def with_correction(cost: PlanCost, correction: Correction) -> PlanCost:
    """A cost, corrected: the fixed part counts as update, and ranks have equal parts of memory."""
    step = cost.step.scaled(correction.factor)
    each = correction.num_bytes / len(cost.memory)
    return replace(
        cost,
        step=replace(step, update=step.update + correction.fixed),
        memory=tuple(replace(one, base=max(one.base + each, 0.0)) for one in cost.memory),
        uncorrected=(cost.step.total, cost.all_bytes),
    )


def family_of(plan: Plan) -> str:
    """One of "one device", "replicas", "stages", "sharded", "tensor" and "servers"."""
    if plan.pipeline is not None:
        return "stages"
    if plan.sharding is not None:
        return "sharded"
    if plan.tensor is not None:
        return "tensor"
    if plan.num_servers:
        return "servers"
    return "one device" if plan.num_ranks == 1 else "replicas"


def learned(runs: Iterable[RunCost]) -> tuple[Correction, ...]:
    """The correction of each family of which there are runs."""
    families: dict[str, list[RunCost]] = {}
    for run in runs:
        if min(*run.seconds, *run.num_bytes) > 0:
            families.setdefault(run.family, []).append(run)
    return tuple(_learned(family, own) for family, own in sorted(families.items()))


def _learned(family: str, runs: Sequence[RunCost]) -> Correction:
    lacking = statistics.median(after - before for before, after in (r.num_bytes for r in runs))
    factor, fixed = _line([run.seconds for run in runs])
    trust = len(runs) / (len(runs) + _PRIOR_RUNS)
    return Correction(family=family, factor=factor, fixed=fixed, num_bytes=trust * lacking)


def _line(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The line through (predicted, measured) whose relative errors are least; it never falls.

    The normal equations of ``sum (a x + b y - 1)^2 + prior ((a - 1)^2 + b^2)``, where x is the
    predicted time and y three milliseconds, both divided by the measured time.
    """
    rows = [(before / after, _FIXED_SECONDS / after) for before, after in pairs]
    xx = sum(x * x for x, _ in rows) + _PRIOR_RUNS
    xy = sum(x * y for x, y in rows)
    yy = sum(y * y for _, y in rows) + _PRIOR_RUNS
    right = sum(x for x, _ in rows) + _PRIOR_RUNS, sum(y for _, y in rows)
    determinant = xx * yy - xy * xy
    factor = (right[0] * yy - right[1] * xy) / determinant
    fixed = (xx * right[1] - xy * right[0]) / determinant
    if fixed < 0 or factor < 0:  # then a factor alone
        factor, fixed = right[0] / xx, 0.0
    return factor, _FIXED_SECONDS * fixed
