"""Programs as text, and a check of whole programs: what every schedule must come to."""

import re
from collections import Counter
from collections.abc import Sequence, Set
from typing import get_args

from lockstep.errors import PlanError, Problems
from lockstep.plan.pipeline.simulation import StageCosts, _check_counts, run_programs
from lockstep.plan.pipeline.stage_graph import StageGraph
from lockstep.plan.program.rank_program import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Pass,
    RankProgram,
    Reduce,
    Step,
    Sync,
)

_WORDS: dict[str, Action] = {str(action): action for action in (Reduce(), Step(), Sync())}
_PASSES: dict[str, type[Pass]] = {kind.letter: kind for kind in get_args(Pass)}


def format_program(program: RankProgram) -> str:
    """``(Forward(0, 0), Step())`` -> ``"0F0 STEP"``."""
    return " ".join(map(str, program))


def parse_program(text: str) -> RankProgram:
    """The inverse of ``format_program``."""
    return tuple(map(_parse_action, text.split()))


def _parse_action(word: str) -> Action:
    if word in _WORDS:
        return _WORDS[word]
    stage, kind, microbatch = re.split("([A-Z])", word)
    return _PASSES[kind](int(stage), int(microbatch))


def check_programs(programs: Sequence[RankProgram], graph: StageGraph) -> None:
    """Check that all passes of a step are there, once, on their ranks, in an order that ends.

    For each stage and each microbatch that any pass names, programs need a forward pass and a
    backward pass, in one or in two parts; programs without any backward pass are for evaluation.

    Raises:
        PlanError: passes that are missing, repeated or on a wrong rank; or a deadlock, with what
            each rank waits for.
    """
    costs = [StageCosts(forward=0.0, backward_input=0.0, backward_weight=0.0)] * graph.num_stages
    _check_counts(graph, programs, costs)
    _check_places(programs, graph)
    run_programs(programs, graph, costs)


def _check_places(programs: Sequence[RankProgram], graph: StageGraph) -> None:
    """Each pass is on its rank, and each that must be there is there once."""
    found = [
        (rank, action)
        for rank, program in enumerate(programs)
        for action in program
        if isinstance(action, Pass)
    ]
    strays = [
        f"{action} on rank {rank}"
        for rank, action in found
        if action.stage >= graph.num_stages
        or graph.rank_of(action.stage, action.microbatch) != rank
    ]
    counts = Counter(action for _, action in found)
    wanted = _wanted(set(counts), graph)
    missing = [str(action) for action in sorted(wanted - counts.keys(), key=str)]
    surplus = [str(action) for action, count in counts.items() if count > (action in wanted)]
    problems = Problems()
    for what, names, fix in (
        ("Passes are on ranks that do not hold their stage's replica.", strays, "Move them."),
        ("Passes are missing.", missing, "Add them."),
        ("Passes are there too often.", surplus, "Leave each once, or its parts instead of it."),
    ):
        if names:
            problems.add(what, received="; ".join(names), fix=fix)
    problems.raise_if_any(PlanError)


def _wanted(found: Set[Pass], graph: StageGraph) -> set[Pass]:
    """What a step consists of, for as many microbatches as occur in ``found``."""
    num_microbatches = 1 + max((action.microbatch for action in found), default=-1)
    trains = any(not isinstance(action, Forward) for action in found)
    wanted: set[Pass] = set()
    for stage in range(graph.num_stages):
        for microbatch in range(num_microbatches):
            whole = Backward(stage, microbatch)
            parts: set[Pass] = {
                BackwardInput(stage, microbatch),
                BackwardWeight(stage, microbatch),
            }
            wanted.add(Forward(stage, microbatch))
            if trains:
                is_split = whole not in found and not parts.isdisjoint(found)
                wanted |= parts if is_split else {whole}
    return wanted
