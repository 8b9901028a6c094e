"""Arrays of numpy, and what becomes one, as tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lockstep.data.map_style.mapped_files import remember_file, shared_with
from lockstep.errors import DataError
from lockstep.formatting import first_few


def as_array(value: Any, name: str) -> np.ndarray[Any, Any]:
    """Rows as an array.

    Raises:
        DataError: they have different shapes.
    """
    try:
        return np.asarray(value)
    except ValueError as error:
        raise DataError(
            f"The rows of `{name}` must form an array.",
            received=error,
            fix="Give all rows the same shape, or pass a map-style Dataset.",
        ) from error


def from_numpy(array: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    """A tensor of an array, in the same memory if torch can read it there.

    Raises:
        DataError: torch has no such numbers.
    """
    usable = array.dtype.isnative and all(
        stride >= 0 and stride % array.itemsize == 0 for stride in array.strides
    )
    if not usable:  # reversed, a field of records, of another byte order: torch needs a copy
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    try:
        return remember_file(shared_with(array), array)
    except TypeError as error:
        if array.dtype.kind in "SU":
            raise holds_texts(name, array.ravel().tolist()) from error
        raise DataError(
            f"`{name}` holds an array that torch cannot read.",
            received=f"dtype {array.dtype}, shape {array.shape}",
            fix="Convert it to numbers, for example with .astype('float32').",
        ) from error


def holds_texts(name: str, texts: Sequence[object]) -> DataError:
    """The error of arrays, or of a stream's batches, with texts among them."""
    return DataError(
        f"`{name}` holds texts, of which no tensor can be made.",
        received=first_few([repr(text) for text in texts]),
        fix="Leave them out of the samples, or in the collate_fn of a DataLoader. Or pass a "
        "map-style Dataset: the model gets lists of texts.",
    )
