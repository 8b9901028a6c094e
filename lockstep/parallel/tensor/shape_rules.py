"""Rules for changes of shape that leave the divided dim of a tensor a dim of its own.

Where one would if the weight were cut elsewhere, it says so (``Owner.refine``).
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from msgspec.structs import replace

from lockstep.parallel.tensor.divided_tensor import (
    DividedTensor,
    Owner,
    has_divided,
    named,
    register,
)
from lockstep.plan.splits import Split

_Arguments = tuple[Any, ...]
_Options = dict[str, Any]


# --- shapes --------------------------------------------------------------------------------------


def _same_view(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """Functions that keep the shape, and may return the same memory."""
    input = args[0]
    if not isinstance(input, DividedTensor) or has_divided((args[1:], kwargs)):
        return NotImplemented
    if any(isinstance(one, torch.Tensor) for one in args[1:]):
        return NotImplemented
    return input.like([func(part, *args[1:], **kwargs) for part in input.parts], is_view=True)


def _cast(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """``to``: what a weight is cast to is divided like the weight."""
    if has_divided((args, kwargs)):
        return _same_view(owner, func, args, kwargs)
    cast = func(*args, **kwargs)
    owner.note_cast(args[0], cast)
    return cast


def _contiguous(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    if has_divided((args, kwargs)):
        return _same_view(owner, func, args, kwargs)
    copy = func(*args, **kwargs)
    owner.note_copy(args[0], copy)
    return copy


def _type_as(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    input, other = args
    if not isinstance(input, DividedTensor):
        return func(input, torch.empty(0, dtype=other.dtype, device=other.device))
    return input.like([part.to(other.device, other.dtype) for part in input.parts], is_view=True)


def _expand(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """``expand`` along other dims than the divided one."""
    input, *sizes = args
    sizes = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    if kwargs or not isinstance(input, DividedTensor):
        return NotImplemented
    split = input.division.at(input.division.dim + len(sizes) - input.dim())
    sizes[split.dim] = -1
    return input.like([func(part, sizes) for part in input.parts], split, is_view=True)


def _view(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """``view``, ``reshape`` and relatives: see ``_reshaped``."""
    input, *sizes = args
    if kwargs or not isinstance(input, DividedTensor) or has_divided(sizes):
        return NotImplemented
    shape = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    if not all(isinstance(size, int) for size in shape):
        return NotImplemented
    return _reshaped(owner, func, input, list(shape))


def _flatten(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    options = {**dict(zip(("input", "start_dim", "end_dim"), args, strict=False)), **kwargs}
    input = options["input"]
    if not isinstance(input, DividedTensor):
        return NotImplemented
    start, stop = options.get("start_dim", 0), options.get("end_dim", -1)
    start, stop = start % input.dim(), stop % input.dim() + 1
    sizes = list(input.shape)
    shape = [*sizes[:start], math.prod(sizes[start:stop]), *sizes[stop:]]
    return _reshaped(owner, torch.Tensor.reshape, input, shape)


def _unflatten(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    if kwargs or len(args) != 3 or not isinstance(args[0], DividedTensor):
        return NotImplemented
    input, dim, sizes = args
    shape = list(input.shape)
    if not isinstance(dim, int):
        return NotImplemented
    dim %= len(shape)
    return _reshaped(owner, torch.Tensor.reshape, input, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def _reshaped(owner: Owner, func: Any, input: DividedTensor, shape: list[int]) -> Any:
    """A new shape, in which the divided dim is cut into several, or joined with those after it."""
    if -1 in shape:
        known = math.prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = input.numel() // max(known, 1)
    found = _divided_dim_of(owner, input, shape)
    if found is None:
        return NotImplemented
    split, span = found
    shapes = [
        [*shape[: split.dim], split.size_of(shard), *shape[split.dim + 1 :]]
        for shard in owner.exchange.own
    ]
    try:
        parts = [func(part, own) for part, own in zip(input.parts, shapes, strict=True)]
    except RuntimeError:  # strides: torch decides on the whole tensor
        return NotImplemented
    return input.like(parts, split, span, is_view=True)


def _divided_dim_of(
    owner: Owner, input: DividedTensor, shape: Sequence[int]
) -> tuple[Split, int] | None:
    """The divided dim of a tensor in a new shape, and its ``span``; None if it has none."""
    split, before = input.division, math.prod(input.shape[: input.division.dim])
    if math.prod(shape) != input.numel():
        return None
    products = list(accumulate(shape, lambda one, other: one * other, initial=1))
    starts = [dim for dim, product in enumerate(products[:-1]) if product == before]
    if not starts and len(split.sizes) == 1:
        return _joined_with_dims_before(input, shape, products)
    if not starts or split.size == 1:
        return None
    start = next((dim for dim in starts if shape[dim] != 1), starts[-1])
    if shape[start] % split.size == 0:
        times = shape[start] // split.size  # joined with dims after it
        sizes = tuple(size * times for size in split.sizes)
        joined = replace(split, dim=start, sizes=sizes, unit=split.unit * times)
        return joined, 0 if input.span % times else input.span // times
    if split.size % shape[start]:
        return None
    if len(split.sizes) == shape[start] and len({*split.sizes}) == 1:
        start += 1  # the blocks are a dim of their own
        size = split.sizes[0]
    else:
        size = split.size
    return _cut_further(owner, input, shape, start, size)


def _joined_with_dims_before(
    input: DividedTensor, shape: Sequence[int], products: Sequence[int]
) -> tuple[Split, int] | None:
    """The divided dim joined with dims before it, each of whose places has a block; else None."""
    split, dims = input.division, input.shape
    for first in range(split.dim):
        start, size = math.prod(dims[:first]), math.prod(dims[first : split.dim + 1])
        found = [dim for dim, one in enumerate(shape) if (products[dim], one) == (start, size)]
        if found:
            blocks = (split.size,) * (size // split.size)
            return replace(split, dim=found[0], sizes=blocks), input.span
    return None


def _cut_further(
    owner: Owner, input: DividedTensor, shape: Sequence[int], dim: int, size: int
) -> tuple[Split, int] | None:
    """The split of the first of the dims into which blocks of a size are cut."""
    split = input.division
    if dim == len(shape) or size % shape[dim] or (size == split.size and len(split.sizes) > 1):
        return None
    times = size // shape[dim]
    if split.unit % times:
        sizes = [one * input.span for one in split.sizes]
        owner.refine(input, sizes, math.lcm(split.unit, times) * input.span)
        return None
    unit = max(split.unit // times, 1)
    return replace(split, dim=dim, sizes=(shape[dim],), unit=unit), input.span * times


def _reordered(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """The dims in another order, which sizes without memory show."""
    input, *rest = args
    if not isinstance(input, DividedTensor):
        return NotImplemented
    numbered = torch.empty(*range(1, input.dim() + 1), device="meta")
    order = [size - 1 for size in func(numbered, *rest, **kwargs).shape]
    split = input.division.at(order.index(input.division.dim))
    return input.like([part.permute(order) for part in input.parts], split, is_view=True)


def _unsqueeze(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    options = {**dict(zip(("input", "dim"), args, strict=False)), **kwargs}
    input, dim = options["input"], options["dim"]
    if not (isinstance(input, DividedTensor) and isinstance(dim, int)):
        return NotImplemented
    dim %= input.dim() + 1
    split = input.division.at(input.division.dim + (dim <= input.division.dim))
    return input.like([part.unsqueeze(dim) for part in input.parts], split, is_view=True)


# --- pieces --------------------------------------------------------------------------------------


def _pieces(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """``chunk`` and ``split``: of a divided dim only if its blocks are these pieces."""
    if len(args) < 2 or not isinstance(args[0], DividedTensor):
        return NotImplemented
    input, count, *rest = args
    dim = kwargs.get("dim", rest[0] if rest else 0)
    dim %= input.dim()
    if dim != input.division.dim:
        columns = [func(part, count, dim) for part in input.parts]
        return tuple(input.like(parts, is_view=True) for parts in zip(*columns, strict=True))
    whole = torch.empty(input.division.size, device="meta")
    return _blocks(owner, input, [len(one) for one in func(whole, count)])


def _unbind(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    input, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not (isinstance(input, DividedTensor) and isinstance(dim, int)):
        return NotImplemented
    dim %= input.dim()
    if dim == input.division.dim:
        _ask_for_blocks(owner, input, [1] * input.division.size)
        return NotImplemented
    split = input.division.at(input.division.dim - (dim < input.division.dim))
    columns = [part.unbind(dim) for part in input.parts]
    return tuple(input.like(parts, split, is_view=True) for parts in zip(*columns, strict=True))


def _blocks(owner: Owner, input: DividedTensor, sizes: Sequence[int]) -> Any:
    """The blocks of the divided dim as tensors, if they have these sizes."""
    split = input.division
    if tuple(sizes) != split.sizes:
        _ask_for_blocks(owner, input, sizes)
        return NotImplemented
    columns = []
    for shard, part in zip(owner.exchange.own, input.parts, strict=True):
        own = [stop - start for start, stop in split.cuts[shard]]
        columns.append(part.split(own, split.dim))
    splits = [replace(split, sizes=(size,)) for size in sizes]
    return tuple(
        input.like(parts, own, is_view=True)
        for parts, own in zip(zip(*columns, strict=True), splits, strict=True)
    )


def _ask_for_blocks(owner: Owner, input: DividedTensor, sizes: Sequence[int]) -> None:
    if len(input.division.sizes) == 1:
        owner.refine(input, [size * input.span for size in sizes], 1)


def _item(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """``x[...]`` with slices, numbers, None and ``...`` that take the divided dim whole."""
    input, index = args
    index = index if isinstance(index, tuple) else (index,)
    plain = (slice, int, type(None), type(Ellipsis))
    if not isinstance(input, DividedTensor) or not all(isinstance(one, plain) for one in index):
        return NotImplemented
    if any(isinstance(one, bool) for one in index):
        return NotImplemented
    dims = _dims_of(index, input.dim())
    own = dims.get(input.division.dim)
    if own is None or index[own] == slice(None):
        split = input.division.at(_dim_after(index, dims, input.division.dim))
        return input.like([part[index] for part in input.parts], split, is_view=True)
    chosen = index[own]
    if isinstance(chosen, int):
        _ask_for_blocks(owner, input, [1] * input.division.size)
        return NotImplemented
    return _slice_of_blocks(owner, input, index, own)


def _slice_of_blocks(owner: Owner, input: DividedTensor, index: Any, own: int) -> Any:
    """A slice of the divided dim, if it is one of the blocks."""
    size = input.division.size
    start, stop, step = index[own].indices(size)
    if step > 1 and start < step and stop == size and size % step == 0:
        return _every(owner, input, index, own, step)
    edges = list(accumulate(input.division.sizes, initial=0))
    if step != 1 or start not in edges or stop not in edges:
        if step == 1 and 0 <= start < stop:
            sizes = [start, stop - start, size - stop]
            _ask_for_blocks(owner, input, _equal_blocks([one for one in sizes if one], size))
        return NotImplemented
    if edges.index(stop) != edges.index(start) + 1:
        return NotImplemented
    blocks = _blocks(owner, input, input.division.sizes)
    rest = tuple(slice(None) if place == own else one for place, one in enumerate(index))
    return _item(owner, None, (blocks[edges.index(start)], rest), {})


def _every(owner: Owner, input: DividedTensor, index: Any, own: int, step: int) -> Any:
    """Each ``step``-th element of the divided dim, if they are as many of each shard."""
    split = input.division
    if split.unit % step:
        sizes = [size * input.span for size in split.sizes]
        owner.refine(input, sizes, math.lcm(split.unit, step) * input.span)
        return NotImplemented
    dim = _dim_after(index, _dims_of(index, input.dim()), split.dim)
    kept = tuple(size // step for size in split.sizes)
    taken = replace(split, dim=dim, sizes=kept, unit=split.unit // step)
    return input.like([part[index] for part in input.parts], taken, input.span * step, is_view=True)


def _equal_blocks(sizes: Sequence[int], size: int) -> list[int]:
    """Blocks of equal size whose edges include those of these; the sizes if there are none."""
    block = math.gcd(*sizes)
    return [block] * (size // block) if size // block <= 4 else list(sizes)


def _dims_of(index: Sequence[Any], num_dims: int) -> dict[int, int]:
    """By dim of a tensor that an index names, the place in the index."""
    named = [place for place, one in enumerate(index) if one is not None and one is not ...]
    if ... not in index:
        return dict(enumerate(named))
    before = [place for place in named if place < index.index(...)]
    after = named[len(before) :]
    return {
        **dict(enumerate(before)),
        **{num_dims - len(after) + number: place for number, place in enumerate(after)},
    }


def _dim_after(index: Sequence[Any], dims: dict[int, int], dim: int) -> int:
    """A dim's number in the result of an index."""
    place = dims.get(dim)
    if place is None:  # under the dots, or after the index
        dots = index.index(...) if ... in index else len(index)
        new = sum(one is None for one in index[:dots])
    else:
        new = sum(one is None for one in index[:place])
    gone = sum(
        isinstance(index[one], int) and index[one] is not None
        for other, one in dims.items()
        if other < dim
    )
    return dim + new - gone


def _joined(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """``cat`` and ``stack`` of tensors that are divided alike, along another dim."""
    options = {**dict(zip(("tensors", "dim"), args, strict=False)), **kwargs}
    tensors, dim = options["tensors"], options.get("dim", 0)
    if func is not torch.stack:  # torch ignores empty vectors
        tensors = [one for one in tensors if tuple(one.shape) != (0,)]
    if not tensors or not all(isinstance(one, DividedTensor) for one in tensors):
        return NotImplemented
    first = tensors[0]
    alike = all(
        one.division.dim == first.division.dim and one.division.is_like(first.division)
        for one in tensors
    )
    is_stack = func is torch.stack
    dim %= first.dim() + is_stack
    if not alike or (dim == first.division.dim and not is_stack and len(tensors) > 1):
        return NotImplemented
    split = first.division.at(first.division.dim + (is_stack and dim <= first.division.dim))
    columns = zip(*(one.parts for one in tensors), strict=True)
    return first.like([func(list(parts), dim) for parts in columns], split)


register(_same_view, named("float double half bfloat16 detach", torch.Tensor))
register(_same_view, [torch.detach])
register(_cast, [torch.Tensor.to])
register(_contiguous, [torch.Tensor.contiguous])
register(_type_as, [torch.Tensor.type_as])
register(_expand, [torch.Tensor.expand])
register(_view, [torch.Tensor.view, torch.Tensor.reshape, torch.reshape])
register(_flatten, [torch.flatten, torch.Tensor.flatten])
register(_unflatten, [torch.unflatten, torch.Tensor.unflatten])
_REORDERED = "transpose swapaxes swapdims permute movedim moveaxis"
register(_reordered, named(_REORDERED, torch, torch.Tensor))
register(_reordered, [vars(torch._C.TensorBase)["mT"].__get__])
register(_unsqueeze, [torch.unsqueeze, torch.Tensor.unsqueeze])
register(_pieces, named("chunk split", torch, torch.Tensor))
register(_unbind, [torch.unbind, torch.Tensor.unbind])
register(_item, [torch.Tensor.__getitem__])
register(_joined, [torch.cat, torch.concat, torch.stack])
