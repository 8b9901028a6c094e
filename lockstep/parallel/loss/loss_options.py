"""Checks and adapts the user's loss and its factors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lockstep.data.map_style.sources import Batch
from lockstep.data.own_loss import OwnLoss
from lockstep.data.trees import Tree
from lockstep.errors import DataError, LossError, Problems
from lockstep.formatting import listed
from lockstep.options import is_number
from lockstep.parallel.loss.function_losses import FunctionAdapter, missing_targets
from lockstep.parallel.loss.model_losses import OwnLossAdapter
from lockstep.parallel.loss.share_losses import JointLoss, LossAdapter, LossParts, ShareLoss

# --- Several losses with a factor each, on several outputs and targets ----------------------------
# Outputs, targets and losses are matched by key, or by position. The loss of a batch is the sum of
# factor times mean, each mean with its own denominator, such as tokens or samples. See
# ``share_losses.JointLoss``.

Losses = Mapping[Any, Any] | Sequence[Any]


class JointAdapter(LossAdapter):
    """Calls several loss functions, each on its part of outputs and targets.

    Args:
        loss: the functions by key, or by position.
        factors: one for each function.
    """

    def __init__(self, loss: Losses, factors: Sequence[float]) -> None:
        self.loss = loss
        keyed = keyed_losses(loss)
        self._adapters = {key: FunctionAdapter(one) for key, one in keyed.items()}
        self.parts = LossParts(names=part_names(loss), factors=tuple(factors))

    @property
    def is_certain(self) -> bool:  # type: ignore[override]
        """True if all losses are."""
        return all(adapter.is_certain for adapter in self._adapters.values())

    @property
    def failure(self) -> str:  # type: ignore[override]
        """The failure of the first loss that failed."""
        return next((one.failure for one in self._adapters.values() if one.failure), "")

    def begin(self, batch_size: int, num_filled: int, *, is_part: bool = False) -> None:
        super().begin(batch_size, num_filled, is_part=is_part)
        for adapter in self._adapters.values():
            adapter.uses_whole_batch = self.uses_whole_batch
            adapter.begin(batch_size, num_filled, is_part=is_part)

    def __call__(self, output: Tree, batch: Batch) -> JointLoss:
        if batch.targets is None:
            raise missing_targets()
        losses = tuple(
            _loss_of(name, adapter, key, output, batch)
            for name, (key, adapter) in zip(self.parts.names, self._adapters.items(), strict=True)
        )
        return JointLoss(losses=losses, parts=self.parts, num_samples=batch.num_samples)


def _loss_of(
    name: str, adapter: FunctionAdapter, key: str | int, whole: Tree, batch: Batch
) -> ShareLoss:
    """Compute one of the losses on its part of outputs and targets."""
    output, target = _part(whole, key), _part(batch.targets, key)
    if output is None:
        raise LossError(
            f"The loss {name!r} needs an output of the model with this key or position.",
            received=_describe(whole),
            fix="Give losses the keys of the model's outputs, or a list of losses for a tuple of "
            "outputs.",
        )
    if target is None:
        raise DataError(
            f"The loss {name!r} needs targets with this key or position.",
            received=_describe(batch.targets),
            fix="Give targets the keys of the losses, or a tuple of targets for a list of losses.",
        )
    try:
        return adapter(output, replace(batch, targets=target))
    except LossError as error:
        raise LossError(f"The loss of {name!r}: {error}") from error


def keyed_losses(loss: Losses) -> dict[Any, Any]:
    """The functions by the key or position of their outputs and targets."""
    return {**loss} if isinstance(loss, Mapping) else dict(enumerate(loss))


def part_names(loss: Losses) -> tuple[str, ...]:
    """Names of the parts in logs: the keys, or positions from 1 on, as in Keras."""
    if isinstance(loss, Mapping):
        return tuple(loss)
    return tuple(f"output_{number}" for number in range(1, len(loss) + 1))


def _part(tree: Tree, key: str | int) -> Any:
    """The value of a key, an attribute or a position; None if there is none."""
    if isinstance(key, int):
        return tree[key] if isinstance(tree, tuple | list) and key < len(tree) else None
    if isinstance(tree, Mapping):
        return tree.get(key)
    return None if isinstance(tree, torch.Tensor) else getattr(tree, key, None)


def _describe(tree: Tree) -> str:
    if isinstance(tree, Mapping):
        return f"a dict with {list(tree)}"
    if isinstance(tree, tuple | list):
        return f"a {type(tree).__name__} of {len(tree)}"
    return f"a {type(tree).__name__}"


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
