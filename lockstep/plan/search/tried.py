"""Ranks the plans that may be the fastest by a few steps of training.

Predictions are a tenth off, and more where ranks take memory from one another. So between plans
whose predictions are close, a trial decides. Plans of one family are mispredicted alike: the best
of each family is tried.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from lockstep.formatting import format_time
from lockstep.plan.cost.breakdown import usable
from lockstep.plan.makers.data_parallel import PlanTrials
from lockstep.plan.search.ranking import Ranked, reason_against

# A trial takes some seconds: the processes of a training start. A training that is expected to be
# shorter than this is not worth trials; of a longer one, so many plans are tried.
_LONG_SECONDS = 60.0
_NUM_TRIALS = 3

# A plan that is expected to take longer than the best by more than this factor is not faster.
_MOST_ERROR = 1.5


def tried(rows: Sequence[Ranked], trials: PlanTrials, num_trials: int | None) -> list[Ranked]:
    """All plans, those that were tried first, by the time of a step.

    Args:
        rows: by predicted time.
        trials: trains by plans.
        num_trials: plans to try; None is none for a short training.
    """
    few = _to_try(rows)[: _number(rows[0], trials) if num_trials is None else num_trials]
    needed = max((row.candidate.cost.all_bytes for row in few), default=0)
    has_memory = trials.free_bytes is None or needed <= usable(trials.free_bytes)
    if len(few) < 2 or not has_memory:
        return [*rows]
    found = trials.times([(row.candidate.name, row.candidate.maker) for row in few])
    # Two plans may have one name.
    times = {id(row): each for row, each in zip(few, found, strict=True)}
    measured = {row: each for row, each in times.items() if not isinstance(each, str)}
    if not measured:
        return [*rows]  # training by the best says what is wrong
    ranked = sorted(rows, key=lambda row: measured.get(id(row), math.inf))
    best = ranked[0]
    return [_explained(row, best, times.get(id(row))) for row in ranked]


def _number(best: Ranked, trials: PlanTrials) -> int:
    seconds = best.candidate.cost.step.total
    is_long = trials.num_steps is None or trials.num_steps * seconds >= _LONG_SECONDS
    return _NUM_TRIALS if is_long else 0


def _to_try(rows: Sequence[Ranked]) -> list[Ranked]:
    """The best of each family, as far as it may be the fastest."""
    limit = _MOST_ERROR * rows[0].candidate.cost.step.total
    firsts: dict[str, Ranked] = {}
    for row in rows:
        one = row.candidate
        if one.cost.fits and not row.is_refused and one.cost.step.total <= limit:
            firsts.setdefault(one.family, row)
    return [*firsts.values()]


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
