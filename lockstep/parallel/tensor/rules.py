"""Rules for operations that work on each part of a divided tensor by itself.

Elementwise functions; functions along dims that are not divided; products and attention with heads
that are divided. Changes of shape: ``shape_rules``.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.parallel.tensor.divided_tensor import (
    DividedTensor,
    Owner,
    divided_in,
    empty_like_whole,
    named,
    register,
)
from lockstep.parallel.tensor.product_rules import _matmul as multiply_by_weight
from lockstep.parallel.tensor.transfers import cut_own, spread
from lockstep.plan.splits import Split

_Arguments = tuple[Any, ...]
_Options = dict[str, Any]


# --- elementwise ---------------------------------------------------------------------------------


def _elementwise(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """Functions of elements at the same place; whole tensors are cut to fit."""
    arguments = [*args, *kwargs.values()]
    lead = next((one for one in arguments if isinstance(one, DividedTensor)), None)
    if lead is None or "out" in kwargs:
        return NotImplemented
    tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
    shape = torch.broadcast_shapes(*(tuple(one.shape) for one in tensors))
    place = lead.division.dim - lead.dim()  # from the end
    if (
        not all(_is_aligned(one, lead, place) for one in tensors)
        or shape[place] != lead.division.size
    ):
        return NotImplemented
    is_in_place = _is_in_place(func, kwargs)
    if is_in_place and not (args[0] is lead and not lead.aliases.has_copies):
        return NotImplemented
    split = lead.division.at(place + len(shape))
    columns = [_parts(owner, one, split.at(place)) for one in arguments]
    names = list(kwargs)
    parts = []
    for each in zip(*columns, strict=True):
        options = dict(zip(names, each[len(args) :], strict=True))
        parts.append(func(*each[: len(args)], **options))
    return args[0] if is_in_place else lead.like(parts, split)


def _is_in_place(func: Any, kwargs: _Options) -> bool:
    name = getattr(func, "__name__", "")
    is_named = name.endswith("_") and not name.endswith("__")
    return is_named or bool(kwargs.get("inplace")) or name in _IN_PLACE_OPERATORS


_IN_PLACE_OPERATORS = ("__iadd__", "__isub__", "__imul__", "__itruediv__")


def _is_aligned(tensor: torch.Tensor, lead: DividedTensor, place: int) -> bool:
    """True if a tensor is divided like another, counted from the last dim, or whole."""
    if isinstance(tensor, DividedTensor):
        return tensor.division.dim - tensor.dim() == place and tensor.division.is_like(
            lead.division
        )
    return True


def _parts(owner: Owner, argument: Any, split: Split) -> Sequence[Any]:
    """An argument for each of this rank's shards; ``split.dim`` counts from the end."""
    if isinstance(argument, DividedTensor):
        return argument.parts
    if not isinstance(argument, torch.Tensor):
        return [argument for _ in owner.exchange.own]
    if argument.dim() < -split.dim or argument.shape[split.dim] == 1:
        return spread(owner.exchange, argument)
    return cut_own(owner.exchange, argument, split.at(split.dim % argument.dim()))


def _activation(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """A function of ``torch.nn.functional`` with an option ``inplace``, maybe by position."""
    if len(args) > 1 and args[-1] is True:
        return NotImplemented
    return _elementwise(owner, func, args, kwargs)


def _dropout(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """Dropout with the whole tensor's random numbers, cut."""
    options = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
    input, p = options["input"], options.get("p", 0.5)
    if not isinstance(input, DividedTensor) or options.get("inplace") or not 0 <= p < 1:
        return NotImplemented
    if not options.get("training", True) or p == 0:
        return input.like(input.parts, is_view=True)
    if input.device.type != "cpu":
        return NotImplemented
    noise = empty_like_whole(input).bernoulli_(1 - p).div_(1 - p)
    cuts = cut_own(owner.exchange, noise, input.division)
    return input.like([part * own for part, own in zip(input.parts, cuts, strict=True)])


# --- along other dims ----------------------------------------------------------------------------


def _along(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """Functions along one dim that keep the shape; not if it is the divided one."""
    input, *rest = args
    dim = kwargs.get("dim", rest[0] if rest else None)
    if not isinstance(input, DividedTensor) or not isinstance(dim, int) or any(divided_in(rest)):
        return NotImplemented
    if dim % input.dim() == input.division.dim:
        return NotImplemented
    return input.like([func(part, *rest, **kwargs) for part in input.parts])


def _reduction(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """Sums and means along dims that are not divided."""
    input, *rest = args
    dims = kwargs.get("dim", rest[0] if rest else None)
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(input, DividedTensor) or not isinstance(dims, list | tuple) or not dims:
        return NotImplemented
    reduced = {dim % input.dim() for dim in dims}
    if input.division.dim in reduced or len(rest) > 2:
        return NotImplemented
    keeps = kwargs.get("keepdim", rest[1] if len(rest) > 1 else False)
    before = 0 if keeps else sum(dim < input.division.dim for dim in reduced)
    split = input.division.at(input.division.dim - before)
    return input.like([func(part, *rest, **kwargs) for part in input.parts], split)


_NORM = ("input", "normalized_shape", "weight", "bias")


def _norm(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """Norms over last dims, none of which is divided."""
    options = {**dict(zip(_NORM, args, strict=False)), **kwargs}
    input, shape = options.pop("input"), options.pop("normalized_shape")
    if len(args) > len(_NORM) or not isinstance(input, DividedTensor):
        return NotImplemented
    if input.division.dim >= input.dim() - len(shape) or any(divided_in(options)):
        return NotImplemented
    weights = {
        name: spread(owner.exchange, options.pop(name))
        for name in ("weight", "bias")
        if options.get(name) is not None
    }
    return input.like(
        [
            func(part, shape, **{name: own[place] for name, own in weights.items()}, **options)
            for place, part in enumerate(input.parts)
        ]
    )


# --- products ------------------------------------------------------------------------------------


def _matmul(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """Products of matrices by heads, or with a weight."""
    if kwargs or len(args) != 2:
        return NotImplemented
    one, other = args
    if isinstance(one, DividedTensor) and isinstance(other, DividedTensor) and _are_batched(args):
        pairs = zip(one.parts, other.parts, strict=True)
        return one.like([func(first, second) for first, second in pairs])
    return multiply_by_weight(owner, func, args, kwargs)


def _are_batched(tensors: Sequence[DividedTensor]) -> bool:
    """True if tensors have as many dims, and are divided alike along one before the last two."""
    first = tensors[0]
    return first.division.dim < first.dim() - 2 and all(
        one.dim() == first.dim()
        and one.division.dim == first.division.dim
        and one.division.is_like(first.division)
        for one in tensors
    )


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _attention(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """Attention by heads; dropout in it draws numbers for all heads at once."""
    options = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
    query, key, value = (options.pop(name) for name in _ATTENTION[:3])
    mask = options.pop("attn_mask", None)
    tensors = (query, key, value)
    if not all(isinstance(one, DividedTensor) for one in tensors) or options.get("dropout_p"):
        return NotImplemented
    if not _are_batched(tensors) or options.get("enable_gqa") or isinstance(mask, DividedTensor):
        return NotImplemented
    split = query.division.at(query.division.dim - query.dim())
    masks = _parts(owner, mask, split)
    parts = [
        func(*each, attn_mask=own, **options)
        for *each, own in zip(query.parts, key.parts, value.parts, masks, strict=True)
    ]
    return query.like(parts)


# --- the table -----------------------------------------------------------------------------------


_ELEMENTWISE = """
abs add cos div divide erf exp log log1p mul multiply neg pow reciprocal relu rsqrt sigmoid sin sqrt
square sub subtract tanh true_divide maximum minimum clamp where masked_fill lerp addcmul addcdiv
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__ __pow__ rsub
eq ne lt le gt ge logical_not logical_and logical_or clone
add_ sub_ mul_ div_ relu_ tanh_ sigmoid_ masked_fill_ __iadd__ __isub__ __imul__ __itruediv__
"""
_ACTIVATIONS = """
celu elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu sigmoid silu
softplus softsign tanh
"""


register(_elementwise, named(_ELEMENTWISE, torch, torch.Tensor))
register(_activation, named(_ACTIVATIONS, F))
register(_dropout, [F.dropout])
register(_along, named("softmax log_softmax cumsum", torch, torch.Tensor, F))
register(_reduction, named("sum mean amax amin", torch, torch.Tensor))
register(_norm, named("layer_norm rms_norm", F))
register(_matmul, named("matmul bmm mm __matmul__", torch, torch.Tensor))
register(_attention, [F.scaled_dot_product_attention])
