"""Divided layers against whole ones, in one process with all shards: values, gradients, gathers.

Each case is a small model, and the operations that may gather. Its shapes are ones that two or
three shards do not divide evenly, where that is possible.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import ModelError
from lockstep.parallel.debug.module_watch import ModuleWatch, Spot
from lockstep.parallel.tensor.divided_tensor import DividedTensor
from lockstep.parallel.tensor.observing import observed_splits
from lockstep.parallel.tensor.parameters import DividedParameters
from lockstep.parallel.tensor.product_rules import product_of_columns
from lockstep.parallel.tensor.shard_exchange import ShardExchange
from lockstep.plan.splits import TensorSplits

END = "the model's output"
HEADS, SIZE = 3, 4
WIDTH = HEADS * SIZE
EXPERTS = 5


class Model(nn.Module):
    """Layers of usual sizes, and a function that uses them."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 14)
        self.gate = nn.Linear(WIDTH, 14, bias=False)
        self.both = nn.Linear(WIDTH, 28)
        self.down = nn.Linear(14, WIDTH)
        self.norm = nn.LayerNorm(SIZE)
        self.scale = nn.Parameter(torch.rand(14))
        self.kernel = nn.Parameter(torch.rand(WIDTH, 14))
        self.bias = nn.Parameter(torch.rand(14))
        self.wide = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.q, self.k, self.v, self.o = (
            nn.Parameter(torch.rand(WIDTH, HEADS, SIZE)) for _ in range(4)
        )
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, 0.3, batch_first=True)
        self.across = nn.MultiheadAttention(WIDTH, HEADS, kdim=7, vdim=11, batch_first=True)
        self.embedding = nn.Embedding(11, WIDTH, padding_idx=2)
        self.convolution = nn.Conv1d(5, 7, 3, padding=1)
        self.kernels = nn.ParameterList(torch.rand(*size, 5, 7) for size in [(3,), (1, 3)])
        self.experts_up = nn.Parameter(torch.rand(EXPERTS, 14, WIDTH))
        self.experts_down = nn.Parameter(torch.rand(EXPERTS, WIDTH, 7))
        self.experts_bias = nn.Parameter(torch.rand(EXPERTS, 1, 14))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def attend(model: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of (n, heads, tokens, size)."""
    heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    mixed: Tensor = model.out(heads.transpose(1, 2).reshape(*heads.shape[:1], -1, WIDTH))
    return mixed


def by_chunks(model: Any, x: Tensor) -> Tensor:
    parts = model.qkv(x).chunk(3, dim=-1)
    return attend(model, *(one.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for one in parts))


def by_split(model: Any, x: Tensor) -> Tensor:
    parts = model.qkv(x).split(WIDTH, dim=2)
    return attend(model, *(one.unflatten(2, (HEADS, SIZE)).transpose(1, 2) for one in parts))


def by_view(model: Any, x: Tensor) -> Tensor:
    parts = model.qkv(x).reshape(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
    return attend(model, *parts.unbind(0))


def by_heads(model: Any, x: Tensor) -> Tensor:
    parts = model.qkv(x).view(*x.shape[:2], HEADS, 3 * SIZE).transpose(1, 2).chunk(3, -1)
    return attend(model, *parts)


def by_slices(model: Any, x: Tensor) -> Tensor:
    fused = model.qkv(x)
    parts = fused[..., :WIDTH], fused[..., WIDTH : 2 * WIDTH], fused[..., 2 * WIDTH :]
    return attend(model, *(one.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for one in parts))


def by_hand(model: Any, x: Tensor) -> Tensor:
    parts = model.qkv(x).chunk(3, dim=-1)
    query, key, value = (
        model.norm(one.view(*x.shape[:2], HEADS, SIZE)).transpose(1, 2) for one in parts
    )
    turned = torch.cat((-key[..., SIZE // 2 :], key[..., : SIZE // 2]), dim=-1)
    scores = query @ (key + turned).transpose(-2, -1) / SIZE**0.5
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    weights = F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    heads = F.dropout(weights, 0.2, training=model.training) @ value
    mixed: Tensor = model.out(heads.transpose(1, 2).contiguous().view(*x.shape[:2], WIDTH))
    return mixed


def mlp(model: Any, x: Tensor) -> Tensor:
    return x + F.dropout(model.down(F.gelu(model.up(x))), 0.1, training=model.training)


def mlp_in_place(model: Any, x: Tensor) -> Tensor:
    hidden: Tensor = model.down(F.relu(model.up(x).mul_(2.0), inplace=True))
    return hidden


def gated(model: Any, x: Tensor) -> Tensor:
    hidden: Tensor = model.down(F.silu(model.gate(x)) * model.up(x) * model.scale)
    return hidden


def gated_fused(model: Any, x: Tensor) -> Tensor:
    one, other = model.both(x).chunk(2, dim=-1)
    hidden: Tensor = model.down(torch.sigmoid(one) * other)
    return hidden


def dropout_between(model: Any, x: Tensor) -> Tensor:
    hidden: Tensor = model.down(F.dropout(model.up(x).transpose(0, 1), 0.3).transpose(0, 1))
    return hidden


def kernels(model: Any, x: Tensor) -> Tensor:
    rows = torch.addmm(model.bias, x.reshape(-1, WIDTH), model.kernel).view(*x.shape[:2], 14)
    return torch.matmul(rows.tanh(), model.kernel.t()) + x


def convolve(model: Any, x: Tensor) -> Tensor:
    convolved: Tensor = model.convolution(x)
    return F.relu(convolved).mean(-1)


def convolve_as_keras(model: Any, x: Tensor) -> Tensor:
    """Kernels with the outputs last; one is copied to another order in memory."""
    vector, matrix = model.kernels
    convolved = F.conv1d(x, vector.permute(2, 1, 0), padding="same")
    kernel = matrix.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
    images = F.conv2d(x[..., None, :], kernel, padding="same").movedim(1, -1).relu()
    return torch.cat([convolved.mT, images.sum(1)], 1)


def tied(model: Any, x: Tensor) -> Tensor:
    embedded = model.embedding((x[..., 0].abs() * 5).long() % 11)
    logits: Tensor = F.linear(embedded, model.embedding.weight)
    return logits


def used_whole_too(model: Any, x: Tensor) -> Tensor:
    product: Tensor = model.up(x) @ model.up.weight
    return product


def normed_over_columns(model: Any, x: Tensor) -> Tensor:
    hidden: Tensor = model.down(F.layer_norm(model.up(x), (14,)))
    return hidden


def summed_over_columns(model: Any, x: Tensor) -> Tensor:
    hidden = model.up(x)
    weighed: Tensor = hidden.softmax(-1) * hidden.sum(-1, keepdim=True)
    return weighed


class Double(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return 2 * input

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def own_function(model: Any, x: Tensor) -> Tensor:
    hidden: Tensor = model.down(Double.apply(model.up(x)))  # type: ignore[no-untyped-call]
    return hidden


class Product(torch.autograd.Function):
    """A product with a weight that is divided elsewhere."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return F.linear(input, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        input, weight = ctx.saved_tensors
        return gradient @ weight, (gradient.mT @ input).sum(0)


def own_product(model: Any, x: Tensor) -> Tensor:
    inner: Tensor = Product.apply(model.out(x), model.up.weight)  # type: ignore[no-untyped-call]
    hidden: Tensor = model.down(inner) + model.down(model.up(x))
    return hidden


def checkpointed(model: Any, x: Tensor) -> Tensor:
    inner = lambda one: model.down(F.gelu(model.up(one)))  # noqa: E731
    out: Tensor = checkpoint(inner, model.out(x), use_reentrant=False)
    return out


def penalised(model: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    hidden = model.down(torch.tanh(model.up(x)))
    (slope,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
    both: Tensor = hidden + slope
    return both


def changed_after_a_look(model: Any, x: Tensor) -> Tensor:
    hidden = model.up(x)
    largest = hidden.argmax(-1, keepdim=True)
    hidden[..., 0] = 0.0
    both: Tensor = model.down(hidden) + largest
    return both


def heads_of(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.view(*x.shape[:2], heads, SIZE).transpose(1, 2)


def with_dropout_in_attention(model: Any, x: Tensor) -> Tensor:
    query, key, value = (heads_of(one) for one in model.qkv(x).chunk(3, dim=-1))
    mask = torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool).tril(-1)
    heads = F.scaled_dot_product_attention(query, key, value, mask, 0.3, scale=0.7)
    mixed: Tensor = model.out(heads.transpose(1, 2).reshape(*x.shape[:2], WIDTH))
    return mixed


def with_fewer_keys(model: Any, x: Tensor) -> Tensor:
    query = heads_of(model.wide(x), 2 * HEADS)
    key, value = (heads_of(one) for one in model.qkv(x).chunk(3, dim=-1)[:2])
    heads = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    narrow: Tensor = F.linear(heads.transpose(1, 2).flatten(2), model.wide.weight.t())
    return narrow


def with_one_key(model: Any, x: Tensor) -> Tensor:
    query = heads_of(model.out(x))
    key = heads_of(x[..., :SIZE] * 2, 1)
    scores = torch.matmul(query, key.transpose(2, 3)).softmax(-1)
    mixed: Tensor = model.out(torch.matmul(scores, key).transpose(1, 2).flatten(2))
    return mixed


def with_a_cache(model: Any, x: Tensor) -> Tensor:
    query, key, value = (heads_of(one) for one in model.qkv(x).chunk(3, dim=-1))
    key, value = (torch.cat([torch.tensor([]), one], dim=-2) for one in (key, value))
    return attend(model, query, key.type_as(query), value)


def with_batched_products(model: Any, x: Tensor) -> Tensor:
    query, key, value = (heads_of(one).transpose(0, 1) for one in model.qkv(x).chunk(3, dim=-1))
    slopes = torch.arange(HEADS * x.shape[1], dtype=x.dtype).view(HEADS, 1, x.shape[1])
    scores = slopes.baddbmm(query[:, 0], key[:, 0].transpose(1, 2), beta=0.1, alpha=SIZE**-0.5)
    heads = torch.bmm(scores.softmax(-1), value[:, 0])
    mixed: Tensor = model.out(heads.transpose(0, 1).flatten(1))
    return mixed


def turned(model: Any, x: Tensor) -> Tensor:
    hidden = F.gelu(x @ model.up.weight.T + model.up.bias)
    with torch.no_grad():
        constant = model.up.weight.t()
    found: Tensor = hidden @ model.down.weight.mT + (x @ constant)[..., :WIDTH]
    return found


def by_einsum(model: Any, x: Tensor) -> Tensor:
    query, key, value = (
        torch.einsum("btw,whs->bths", x, one) for one in (model.q, model.k, model.v)
    )
    weights = torch.einsum("bihs,bjhs->bhij", query, key).softmax(-1)
    heads = torch.einsum("bhij,bjhs->bihs", weights, value)
    mixed: Tensor = torch.einsum("bihs, whs -> biw", [heads, model.o]) + x
    return mixed


def same_letter_twice(model: Any, x: Tensor) -> Tensor:
    trace: Tensor = torch.einsum("bii->b", model.up(x)[:, :5, :5]) + torch.einsum(
        "biu,bju->bij", model.up(x), model.gate(x)
    ).sum((1, 2))
    return trace


def with_layers_left_out(model: Any, x: Tensor) -> Tensor:
    hidden: Tensor = model.out(x if model.training else model.down(model.up(x)))
    return hidden


def with_a_hook(model: Any, x: Tensor) -> Tensor:
    hidden = model.up(x)
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient / 2)
    found: Tensor = model.down(torch.tanh(hidden)) * hidden.sum(-1, keepdim=True)
    return found


def with_a_hook_of_a_view(model: Any, x: Tensor) -> Tensor:
    """Of one matrix of a stack, before it is turned; others are divided."""
    found = torch.zeros_like(x[..., :1])
    for number, matrix in enumerate(model.experts_up):
        if number == 1 and matrix.requires_grad:
            matrix.register_hook(lambda gradient: gradient / 2)
        found = found + (x @ matrix.t()).tanh().sum(-1, keepdim=True)
    return found


def detached_in_place(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model.down(model.up(x).add(1.0).detach_())
    return found


def changed_by_its_data(model: Any, x: Tensor) -> Tensor:
    hidden = model.up(x)
    hidden.data.mul_(2.0)
    found: Tensor = model.down(hidden)
    return found


def leaf_behind_a_frozen_layer(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = model.up(x)
    hidden = hidden.requires_grad_()
    found: Tensor = model.down(hidden.tanh())
    (slope,) = torch.autograd.grad(found.sum(), hidden, create_graph=True)
    both: Tensor = found + slope.sum()
    return both


def slope_in_between(model: Any, x: Tensor) -> Tensor:
    hidden = model.up(x)
    found: Tensor = model.down(torch.tanh(hidden))
    of = hidden, model.gate.weight
    slopes = torch.autograd.grad(found.sum(), of, create_graph=True, allow_unused=True)
    both: Tensor = found + slopes[0].square().sum()
    return both if slopes[-1] is None else both * float("nan")  # it is not used


def torchs_attention(model: Any, x: Tensor) -> Tensor:
    hidden = torch.zeros(x.shape[:2], dtype=torch.bool)
    hidden[:, 3:] = True
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    found, _ = model.attention(x, x, x, hidden, attn_mask=mask, need_weights=False)
    mixed: Tensor = x + F.dropout(found, 0.2, training=model.training)
    return mixed


def torchs_attention_with_weights(model: Any, x: Tensor) -> Tensor:
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    found, weights = model.attention(x, x, x, attn_mask=mask)
    both: Tensor = found + weights.sum(-1, keepdim=True)
    return both


def torchs_attention_across(model: Any, x: Tensor) -> Tensor:
    found, _ = model.across(x, x[:, :4, :7], x[:, :4, 1:], need_weights=False)
    both: Tensor = x + found
    return both


def torchs_attention_across_in_one(model: Any, x: Tensor) -> Tensor:
    found, _ = model.attention(x, x[:, :4], x[:, :4])
    both: Tensor = x + found
    return both


def transformed(model: Any, x: Tensor) -> Tensor:
    slopes = torch.func.grad(lambda x: model.up(x).tanh().sum())(x)
    rows = torch.vmap(lambda row: model.down(model.up(row).relu()))(x)
    mixed: Tensor = slopes + rows + model.down(model.up(x).relu())
    return mixed


def routed(x: Tensor, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Each token by two of the experts; the last one has none."""
    tokens = x.flatten(0, 1)
    weights, chosen = tokens[:, : EXPERTS - 1].softmax(-1).topk(2, -1)
    found = torch.zeros_like(tokens)
    for expert in range(EXPERTS):
        rows, column = torch.where(chosen == expert)
        output = run(expert, tokens[rows]) * weights[rows, column, None]
        found.index_add_(0, rows, output)
    return found


def experts_in_a_loop(model: Any, x: Tensor) -> Tensor:
    def run(expert: int, tokens: Tensor) -> Tensor:
        gate, up = F.linear(tokens, model.experts_up[torch.tensor(expert)]).chunk(2, -1)
        made: Tensor = (gate.sigmoid() * up) @ model.experts_down[expert].T
        return made

    return routed(x, run)


def experts_with_gates_between(model: Any, x: Tensor) -> Tensor:
    ups = list(model.experts_up)

    def run(expert: int, tokens: Tensor) -> Tensor:
        both = tokens @ ups[expert].t() + model.experts_bias[expert, 0]
        gate, up = both[..., ::2], both[..., 1::2]
        return F.linear(gate.sigmoid() * up, model.experts_down[expert])

    return routed(x, run)


def experts_by_capacity(model: Any, x: Tensor) -> Tensor:
    tokens = x.flatten(0, 1)
    scores = tokens[:, :EXPERTS].softmax(-1)
    chosen = F.one_hot(scores.argmax(-1), EXPERTS)
    place = F.one_hot((chosen.cumsum(0) * chosen).clamp(max=3), 4)[..., 1:3].to(x)  # two for each
    slots = torch.einsum("tec,tw->ecw", place, tokens)
    hidden = torch.baddbmm(model.experts_bias, slots, model.experts_up.mT)
    hidden = torch.cat([hidden, hidden.roll(1, -1)], -1)[..., :7].relu()
    output = torch.bmm(hidden, model.experts_down.transpose(1, 2))
    return torch.einsum("tec,ecw->tw", place * scores[..., None], output)


def experts_by_einsum(model: Any, x: Tensor) -> Tensor:
    slots = x.flatten(0, 1).expand(EXPERTS, -1, -1)
    hidden = torch.einsum("ecw,ehw->ech", slots, model.experts_up)[..., :7].sigmoid()
    output = torch.einsum("ech,ewh->ecw", hidden, model.experts_down)
    return output.view(EXPERTS, -1, WIDTH).sum(0)


def all_experts_for_all(model: Any, x: Tensor) -> Tensor:
    hidden = x.flatten(0, 1) @ model.experts_up.mT + model.experts_bias
    mixed: Tensor = (hidden[..., 7:].tanh() @ model.experts_down.mT).sum(dim=0, keepdim=True)
    return mixed


def losses_over_classes(model: Any, x: Tensor) -> Tensor:
    logits = model.up(x)
    flat, target = logits.flatten(0, 1), torch.arange(10) % 7 * 2
    weight = torch.linspace(0.5, 2.0, 14, dtype=x.dtype)
    loss: Tensor = F.cross_entropy(flat, target)
    loss = loss + F.cross_entropy(flat * 200, target, reduction="sum", ignore_index=4)
    loss = loss + F.cross_entropy(flat, target, weight, ignore_index=0)
    smoothed = F.cross_entropy(flat, target, reduction="none", label_smoothing=0.1)
    fused = F.cross_entropy(model.both(x).chunk(2, -1)[0].transpose(1, 2), target.view(2, 5))
    return loss + smoothed @ torch.arange(10.0, dtype=x.dtype) + fused


def loss_of_probabilities(model: Any, x: Tensor) -> Tensor:
    return F.cross_entropy(model.up(x).flatten(0, 1), x.new_full((10, 14), 1 / 14))


CASES: dict[Callable[[Any, Tensor], Tensor], set[str]] = {
    by_chunks: set(),
    by_split: set(),
    by_view: set(),
    by_heads: set(),
    by_slices: set(),
    by_hand: set(),
    mlp: set(),
    mlp_in_place: set(),
    gated: set(),
    gated_fused: set(),
    dropout_between: set(),
    kernels: set(),
    convolve_as_keras: {END},
    convolve: {END},
    tied: {END},
    used_whole_too: set(),
    normed_over_columns: {"layer_norm", END},
    summed_over_columns: {"softmax"},
    own_function: {"Double", END},
    own_product: {"Product", "linear", END},
    checkpointed: {"checkpoint"},
    penalised: set(),
    changed_after_a_look: {"argmax", END},
    with_dropout_in_attention: set(),
    with_fewer_keys: set(),
    with_one_key: {"linear"},
    with_a_cache: set(),
    with_batched_products: set(),
    turned: set(),
    by_einsum: set(),
    same_letter_twice: {"einsum"},
    with_layers_left_out: {END},
    torchs_attention: set(),
    torchs_attention_with_weights: {"mean"},
    torchs_attention_across: set(),
    torchs_attention_across_in_one: {END},
    with_a_hook: {"register_hook", END},
    with_a_hook_of_a_view: set(),
    detached_in_place: {"detach_", END},
    changed_by_its_data: {"__get__", END},
    leaf_behind_a_frozen_layer: {"requires_grad_", "sum"},
    slope_in_between: set(),
    transformed: set(),
    experts_in_a_loop: set(),
    experts_with_gates_between: set(),
    experts_by_capacity: {"roll"},
    experts_by_einsum: set(),
    all_experts_for_all: set(),
    losses_over_classes: set(),
    loss_of_probabilities: {"cross_entropy"},
}


def run(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    output = model(x)
    return output.whole() if isinstance(output, DividedTensor) else output


def gradients(model: nn.Module, divided: DividedParameters | None = None) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if divided is not None and divided.is_divided(name):
            divided.keep(name, gradient)
            gradient = assembled(divided, name, torch.full_like(parameter, float("nan")))
        if gradient is not None:
            found[name] = gradient
    return found


def assembled(divided: DividedParameters, name: str, place: Tensor) -> Tensor | None:
    taken = divided.take_gradient(name)
    for shard, parts in (taken or {}).items():
        for block, part in zip(divided.blocks(name, place, shard), parts, strict=True):
            block.copy_(part)
    return None if taken is None else place


def divide(model: nn.Module, x: Tensor, num_shards: int) -> TensorSplits:
    return observed_splits(model, partial(model, x), num_shards)


def on_shards(model: nn.Module, splits: TensorSplits) -> DividedParameters:
    exchange = ShardExchange(splits.num_shards, range(splits.num_shards))
    by_name = {one.name: one.split for one in splits.parameters}
    return DividedParameters(dict(model.named_parameters()), by_name, exchange)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.manual_seed(1))


@pytest.mark.parametrize("num_shards", [2, 3])
@pytest.mark.parametrize("body", CASES, ids=lambda body: body.__name__)
def test_divided_layers_compute_the_same(
    body: Callable[[Any, Tensor], Tensor], num_shards: int, x: Tensor
) -> None:
    model = Model(body).double()
    expected = run(model, x)
    expected.square().sum().backward()
    plain = gradients(model)
    model.zero_grad()
    splits = divide(model, x, num_shards)
    assert splits.parameters
    divided = on_shards(model, splits)
    with divided.running():
        output = run(model, x)
        output.square().sum().backward()
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    found = gradients(model, divided)
    assert found.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12, msg=name)
    gathered = {one.gathered_for for one in splits.parameters} - {""}
    assert gathered == CASES[body]


def test_a_target_that_is_no_class_is_torchs_error(x: Tensor) -> None:
    model = Model(lambda model, x: F.cross_entropy(model.up(x)[0], torch.full((5,), 14))).double()
    with pytest.raises(IndexError, match="Target 14 is out of bounds"):
        divide(model, x, 2)


def cast_weights(model: Any, x: Tensor) -> Tensor:
    up, down, bias = (
        one.to(x.dtype) for one in (model.up.weight, model.down.weight, model.up.bias)
    )
    with torch.no_grad():
        fixed = model.gate.weight.to(x.dtype)
    both: Tensor = F.linear(F.linear(x, up, bias).tanh(), down) + F.linear(x, fixed).sum()
    changed = model.out.weight.to(x.dtype)
    return both + F.linear(x, changed.mul_(2.0))


def test_weights_that_are_cast_are_divided_like_others(x: Tensor) -> None:
    model = Model(cast_weights)
    run(model, x).square().sum().backward()
    plain = gradients(model)
    model.zero_grad()
    splits = divide(model, x, 2)
    by = {one.name: one.by for one in splits.parameters}
    assert by == {"up.weight": "columns", "up.bias": "columns", "down.weight": "rows"}
    divided = on_shards(model, splits)
    with divided.running():
        run(model, x).square().sum().backward()
    found = gradients(model, divided)
    assert found.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


def test_groups_of_tokens_are_multiplied_by_parts_of_their_experts(x: Tensor) -> None:
    """In float32: the kernel takes no float64. Its parts begin at multiples of 16 bytes."""
    stops = torch.tensor([3, 3, 4, 9, 10], dtype=torch.int32)

    def by_groups(model: Any, x: Tensor) -> Tensor:
        both = F.grouped_mm(x.flatten(0, 1).float(), model.ups.mT, offs=stops)
        gated = both[..., ::2].sigmoid() * both[..., 1::2]
        gate, up = F.grouped_mm(gated, model.middle, offs=stops).chunk(2, -1)
        return F.grouped_mm(gate.sigmoid() * up, model.downs.mT, offs=stops)

    model = Model(by_groups)
    model.ups, model.downs = (nn.Parameter(torch.rand(5, *size)) for size in [(40, 12), (12, 20)])
    model.middle = nn.Parameter(torch.rand(5, 20, 40))
    expected = run(model, x)
    expected.square().sum().backward()
    plain = gradients(model)
    model.zero_grad()
    splits = divide(model, x, 3)
    found = {one.name: (one.by, one.split.sizes, one.split.unit) for one in splits.parameters}
    assert found == {
        "ups": ("columns", (40,), 8),
        "middle": ("rows", (20,), 4),
        "downs": ("columns", (12,), 4),
    }
    divided = on_shards(model, splits)
    with divided.running():
        output = run(model, x)
        output.square().sum().backward()
    torch.testing.assert_close(output, expected)
    for name, gradient in gradients(model, divided).items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_stay_whole_for_a_reason(kind: Any, x: Tensor) -> None:
    model = nn.ModuleList([kind(WIDTH, 6, batch_first=True), nn.Linear(6, 4)]).double()
    recurrent, linear = model
    splits = observed_splits(model, lambda: linear(recurrent(x)[0]), 2)
    assert {one.name for one in splits.parameters} == {"1.weight", "1.bias"}
    name = "rnn_tanh" if kind is nn.RNN else kind.__name__.lower()
    assert {reason for _, reason in splits.whole} == {f"used by {name}"}


def test_layers_that_training_leaves_out_are_divided(x: Tensor) -> None:
    splits = divide(Model(with_layers_left_out).double(), x, 2)
    assert {"up.weight", "down.weight"} <= {one.name for one in splits.parameters}


def test_a_weight_used_turned_is_divided(x: Tensor) -> None:
    splits = divide(Model(turned).double(), x, 2)
    by = {one.name: one.by for one in splits.parameters}
    assert (by["up.weight"], by["down.weight"]) == ("columns", "rows")


def test_a_view_of_an_output_changed_in_place_is_refused(x: Tensor) -> None:
    def body(model: Any, x: Tensor) -> Tensor:
        hidden = model.up(x)
        turned = hidden.transpose(0, 1)
        hidden[..., 0] = 0.0
        doubled: Tensor = turned * 2
        return doubled

    model = Model(body).double()
    with pytest.raises(ModelError, match="changes the output of a divided layer in place"):
        divide(model, x, 2)


def test_a_hook_after_a_use_is_refused(x: Tensor) -> None:
    def body(model: Any, x: Tensor) -> Tensor:
        hidden = model.up(x)
        found: Tensor = model.down(hidden)
        hidden.register_hook(lambda gradient: gradient / 2)
        return found

    with pytest.raises(ModelError, match="gets a gradient hook after it was used"):
        divide(Model(body).double(), x, 2)


def test_a_gradient_that_is_retained_is_that_of_the_whole(x: Tensor) -> None:
    def body(model: Any, x: Tensor) -> Tensor:
        model.hidden = model.up(x)
        if model.hidden.requires_grad:
            model.hidden.retain_grad()
        found: Tensor = model.down(model.hidden.tanh())
        return found

    model = Model(body).double()
    splits = divide(model, x, 2)
    found = []
    for context in (nullcontext(), on_shards(model, splits).running()):
        with context:
            run(model, x).square().sum().backward()
            found.append(model.hidden.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_a_gradient_retained_after_a_use_is_refused(x: Tensor) -> None:
    def body(model: Any, x: Tensor) -> Tensor:
        hidden = model.up(x)
        found: Tensor = model.down(hidden)
        hidden.retain_grad()
        return found

    with pytest.raises(ModelError, match="after it was used"):
        divide(Model(body).double(), x, 2)


class UsedWithin(nn.Module):
    """Its output is used before it is returned."""

    def __init__(self, up: nn.Linear) -> None:
        super().__init__()
        self.up = up

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.linear(x, self.up.weight, self.up.bias).tanh()
        return hidden, hidden * 2


def test_hooks_of_a_proof_are_not_refused(x: Tensor) -> None:
    def body(model: Any, x: Tensor) -> Tensor:
        hidden, doubled = model.within(x)
        found: Tensor = model.down(hidden) + model.down(doubled)
        return found

    model = Model(body).double()
    model.within = UsedWithin(model.up)
    splits = divide(model, x, 2)
    assert "down.weight" in {one.name for one in splits.parameters if one.by == "rows"}
    noted = []
    for context in (nullcontext(), on_shards(model, splits).running()):
        with context, ModuleWatch(model).watching() as values:
            run(model, x).square().sum().backward()
        noted.append({spot: value for of_share in values.values() for spot, value in of_share})
    plain, found = noted
    assert plain.keys() - found.keys() == {Spot("gradient", "within")}
    for spot, value in found.items():
        torch.testing.assert_close(value, plain[spot], rtol=1e-12, atol=1e-12, msg=str(spot))


def test_a_hook_of_a_view_after_a_use_of_its_view_is_refused(x: Tensor) -> None:
    def body(model: Any, x: Tensor) -> Tensor:
        matrix = model.experts_up[1]
        found: Tensor = x @ matrix.t()
        if matrix.requires_grad:
            matrix.register_hook(lambda gradient: gradient / 2)
        return found

    with pytest.raises(ModelError, match="gets a gradient hook after it was used"):
        divide(Model(body).double(), x, 2)


@pytest.mark.parametrize(
    "body",
    [
        lambda model, x: torch.vmap(torch.tanh)(model.up(x)),
        lambda model, x: torch.vmap(model.up(x).mul)(x[0, 0]),
    ],
    ids=["given", "enclosed"],
)
def test_a_transform_of_an_output_is_refused(body: Any, x: Tensor) -> None:
    with pytest.raises(ModelError, match="A transform of torch"):
        divide(Model(body).double(), x, 2)


def test_an_output_that_is_kept_is_refused(x: Tensor) -> None:
    kept: list[Tensor] = []

    def body(model: Any, x: Tensor) -> Tensor:
        kept.append(model.up(x))
        hidden: Tensor = model.down(kept[-1])
        return hidden

    model = Model(body).double()
    divided = on_shards(model, divide(model, x, 2))
    with divided.running():
        run(model, x)
    with pytest.raises(ModelError, match=r"after the pass, by the model or by a hook.*=\['up'\]"):
        str(kept[-1])


def test_parameters_whose_gradients_have_hooks_stay_whole(x: Tensor) -> None:
    model = Model(mlp).double()
    model.up.weight.register_hook(lambda gradient: gradient)
    splits = divide(model, x, 2)
    assert ("up.weight", "its gradient has a hook") in splits.whole
    assert "up.weight" not in {one.name for one in splits.parameters}


def test_gradients_of_columns_are_formed_in_the_order_of_memory() -> None:
    """A transposed one would be copied; they can be differentiated again."""
    weight = torch.randn(5, 8, dtype=torch.float64)[:, 2:6].requires_grad_()
    inputs = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def product(inputs: Tensor, weight: Tensor) -> Tensor:
        return product_of_columns(F.linear, inputs, weight, None)

    outputs = product(inputs, weight)
    assert torch.equal(outputs, F.linear(inputs, weight))
    (gradient,) = torch.autograd.grad(outputs.sum(), weight)
    assert gradient.is_contiguous()
    assert torch.autograd.gradgradcheck(product, (inputs, weight))
    one_sample = inputs.detach()[0, 0].requires_grad_()
    assert torch.autograd.gradcheck(product, (one_sample, weight))
