"""Losses and metrics of an epoch so far, as a state to resume from.

Losses of steps are kept one by one, because their sums are exactly rounded: a resumed epoch has the
same loss as one that was not interrupted.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from lockstep.checkpoint.trees import Tree
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.worker import Worker
from lockstep.train.checkpointing.training_state import copied
from lockstep.train.logging.metrics import Metrics


def epoch_sums(
    results: Sequence[StepResult], metrics: Metrics, control: Control, *, are_apart: bool = False
) -> Tree:
    """A tree of plain values and tensors, on rank 0; all ranks call it.

    Args:
        results: of the epoch's steps, as this rank knows them.
        metrics: this rank's.
        control: its control channel.
        are_apart: each rank has made its own steps.
    """
    steps, states = control.gather(results), metrics.states(control)
    if control.rank != 0:
        return None
    if are_apart:
        whole = [result for own in steps for result in own]
    else:
        whole = [  # each rank knows the parts of its shares' losses
            replace(ranks[0], parts=[sums for result in ranks for sums in result.parts])
            for ranks in zip(*steps, strict=True)
        ]
    return {**steps_as_tree(whole), "metrics": copied(states)}


def steps_as_tree(results: Sequence[StepResult]) -> dict[str, Tree]:
    """Steps as a tree, for ``results_so_far``."""
    losses = [[result.total, result.weight] for result in results]
    counts = [[result.num_samples, int(result.is_skipped), result.num_bad] for result in results]
    return {
        "losses": torch.tensor(losses, dtype=torch.float64).reshape(-1, 2),
        "counts": torch.tensor(counts, dtype=torch.int64).reshape(-1, 3),
        "parts": [list(result.parts) for result in results],
    }


def results_so_far(sums: Tree, *, has_parts: bool) -> list[StepResult]:
    """The steps of a resumed epoch.

    Args:
        sums: from ``epoch_sums`` or ``steps_as_tree``.
        has_parts: this rank holds the parts of their losses, for all ranks.
    """
    steps = zip(sums["losses"].tolist(), sums["counts"].tolist(), sums["parts"], strict=True)
    return [
        StepResult(
            total=total,
            weight=weight,
            num_samples=size,
            is_skipped=bool(is_skipped),
            parts=parts if has_parts else [],
            num_bad=num_bad,
        )
        for (total, weight), (size, is_skipped, num_bad), parts in steps
    ]


def results_of_ranks(
    worker: Worker, control: Control, results: list[StepResult]
) -> list[StepResult]:
    """The steps of an epoch; on rank 0, with local steps, those of all ranks."""
    if worker.local_steps is None:
        return results
    gathered = control.gather(worker.local_steps.results_of_epoch(results))
    return [result for own in gathered for result in own]


def mean_loss(results: Sequence[StepResult]) -> float:
    """The loss of an epoch, by exactly rounded sums, which do not depend on the order of ranks."""
    weight = math.fsum(result.weight for result in results)
    return math.fsum(result.total for result in results) / weight if weight else math.nan


def joined_turns(results: Sequence[StepResult], *, has_parts: bool) -> StepResult:
    """The steps that took turns with a batch as one: their losses add up, and each is a part.

    Args:
        results: of the steps; all ranks know their losses.
        has_parts: this rank holds the parts.
    """
    sums = tuple((float(result.total), result.weight) for result in results)
    size = results[0].num_samples
    return StepResult(
        total=math.fsum(size * result.loss for result in results if result.weight),
        weight=float(size),
        num_samples=size,
        is_skipped=any(result.is_skipped for result in results),
        parts=[sums] if has_parts else [],
    )
