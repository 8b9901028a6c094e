"""Data of Keras models with samples along another dim than the first.

Lockstep keeps samples along the first dim. The dim is moved there when data is adapted, for arrays
before Keras gets them and for streams batch by batch. It is moved back where the model is called
(``KerasModel``), and in the outputs that ``predict`` returns. Losses, metrics and sample weights
are Keras's own, and get samples first. Moving a dim makes a view, no copy.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

from lockstep.data.batch_dims import SAMPLES_FIRST, BatchDims
from lockstep.data.trees import Tree, tensors_of
from lockstep.errors import DataError, ModelError, OptionError


@dataclass(frozen=True)
class Layout:
    """Moves the dim of samples to the front, and back.

    Attributes:
        dims: where the samples are.
    """

    dims: BatchDims = SAMPLES_FIRST

    def __bool__(self) -> bool:
        """Whether any dim must be moved."""
        return bool(self.dims)

    # --- data ------------------------------------------------------------------------------------

    def arrays(self, x: Any, y: Any = None) -> tuple[Any, Any]:
        """Inputs and targets with samples first; streams are returned as they are."""
        if not self or not can_convert_arrays((x, y)):
            return x, y
        return self._rows(x, y)

    def batch(self, element: Any) -> Any:
        """A batch of a stream with samples first."""
        if not self:
            return element
        x, y, *weights = unpack_x_y_sample_weight(element)
        return (*self._rows(x, y), *weights)

    def _rows(self, x: Any, y: Any) -> tuple[Any, Any]:
        return _turned(x, self.dims.inputs, _to_rows), _turned(y, self.dims.targets, _to_rows)

    # --- the model -------------------------------------------------------------------------------

    def as_model(self, iterator: Any) -> Iterator[Any]:
        """The first batch of Keras's iterator as the model takes it, to build the model."""
        is_turned = type(iterator.data_adapter) is ArrayDataAdapter
        for start, end, batches in iterator:
            x, y, _ = unpack_x_y_sample_weight(next(iter(batches)))
            if is_turned:
                x, y = self.inputs(x), _turned(y, self.dims.targets, _from_rows)
            yield start, end, [(x, y)]

    def inputs(self, inputs: Tree) -> Tree:
        """As the model takes them."""
        return _turned(inputs, self.dims.inputs, _from_rows) if self else inputs

    def outputs(self, outputs: Tree) -> Tree:
        """As the model returns them."""
        return _turned(outputs, self.dims.outputs, _from_rows) if self else outputs

    def output_rows(self, outputs: Tree, inputs: Tree) -> Tree:
        """The model's outputs with samples first, as many as in ``inputs``.

        Raises:
            ModelError: samples are not where ``batch_dim`` says.
        """
        if not self:
            return outputs
        rows = _turned(outputs, self.dims.outputs, _to_rows)
        count = len(next(tensors_of(inputs)))
        for one in tensors_of(rows):
            if len(one) != count:
                raise ModelError(
                    f"The model's outputs must have their {count} samples where `batch_dim` says.",
                    received=f"{len(one)} along dim {self.dims.outputs}",
                    fix="Say where they are: scope(batch_dim={'inputs': ..., 'targets': ..., "
                    "'outputs': 0}).",
                )
        return rows


def layout_of(batch_dim: Any) -> Layout:
    """The layout for a user's ``batch_dim``: see ``Strategy.scope``.

    Raises:
        OptionError: it is invalid, or there are constants among the inputs.
    """
    dims = BatchDims.of(batch_dim)
    if not all(map(_has_no_constants, (dims.inputs, dims.targets, dims.outputs))):
        raise OptionError(
            "All inputs, targets and outputs of a Keras model must have a dim of samples.",
            received=f"batch_dim={batch_dim!r}",
            fix="Keep data without samples in the model, as a weight or an attribute.",
        )
    return Layout(dims)


def _has_no_constants(dims: Any) -> bool:
    if isinstance(dims, Mapping | tuple | list):
        parts = dims.values() if isinstance(dims, Mapping) else dims
        return all(map(_has_no_constants, parts))
    return dims is not None


def _turned(tree: Tree, dims: Any, turn: Callable[[Any, int], Any]) -> Tree:
    """A structure as Keras has them, with the dim of every array moved."""
    if not isinstance(dims, Mapping | tuple | list):
        return keras.tree.map_structure(lambda one: None if one is None else turn(one, dims), tree)
    if isinstance(dims, Mapping) and isinstance(tree, Mapping) and dims.keys() <= tree.keys():
        return {name: _turned(one, dims.get(name, 0), turn) for name, one in tree.items()}
    if isinstance(dims, tuple | list) and isinstance(tree, tuple | list) and len(dims) == len(tree):
        return type(tree)(_turned(one, dim, turn) for one, dim in zip(tree, dims, strict=True))
    raise DataError(
        "`batch_dim` must name the dim of samples of every part.",
        received=f"batch_dim={dims!r} for a {type(tree).__name__}",
        fix="Give one for each: a dict for a dict of inputs, a list for a list.",
    )


def _to_rows(array: Any, dim: int) -> Any:
    return _moved(array, dim, 0)


def _from_rows(array: Any, dim: int) -> Any:
    return _moved(array, 0, dim)


def _moved(array: Any, start: int, stop: int) -> Any:
    """A view with a dim moved; of arrays with fewer dims (a number per sample), the last."""
    if not isinstance(array, torch.Tensor):
        array = np.asarray(array)
    last = array.ndim - 1
    if last < 1:
        return array
    move = torch.movedim if isinstance(array, torch.Tensor) else np.moveaxis
    return move(array, min(start, last), min(stop, last))
