"""Batches of rows of Hugging Face datasets, as their own Trainer makes them.

A dataset with a format (``with_format("torch")``) has tensors. One without has Python values, and
torch's ``default_collate`` would make many tensors of a list of numbers. Hugging Face's
``default_data_collator`` makes one; the first row determines columns and types.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from lockstep.errors import DataError

_LABELS = ("label", "label_ids")


def has_plain_rows(dataset: Any) -> bool:
    """Whether it is a dataset of Hugging Face's without a format, or a part of one."""
    while (
        isinstance(dataset, Subset)
        or type(dataset).__module__ == "lockstep.data.iterable.read_ahead"
    ):
        dataset = dataset.dataset
    if type(dataset).__module__.partition(".")[0] != "datasets":
        return False
    if hasattr(dataset, "format"):
        return dataset.format["type"] is None
    return getattr(dataset, "_formatting", None) is None


def collate_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of rows: ``label`` becomes ``labels``; strings and None are left out.

    Raises:
        DataError: the values of a column have different lengths.
    """
    first = rows[0]
    label = next((name for name in _LABELS if first.get(name) is not None), None)
    batch = {} if label is None else {"labels": _labels([row[label] for row in rows])}
    for name, value in first.items():
        if name not in _LABELS and value is not None and not isinstance(value, str):
            batch[name] = _stacked(name, [row[name] for row in rows])
    return batch


def _labels(values: list[Any]) -> torch.Tensor:
    is_whole = all(isinstance(one, int | np.integer) for one in np.ravel(values[0]).tolist()[:1])
    stacked = _stacked("label", values)
    return stacked.to(torch.long if is_whole else torch.float)


def _stacked(name: str, values: list[Any]) -> torch.Tensor:
    try:
        if isinstance(values[0], torch.Tensor):
            return torch.stack(values)
        if isinstance(values[0], np.ndarray):
            return torch.from_numpy(np.stack(values))
        return torch.tensor(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(
            f"The rows of a batch must have numbers of the same shape in column {name!r}.",
            received=error,
            fix='Pad them when they are tokenized (padding="max_length", truncation=True), make '
            "batches with a DataLoader whose collate_fn pads, or remove the column.",
        ) from error
