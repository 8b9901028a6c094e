"""Candidates in the order of what they cost, and why each loser loses."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from lockstep.errors import LockstepError, OptionError, PlanError
from lockstep.formatting import format_bytes, format_time
from lockstep.plan.cost.breakdown import USABLE, StepTime
from lockstep.plan.makers.data_parallel import Try, try_none
from lockstep.plan.search.candidates import Candidate, Problem, candidates

OBJECTIVES = ("time", "memory")


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A candidate and its place.

    Attributes:
        candidate: the candidate.
        reason: why it is not the first; empty for the first.
        is_refused: its Plan cannot be used.
        tried: seconds of a step in its trial; None without.
        failure: why its trial failed, if that of every other plan failed, too.
    """

    candidate: Candidate
    reason: str = ""
    is_refused: bool = False
    tried: float | None = None
    failure: str = ""


def best_plans(
    problem: Problem,
    objective: str = "time",
    others: Sequence[Candidate] = (),
    attempt: Try = try_none,
) -> list[Ranked]:
    """All candidates, the best first, and those that do not fit into memory last.

    Args:
        problem: the model, the devices and the batch.
        objective: ``"time"`` of a step; or ``"memory"``, the peak of the rank that needs most.
        others: candidates beside those of the search.
        attempt: makes the Plan of the best; if it cannot be used, the next one may be the best.

    Raises:
        OptionError: an unknown objective.
        PlanError: nothing fits; with what would make it fit.
    """
    if objective not in OBJECTIVES:
        raise OptionError(
            "The objective must be what plans are ranked by.",
            received=f"objective={objective!r}",
            fix="Use 'time' or 'memory'.",
        )
    found = sorted([*others, *candidates(problem)], key=lambda one: _key(one, objective))
    refused = []
    while found and found[0].cost.fits and (reason := refusal(found[0], attempt)):
        refused.append(Ranked(candidate=found.pop(0), reason=reason, is_refused=True))
    if not found:  # never where one device fits
        raise PlanError(
            "None of the plans that fit into memory can be used.",
            received=f"{refused[0].candidate.name}, which {refused[0].reason}",
            fix="Choose a strategy yourself.",
        )
    if not found[0].cost.fits:
        raise _nothing_fits(found, refused)
    best = found[0]
    ranked = [
        Ranked(candidate=one, reason="" if one is best else reason_against(one, best, objective))
        for one in found
    ]
    return [*ranked, *refused]


def refusal(one: Candidate, attempt: Try) -> str:
    """Why its Plan cannot be used; "" if it can."""
    try:
        attempt(one.maker)
    except LockstepError as error:
        return f"cannot be used: {error}"
    return ""


def _key(one: Candidate, objective: str) -> tuple[bool, float, float, int]:
    seconds, peak = one.cost.step.total, float(one.cost.peak.total)
    first, second = (seconds, peak) if objective == "time" else (peak, seconds)
    return (not one.cost.fits, first, second, one.num_devices)


def reason_against(loser: Candidate, best: Candidate, objective: str = "time") -> str:
    """Why one loses: it does not fit, or the part of its cost that is most above the best's."""
    if loser.cost.excess is not None:
        rank, needed, limit = loser.cost.excess
        may = f"{format_bytes(limit)}, {USABLE:.0%} of its memory"
        return f"does not fit: rank {rank} needs {format_bytes(needed)} and may fill {may}"
    if objective == "memory":
        return _memory_reason(loser, best)
    return _time_reason(loser.cost.step, best.cost.step)


def _time_reason(step: StepTime, best: StepTime) -> str:
    more = {
        "slower compute": (step.forward + step.backward) - (best.forward + best.backward),
        "exchange": step.exchange - best.exchange,
        "update": step.update - best.update,
        "bubble": step.bubble - best.bubble,
    }
    part = max(more, key=lambda name: more[name])
    if step.total <= best.total * (1 + 1e-9):
        return "no faster"
    return f"{part}: {format_time(more[part])} more"


def _memory_reason(loser: Candidate, best: Candidate) -> str:
    mine, its = loser.cost.peak, best.cost.peak
    more = {one.name: getattr(mine, one.name) - getattr(its, one.name) for one in fields(mine)}
    part = max(more, key=lambda name: more[name])
    if more[part] <= 0:
        return "as small, and slower"
    return f"{part}: {format_bytes(more[part])} more"


def _nothing_fits(found: Sequence[Candidate], refused: Sequence[Ranked]) -> PlanError:
    """The candidate that lacks least says what would make it fit."""
    fitting = [f"; {one.candidate.name} would fit, and {one.reason}" for one in refused[:1]]
    lacks = []
    for one in found:
        assert one.cost.excess is not None
        rank, needed, limit = one.cost.excess
        lacks.append((needed - limit, needed, limit, one, rank))
    lack, needed, limit, one, rank = min(lacks, key=lambda each: each[0])
    return PlanError(
        "Nothing fits into the memory of these devices.",
        received=f"a plan may fill {format_bytes(limit)} of a device, {USABLE:.0%} of its memory; "
        f"{one.name} needs least, {format_bytes(needed)} on rank {rank}{''.join(fitting)}",
        fix=f"Use devices with {format_bytes(lack / USABLE)} more, more devices, or a smaller "
        "batch.",
    )


def described(row: Ranked) -> dict[str, Any]:
    """A candidate's costs and reason, for a record."""
    cost = row.candidate.cost
    return {
        "name": row.candidate.name,
        "reason": row.reason,
        "seconds": cost.step.total,
        "tried": row.tried,
        "step": asdict(cost.step),
        "memory": asdict(cost.peak),
        "all_bytes": cost.all_bytes,
        "as_modelled": cost.as_modelled,
        "family": row.candidate.family,
        "bytes_sent": cost.bytes_sent,
    }
