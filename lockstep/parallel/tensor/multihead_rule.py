"""The rule for ``nn.MultiheadAttention``: torch's function, with the heads as a dim of their own.

Torch joins heads and samples in one dim, which would hide that each head works by itself.
"""

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.parallel.tensor.divided_tensor import RULES, Owner

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


RULES[F.multi_head_attention_forward] = _multihead
