"""Order of messages and sums for thousands of ranks: made, and run to its end, without any device.

What ranks do in a step is run as they would do it over a process group
(``comm.p2p.process_group_p2p``): a channel of each pair hands its messages over in the order in
which they were sent, and has slots for so many; a sum waits for all ranks of its group.
"""

import resource
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import pytest

from lockstep.parallel.exchange.exchange_layout import _slots_in_training
from lockstep.plan.decision import Pipeline, Stage, StagedUpdate
from lockstep.plan.mesh import Axis
from lockstep.plan.pipeline.stage_graph import StageGraph
from lockstep.plan.program.lowering import lower_stages, stage_graph
from lockstep.plan.program.rank_program import (
    BackwardWeight,
    Forward,
    RankProgram,
    Reduce,
    Step,
    Sync,
)
from lockstep.plan.spec import Plan

Message = tuple[str, int, int]


def hybrid(data: int, pipe: int, *, microbatches: int, schedule: str, chunks: int = 1) -> Plan:
    """Replicas of a chain of stages; hosts of eight ranks, where there are as many."""
    num_ranks = data * pipe
    stages = tuple(
        Stage(
            ranks=tuple(replica * pipe + stage % pipe for replica in range(data)),
            needs=(stage - 1,) if stage else (),
        )
        for stage in range(pipe * chunks)
    )
    return Plan(
        strategy="hybrid",
        mesh=(Axis(name="data", size=data), Axis(name="pipe", size=pipe)),
        devices=tuple(f"cpu:{rank % 8}" for rank in range(num_ranks)),
        threads_per_device=1,
        num_shares=data * microbatches,
        interleaved=False,
        layers=(),
        update=StagedUpdate(),
        precision="fp32",
        pipeline=Pipeline(schedule=schedule, stages=stages),
        hosts=(8,) * (num_ranks // 8) if num_ranks > 8 else (),
    )


def stuck(programs: Sequence[RankProgram], graph: StageGraph, num_slots: int) -> list[int]:
    """Run programs as far as they go: the ranks that never come to their end."""
    channels: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
    arrived: list[set[Message]] = [set() for _ in programs]
    num_moves = num_summing = 0

    def run(rank: int) -> Iterator[None]:
        """A step of one rank; yields where it cannot go on."""
        nonlocal num_moves, num_summing
        for action in programs[rank]:
            if isinstance(action, Reduce):
                num_moves, num_summing = num_moves + 1, num_summing + 1
                while num_summing < len(programs):
                    yield
            if isinstance(action, Reduce | Step | Sync | BackwardWeight):
                continue
            kind = "F" if isinstance(action, Forward) else "B"
            before, after = graph.predecessors[action.stage], graph.successors[action.stage]
            sources, targets = (before, after) if kind == "F" else (after, before)
            for source in sources:
                channel = graph.rank_of(source, action.microbatch), rank
                while channel[0] != rank and (kind, source, action.microbatch) not in arrived[rank]:
                    while not channels[channel]:
                        yield
                    arrived[rank].add(channels[channel].popleft())
                    num_moves += 1
            for target in targets:
                channel = rank, graph.rank_of(target, action.microbatch)
                if channel[1] != rank:
                    while len(channels[channel]) >= num_slots:
                        yield
                    channels[channel].append((kind, action.stage, action.microbatch))
                    num_moves += 1

    left = {rank: run(rank) for rank in range(len(programs))}
    while left:
        moves_before = num_moves, len(left)
        left = {rank: steps for rank, steps in left.items() if next(steps, "end") != "end"}
        if (num_moves, len(left)) == moves_before:
            break
    return sorted(left)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("gpipe", 1), ("interleaved", 2)]
)
def test_no_schedule_comes_to_a_deadlock(schedule: str, chunks: int) -> None:
    plan = hybrid(4, 4, microbatches=6, schedule=schedule, chunks=chunks)
    assert plan.pipeline is not None
    for num_samples in (1, 7, 24, 40):
        programs = lower_stages(plan, plan.pipeline, num_samples)
        assert stuck(programs, stage_graph(plan.pipeline), _slots_in_training(plan)) == []


def test_a_deadlock_is_found() -> None:
    plan = hybrid(1, 2, microbatches=2, schedule="1f1b")
    assert plan.pipeline is not None
    first, second = lower_stages(plan, plan.pipeline, 2)
    backward_first = tuple(sorted(first, key=lambda action: isinstance(action, Forward)))
    assert stuck([backward_first, second], stage_graph(plan.pipeline), 4) == [0, 1]


def test_4096_ranks() -> None:
    begun, most_before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = hybrid(512, 8, microbatches=16, schedule="1f1b")
    assert plan.pipeline is not None
    programs = lower_stages(plan, plan.pipeline, plan.num_shares)
    assert len(programs) == 4096
    assert stuck(programs, stage_graph(plan.pipeline), _slots_in_training(plan)) == []
    assert time.process_time() - begun < 60
    most_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert most_kib - most_before < 1 << 20
