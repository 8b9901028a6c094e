"""Rules for attention: by heads, or of the queries of some times to the keys and values of all.

For ``nn.MultiheadAttention`` torch's function, with the heads as a dim of their own: torch joins
heads and samples in one dim, which would hide that each head works by itself.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.tensor.divided_tensor import RULES, DividedTensor, Owner
from lockstep.parallel.tensor.product_rules import divided_by_time
from lockstep.parallel.tensor.rules import are_rows, parts_of, parts_of_batch
from lockstep.parallel.tensor.transfers import cut_own, gather, spread

_Arguments = tuple[Any, ...]
_Options = dict[str, Any]

_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _attention(owner: Owner, func: Any, args: _Arguments, kwargs: _Options) -> Any:
    """Attention by heads."""
    options = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
    tensors = [options.pop(name) for name in _ATTENTION[:3]]
    mask = options.pop("attn_mask", None)
    if are_rows(owner, tensors[0]) and not isinstance(mask, DividedTensor):
        return _attention_of_rows(owner, func, tensors, mask, options)
    if options.pop("enable_gqa", False):
        tensors = [tensors[0], *(_repeated(one, tensors[0]) for one in tensors[1:])]
    parts = None if isinstance(mask, DividedTensor) else parts_of_batch(owner, tensors)
    lead = next((one for one in tensors if isinstance(one, DividedTensor)), None)
    if parts is None or lead is None:
        return NotImplemented
    masks = parts_of(owner, mask, lead.division.at(lead.division.dim - lead.dim()))
    dropout = options.pop("dropout_p", 0.0)
    if not dropout:
        each = zip(*parts, masks, strict=True)
        return lead.like([func(*own, attn_mask=mask, **options) for *own, mask in each])
    is_refused = options.get("is_causal") and mask is not None  # by torch
    if lead.device.type != "cpu" or dropout >= 1 or is_refused:
        return NotImplemented
    batch = torch.broadcast_shapes(*(one.shape[:-2] for one in tensors[:2]))
    shape = [*batch, tensors[0].shape[-2], tensors[1].shape[-2]]
    noise = torch.empty(shape, dtype=lead.dtype).bernoulli_(1 - dropout).div_(1 - dropout)
    noises = cut_own(owner.exchange, noise, lead.division)
    return lead.like([_attend(*own, **options) for own in zip(*parts, masks, noises, strict=True)])


def _attention_of_rows(
    owner: Owner, func: Any, tensors: Sequence[Any], mask: Any, options: _Options
) -> Any:
    """Attention of a shard's queries to the keys and values of all times.

    These are gathered again in backward, so that no rank keeps them whole.
    """
    query, *others = tensors
    is_causal, dropout = options.pop("is_causal", False), options.pop("dropout_p", 0.0)
    is_refused = is_causal and mask is not None  # by torch
    if is_refused or (dropout and (query.device.type != "cpu" or dropout >= 1)):
        return NotImplemented
    masks = parts_of(owner, mask, query.division.at(-2))
    repeats = options.pop("enable_gqa", False)
    exchange, num_shards = owner.exchange, len(query.parts)

    def attend(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        queries, rest = parts[:num_shards], parts[num_shards:]
        wholes = []
        for one in others:
            own, rest = rest[: len(_own(one))], rest[len(_own(one)) :]
            is_part = isinstance(one, DividedTensor)
            whole = gather(exchange, own, one.division, one.shape) if is_part else own[0]
            wholes.append(spread(exchange, _repeated(whole, query) if repeats else whole))
        noises: Sequence[Any] = [None] * num_shards
        if dropout:
            shape = [*query.shape[:-1], others[0].shape[-2]]
            noise = torch.empty(shape, dtype=query.dtype).bernoulli_(1 - dropout).div_(1 - dropout)
            noises = cut_own(exchange, noise, query.division)
        return tuple(
            _attend_rows(func, own, noise, start, is_causal=is_causal, **options)
            for own, noise, start in zip(
                zip(queries, *wholes, masks, strict=True), noises, _starts(query), strict=True
            )
        )

    parts = [part for one in tensors for part in _own(one)]
    made = checkpoint(attend, *parts, use_reentrant=False, preserve_rng_state=bool(dropout))
    return query.like(made)


def _own(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return tensor.parts if isinstance(tensor, DividedTensor) else [tensor]


def _starts(divided: DividedTensor) -> list[int]:
    """The first place of each of this rank's shards."""
    return [divided.division.cuts[shard][0][0] for shard in divided.owner.exchange.own]


def _attend_rows(
    func: Any,
    tensors: Sequence[Any],
    noise: torch.Tensor | None,
    start: int,
    *,
    is_causal: bool,
    **options: Any,
) -> torch.Tensor:
    """Attention of the queries from a place on, with their rows of the mask."""
    query, key, value, mask = tensors
    if is_causal:
        stop = min(start + query.shape[-2], key.shape[-2])
        key, value = key[..., :stop, :], value[..., :stop, :]
        mask = torch.ones(query.shape[-2], stop, dtype=torch.bool, device=query.device).tril(start)
        noise = None if noise is None else noise[..., :stop]
    if noise is None:
        made: torch.Tensor = func(query, key, value, attn_mask=mask, **options)
        return made
    return _attend(query, key, value, mask, noise, **options)


def _repeated(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Heads of keys or values, each as often as queries have it."""
    times = query.shape[-3] // tensor.shape[-3]
    shape = [*tensor.shape[:-3], query.shape[-3], *tensor.shape[-2:]]
    grown = [*tensor.shape[:-2], times, *tensor.shape[-2:]]
    return tensor if times == 1 else tensor.unsqueeze(-3).expand(*grown).reshape(*shape)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    noise: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention whose weights are multiplied by noise: torch's for cores, with dropout in it."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    is_hidden = (scores == -math.inf).all(-1, keepdim=True)  # such a query attends to nothing
    weights = scores.masked_fill(is_hidden, 0.0).softmax(-1).masked_fill(is_hidden, 0.0)
    return weights * noise @ value


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def _multihead(owner: Owner, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    query, key, value = (given[name] for name in ("query", "key", "value"))
    others = (given[name] for name in ("bias_k", "bias_v", "static_k", "static_v"))
    is_usual = query.dim() == key.dim() == 3 and not given["add_zero_attn"]
    if not is_usual or any(one is not None for one in others):
        return NotImplemented
    if given["is_causal"] and given["attn_mask"] is None:
        return NotImplemented  # torch refuses that
    if not given["use_separate_proj_weight"] and not (query is key is value):
        return NotImplemented  # parts of one weight for each
    if owner.divides_time:
        query, key, value = (_by_time(owner, one) for one in (query, key, value))
    tokens, samples, width = query.shape
    heads = given["num_heads"]
    first, second, third = (
        one.view(one.shape[0], samples, heads, width // heads).permute(1, 2, 0, 3)
        for one in _projected(given, query, key, value)
    )
    mask = _mask(given, samples, heads, query.dtype)
    dropout = given["dropout_p"] if given["training"] else 0.0
    weights = None
    if given["need_weights"]:
        scores = (first * (width // heads) ** -0.5) @ second.transpose(-2, -1)
        weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        mixed = weights @ third
        weights = weights.mean(dim=1) if given["average_attn_weights"] else weights
    else:
        mixed = F.scaled_dot_product_attention(first, second, third, mask, dropout)
    joined = mixed.permute(2, 0, 1, 3).reshape(tokens, samples, width)
    return F.linear(joined, given["out_proj_weight"], given["out_proj_bias"]), weights


def _by_time(owner: Owner, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor (tokens, samples, width), divided by tokens if it can be."""
    parts = None if isinstance(tensor, DividedTensor) else divided_by_time(owner, tensor, 0)
    return tensor if parts is None else parts


def _projected(given: dict[str, Any], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values, of shape (tokens, samples, width)."""
    bias = given["in_proj_bias"]
    if not given["use_separate_proj_weight"]:
        return F.linear(inputs[0], given["in_proj_weight"], bias).chunk(3, dim=-1)
    biases = [None] * 3 if bias is None else bias.chunk(3)
    weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    return tuple(F.linear(*each) for each in zip(inputs, weights, biases, strict=True))


def _mask(
    given: dict[str, Any], samples: int, heads: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """What is added to scores of shape (samples, heads, tokens, tokens)."""
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    if mask is not None:
        mask = _added(mask, dtype)
        mask = mask.view(samples, heads, *mask.shape[1:]) if mask.dim() == 3 else mask
    if padding is None:
        return mask  # type: ignore[no-any-return]
    padding = _added(padding, dtype)[:, None, None]
    return padding if mask is None else mask + padding


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as numbers; True hides."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


RULES |= {
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multihead,
}
