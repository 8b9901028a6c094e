"""Several losses with a factor each, on several outputs and targets.

Outputs, targets and losses are matched by key, or by position. The loss of a batch is the sum of
factor times mean, each mean with its own denominator, such as tokens or samples. See
``share_losses.JointLoss``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lockstep.data.map_style.sources import Batch
from lockstep.data.trees import Tree
from lockstep.errors import DataError, LossError
from lockstep.parallel.loss.function_losses import FunctionAdapter, missing_targets
from lockstep.parallel.loss.share_losses import JointLoss, LossAdapter, LossParts, ShareLoss

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
