"""Map-style datasets: their recognition, and reading samples from them.

An exception of a dataset becomes an error that names the sample, wherever it is read: in the
script, in a helper, in a thread or process that reads ahead.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.errors import BadRecordError, LockstepError, Problems
from lockstep.formatting import first_few

_NOT_MAP_STYLE = (
    *(DataLoader, IterableDataset, torch.Tensor, np.ndarray),
    *(str, bytes, dict, list, tuple, type),
)


def check_map_style(dataset: object, function: str, problems: Problems) -> None:
    """Note a problem with data that has no samples by index, or is in memory already."""
    has_both = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if has_both and not isinstance(dataset, _NOT_MAP_STYLE):
        return
    fix = "Give it an object with __getitem__ and __len__."
    if isinstance(dataset, DataLoader):
        fix = f"Wrap its dataset: DataLoader({function}(dataset), ...)."
    elif isinstance(dataset, torch.Tensor | np.ndarray | list | tuple | dict):
        fix = "Arrays are in memory already: pass them to fit directly."
    problems.add(
        f"lockstep.data.{function} needs a map-style dataset.",
        received=type(dataset).__name__,
        fix=fix,
    )


def read_items(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """The samples at these indices, all at once where the dataset has ``__getitems__``.

    Raises:
        BadRecordError: the dataset raises an exception, which is the cause.
    """
    if hasattr(dataset, "__getitems__"):
        with _named(dataset, indices):
            return list(dataset.__getitems__(list(indices)))
    items = []
    for index in indices:
        with _named(dataset, [index]):
            items.append(dataset[index])
    return items


def name_of(dataset: Any) -> str:
    """The name of a dataset's class; for a wrapper of Lockstep's, of the dataset within."""
    while type(dataset).__module__.startswith("lockstep.") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return type(dataset).__name__


@contextmanager
def _named(dataset: Any, indices: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except LockstepError:  # from an inner dataset: it names the sample already
        raise
    except Exception as error:
        for index in indices if len(indices) > 1 else ():
            read_items(dataset, [index])  # the bad one raises here
        which = f"Sample {indices[0]}" if len(indices) == 1 else f"One of {first_few(indices)}"
        raise BadRecordError(
            f"{which} of the dataset ({name_of(dataset)}) cannot be read.",
            received=f"{type(error).__name__}: {error}",
            fix=f"Try dataset[{indices[0]}] by itself; leave it out, or "
            'pass fit(on_bad_record="skip").',
            index=indices[0],
        ) from error
