"""Tensors with samples along another dim than the first, such as data with time first.

Lockstep keeps samples along the first dim. The dim of the user's data is moved there when the data
is adapted, and moved back for the user's code: the model, the loss, the metrics, a ``train_step``,
and the results of ``predict``. Moving a dim makes a view, no copy.

An input without samples (the edges of a graph, a mask over time) is a ``Constant``: every batch
gets it unchanged.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from lockstep.data.iterable.streams import Stream
from lockstep.data.map_style.sources import Constant, Source
from lockstep.data.own_loss import OwnLoss
from lockstep.data.trees import Tree, map_leaves, map_tensors, tensors_of
from lockstep.errors import DataError, ModelError, OptionError

# A dim; None for a constant; or several of these by position or by name.
Dims = Any

_PARTS = ("inputs", "targets", "outputs")


@dataclass(frozen=True, kw_only=True)
class BatchDims:
    """Where the samples are.

    Attributes:
        inputs: in the model's inputs.
        targets: in the targets.
        outputs: in the model's outputs.
    """

    inputs: Dims = 0
    targets: Dims = 0
    outputs: Dims = 0

    @classmethod
    def of(cls, batch_dim: Any) -> "BatchDims":
        """From a user's ``batch_dim``: see ``Trainer``.

        Raises:
            OptionError: it is invalid.
        """
        if isinstance(batch_dim, BatchDims):
            return batch_dim
        parts = batch_dim if isinstance(batch_dim, Mapping) else dict.fromkeys(_PARTS, batch_dim)
        is_fit = set(parts) <= set(_PARTS) and all(map(_is_dims, parts.values()))
        if not is_fit or (not isinstance(batch_dim, Mapping) and batch_dim is None):
            raise OptionError(
                "`batch_dim` must be a dim, or say where samples are in each part.",
                received=repr(batch_dim),
                fix="Pass batch_dim=1, or batch_dim={'inputs': {'x': 1, 'mask': None}, "
                "'targets': 1, 'outputs': 1}: None is for inputs without samples.",
            )
        return cls(**parts)

    def __bool__(self) -> bool:
        """Whether any dim must be moved."""
        return self != SAMPLES_FIRST

    # --- data ------------------------------------------------------------------------------------

    def data(self, data: Any, *, with_targets: bool) -> Any:
        """A user's data, or a batch of a stream, with samples first; Datasets are unchanged."""
        if isinstance(data, Source | Constant) or not self:
            return data
        if isinstance(data, tuple | list) and with_targets:
            first, *others = data
            targets = [_turned(each, self.targets, _to_rows) for each in others[:1]]
            return (_turned(first, self.inputs, _to_rows), *targets, *others[1:])
        is_indexed = hasattr(data, "__getitem__") and not hasattr(data, "__array__")
        if is_indexed and not isinstance(data, dict | tuple | list):
            return data
        return _turned(data, self.inputs, _to_rows)

    def stream(self, stream: Stream) -> Any:
        """A function that begins a pass of a stream, with samples first."""
        turn = partial(self.data, with_targets=True)
        return lambda: map(_without_constants, map(turn, stream.begin()))

    # --- the user's code --------------------------------------------------------------------------

    def given_inputs(self, inputs: Tree, dtype: torch.dtype | None = None) -> Tree:
        """Inputs as the model takes them; floating constants in ``dtype``, or in the others'."""
        if not self:
            return inputs
        tensors = list(tensors_of(inputs))
        found = dtype or next((one.dtype for one in tensors if one.is_floating_point()), None)

        def constant(one: Constant) -> torch.Tensor:
            value: torch.Tensor = one.value.to(tensors[0].device)
            is_cast = found is not None and value.is_floating_point()
            cast: torch.Tensor = value.to(found) if is_cast else value
            return cast

        turned = _turned(inputs, self.inputs, _from_rows)
        return map_leaves(Constant, constant, turned)

    def given_targets(self, targets: Tree) -> Tree:
        """Targets as the loss takes them."""
        return _turned(targets, self.targets, _from_rows) if self else targets

    def given_outputs(self, outputs: Tree) -> Tree:
        """Outputs as the loss takes them, and as ``predict`` returns them."""
        return _turned(outputs, self.outputs, _from_rows) if self else outputs

    def output_rows(self, outputs: Tree, inputs: Tree) -> Tree:
        """The model's outputs with samples first.

        Args:
            outputs: as the model has returned them.
            inputs: of the model, with samples first.

        Raises:
            ModelError: samples are not where ``batch_dim`` says.
        """
        if not self:
            return outputs
        num_samples = len(next(tensors_of(inputs)))

        def check(tensor: torch.Tensor, dim: int | None) -> Any:
            rows = _to_rows(tensor, dim)
            if isinstance(rows, Constant):
                return tensor
            if rows.dim() and len(rows) != num_samples:
                raise ModelError(
                    f"The model's outputs must have their {num_samples} samples along dim {dim}.",
                    received=f"shape {tuple(tensor.shape)}",
                    fix="Say where they are: batch_dim={'inputs': ..., 'targets': ..., "
                    "'outputs': 0}, None for what belongs to no sample.",
                )
            return rows

        return _turned(outputs, self.outputs, check)

    def loss(self, loss: Any) -> Any:
        """A loss, or several, that get outputs and targets in the user's layout."""
        if not self or loss is None:
            return loss
        if isinstance(loss, Mapping):
            return {key: self.loss(one) for key, one in loss.items()}
        if isinstance(loss, list | tuple):
            return [self.loss(one) for one in loss]
        if isinstance(loss, OwnLoss):
            if loss.weight is not None:
                raise OptionError(
                    "With `batch_dim`, the denominator of a model's own loss must be inferred.",
                    received="OwnLoss(weight=...)",
                    fix="Leave weight out, or pass the outputs to a loss function.",
                )
            return loss
        return TurnedLoss(loss, self)

    def steps(self, functions: Any) -> Any:
        """Training steps that get batches in the user's layout."""
        if not self or functions is None:
            return functions
        if isinstance(functions, Mapping):
            return {name: TurnedStep(one, self) for name, one in functions.items()}
        return TurnedStep(functions, self)


SAMPLES_FIRST = BatchDims()


@dataclass(frozen=True)
class TurnedLoss:
    """A loss function that gets outputs and targets in the user's layout."""

    loss: Any
    dims: BatchDims

    @property
    def __signature__(self) -> inspect.Signature:
        """The function's signature."""
        loss = self.loss
        return inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss)

    def __call__(self, output: Tree, target: Tree, **options: Any) -> Any:
        """The function's result."""
        given = self.dims.given_outputs(output), self.dims.given_targets(target)
        return self.loss(*given, **options)


@dataclass(frozen=True)
class TurnedStep:
    """A training step that gets batches in the user's layout."""

    function: Any
    dims: BatchDims

    def __call__(self, model: Any, batch: Any) -> Any:
        """The function's result."""
        dims = self.dims
        if not isinstance(batch, tuple):
            return self.function(model, dims.given_inputs(batch))
        inputs, targets, *rest = batch
        given = dims.given_inputs(inputs), dims.given_targets(targets)
        return self.function(model, (*given, *rest))


def _turned(tree: Tree, dims: Dims, turn: Callable[[Any, Any], Any]) -> Tree:
    """A tree with the dim of every tensor or array moved by ``turn``."""
    if isinstance(dims, Mapping) and isinstance(tree, Mapping):
        return {key: _turned(value, dims.get(key, 0), turn) for key, value in tree.items()}
    if isinstance(dims, tuple | list) and isinstance(tree, tuple | list):
        if len(dims) != len(tree):
            raise DataError(
                "`batch_dim` must name the dim of samples of every part.",
                received=f"{len(dims)} dims for {len(tree)} parts",
                fix="Give one for each; None for what belongs to no sample.",
            )
        return tuple(_turned(value, dim, turn) for value, dim in zip(tree, dims, strict=True))
    is_array = hasattr(tree, "__array__") and not isinstance(tree, torch.Tensor)
    if isinstance(tree, list) or is_array:
        tree = torch.as_tensor(np.asarray(tree))
    if isinstance(tree, Constant):
        return turn(tree, None)
    return map_tensors(lambda tensor: turn(tensor, dims), tree)


def _to_rows(tensor: torch.Tensor, dim: int | None) -> Any:
    if dim is None:
        return Constant(tensor)
    return tensor.movedim(_own_dim(tensor, dim), 0) if tensor.dim() else tensor


def _from_rows(tensor: Any, dim: int | None) -> Any:
    if not dim or tensor.dim() < 2:  # samples are first already, or there are none
        return tensor
    # Contiguous, as user's data and models' outputs are: losses make views of them.
    return tensor.movedim(0, _own_dim(tensor, dim)).contiguous()


def _own_dim(tensor: torch.Tensor, dim: int) -> int:
    """The dim, or the last of a tensor with fewer dims (one number per sample)."""
    return min(dim, tensor.dim() - 1)


def _is_dims(dims: Dims) -> bool:
    if isinstance(dims, Mapping):
        return all(map(_is_dims, dims.values()))
    if isinstance(dims, tuple | list):
        return all(map(_is_dims, dims))
    return dims is None or (isinstance(dims, int) and not isinstance(dims, bool) and dims >= 0)


def _without_constants(data: Any) -> Any:
    def refuse(_: Constant) -> None:
        raise DataError(
            "Batches of a stream hold samples only.",
            received="a part that belongs to no sample, by `batch_dim`",
            fix="Keep it in the model, as a buffer; or pass arrays.",
        )

    map_leaves(Constant, refuse, data)
    return data
