"""What a constant factor between two runs' gradients means."""

import math
from collections.abc import Iterator

from lockstep.proof.recording.record_frames import GRADIENT
from lockstep.proof.records.batches import losses_of
from lockstep.proof.records.comparison import Pairing
from lockstep.proof.records.run import Run
from lockstep.proof.records.sample_causes import Cause

_ROUND = 1e-3  # how near to a round number a norm is that was clipped
_EXACTLY = 1e-5  # the same, where many round numbers are tried


def explain_factor(pairing: Pairing, step: int, factor: float, shown: str, allowed: float) -> Cause:
    """The cause of gradients that are the reference's times a factor."""
    clipped = _clipping(pairing, step, factor)
    known = [*_window_factors(pairing, step), *_known_factors(pairing, step)]
    near = [(each, text) for each, text in known if abs(factor / each - 1) <= max(allowed, 1e-4)]
    what = f"In step {step} {shown} are {factor:.5g} times the reference's. "
    if near:
        return Cause("constant factor", what + near[0][1])
    if clipped is not None:
        return Cause("clipping", what + clipped)
    if factor >= 256 and math.log2(factor).is_integer():
        return Cause(
            "constant factor",
            f"{what}A power of two: the loss scale. Unscale gradients before the update.",
        )
    return Cause("constant factor", f"{what}Look at what scales the loss, and at clipping.")


def _window_factors(pairing: Pairing, step: int) -> Iterator[tuple[float, str]]:
    """The factors of a step with fewer batches than the one before, as at an epoch's end."""
    if step == 0:
        return
    steps = pairing.run.first.steps
    now, before = (len(steps[each].losses) for each in (step, step - 1))
    if 0 < now < before:
        yield (
            now / before,
            f"The step has {now} batches, the one before had {before}: losses are divided by "
            f"{before} in both. Divide them by the number of batches that the step has.",
        )


def _known_factors(pairing: Pairing, step: int) -> list[tuple[float, str]]:
    ranks = pairing.run.world_size
    losses = len(pairing.run.first.steps[step].losses)
    total = sum(each.weight or 0 for each in losses_of(pairing.run, step))
    found: list[tuple[float, str]] = []
    if losses > 1 and losses != ranks:
        found += [
            (losses, f"The step has {losses} batches: divide each one's loss by their number."),
            (1 / losses, f"The step has {losses} batches: the loss is divided by it twice."),
        ]
    if ranks > 1:
        both = f", or of batches in a step ({losses})" if losses == ranks else ""
        found += [
            (ranks, f"That is the number of ranks{both}: a sum where a mean is needed."),
            (1 / ranks, f"That is one over the number of ranks{both}: divided once too often."),
        ]
    if ranks > 1 and losses > 1:
        text = "That is the number of ranks times that of batches in a step."
        found += [(ranks * losses, text), (1 / (ranks * losses), f"One over it: {text}")]
    if total > 1:
        share = total / ranks
        if ranks > 1:
            text = "That is the weight of a rank's share: a sum where a mean is needed."
            found += [(share, text)]
        found += [
            (total, "That is the weight of the batch: a sum where a mean is needed."),
            (1 / total, "That is one over the weight of the batch: divided once too often."),
        ]
    return found


def _clipping(pairing: Pairing, step: int, factor: float) -> str | None:
    own, other = (_total_norm(run, step) for run in (pairing.run, pairing.reference))
    if factor < 1 and _is_round(own):
        return f"Their norm together is {own:.4g}: they were clipped, the reference's were not."
    if factor < 1 and (scale := _scale_of(own)):
        return (
            f"Times {scale} their norm together is {own * scale:.4g}: they were clipped while they "
            "had that loss scale. Unscale gradients before they are clipped."
        )
    if factor > 1 and _is_round(other):
        return f"The reference's norm is {other:.4g}: its gradients were clipped, these were not."
    return None


def _scale_of(clipped: float) -> int:
    """The loss scale, a power of two, that makes a norm round; 0 for none."""
    scales = (2**power for power in range(8, 25))
    return next((each for each in scales if _is_round(clipped * each, _EXACTLY)), 0)


def _total_norm(run: Run, step: int) -> float:
    sizes = [value.size for (kind, _), value in run.values(step).items() if kind == GRADIENT]
    return math.sqrt(sum(size**2 for size in sizes))


def _is_round(number: float, nearness: float = _ROUND) -> bool:
    """Whether it has one digit, or two with a five."""
    if not math.isfinite(number) or number <= 0:
        return False
    scaled = number / 10.0 ** math.floor(math.log10(number))
    return any(
        abs(scaled / each - 1) < nearness for each in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9, 10)
    )
