"""Errors of models that use units in ways in which these cannot be gathered in time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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


@contextmanager
def refusing_transforms() -> Iterator[None]:
    """Within the block torch.func's gradients, which forbid the hooks there, are our own error.

    Raises:
        ModelError: the model, the loss or a step has used one.
    """
    try:
        yield
    except RuntimeError as error:
        if "yet support saved tensor hooks" not in str(error):
            raise
        raise ModelError(
            "torch.func.grad, vjp, jacrev and hessian allow no hooks on saved tensors, by which "
            "units of sharded parameters are gathered in backward.",
            received="one of them in a step",
            fix='Use level="gradients".',
        ) from error
