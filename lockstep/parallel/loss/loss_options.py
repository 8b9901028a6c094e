"""Checks and adapts the user's loss and its factors."""

import math
from collections.abc import Mapping
from typing import Any

from lockstep.data.own_loss import OwnLoss
from lockstep.errors import Problems
from lockstep.formatting import listed
from lockstep.options import is_number
from lockstep.parallel.loss.function_losses import FunctionAdapter
from lockstep.parallel.loss.joint_losses import JointAdapter, keyed_losses
from lockstep.parallel.loss.model_losses import OwnLossAdapter
from lockstep.parallel.loss.share_losses import LossAdapter


def adapt_loss(loss: Any, loss_weights: Any = None) -> LossAdapter:
    """The adapter of a loss that ``check_loss`` accepts."""
    if isinstance(loss, OwnLoss):
        return OwnLossAdapter(loss)
    if not isinstance(loss, Mapping | list | tuple):
        return FunctionAdapter(loss)
    given = {} if loss_weights is None else keyed_losses(loss_weights)
    return JointAdapter(loss, [float(given.get(key, 1.0)) for key in keyed_losses(loss)])


def check_loss(
    loss: object, loss_weights: object, problems: Problems, name: str = "`loss`"
) -> None:
    """Add a problem for an invalid loss, or for invalid factors of several losses."""
    if isinstance(loss, Mapping | list | tuple):
        _check_several(loss, problems)
        _check_factors(loss, loss_weights, problems)
        return
    if loss is not None and not isinstance(loss, OwnLoss):
        _check_function(loss, name, problems)
    if loss_weights is not None:
        problems.add(
            "`loss_weights` goes with several losses.",
            received=f"loss_weights={loss_weights!r} and one loss",
            fix="Leave it out, or pass loss={'a': ..., 'b': ...}.",
        )


def _check_several(loss: Any, problems: Problems) -> None:
    keyed = keyed_losses(loss)
    if not keyed:
        problems.add(
            "Several losses must be at least one.", received=repr(loss), fix="Name a loss."
        )
    for key, one in keyed.items():
        if isinstance(loss, Mapping) and not (isinstance(key, str) and key):
            problems.add(
                "Losses must be named by the keys of the model's outputs.",
                received=repr(key),
                fix="Use strings, or a list of losses for a tuple of outputs.",
            )
        _check_function(one, f"loss[{key!r}]", problems)


def _check_function(loss: object, name: str, problems: Problems) -> None:
    if isinstance(loss, type) or not callable(loss):
        problems.add(
            f"{name} must be callable as loss(output, target).",
            received=f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss),
            fix="Pass an instance: torch.nn.CrossEntropyLoss(), for example.",
        )


def _check_factors(loss: Any, factors: Any, problems: Problems) -> None:
    if factors is None:
        return
    if isinstance(factors, Mapping) != isinstance(loss, Mapping) or not isinstance(
        factors, Mapping | list | tuple
    ):
        problems.add(
            "`loss_weights` must have the form of `loss`: a dict, or a list.",
            received=type(factors).__name__,
            fix="Give a number for each loss, under the same key or in the same place.",
        )
        return
    known = keyed_losses(loss)
    strange = [key for key in keyed_losses(factors) if key not in known]
    if strange or (not isinstance(loss, Mapping) and len(factors) != len(loss)):
        problems.add(
            "`loss_weights` must belong to the losses.",
            received=f"{len(factors)} for {len(loss)} losses"
            if not isinstance(loss, Mapping)
            else f"{listed(map(str, strange))} beside losses {listed(map(str, known))}",
            fix="Give a number for each loss; a loss of a dict that has none counts once.",
        )
    for key, factor in keyed_losses(factors).items():
        if not (is_number(factor) and math.isfinite(factor)):
            problems.add(
                "`loss_weights` must be finite numbers.",
                received=f"{factor!r} for {key!r}",
                fix="Use 1.0.",
            )
