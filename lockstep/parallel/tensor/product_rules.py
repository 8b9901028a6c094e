"""Rules for products with divided weights: linear layers, convolutions, embeddings.

A weight that is divided by columns, its outputs, gives each shard a part of the outputs. One that
is divided by rows, its inputs, takes a part of the inputs, and the shards' results are added up.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from lockstep.parallel.settings import autocast_dtype
from lockstep.parallel.tensor.divided_tensor import (
    RULES,
    DividedTensor,
    Owner,
    Use,
    base_of,
    named,
    whole_of,
)
from lockstep.parallel.tensor.shard_exchange import Tensors
from lockstep.parallel.tensor.transfers import cut_own, spread, total
from lockstep.plan.splits import Split

# Multiplies a part of the inputs by a part of the weight, and adds a part of the bias.
_Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Weight(NamedTuple):
    """A weight that a product takes.

    Attributes:
        whole: a matrix, or a stack of them, such as one for each expert.
        place: in the stack, of the matrix that is taken; None if all is.
        is_turned: the matrices are transposed.
    """

    whole: torch.Tensor
    place: int | None = None
    is_turned: bool = False

    @property
    def dims(self) -> tuple[int, int]:
        """The dims of ``whole`` that are the rows and columns of what is taken."""
        first = self.whole.dim() - 2
        return (first + 1, first) if self.is_turned else (first, first + 1)

    def turned(self, part: torch.Tensor) -> torch.Tensor:
        """A part of what is taken, as the product takes it."""
        return part.mT if self.is_turned else part


def weight_of(owner: Owner, tensor: Any) -> Weight | None:
    """The weight of which a tensor is a view: all of it, or one matrix; None if it is none."""
    if isinstance(tensor, DividedTensor):
        return None
    if owner.name_of(tensor):
        return Weight(tensor)
    base = tensor._base
    if base is None or tensor.dim() < 2 or not 2 <= base.dim() <= 3 or not owner.name_of(base):
        return None
    offset, place = tensor.storage_offset() - base.storage_offset(), None
    if tensor.dim() < base.dim():
        place, offset = divmod(offset, max(base.stride(0), 1))
    if offset or not is_plain_view(tensor, base):
        return None
    one = base if place is None else base[place].detach()
    for is_turned, matrix in enumerate((one, one.mT)):
        if (tensor.shape, tensor.stride()) == (matrix.shape, matrix.stride()):
            may_divide = owner.may_divide(owner.name_of(base), tensor)
            return Weight(base, place, bool(is_turned)) if may_divide else None
    return None


def is_plain_view(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether the gradient of a view goes to its base, and to nothing else."""
    has_gradient = base.requires_grad and torch.is_grad_enabled()
    is_plain = not (view._backward_hooks or view.retains_grad)
    # A view that was made without gradients says that it requires them.
    return is_plain and (view.grad_fn is not None) == has_gradient


def _linear(owner: Owner, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, matrix, bias = (*args, *kwargs.values(), None)[:3]
    if owner.divides_time:
        return _of_rows(owner, func, (input, matrix, bias), 0)
    weight = weight_of(owner, matrix)
    if weight is None or matrix.dim() != 2:
        return NotImplemented
    columns, rows = weight.dims

    def product(input: torch.Tensor, part: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        made: torch.Tensor = func(input, weight.turned(part), bias)
        return made

    return _multiplied(owner, func, input, weight, bias, columns, rows, product)


def _matmul(owner: Owner, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or args[0].dim() < 2 or args[1].dim() != 2:
        return NotImplemented
    if owner.divides_time:
        return _of_rows(owner, func, args, 0)
    weight = weight_of(owner, args[1])
    if weight is None:
        return NotImplemented
    rows, columns = weight.dims
    product: _Product = lambda input, part, bias: func(input, weight.turned(part))  # noqa: E731
    return _multiplied(owner, func, args[0], weight, None, columns, rows, product)


def _grouped(owner: Owner, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each group of rows multiplied by its matrix of a stack, as by the expert of these tokens."""
    if len(args) != 2 or kwargs.get("bias") is not None or args[0].dim() != 2:
        return NotImplemented
    input, stack = args
    weight = weight_of(owner, stack) if stack.dim() == 3 else None
    if weight is None:
        return NotImplemented
    rows, columns = weight.dims
    unit = 16 // stack.itemsize  # torch's kernels read so many bytes at once
    split = owner.split_of(weight.whole, Use(columns, rows, _along_last(input), unit=unit))
    if split is None or any(split.size_of(shard) % unit for shard in range(split.num_shards)):
        if split is not None and split.dim == rows and isinstance(input, DividedTensor):
            sizes = [size * input.span for size in input.division.sizes]
            owner.refine(input, sizes, math.lcm(unit, input.division.unit) * input.span)
        return NotImplemented
    product: _Product = lambda input, part, bias: func(  # noqa: E731
        input, weight.turned(part), **kwargs
    )
    return _multiplied(owner, func, input, weight, None, columns, rows, product)


def _of_rows(owner: Owner, func: Any, args: Sequence[Any], place: int) -> Any:
    """A product with a whole weight, of those rows of a tensor that a shard has."""
    input = args[place]
    if not isinstance(input, DividedTensor):
        input = divided_by_time(owner, input)
    if input is None or input.division.dim == input.dim() - 1:
        return NotImplemented
    columns = [input.parts if one is args[place] else each_whole(owner, one, func) for one in args]
    parts = [func(*each) for each in zip(*columns, strict=True)]
    weights = [base_of(one) for one in args if isinstance(one, torch.Tensor)]
    for one in weights:
        owner.note_time(one)
    names = filter(None, map(owner.name_of, weights))
    return DividedTensor.of(parts, input.division, owner, next(names, input.origin))


def divided_by_time(owner: Owner, whole: torch.Tensor, dim: int = 1) -> DividedTensor | None:
    """A tensor (samples, time, features), divided by time; None if it is no such tensor.

    Shards have two times or more: where one is all, strides do not tell the order in memory.
    """
    count = owner.exchange.num_shards
    if whole.dim() != 3 or whole.shape[dim] < 2 * count or not whole.is_floating_point():
        return None
    split = Split(dim=dim, sizes=(whole.shape[dim],), num_shards=count)
    return DividedTensor.of(cut_own(owner.exchange, whole, split), split, owner, "the sequence")


def each_whole(owner: Owner, argument: Any, func: Any) -> Sequence[Any]:
    """An argument whole, for each of this rank's shards."""
    if not isinstance(argument, torch.Tensor):
        return [argument for _ in owner.exchange.own]
    return spread(owner.exchange, whole_of(argument, func))


def _along_last(input: Any) -> Any:
    """A tensor if it is divided along its last dim, which a product sums over."""
    is_divided = isinstance(input, DividedTensor) and input.division.dim == input.dim() - 1
    return input if is_divided else None


def _addmm(owner: Owner, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3 or args[0].dim() != 1:
        return NotImplemented
    if owner.divides_time:
        return _of_rows(owner, func, args, 1)
    bias, input, matrix = args
    weight = weight_of(owner, matrix)
    if weight is None:
        return NotImplemented
    rows, columns = weight.dims

    def product(input: torch.Tensor, part: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        own = weight.turned(part)
        made: torch.Tensor = input @ own if bias is None else func(bias, input, own)
        return made

    return _multiplied(owner, func, input, weight, bias, columns, rows, product)


def _multiplied(
    owner: Owner,
    func: Any,
    input: Any,
    weight: Weight,
    bias: Any,
    columns: int,
    rows: int,
    product: _Product,
) -> Any:
    """The product with a weight whose outputs are the dim ``columns``, its inputs ``rows``."""
    split = owner.split_of(weight.whole, Use(columns, rows, _along_last(input)))
    if split is None:
        return NotImplemented
    if split.dim != rows:
        return _by_columns(owner, func, input, weight, bias, split, -1, product)
    is_matrix = weight.place is not None or weight.whole.dim() == 2
    is_cast = autocast_dtype(weight.whole.device.type) is not None
    if is_matrix and rows == weight.whole.dim() - 1 and not is_cast:
        product = partial(product_of_columns, product)
    weights = owner.parts_of(weight.whole, split, weight.place)
    pairs = zip(_inputs(owner, func, input, split), weights, strict=True)
    summed = total(owner.exchange, [product(own, part, None) for own, part in pairs])
    return summed if bias is None else summed + whole_of(bias, func)


def product_of_columns(
    product: _Product, input: torch.Tensor, weight: torch.Tensor, bias: None
) -> torch.Tensor:
    """``product`` with columns of a matrix, as a rank has them: its weight is no matrix of its own.

    torch would form the gradient transposed, and copy it to the matrix's order, which takes nearly
    as long as the product.
    """
    found: torch.Tensor = _OfColumns.apply(  # type: ignore[no-untyped-call]
        product, input, weight
    )
    return found


class _OfColumns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: _Product, input: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return product(input, weight, None)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        of_input = gradient.matmul(weight) if ctx.needs_input_grad[1] else None
        of_weight = None
        if ctx.needs_input_grad[2]:
            of_weight = _rows(gradient).t().mm(_rows(input))
        return None, of_input, of_weight


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _by_columns(
    owner: Owner,
    func: Any,
    input: Any,
    weight: Weight,
    bias: Any,
    split: Split,
    dim: int,
    product: _Product,
) -> DividedTensor:
    """The product with a weight that is divided by its outputs, which are ``dim`` of the result."""
    inputs = spread(owner.exchange, whole_of(input, func))
    biases: Any = [None for _ in inputs]
    if bias is not None:
        biases = owner.parts_of(whole_of(bias, func), split.at(0))
    weights = owner.parts_of(weight.whole, split, weight.place)
    parts = [product(*each) for each in zip(inputs, weights, biases, strict=True)]
    name = owner.name_of(weight.whole)
    return DividedTensor.of(parts, split.at(dim % parts[0].dim()), owner, name)


def _inputs(owner: Owner, func: Any, input: Any, split: Split) -> Tensors:
    """This rank's parts of inputs, whose last dim is divided like a weight's."""
    last = split.at(input.dim() - 1)
    if isinstance(input, DividedTensor):
        if input.division.dim == last.dim and input.division.is_like(last):
            return input.parts
        input = input.whole(func)
    return cut_own(owner.exchange, input, last)


_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def _convolution(num_dims: int) -> Any:
    def rule(owner: Owner, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = {**dict(zip(_CONVOLUTION, args, strict=False)), **kwargs}
        input, bias = options.pop("input"), options.pop("bias", None)
        kernel = _kernel_of(owner, options.pop("weight"))
        if kernel is None or options.get("groups", 1) != 1:
            return NotImplemented
        weight, order = kernel
        split = owner.split_of(weight, Use(order[0]))
        if split is None:
            return NotImplemented

        def product(
            input: torch.Tensor, part: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            made: torch.Tensor = func(input, part.permute(order), bias, **options)
            return made

        return _by_columns(owner, func, input, Weight(weight), bias, split, -1 - num_dims, product)

    return rule


def _kernel_of(owner: Owner, tensor: Any) -> tuple[torch.Tensor, list[int]] | None:
    """The weight that a tensor is, with its dims in another order, and that order; else None.

    Keras's kernels have the outputs last.
    """
    if isinstance(tensor, DividedTensor):
        return None
    view = owner.view_of(tensor)
    base = base_of(view)
    if not owner.name_of(base) or view.dim() != base.dim():
        return None
    if view is not base and not is_plain_view(view, base):
        return None
    left = dict(enumerate(zip(base.shape, base.stride(), strict=True)))
    order: list[int] = []
    for one in zip(view.shape, view.stride(), strict=True):
        order += [dim for dim, other in left.items() if other == one][:1]
        left.pop(order[-1] if order else -1, None)
    is_whole = len(order) == base.dim() and view.storage_offset() == base.storage_offset()
    return (base, order) if is_whole else None


_EMBEDDING = (
    "input",
    "weight",
    "padding_idx",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "sparse",
)


def _embedding(owner: Owner, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a weight that is whole in memory; each rank forms the gradient of its own.

    Or columns of all rows, if the user says so.
    """
    options = {**dict(zip(_EMBEDDING, args, strict=False)), **kwargs}
    is_plain = not any(options.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse"))
    input, weight = whole_of(options["input"], func), options["weight"]
    if owner.divides_time and not isinstance(weight, DividedTensor):
        made = func(*args, **kwargs)
        # A mode of torch's functions has called this rule again.
        parts = None if isinstance(made, DividedTensor) else divided_by_time(owner, made)
        if parts is None:
            return made
        owner.note_time(weight)
        parts.origin = owner.name_of(weight)
        return parts
    split = owner.split_of(weight, Use(0, 1)) if is_plain else None
    if split is None:
        return NotImplemented
    if split.dim == 1:
        padding = options.get("padding_idx")
        columns = [func(input, part, padding) for part in owner.parts_of(weight, split)]
        return DividedTensor.of(columns, split.at(input.dim()), owner, owner.name_of(weight))
    return _Embedding.apply(  # type: ignore[no-untyped-call]
        input,
        weight.detach(),
        options.get("padding_idx"),
        [split.cuts[shard] for shard in owner.exchange.own],
        *owner.parts_of(weight, split),
    )


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        padding: int | None,
        cuts: Any,
        *parts: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.padding = -1 if padding is None else padding % len(weight)
        ctx.cuts, ctx.shapes = cuts, [part.shape for part in parts]
        return F.embedding(input, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (input,) = ctx.saved_tensors
        numbers, gradients = input.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        own = [
            _gradient_of_rows(numbers, gradients, cuts, shape, ctx.padding)
            for cuts, shape in zip(ctx.cuts, ctx.shapes, strict=True)
        ]
        return None, None, None, None, *own


def _gradient_of_rows(
    numbers: torch.Tensor, gradients: torch.Tensor, cuts: Any, shape: torch.Size, padding: int
) -> torch.Tensor:
    """The gradient of the rows of a shard."""
    made, offset = gradients.new_zeros(shape), 0
    for start, stop in cuts:
        chosen = ((numbers >= start) & (numbers < stop) & (numbers != padding)).nonzero()[:, 0]
        made = made.index_add(0, numbers[chosen] - start + offset, gradients[chosen])
        offset += stop - start
    return made


RULES[F.linear] = _linear
RULES[torch.addmm] = _addmm
RULES[F.embedding] = _embedding
RULES |= dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), _matmul)
RULES |= dict.fromkeys((torch.mm, torch.Tensor.mm), _matmul)
RULES |= dict.fromkeys(named("grouped_mm _grouped_mm", F, torch), _grouped)
RULES |= {F.conv1d: _convolution(1), F.conv2d: _convolution(2), F.conv3d: _convolution(3)}
