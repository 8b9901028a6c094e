"""The samples and losses of a step, over all ranks."""

import math
from itertools import combinations

import numpy as np

from lockstep.proof.recording.record_frames import Loss, Samples
from lockstep.proof.recording.samples import words_of
from lockstep.proof.records.run import Run


def batch_words(run: Run, step: int) -> np.ndarray | None:
    """The words of all samples of a step, over all ranks; None if a rank has noted none."""
    found: list[Samples] = []
    for batches in run.samples(step).values():
        if not batches:
            return None
        found += batches
    return np.concatenate([words_of(each) for each in found]) if found else None


def losses_of(run: Run, step: int) -> list[Loss]:
    """All losses of a step, over all ranks; a missing weight is the number of samples."""
    found = []
    for own in run.ranks.values():
        if step not in own.steps:
            continue
        losses, samples = own.steps[step].losses, own.steps[step].samples
        for index, loss in enumerate(losses):
            weight = loss.weight
            if weight is None and len(samples) == len(losses):
                weight = float(len(words_of(samples[index])))
            found.append(Loss(loss.value, weight))
    return found


def mean_loss(run: Run, step: int) -> float | None:
    """The loss over the whole batch; None if it is unknown."""
    losses = losses_of(run, step)
    weights = [math.nan if each.weight is None else each.weight for each in losses]
    if len(losses) == 1:
        return losses[0].value
    if not losses or not sum(weights) > 0:
        return None
    products = (each.value * weight for each, weight in zip(losses, weights, strict=True) if weight)
    return sum(products) / sum(weights)


def beyond(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The words that one has more often than the other, as often."""
    values, counts = np.unique(one, return_counts=True)
    others = dict(zip(*np.unique(other, return_counts=True), strict=True))
    there = np.array([others.get(value, 0) for value in values])
    return np.repeat(values, np.maximum(counts - there, 0))


def words_by_rank(run: Run, step: int) -> dict[int, np.ndarray]:
    """The words of the samples of each rank that has noted some."""
    return {
        rank: np.concatenate([words_of(each) for each in batches])
        for rank, batches in run.samples(step).items()
        if batches
    }


def shared_by_ranks(run: Run, step: int) -> np.ndarray:
    """Words of samples that two ranks have in one step."""
    words = words_by_rank(run, step)
    found = [np.intersect1d(one, other) for one, other in combinations(words.values(), 2)]
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)
