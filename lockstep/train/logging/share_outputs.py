"""Joins the outputs and targets of a batch's shares for metrics.

Tensors are concatenated along their first dim. Values without a row for each sample must be equal
in all shares. Other values (a loss that the model returns) cannot be joined, which is an error only
if a metric uses them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from lockstep.data.trees import Tree, concatenate
from lockstep.errors import ModelError
from lockstep.parallel.loss.whole_batch import have_rows


def joined_trees(trees: Sequence[tuple[Tree, Tree]], sizes: Sequence[int]) -> tuple[Tree, Tree]:
    """The outputs and targets of a batch.

    Args:
        trees: outputs and targets of each share, by share.
        sizes: their numbers of samples.

    Raises:
        ModelError: shares have outputs of different structure.
    """
    if len(trees) == 1:
        return trees[0]
    outputs, targets = map(list, zip(*trees, strict=True))
    is_rows = isinstance(outputs[0], torch.Tensor)
    return (
        concatenate(outputs, partial(_joined, sizes=sizes, is_rows=is_rows)),
        concatenate(targets, partial(_joined, sizes=sizes, is_rows=True)),
    )


class NotJoined:
    """A placeholder for values of shares that cannot be joined; using it is an error."""

    def __init__(self, received: str) -> None:
        self._received = received

    def _refuse(self) -> NoReturn:
        raise ModelError(
            "A metric gets the outputs of the whole batch, joined from its parts: tensors must "
            "have a row for each sample, anything else must be equal in all parts.",
            received=self._received,
            fix="Use values with a row for each sample in the metric, padded to one shape.",
        )

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    def __float__(self) -> float:
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in args:
            if isinstance(one, cls):
                one._refuse()
        return NotImplemented


def _joined(leaves: Sequence[Any], sizes: Sequence[int], *, is_rows: bool) -> Any:
    """One value of all shares.

    Args:
        leaves: the value, by share.
        sizes: numbers of samples, by share.
        is_rows: a tensor with as many rows as samples has a row for each, even if all shares have
            equal tensors.
    """
    first = leaves[0]
    if not isinstance(first, torch.Tensor):
        is_same = all(type(one) is type(first) and one == first for one in leaves)
        return first if is_same else NotJoined(f"a {type(first).__name__} that differs")
    shapes = list(dict.fromkeys(str(tuple(one.shape)) for one in leaves))
    is_same = all(torch.equal(one, first) for one in leaves)
    if len({one.shape[1:] for one in leaves}) > 1 or not have_rows(leaves, sizes):
        return first if is_same else NotJoined(f"tensors of shape {' and '.join(shapes)}")
    if is_same and not is_rows and first.is_floating_point() and len(first.unique(dim=0)) > 1:
        return NotJoined(f"the same {first.shape[0]} rows from each part of {sizes[0]} samples")
    return torch.cat([one.to(first.device) for one in leaves])
