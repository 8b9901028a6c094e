"""Errors of models that use units in ways in which these cannot be gathered in time."""

from collections.abc import Sequence

from lockstep.errors import ModelError


def disorder(names: Sequence[str], *, is_again: bool) -> ModelError:
    """A unit is used after one that follows it.

    Args:
        names: of the one that follows, and of the unit.
        is_again: its module's forward pass runs in backward.
    """
    received = f"{names[1]!r} after {names[0]!r}"
    if is_again:
        return ModelError(
            "The backward pass computes several units of sharded parameters again, as "
            "torch.utils.checkpoint does around all of them.",
            received=received,
            fix=f"Make them one unit, units=[{[*names]}]; or have Lockstep compute each again, "
            "without torch.utils.checkpoint: FullyShardedStrategy(recompute=True).",
        )
    return unit_error(
        "The model uses units of sharded parameters in another order than in its first step.",
        received,
    )


def unit_error(what: str, received: str) -> ModelError:
    """Any other use that units do not allow."""
    return ModelError(
        what,
        received=received,
        fix="Name both as one unit, or leave one out, so that it stays on every rank: "
        'FullyShardedStrategy(units=[...]); or use level="gradients".',
    )
