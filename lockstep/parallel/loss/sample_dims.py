"""The dim of a tensor's samples, and where a view or a transposition moves it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Later:
    """Samples along a later dim than the first.

    Attributes:
        sizes: of the dims up to and including the samples'.
        is_flat: these dims are flattened into one, in which the samples repeat.
    """

    sizes: tuple[int, ...]
    is_flat: bool = False

    @property
    def num_dims(self) -> int:
        """Number of dims up to and including the samples'."""
        return 1 if self.is_flat else len(self.sizes)

    def after(self, name: str, args: Sequence[Any], before: Any, result: Any) -> "Later | None":
        """The dims after a view that flattens these and leaves the others; None for other views."""
        num_rows = math.prod(self.sizes)
        flattens = name == "flatten" or (bool(args) and args[0] in (-1, (-1,)))
        flattens |= bool(args) and isinstance(args[0], tuple | list) and args[0][0] == -1
        rest = before.shape[self.num_dims :]
        return Later(self.sizes, True) if flattens and result.shape == (num_rows, *rest) else None


def is_in_order(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    source: torch.Tensor,
    result: torch.Tensor,
    *,
    num_samples: int,
    has_size: bool,
) -> bool:
    """True if a view keeps the rows of each sample together and in order, for any batch size.

    Args:
        name: of the operation.
        args: without the tensor.
        kwargs: of the operation.
        source: the tensor.
        result: the view.
        num_samples: in ``source``.
        has_size: the loss function has read a size, so numbers in ``args`` may depend on it.
    """
    if len(result) % num_samples:
        return False
    if name == "flatten":
        return True
    if name in ("squeeze", "unsqueeze", "unflatten"):
        num_dims = source.dim() + (name == "unsqueeze")
        dims = dims_of(args[:1], kwargs, num_dims)
        return (num_samples > 1 and name == "squeeze" and not dims) or (
            bool(dims) and 0 not in dims
        )
    shape = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args
    if kwargs or not shape or not all(type(each) is int for each in shape):
        return False
    if shape[0] == -1:
        return True
    if -1 in shape:
        return num_samples > 1 and has_size and shape[0] == len(source)
    rest = result.shape[1:]
    return not rest or rest == source.shape[-len(rest) :]


def is_later_dim(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if ``size`` is called for one dim, and not for the first."""
    dims = dims_of(args[1:2], kwargs, args[0].dim())
    return bool(dims) and 0 not in dims


def dims_of(given: Sequence[Any], kwargs: Mapping[str, Any], num_dims: int) -> list[int]:
    """The given dims, counted from the first; none if they are not plain ints."""
    found = given[0] if given else kwargs.get("dim", kwargs.get("axis"))
    dims: list[Any] = list(found) if isinstance(found, tuple | list) else [found]
    if not all(type(dim) is int for dim in dims):
        return []
    return [dim % max(num_dims, 1) for dim in dims]


def is_narrower(tensor: torch.Tensor, result: torch.Tensor, num_dims: int) -> bool:
    """True if a constant is the same for all samples, which are along the last of ``num_dims``."""
    missing = result.dim() - tensor.dim()
    return missing >= num_dims or (missing >= 0 and tensor.shape[num_dims - 1 - missing] == 1)


def takes_all(index: Any, num_dims: int) -> bool:
    """True if an index takes the same part of every sample."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(one is None or one is ... or type(one) in (int, slice) for one in parts):
        return False
    if parts and parts[0] is ...:
        return sum(one is not None for one in parts[1:]) < num_dims and parts.count(...) == 1
    return bool(parts) and parts[0] == slice(None)


def keeps_first(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], num_dims: int) -> bool:
    """True if a transposition leaves the first dim in place."""
    dims = dims_of([args], kwargs, num_dims) if args and type(args[0]) is int else []
    if kwargs or not dims:
        return False
    return dims[0] == 0 if name == "permute" else 0 not in dims


def new_place_of_first(name: str, args: Sequence[Any], num_dims: int) -> int:
    """The dim to which an operation moves the first one; 0 if it does not, or is not known to."""
    dims = dims_of([args], {}, num_dims) if all(type(one) is int for one in args) else []
    if name == "permute" and 0 in dims:
        return dims.index(0)
    if len(dims) != 2:
        return 0
    is_swapped = name in ("transpose", "swapaxes") and 0 in dims
    return max(dims) if is_swapped or (name == "movedim" and dims[0] == 0) else 0
