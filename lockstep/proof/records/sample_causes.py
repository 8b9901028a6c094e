"""Causes that lie in what ranks read and draw: repeated samples, other batches, equal dropout."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lockstep.proof.recording.record_frames import START
from lockstep.proof.records.batches import batch_words, beyond, shared_by_ranks, words_by_rank
from lockstep.proof.records.comparison import RANDOM, Difference, Pairing
from lockstep.proof.records.run import Run


class Cause(NamedTuple):
    """The likely cause of a difference.

    Attributes:
        kind: in a few words, of a fixed vocabulary.
        text: the evidence, and what to do, as sentences.
    """

    kind: str
    text: str


def find(pairing: Pairing, first: Difference) -> Cause:
    """The cause of other samples, or of equal random numbers."""
    run, step = pairing.run, first.step
    if first.kind == RANDOM:
        return alike(first.name)
    shared = shared_by_ranks(run, step)
    if pairing.is_single or shared.size:
        return _repeated(run, step, shared)
    own, other = batch_words(run, step), batch_words(pairing.reference, step)
    assert own is not None, "it was compared"
    assert other is not None, "it was compared"
    return (
        _skipped(pairing, step, own, other)
        or _other_size(run, step, own, other)
        or _within(run, own, other)
        or _elsewhere(pairing, step, own)
    )


def alike(name: str) -> Cause:
    """The cause of dropout that all ranks draw alike."""
    return Cause(
        "dropout drawn alike",
        f"All ranks drop the same values ({name}): they have the same seed when they train. After "
        "the model is made, seed each rank with a number of its own.",
    )


def _repeated(run: Run, step: int, shared: np.ndarray) -> Cause:
    words = words_by_rank(run, step)
    same = all(np.array_equal(np.sort(one), shared) for one in words.values())
    what = "the same samples" if same else f"{shared.size} samples in common"
    return Cause(
        "samples repeated",
        f"In step {step} ranks read {what}{_listed(run, shared)}: no sampler divides the "
        "data, or it is the same on every rank.",
    )


def _skipped(pairing: Pairing, step: int, own: np.ndarray, other: np.ndarray) -> Cause | None:
    run = pairing.run
    has_next = all((step + 1) in own.steps for own in pairing.reference.ranks.values())
    following = batch_words(pairing.reference, step + 1) if has_next else None
    batches = [len(each.first.steps[step].samples) for each in (run, pairing.reference)]
    both = following is not None and _same(own, np.concatenate([other, following]))
    if both and batches[0] > batches[1]:
        return Cause(
            "update left out",
            f"Step {step} has the samples of the reference's steps {step} and {step + 1}: an "
            "update between them was left out. A loss scaler that skipped it, or accumulation.",
        )
    if following is not None and _same(own, following):
        return Cause(
            "update left out",
            f"Step {step} has the samples of the reference's step {step + 1}: an update was left "
            "out, and its samples with it.",
        )
    return None


def _other_size(run: Run, step: int, own: np.ndarray, other: np.ndarray) -> Cause | None:
    if len(own) == len(other):
        return None
    ratio = len(own) / len(other)
    batches = len(run.first.steps[step].samples)
    hint = ""
    if ratio in (run.world_size, 1 / run.world_size):
        hint = " That is the number of ranks: the batch size is of each rank, not of all."
    elif ratio == batches:
        hint = f" That is the number of batches in a step, {batches}."
    if not hint and (_is_within(own, other) or _is_within(other, own)):
        return None
    return Cause(
        "batch size",
        f"Step {step} has {len(own)} samples, the reference {len(other)}.{hint} Keep the global "
        "batch: batch_size = global // number of ranks.",
    )


def _within(run: Run, own: np.ndarray, other: np.ndarray) -> Cause | None:
    if _is_within(own, other):
        missing = beyond(other, own)
        return Cause(
            "samples left out",
            f"{missing.size} of the reference's samples are missing{_listed(run, missing)}: the "
            "last of a batch that the number of ranks does not divide, or a rank that read less.",
        )
    if _is_within(other, own):
        extra = beyond(own, other)
        return Cause(
            "samples repeated",
            f"{extra.size} samples are more than the reference's{_listed(run, extra)}: a sampler "
            "that pads its last batch repeats some.",
        )
    return None


def _elsewhere(pairing: Pairing, step: int, own: np.ndarray) -> Cause:
    for other in range(step):
        words = batch_words(pairing.run, other)
        if words is not None and np.array_equal(own, words):
            return Cause(
                "other samples",
                f"Step {step} has the samples of step {other} again, in the same order: an epoch "
                "repeats the order of the one before. Call set_epoch on the sampler before each "
                "epoch.",
            )
    for other in range(pairing.reference.num_steps):
        words = batch_words(pairing.reference, other)
        if other != step and words is not None and _same(own, words):
            return Cause(
                "other samples",
                f"Step {step} has the samples of the reference's step {other}: the order of the "
                "batches differs.",
            )
    return Cause(
        "other samples",
        f"Step {step} has other samples than the reference: another order. Look at the seed of the "
        "shuffling, at set_epoch, and at how ranks take their part.",
    )


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(np.sort(one), np.sort(other))


def _is_within(part: np.ndarray, whole: np.ndarray) -> bool:
    return len(part) < len(whole) and beyond(part, whole).size == 0


def _listed(run: Run, words: Sequence[int] | np.ndarray) -> str:
    steps = (own for number, own in run.first.steps.items() if number != START)
    batches = [each for own in steps for each in own.samples]
    if not len(words) or not batches or not batches[0].are_ids:
        return ""
    shown = ", ".join(str(int(word)) for word in words[:5])
    return f" ({shown}, ...)" if len(words) > 5 else f" ({shown})"
