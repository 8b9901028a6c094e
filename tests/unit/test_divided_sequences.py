"""Sequences divided by time against whole ones, in one process: values, gradients, and memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.parallel.tensor.divided_tensor import DividedTensor
from lockstep.parallel.tensor.observing import observed_splits
from lockstep.parallel.tensor.parameters import DividedParameters
from lockstep.parallel.tensor.shard_exchange import ShardExchange

TIMES, WIDTH, HEADS, CLASSES = 7, 12, 2, 9
END = "the model's output"
TOKENS = torch.randint(CLASSES, (3, TIMES), generator=torch.Generator().manual_seed(2))


class Model(nn.Module):
    """A layer of a transformer around a way to attend."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.tokens, self.times = nn.Embedding(CLASSES, WIDTH), nn.Embedding(TIMES, WIDTH)
        self.norm, self.last_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.both = nn.Linear(WIDTH, WIDTH)
        self.mixed = nn.MultiheadAttention(WIDTH, HEADS, 0.2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Parameter(torch.rand(20, WIDTH) / 4)
        self.bias = nn.Parameter(torch.rand(WIDTH))
        self.out = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.times(torch.arange(tokens.shape[1]))
        x = x + self.attend(self, self.norm(x))
        hidden = F.dropout(F.gelu(self.up(x)), 0.2, self.training)
        flat = torch.addmm(self.bias, hidden.view(-1, 20), self.down)
        logits: Tensor = self.out(self.last_norm(x + flat.view(x.shape)))
        return logits


def heads_of(x: Tensor, count: int = HEADS) -> Tensor:
    heads: Tensor = x.unflatten(-1, (count, -1)).transpose(1, 2)
    return heads


def joined(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def turned(heads: Tensor) -> Tensor:
    """Rotary positions."""
    angles = torch.arange(heads.shape[-2], dtype=heads.dtype)[:, None] * 0.3
    first, second = heads.chunk(2, -1)
    both: Tensor = heads * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
    return both


def causal(model: Any, x: Tensor) -> Tensor:
    query = turned(heads_of(model.query(x)))
    key = turned(heads_of(model.both(x)[..., : WIDTH // 2], 1))
    value = heads_of(model.both(x)[..., WIDTH // 2 :], 1)
    return joined(
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    )


def causal_with_dropout(model: Any, x: Tensor) -> Tensor:
    query, key = (heads_of(layer(x)) for layer in (model.query, model.both))
    return joined(F.scaled_dot_product_attention(query, key, query, dropout_p=0.2, is_causal=True))


def with_a_mask(model: Any, x: Tensor) -> Tensor:
    query, key = (heads_of(layer(x)) for layer in (model.query, model.both))
    padding = (torch.arange(TIMES) < torch.tensor([[7], [4], [5]]))[:, None, None]
    return joined(F.scaled_dot_product_attention(query, key, key, padding))


def by_hand(model: Any, x: Tensor) -> Tensor:
    """With a bias that depends on the distance."""
    query, key = (heads_of(layer(x)) for layer in (model.query, model.both))
    times = torch.arange(TIMES)
    scores = query @ key.transpose(-2, -1) - 0.1 * (times[:, None] - times).abs()
    hidden = torch.ones(TIMES, TIMES, dtype=torch.bool).triu(1)
    return joined(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ key)


def by_batches(model: Any, x: Tensor) -> Tensor:
    query, key = model.query(x), model.both(x)
    slopes = torch.arange(TIMES, dtype=x.dtype).expand(3, 1, -1)
    return torch.bmm(torch.baddbmm(slopes, query, key.mT, alpha=0.2).softmax(-1), key)


def torchs(model: Any, x: Tensor) -> Tensor:
    found, _ = model.mixed(x, x, x, need_weights=False)
    across, _ = model.mixed(x, TIMES - model.tokens(TOKENS[:, :5]), x[:, :5], need_weights=False)
    mixed: Tensor = found + across
    return mixed


def of_all_times(model: Any, x: Tensor) -> Tensor:
    mixed: Tensor = model.query(x) * model.both(x).cumsum(1)
    return mixed


CASES: dict[Callable[..., Tensor], set[str]] = {
    causal: set(),
    causal_with_dropout: set(),
    with_a_mask: set(),
    by_hand: {"__matmul__"},
    by_batches: {"baddbmm"},
    torchs: {"__getitem__"},
    of_all_times: {"cumsum"},
}


def loss_of(model: nn.Module) -> Tensor:
    torch.manual_seed(3)
    logits, targets = model(TOKENS), TOKENS.roll(1, 1)
    weight = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=4)
    loss = loss + F.cross_entropy(logits.transpose(1, 2), targets, weight)
    by_token = F.cross_entropy(logits.mT, targets, reduction="none", label_smoothing=0.1)
    return loss + (by_token * torch.arange(TIMES, dtype=torch.float64)).sum(1).mean()


@pytest.mark.parametrize("num_shards", [2, 3])
@pytest.mark.parametrize("attend", CASES, ids=lambda attend: attend.__name__)
def test_divided_sequences_compute_the_same(attend: Callable[..., Tensor], num_shards: int) -> None:
    model = Model(attend).double()
    expected = loss_of(model)
    expected.backward()
    plain = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    splits = observed_splits(model, partial(model, TOKENS), num_shards, divides_time=True)
    assert {"tokens.weight", "norm.weight", "down", "out.weight"} <= dict(
        splits.by_time or ()
    ).keys()
    parameters = dict(model.named_parameters())
    exchange = ShardExchange(num_shards, range(num_shards))
    with DividedParameters(parameters, {}, exchange, divides_time=True).running():
        found = loss_of(model)
        found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for name, gradient in plain.items():
        torch.testing.assert_close(
            parameters[name].grad, gradient, rtol=1e-12, atol=1e-12, msg=name
        )
    assert {reason for _, reason in splits.by_time or ()} - {"", END} == CASES[attend]


def saved_bytes(model: nn.Module, tokens: Tensor) -> int:
    """What autograd keeps of activations."""
    kept: dict[int, tuple[int, Tensor]] = {}
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    assert isinstance(logits, DividedTensor) or logits.shape[1] == tokens.shape[1]
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("num_shards", [2, 4])
def test_a_rank_keeps_its_part_of_the_activations(num_shards: int) -> None:
    model = Model(causal).eval()
    model.times = nn.Embedding(128, WIDTH)
    tokens = torch.randint(CLASSES, (2, 128))
    whole = saved_bytes(model, tokens)
    exchange = ShardExchange(num_shards, range(1))  # one rank's part; the others give nothing
    parameters = DividedParameters(dict(model.named_parameters()), {}, exchange, divides_time=True)
    with parameters.running():
        own = saved_bytes(model, tokens)
    assert own < whole * (1 / num_shards + 0.05)
