"""How a tensor is compressed between memory domains (``plan.program.compression``), and summed.

A compressor is a generator, called a conversation: it yields its domain's messages, is sent the
messages of all domains, and returns two tensors: this domain's own tensor as decompressed by all,
and the sum of all domains'. All domains run the same conversation for a tensor and send tensors of
the same shapes, so messages need no headers and those of many tensors are sent together. All
compute the sum from the same numbers in the same order, and get the same bits.
"""

from collections.abc import Generator, Sequence
from typing import assert_never

import torch

from lockstep.plan.program.compression import (
    INT8_BLOCK,
    BFloat16,
    Compression,
    Int8,
    PowerSGD,
    TopK,
)

Message = Sequence[torch.Tensor]

# This domain's tensor as decompressed, and the sum over all domains.
Understood = tuple[torch.Tensor, torch.Tensor]

# Yields a message, is sent those of all domains in their order.
Conversation = Generator[Message, Sequence[Message], Understood]


def first_basis(compression: Compression, tensor: torch.Tensor) -> torch.Tensor | None:
    """The initial state of a tensor's compressor; None if it keeps none."""
    if not isinstance(compression, PowerSGD):
        return None
    columns = tensor.flatten(1).shape[1]
    return _random((columns, compression.rank), tensor.dtype)


def conversation(
    compression: Compression, tensor: torch.Tensor, basis: torch.Tensor | None
) -> Conversation:
    """Begin a conversation about a dense tensor, which is not changed.

    Args:
        compression: how.
        tensor: this domain's.
        basis: the result of ``first_basis``; the conversation updates it at its end.
    """
    match compression:
        case BFloat16():
            return in_bfloat16(tensor)
        case Int8():
            return in_int8(tensor)
        case TopK():
            return largest(tensor, compression.count(tensor.numel()))
        case PowerSGD():
            assert basis is not None
            return by_factors(tensor, basis)
        case _:
            assert_never(compression)


def as_it_is(tensor: torch.Tensor) -> Conversation:
    """No compression."""
    received = yield [tensor]
    return tensor, _sum([whole for (whole,) in received])


def in_bfloat16(tensor: torch.Tensor) -> Conversation:
    """The nearest numbers of bfloat16."""
    own = tensor.to(torch.bfloat16)
    received = yield [own]
    return own.to(tensor.dtype), _sum([rounded.to(tensor.dtype) for (rounded,) in received])


def in_int8(tensor: torch.Tensor) -> Conversation:
    """Integers, with a scale for each block of elements."""
    size = tensor.numel()
    blocks = torch.nn.functional.pad(tensor.reshape(-1), (0, -size % INT8_BLOCK))
    blocks = blocks.view(-1, INT8_BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).div_(127)
    # The scale of values that are not finite is not finite either; zeros can have any scale.
    steps = torch.where(scales > 0, scales, 1)
    own = [blocks.div(steps).round_().nan_to_num_(0).to(torch.int8), scales]
    received = yield own

    def understood(message: Message) -> torch.Tensor:
        integers, sizes = message
        return (integers.to(tensor.dtype) * sizes).view(-1)[:size].view(tensor.shape)

    return understood(own), _sum(list(map(understood, received)))


def largest(tensor: torch.Tensor, count: int) -> Conversation:
    """The elements that are largest in size, and where they are."""
    flat = tensor.reshape(-1)
    places = flat.abs().topk(count, sorted=False).indices
    own = [flat[places], places.to(torch.int32 if len(flat) < 1 << 31 else torch.int64)]
    received = yield own

    def add_to(sums: torch.Tensor, message: Message) -> torch.Tensor:
        values, at = message  # each place once, so additions do not race
        return sums.index_add_(0, at.long(), values)

    whole = torch.zeros_like(flat)
    for message in received:
        add_to(whole, message)
    return add_to(torch.zeros_like(flat), own).view(tensor.shape), whole.view(tensor.shape)


def by_factors(tensor: torch.Tensor, basis: torch.Tensor) -> Conversation:
    """Two thin factors of a matrix: its product with the last basis, and the new basis.

    Args:
        tensor: the matrix, with a row for each of its first dim.
        basis: shape (columns, rank), of the step before; replaced by this step's.
    """
    matrix = tensor.flatten(1)
    products = yield [matrix @ basis]
    directions = orthonormal(_sum([product for (product,) in products]))
    own = matrix.t() @ directions
    factors = yield [own]
    whole = _sum([factor for (factor,) in factors])
    basis.copy_(_refreshed(whole))
    return (directions @ own.t()).view(tensor.shape), (directions @ whole.t()).view(tensor.shape)


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span the same, by Gram and Schmidt; new memory.

    A column that depends on earlier ones, up to rounding, becomes zero: its direction would be
    rounding noise.
    """
    columns = columns.clone()
    least = torch.finfo(columns.dtype).eps ** 0.5
    for number in range(columns.shape[1]):
        column, before = columns[:, number], columns[:, :number]
        size = column.norm()
        for _ in range(2):  # the second time for what the first has left by rounding
            column -= before @ (before.t() @ column)
        rest = column.norm()
        column.mul_(torch.where(rest > least * size, 1 / rest, 0))
    return columns


def _refreshed(basis: torch.Tensor) -> torch.Tensor:
    """A basis to begin the next step with: columns that have become zero are drawn anew."""
    is_zero = (basis == 0).all(0)
    if not is_zero.any():
        return basis
    return torch.where(is_zero, _random(basis.shape, basis.dtype), basis)


def _random(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, the same everywhere for the same shape."""
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in their order, in new memory."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
