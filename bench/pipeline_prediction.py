"""Is a step as long as the simulator says? A GPT in two stages on two cores.

Trains, with a clock around every pass of both ranks, that stops while a rank waits for the other.
Then the simulator gets the medians of these times, and its step is compared with the real one.
Run: ``python bench/pipeline_prediction.py``.
"""

import argparse
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from nets import NETS
from torch_contenders import FUSED_ADAM

import lockstep
import lockstep.train.trainer as trainer_module
from lockstep.comm.shared_memory.status_board import StatusBoard
from lockstep.parallel.worker import Worker
from lockstep.plan.pipeline.schedules import make_schedule
from lockstep.plan.pipeline.simulation import StageCosts, run_programs
from lockstep.plan.program.lowering import stage_graph
from lockstep.plan.program.rank_program import Pass
from lockstep.train.fit.fit_task import FitTask

NUM_STEPS = 60
WARM_UP_STEPS = 10


@dataclass
class Clock:
    """Seconds of every pass and of every wait, on one rank.

    Attributes:
        passes: by kind and stage, without waiting.
        steps: whole steps.
        rest: from the end of the last pass to the end of the step, without waiting.
    """

    passes: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    waited: float = 0.0


class TimedFit(FitTask):
    """A FitTask with a clock around every action of a rank."""

    def run(self, worker: Any, control: Any, driver: Any) -> Any:
        clock = Clock()
        watch_waits(clock)
        watch_actions(clock)
        train_step = worker.train_step

        def timed_step(*arguments: Any) -> Any:
            clock.rest.append(0.0)
            begin = time.perf_counter()
            result = train_step(*arguments)
            clock.steps.append(time.perf_counter() - begin)
            return result

        vars(worker)["train_step"] = timed_step
        result = super().run(worker, control, driver)
        found = control.gather((dict(clock.passes), clock.steps, clock.rest))
        if control.rank == 0:
            report(found, worker.plan)
        return result


def watch_waits(clock: Clock) -> None:
    wait = StatusBoard._wait

    def timed_wait(board: StatusBoard, *arguments: Any) -> None:
        begin = time.perf_counter()
        wait(board, *arguments)
        clock.waited += time.perf_counter() - begin

    setattr(StatusBoard, "_wait", timed_wait)  # noqa: B010 - in this process only


def watch_actions(clock: Clock) -> None:
    run = Worker._run

    def timed(worker: Worker, now: Any, actions: Any) -> None:
        begin, waited = time.perf_counter(), clock.waited
        run(worker, now, actions)
        seconds = time.perf_counter() - begin - (clock.waited - waited)
        (action,) = actions
        if isinstance(action, Pass):
            clock.passes[type(action).__name__, action.stage].append(seconds)
        else:
            clock.rest[-1] += seconds

    setattr(Worker, "_run", timed)  # noqa: B010 - in this process only


def report(found: list[Any], plan: lockstep.Plan) -> None:
    """Print predicted and measured step times."""
    assert plan.pipeline is not None
    num_microbatches = plan.num_shares
    skipped = WARM_UP_STEPS * num_microbatches
    medians = {
        key: statistics.median(seconds[skipped:])
        for passes, _, _ in found
        for key, seconds in passes.items()
    }
    graph = stage_graph(plan.pipeline)
    costs = [
        StageCosts(
            forward=medians["Forward", stage],
            backward_input=medians.get(("Backward", stage)) or medians["BackwardInput", stage],
            backward_weight=medians.get(("BackwardWeight", stage), 0.0),
        )
        for stage in range(len(plan.pipeline.stages))
    ]
    timeline = run_programs(
        make_schedule(plan.pipeline.schedule, graph, num_microbatches), graph, costs
    )
    rest = max(statistics.median(rest[WARM_UP_STEPS:]) for _, _, rest in found)
    measured = statistics.median(found[0][1][WARM_UP_STEPS:])
    predicted = timeline.makespan + rest
    for key, seconds in sorted(medians.items()):
        print(f"{key[0]:14s} of stage {key[1]}: {1000 * seconds:6.2f} ms")
    print(f"update and the like: {1000 * rest:.2f} ms")
    print(f"bubble: {100 * timeline.bubble_rate:.1f} % (without the update)")
    print(f"predicted step: {1000 * predicted:.1f} ms")
    print(f"measured step: {1000 * measured:.1f} ms, {measured / predicted:.3f} of that")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    options = parser.parse_args()
    net = NETS["gpt"]

    vars(trainer_module)["FitTask"] = TimedFit
    trainer = lockstep.Trainer(
        net.make_model(),
        loss=net.loss,
        optimizer=FUSED_ADAM,
        strategy=lockstep.PipelineStrategy(
            2, microbatches=options.microbatches, schedule=options.schedule
        ),
    )
    inputs, targets = net.make_data(net.batch_size)
    trainer.fit((inputs, targets), epochs=NUM_STEPS, batch_size=net.batch_size, verbose=0)
    print(trainer.plan)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
