"""Rules for operations that work on each part of a divided tensor by itself.

Elementwise functions; functions along dims that are not divided; products of heads, of experts, and
of times. Changes of shape: ``shape_rules``. Attention: ``attention_rules``.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.parallel.tensor.divided_tensor import (
    DividedTensor,
    Owner,
    Use,
    base_of,
    empty_like_whole,
    has_divided,
    named,
    register,
    whole_of,
)
from lockstep.parallel.tensor.product_rules import Weight, each_whole, is_plain_view, weight_of
from lockstep.parallel.tensor.product_rules import _matmul as multiply_by_weight
from lockstep.parallel.tensor.transfers import cut_own, gather, spread, total
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
    columns = [parts_of(owner, one, split.at(place)) for one in arguments]
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


def parts_of(owner: Owner, argument: Any, split: Split) -> Sequence[Any]:
    """An argument for each of this rank's shards; ``split.dim`` counts from the end."""
    if isinstance(argument, DividedTensor):
        return argument.parts
    if not isinstance(argument, torch.Tensor):
        return [argument for _ in owner.exchange.own]
    if argument.dim() < -split.dim or argument.shape[split.dim] == 1:
        return spread(owner.exchange, argument)
    own = split.at(split.dim % argument.dim())
    if owner.divides_time:
        return cut_own(owner.exchange, argument, own)
    if owner.name_of(argument):
        return owner.parts_of(argument, own)
    vector = _vector_of(owner, argument, own.dim)
    if vector is None:
        return cut_own(owner.exchange, argument, own)
    shape = [-1 if dim == own.dim else 1 for dim in range(argument.dim())]
    return [part.view(shape) for part in owner.parts_of(vector, own.at(0))]


def _vector_of(owner: Owner, view: torch.Tensor, dim: int) -> torch.Tensor | None:
    """The weight with one dim that is ``dim`` of a view, as the bias of a convolution of Keras."""
    base = base_of(view)
    name = owner.name_of(base)
    if not name or not base.dim() == 1 <= base.numel() == view.numel() == view.shape[dim]:
        return None
    return base if is_plain_view(view, base) and owner.may_divide(name, view) else None


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
    if not isinstance(input, DividedTensor) or not isinstance(dim, int) or has_divided(rest):
        return NotImplemented
    if dim % input.dim() == input.division.dim:
        return NotImplemented
    return input.like([func(part, *rest, **kwargs) for part in input.parts])


def _reduction(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """Sums and means along dims that are not divided; sums along one that is, over the shards."""
    input, *rest = args
    dims = kwargs.get("dim", rest[0] if rest else None)
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(input, DividedTensor) or not isinstance(dims, list | tuple) or not dims:
        return NotImplemented
    reduced = {dim % input.dim() for dim in dims}
    if len(rest) > 2:
        return NotImplemented
    if input.division.dim in reduced:
        if func not in _SUMS or not input.is_floating_point():
            return NotImplemented
        return total(owner.exchange, [func(part, *rest, **kwargs) for part in input.parts])
    keeps = kwargs.get("keepdim", rest[1] if len(rest) > 1 else False)
    before = 0 if keeps else sum(dim < input.division.dim for dim in reduced)
    split = input.division.at(input.division.dim - before)
    return input.like([func(part, *rest, **kwargs) for part in input.parts], split)


_SUMS = (torch.sum, torch.Tensor.sum)

_NORM = ("input", "normalized_shape", "weight", "bias")


def _norm(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """Norms over last dims, none of which is divided."""
    options = {**dict(zip(_NORM, args, strict=False)), **kwargs}
    input, shape = options.pop("input"), options.pop("normalized_shape")
    if len(args) > len(_NORM) or not isinstance(input, DividedTensor):
        return NotImplemented
    if input.division.dim >= input.dim() - len(shape) or has_divided(options):
        return NotImplemented
    for name in ("weight", "bias"):
        owner.note_time(options.get(name))
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
    """Products of matrices by heads or experts, or with a weight."""
    if kwargs or len(args) != 2:
        return NotImplemented
    found = _batched(owner, func, args)
    if found is None and are_rows(owner, args[0]) and args[1].dim() <= args[0].dim():
        each = zip(args[0].parts, each_whole(owner, args[1], func), strict=True)
        return args[0].like([func(*own) for own in each])
    return multiply_by_weight(owner, func, args, kwargs) if found is None else found


def are_rows(owner: Owner, tensor: Any) -> bool:
    """Whether a matrix is divided by its rows, which are times."""
    is_divided = owner.divides_time and isinstance(tensor, DividedTensor)
    return is_divided and bool(tensor.division.dim == tensor.dim() - 2)


def _baddbmm(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    options = {**dict(zip(("input", "batch1", "batch2"), args, strict=False)), **kwargs}
    tensors = [options.pop(name, None) for name in ("input", "batch1", "batch2")]
    is_plain = all(isinstance(one, torch.Tensor) for one in tensors) and "out" not in options
    found = _batched(owner, partial(func, **options), tensors) if is_plain else None
    if found is None and is_plain and are_rows(owner, tensors[1]):
        input, rows, others = tensors
        added = parts_of(owner, whole_of(input, func), rows.division.at(-2))
        columns = zip(added, rows.parts, each_whole(owner, others, func), strict=True)
        return rows.like([func(*each, **options) for each in columns])
    return NotImplemented if found is None else found


def _batched(owner: Owner, func: Any, tensors: Sequence[Any]) -> DividedTensor | None:
    """A product of tensors that are divided along one dim before the last two; None if none are.

    A stack of weights is divided there, too: a shard has whole ones, such as experts.
    """
    parts = parts_of_batch(owner, tensors)
    if parts is not None:
        return _lead_of(tensors).like([func(*each) for each in zip(*parts, strict=True)])
    weights = {place: found for place, one in enumerate(tensors) if (found := _stack(owner, one))}
    if not weights or any(one.dim() > 3 for one in tensors):
        return None
    weight = next(iter(weights.values()))
    if {one.shape[0] for one in tensors if one.dim() == 3} - {1, len(weight.whole)}:
        return None
    split = owner.split_of(weight.whole, Use(0, by="matrices"))
    if split is None:
        return None
    columns = [
        _parts_of_stack(owner, one, weights.get(place), split) for place, one in enumerate(tensors)
    ]
    made = [func(*each) for each in zip(*columns, strict=True)]
    return DividedTensor.of(made, split, owner, owner.name_of(weight.whole))


def _stack(owner: Owner, tensor: Any) -> Weight | None:
    """The weight of which a tensor is all, if it is a stack of matrices for as many shards."""
    if isinstance(tensor, DividedTensor) or tensor.dim() != 3:
        return None
    weight = weight_of(owner, tensor)
    return weight if weight is not None and len(tensor) >= owner.exchange.num_shards else None


def _parts_of_stack(
    owner: Owner, tensor: Any, weight: Weight | None, split: Split
) -> Sequence[torch.Tensor]:
    if weight is not None and owner.split_of(weight.whole, Use(0, by="matrices")) == split:
        return [weight.turned(one) for one in owner.parts_of(weight.whole, split)]
    return parts_of(owner, whole_of(tensor, torch.bmm), split.at(-3))


def _lead_of(tensors: Sequence[Any]) -> DividedTensor:
    """The first divided tensor."""
    return next(one for one in tensors if isinstance(one, DividedTensor))


def parts_of_batch(owner: Owner, tensors: Sequence[Any]) -> list[Sequence[Any]] | None:
    """The parts of tensors with as many dims, by tensor; None if a cut crosses matrices.

    Those that are divided are so alike, along one dim before the last two; others are cut to fit.
    """
    if not has_divided(list(tensors)):
        return None
    lead = _lead_of(tensors)
    place = lead.division.dim - lead.dim()
    if place >= -2 or any(one.dim() != lead.dim() for one in tensors):
        return None
    if not all(_is_aligned(one, lead, place) for one in tensors):
        _ask_for_one_unit(owner, [one for one in tensors if isinstance(one, DividedTensor)])
        return None
    sizes = {one.shape[place] for one in tensors}
    if not sizes <= {1, lead.division.size}:
        return None
    split = lead.division.at(place)
    return [_parts_beside(owner, one, lead, split) for one in tensors]


def _parts_beside(owner: Owner, tensor: Any, lead: DividedTensor, split: Split) -> Sequence[Any]:
    """A tensor's parts beside those of a divided one; of a stack of weights, its own parts."""
    weight = _stack(owner, tensor) if split.dim == -3 else None
    own = None if weight is None else owner.split_of(weight.whole, Use(0, 0, lead, "matrices"))
    if weight is None or own is None or not own.is_like(split):
        return parts_of(owner, tensor, split)
    return [weight.turned(one) for one in owner.parts_of(weight.whole, own)]


def _ask_for_one_unit(owner: Owner, tensors: Sequence[DividedTensor]) -> None:
    """Heads of queries that share a head of keys stay together."""
    unit = math.lcm(*(one.division.unit for one in tensors))
    for one in tensors:
        if one.division.unit != unit:
            sizes = [size * one.span for size in one.division.sizes]
            owner.refine(one, sizes, unit * one.span)


# --- gradients -----------------------------------------------------------------------------------


def _grad(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """Gradients of divided tensors are those of their parts, gathered."""
    outputs, inputs, *rest = args
    outputs = [whole_of(one, func) for one in outputs]
    if kwargs.get("grad_outputs") is not None:
        kwargs["grad_outputs"] = [whole_of(one, func) for one in kwargs["grad_outputs"]]
    columns = [one.parts if isinstance(one, DividedTensor) else [one] for one in inputs]
    found = iter(func(outputs, [one for column in columns for one in column], *rest, **kwargs))
    gradients: list[torch.Tensor | None] = []
    for one, column in zip(inputs, columns, strict=True):
        own = [next(found) for _ in column]
        if not isinstance(one, DividedTensor) or own[0] is None:
            gradients.append(own[0])
            continue
        more = own[0].dim() - one.dim()  # of a batch of gradients
        shape = [*own[0].shape[:more], *one.shape]
        split = one.division.at(one.division.dim + more)
        gradients.append(gather(owner.exchange, own, split, shape))
    return tuple(gradients)


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
register(_baddbmm, named("baddbmm", torch, torch.Tensor))
register(_grad, [torch.autograd.grad])
