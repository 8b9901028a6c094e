"""Errors of models that use units in ways in which these cannot be gathered in time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lockstep.capture.measuring import FORBIDDEN_HOOKS
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
    return _unit_error(
        "The model uses units of sharded parameters in another order than in its first step.",
        received,
    )


def misused(why: str, name: str) -> ModelError:
    """Any other use that units do not allow."""
    return _unit_error(f"A unit of sharded parameters {why}.", repr(name))


def _unit_error(what: str, received: str) -> ModelError:
    return ModelError(
        what,
        received=received,
        fix="Name both as one unit, or leave one out, so that it stays on every rank: "
        'FullyShardedStrategy(units=[...]); or use level="gradients".',
    )


@contextmanager
def refusing_transforms(
    use: str = "units of sharded parameters are gathered in backward",
    fix: str = 'Use level="gradients".',
) -> Iterator[None]:
    """Within the block torch.func's gradients, which forbid the hooks there, are our own error.

    Args:
        use: what the hooks are for.
        fix: how to do without them.

    Raises:
        ModelError: the model, the loss or a step has used one.
    """
    try:
        yield
    except RuntimeError as error:
        if FORBIDDEN_HOOKS not in str(error):
            raise
        raise ModelError(
            "torch.func.grad, vjp, jacrev and hessian allow no hooks on saved tensors, by which "
            f"{use}.",
            received="one of them in a step",
            fix=fix,
        ) from error


def check_no_transform() -> None:
    """Check that no transform of torch.func is under way: no memory can be filled within one.

    Raises:
        ModelError: a unit is used within one.
    """
    if torch._C._are_functorch_transforms_active():
        raise ModelError(
            "Units of sharded parameters cannot be gathered within a transform of torch.func "
            "(grad, jvp, vmap).",
            received="a layer of a unit that is used in one",
            fix='Use level="gradients".',
        )
