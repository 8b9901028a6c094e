"""Transfers between whole and divided tensors, with their gradients.

    gather   parts to the whole tensor       backward: cut
    cut      the whole tensor to its parts   backward: gather
    spread   the whole tensor to each shard  backward: total
    total    the sum of all shards           backward: spread

Ranks compute the same on whole tensors, so each has the whole tensor's gradient. Each backward is a
transfer, so gradients can be differentiated again.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.parallel.tensor.shard_exchange import ShardExchange, Tensors, cut
from lockstep.plan.splits import Split


def gather(
    exchange: ShardExchange, parts: Tensors, split: Split, shape: Sequence[int]
) -> torch.Tensor:
    """The whole tensor."""
    whole: torch.Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
        exchange, split, shape, *parts
    )
    return whole


def cut_own(exchange: ShardExchange, whole: torch.Tensor, split: Split) -> Tensors:
    """This rank's parts of a whole tensor."""
    if not (torch.is_grad_enabled() and whole.requires_grad):
        return [cut(whole, split, shard) for shard in exchange.own]
    parts: Tensors = _Cut.apply(exchange, split, whole)  # type: ignore[no-untyped-call]
    return parts


def spread(exchange: ShardExchange, whole: torch.Tensor) -> Tensors:
    """A whole tensor, for each of this rank's shards."""
    if not (torch.is_grad_enabled() and whole.requires_grad):
        return [whole for _ in exchange.own]
    each: Tensors = _Spread.apply(exchange, whole)  # type: ignore[no-untyped-call]
    return each


def total(exchange: ShardExchange, partials: Tensors) -> torch.Tensor:
    """The sum of the partial results of all shards."""
    whole: torch.Tensor = _Total.apply(exchange, *partials)  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: ShardExchange, split: Split, shape: Sequence[int], *parts: torch.Tensor
    ) -> torch.Tensor:
        ctx.exchange, ctx.split = exchange, split
        return exchange.gathered(parts, split, shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None, None, *cut_own(ctx.exchange, gradient, ctx.split)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: ShardExchange, split: Split, whole: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.split, ctx.shape = exchange, split, whole.shape
        return tuple(cut(whole, split, shard).clone() for shard in exchange.own)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, gather(ctx.exchange, gradients, ctx.split, ctx.shape)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: ShardExchange, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return tuple(whole.view_as(whole) for _ in exchange.own)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, total(ctx.exchange, gradients)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: ShardExchange, *partials: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.total(partials)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *spread(ctx.exchange, gradient)
