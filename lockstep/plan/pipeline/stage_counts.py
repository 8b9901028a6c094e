"""How many stages to cut a model into, and why."""

from dataclasses import dataclass

from lockstep.errors import OptionError, Problems
from lockstep.formatting import format_time
from lockstep.plan.pipeline.cuts import (
    Cut,
    CutProblem,
    best_cut,
    check_memory,
    counted,
    fewest_stages,
)

# Fewer stages are taken when more would not shorten the step by more than this.
_WORTH_A_STAGE = 0.01


def choose_num_stages(
    problem: CutProblem, num_devices: int, num_microbatches: int
) -> tuple[int, str]:
    """How many stages, at most one per device, make a step shortest, and why, in a sentence.

    A step of m microbatches through k stages takes m + k - 1 times what the slowest stage does
    (1F1B: Narayanan et al. 2021, section 2.2). Fewer stages are preferred where they take at most
    1% longer. Numbers of stages that exceed the memory limit are left out.

    Raises:
        OptionError: no devices or no microbatches.
        PlanError: the model does not fit into the memory of so many devices.
    """
    _check_counts(num_devices, num_microbatches)
    most = min(num_devices, len(problem.layers))
    check_memory(problem, most)
    fewest = fewest_stages(problem, problem.memory_limit_bytes)
    steps = {
        count: _step_times(problem, best_cut(problem, count), num_microbatches)
        for count in range(fewest, most + 1)
    }
    enough = (1 + _WORTH_A_STAGE) * min(step.seconds for step in steps.values())
    chosen = min(count for count, step in steps.items() if step.seconds <= enough)
    return chosen, _reason(chosen, steps, num_devices)


@dataclass(frozen=True, kw_only=True)
class _StepTimes:
    """A step's predicted time, and the part that its slowest stage spends on transfers."""

    seconds: float
    transfer_seconds: float


def _step_times(problem: CutProblem, cut: Cut, num_microbatches: int) -> _StepTimes:
    slowest = cut.stage_seconds.index(cut.slowest)
    num_bytes = cut.stage_bytes_received[slowest] + cut.stage_bytes_sent[slowest]
    # The first microbatch takes this long from stage to stage before the last has work.
    num_rounds = num_microbatches + len(cut.starts) - 1
    return _StepTimes(
        seconds=num_rounds * cut.slowest,
        transfer_seconds=num_rounds * 2 * problem.seconds_per_byte * num_bytes,
    )


def _check_counts(num_devices: int, num_microbatches: int) -> None:
    problems = Problems()
    for name, count in (("num_devices", num_devices), ("num_microbatches", num_microbatches)):
        if count < 1:
            problems.add(
                "A pipeline has at least one of each.",
                received=f"{name}={count}",
                fix=f"Use {name}=1 or more.",
            )
    problems.raise_if_any(OptionError)


def _reason(chosen: int, steps: dict[int, _StepTimes], num_devices: int) -> str:
    """One sentence: the step with ``chosen`` stages, and with one fewer and one more."""
    fewer, more = chosen - 1, chosen + 1
    others = []
    if fewer in steps:
        others.append(f"{counted(fewer, 'stage')} would take {_step_text(steps[fewer])}")
    elif fewer:
        others.append(f"{counted(fewer, 'stage')} would not fit in memory")
    if more in steps:
        others.append(f"{counted(more, 'stage')} would take {_step_text(steps[more])}")
    elif chosen == num_devices:
        others.append(f"there {'is' if chosen == 1 else 'are'} {counted(chosen, 'device')}")
    else:
        others.append(f"the model has {counted(chosen, 'layer')}")
    step = _step_text(steps[chosen], " a step")
    return f"{counted(chosen, 'stage')}: {step}; {' and '.join(others)}."


def _step_text(step: _StepTimes, what: str = "") -> str:
    text = f"{format_time(step.seconds)}{what}"
    transfer = step.transfer_seconds
    return f"{text} ({format_time(transfer)} of it communication)" if transfer else text
