"""Rules for steps whose loss is not finite, or depends on no parameter."""

import math
from collections.abc import Callable, Sequence

from lockstep.errors import LossError, ModelError, NonFiniteLossError
from lockstep.parallel.data_parallel.gradient_rules import OnNonFinite


def refuses(
    rule: OnNonFinite,
    step: int,
    bounds: Sequence[tuple[int, int]],
    totals: Sequence[float],
    diagnose: Callable[[int], str],
) -> bool:
    """True if a step must be skipped because the loss of a share is NaN or infinite.

    One such loss makes the whole gradient NaN or infinite, even with weight 0.

    Args:
        rule: the treatment of such a step.
        step: the step's number.
        bounds: samples ``[start, stop)`` of each share.
        totals: total losses of the filled shares.
        diagnose: returns where a share's values stop being finite; empty if unknown.

    Raises:
        NonFiniteLossError: with the rule "raise".
    """
    if rule == "ignore":  # the totals may not be known yet
        return False
    share = next((share for share, total in enumerate(totals) if not math.isfinite(total)), None)
    if share is None:
        return False
    if rule == "raise":
        raise _nonfinite_loss(step, bounds[share], share, totals[share], diagnose(share))
    return True


def _nonfinite_loss(
    step: int, bounds: tuple[int, int], share: int, total: float, diagnosis: str
) -> NonFiniteLossError:
    start, stop = bounds
    where = f"; {diagnosis}" if diagnosis else ""
    return NonFiniteLossError(
        f"The loss of step {step} is not finite.",
        received=f"{total} from share {share} (samples {start} to {stop - 1} of the batch){where}",
        fix="Lower the learning rate, check these samples, or skip such steps with "
        'on_nonfinite="skip". The weights are those before this step.',
    )


def unused(step: int) -> LossError:
    """The error for a loss that depends on no trainable parameter."""
    return LossError(
        f"The loss of step {step} must depend on a trainable parameter.",
        received="a loss that needs no gradient",
        fix="Look for detach(), no_grad() or frozen parameters on the way to it.",
    )


def unequal_scale(step: int) -> ModelError:
    """The error for gradients that must be scaled after backward, and cannot."""
    return ModelError(
        "Hooks must be linear where the loss is not a mean over the samples: gradients are then "
        "divided by its weight after backward, when the weights of all shares are known.",
        received=f"a hook or an autograd function that is not linear (it clips) in step {step}",
        fix="Clip gradients of parameters (clip_norm, clip_value), return a mean over the samples, "
        "or train on one device.",
    )
