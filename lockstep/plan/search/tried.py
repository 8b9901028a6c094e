"""Ranks the plans that may be the fastest by a few steps of training.

Predictions are a tenth off, and more where ranks take memory from one another. So between plans
whose predictions are close, a trial decides. Plans of one family are mispredicted alike: the best
of each family is tried.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from lockstep.errors import LockstepError
from lockstep.formatting import format_time
from lockstep.plan.cost.breakdown import usable
from lockstep.plan.cost.corrections import family_of
from lockstep.plan.makers.data_parallel import PlanTrials, Try, try_none
from lockstep.plan.search.ranking import Ranked, reason_against, refusal
from lockstep.plan.spec import Plan

# A trial takes some seconds: the processes of a training start. A training that is expected to be
# shorter than this is not worth trials; of a longer one, so many plans are tried.
_LONG_SECONDS = 60.0
_NUM_TRIALS = 3

# A plan that is expected to take longer than the best by more than this factor is not faster.
_MOST_ERROR = 1.5


def begun_first(rows: Sequence[Ranked], begun: Plan, attempt: Try) -> list[Ranked] | None:
    """All plans, first the one by which a training was begun; None if it is not among them.

    Another one would sum in another order, and draw other random numbers.

    Args:
        rows: the best first.
        begun: the Plan.
        attempt: makes the Plan of one, or says why it cannot be used.
    """
    for row in rows:
        one = row.candidate
        is_usable = one.cost.fits and not row.is_refused and one.family == family_of(begun)
        if is_usable and _is_made(row, begun, attempt):
            others = [_against_begun(each, row) for each in rows if each is not row]
            return [replace(row, reason=""), *others]
    return None


def _against_begun(row: Ranked, begun: Ranked) -> Ranked:
    one = row.candidate
    if row.is_refused:
        return row
    if one.cost.fits and one.cost.step.total < begun.candidate.cost.step.total:
        return replace(row, reason="the training was begun by another plan")
    return replace(row, reason=reason_against(one, begun.candidate))


def _is_made(row: Ranked, begun: Plan, attempt: Try) -> bool:
    try:
        plan = attempt(row.candidate.maker)
    except LockstepError:
        return False
    return plan is not None and _decision(plan) == _decision(begun)


def _decision(plan: Plan) -> Plan:
    """A Plan without what was predicted."""
    staged = plan.pipeline
    if staged is not None:
        stages = [msgspec.structs.replace(stage, predicted=None) for stage in staged.stages]
        staged = msgspec.structs.replace(staged, stages=tuple(stages))
    return msgspec.structs.replace(plan, notes=(), pipeline=staged)


def tried(
    rows: Sequence[Ranked], trials: PlanTrials, num_trials: int | None, attempt: Try = try_none
) -> list[Ranked]:
    """All plans, those that were tried first, by the time of a step.

    Args:
        rows: by predicted time.
        trials: trains by plans.
        num_trials: plans to try; None is 3 for a long training, else 0.
        attempt: makes the Plan of one, or says why it cannot be used.
    """
    number = _number(rows[0], trials) if num_trials is None else num_trials
    few, rows = _to_try(rows, number, attempt)
    needed = max((row.candidate.cost.all_bytes for row in few), default=0)
    has_memory = trials.free_bytes is None or needed <= usable(trials.free_bytes)
    if len(few) < 2 or not has_memory:
        return [*rows]
    found = trials.times([(row.candidate.name, row.candidate.maker) for row in few])
    # Two plans may have one name.
    times = {id(row): each for row, each in zip(few, found, strict=True)}
    measured = {row: each for row, each in times.items() if not isinstance(each, str)}
    if not measured:  # training by the best may say what is wrong
        reason = times.get(id(rows[0]))
        return [replace(rows[0], failure=str(reason)), *rows[1:]]
    ranked = sorted(rows, key=lambda row: measured.get(id(row), math.inf))
    best = ranked[0]
    return [_explained(row, best, times.get(id(row))) for row in ranked]


def _number(best: Ranked, trials: PlanTrials) -> int:
    seconds = best.candidate.cost.step.total
    is_long = trials.num_steps is None or trials.num_steps * seconds >= _LONG_SECONDS
    return _NUM_TRIALS if is_long else 0


def _to_try(rows: Sequence[Ranked], number: int, attempt: Try) -> tuple[list[Ranked], list[Ranked]]:
    """The best of each family, as far as it may be the fastest; and all plans.

    The last of all are those that cannot be used.
    """
    limit = _MOST_ERROR * rows[0].candidate.cost.step.total
    few: list[Ranked] = []
    left: list[Ranked] = []
    refused: list[Ranked] = []
    families: set[str] = set()
    for row in rows:
        one = row.candidate
        may_win = one.cost.fits and not row.is_refused and one.cost.step.total <= limit
        if may_win and one.family not in families and len(few) < number:
            families.add(one.family)
            if reason := refusal(one, attempt):
                refused.append(Ranked(candidate=one, reason=reason, is_refused=True))
                continue
            few.append(row)
        left.append(row)
    return few, [*left, *refused]


def _explained(row: Ranked, best: Ranked, found: float | str | None) -> Ranked:
    """With its trial, and why it is not the best."""
    if row.is_refused:
        return row
    if isinstance(found, str):
        return replace(row, reason=f"its trial failed: {found}")
    if row is best:
        return replace(row, reason="", tried=found)
    if found is not None:
        return replace(row, reason=f"a step of its trial took {format_time(found)}", tried=found)
    return replace(row, reason=reason_against(row.candidate, best.candidate))
