"""The reference's random numbers: drawn for a whole batch, they are those its shares draw."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.data.order import share_seed
from lockstep.plan.shares import share_bounds
from lockstep.proof.streams import Probe, ShareStreams, probe_draws

NUM_SAMPLES = 7
Forward = Callable[[Tensor], Tensor]


def bounds_of(num_shares: int) -> list[tuple[int, int]]:
    return list(share_bounds(NUM_SAMPLES, num_shares))


def by_share(forward: Forward, inputs: Tensor, num_shares: int, dim: int = 0) -> Tensor:
    """What the shares compute, each by itself and from its own seed."""
    outputs = []
    for share, (start, stop) in enumerate(bounds_of(num_shares)):
        torch.manual_seed(share_seed(0, 3, share))
        outputs.append(forward(inputs.narrow(dim, start, stop - start).contiguous()))
    return torch.cat(outputs, dim)


def streams(num_shares: int, probe: Probe | None = None) -> ShareStreams:
    seeds = [share_seed(0, 3, share) for share in range(num_shares)]
    states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
    torch.manual_seed(99)  # must not matter
    return ShareStreams(bounds_of(num_shares), states, probe)


def at_once(forward: Forward, inputs: Tensor, num_shares: int, dim: int = 0) -> Tensor:
    probe = probe_draws(
        NUM_SAMPLES - 1, lambda: forward(inputs.narrow(dim, 0, NUM_SAMPLES - 1).contiguous())
    )
    mode = streams(num_shares, probe)
    with mode:
        output = forward(inputs)
    assert mode.notes == []
    return output


ELEMENTWISE: dict[str, Forward] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "dropout of channels": lambda x: F.dropout2d(x, 0.4),
    "dropout of channels last": lambda x: F.dropout(x.to(memory_format=torch.channels_last), 0.4),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "two in a row": lambda x: F.dropout(F.dropout(x, 0.2), 0.3),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, dim=-1),
    "normal noise": lambda x: x + torch.randn_like(x),
    "uniform noise of a size": lambda x: x + torch.rand(len(x), 1, 1, 1),
    "normal noise of a size": lambda x: x + torch.randn(x.shape, dtype=x.dtype),
    "whole numbers": lambda x: x + torch.randint(5, x.shape) + torch.randint_like(x, 2, 9),
    "in place": lambda x: x + torch.empty_like(x).uniform_() + torch.empty_like(x).normal_(2, 3),
    "by given means": lambda x: torch.normal(x, 0.5) + torch.normal(0.5, x.abs()),
    "by given odds": lambda x: torch.bernoulli(x.sigmoid()) + x.sigmoid().bernoulli(),
    "broadcast odds": lambda x: torch.empty_like(x).bernoulli_(torch.full((8, 1), 0.3)),
    "poisson": lambda x: torch.poisson(x.abs()),
    "flattened": lambda x: F.dropout(x.flatten(0, 1), 0.4).unflatten(0, (-1, 6)),
    "some rows of each": lambda x: torch.cat([F.dropout(x[:, :2], 0.4), x[:, 2:]], 1),
    "multinomial": lambda x: torch.multinomial(x.flatten(1).softmax(1), 3),
    "seeded anew": lambda x: seeded_anew(x),
    "put back": lambda x: put_back(x),
}


def seeded_anew(x: Tensor) -> Tensor:
    first = F.dropout(x, 0.2)
    torch.manual_seed(5)
    return first + torch.randn_like(x) + torch.randn_like(x)


def put_back(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=()):
        first = F.dropout(x, 0.2)
    return first + F.dropout(x, 0.4) + torch.randn(len(x), 2, 1, 1).sum(1, keepdim=True)


@pytest.mark.parametrize("num_shares", [2, 3])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_draws_have_the_bits_of_the_shares(name: str, num_shares: int) -> None:
    inputs = torch.randn(NUM_SAMPLES, 6, 8, 8, dtype=torch.float64)
    forward = ELEMENTWISE[name]
    expected = by_share(forward, inputs, num_shares)
    assert torch.equal(at_once(forward, inputs, num_shares), expected)
    other = torch.get_rng_state()
    assert not torch.equal(forward(inputs), expected)  # draws something at all
    torch.set_rng_state(other)


class Attention(nn.Module):
    """Attention that returns its weights, so that dropout sees samples times heads."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, dropout=0.4, **options)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x, x, x)[0]
        return output


def lstm(**options: Any) -> Forward:
    layer = nn.LSTM(8, 8, num_layers=3, dropout=0.4, **options).double()
    return lambda x: layer(x)[0]


def gru() -> Forward:
    layer = nn.GRU(8, 4, num_layers=2, dropout=0.4, bidirectional=True).double()
    return lambda x: layer(x)[0]


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4)


# How a layer is made, and which dim of its input is the samples'. With time first, time is at times
# a multiple of the samples, so that sizes alone would mislead.
LAYERS: dict[str, tuple[Callable[[], Forward], int]] = {
    "lstm": (lstm, 1),
    "lstm, samples first": (lambda: lstm(batch_first=True), 0),
    "gru, both ways": (gru, 1),
    "attention with weights": (lambda: Attention().double(), 1),
    "attention with weights, samples first": (lambda: Attention(batch_first=True).double(), 0),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.4).double(), 1),
    "scaled dot product": (lambda: attend, 0),
}


@pytest.mark.parametrize("length", [NUM_SAMPLES, 2 * NUM_SAMPLES, 5])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_get_the_numbers_of_their_shares(name: str, length: int) -> None:
    make, dim = LAYERS[name]
    shape = (NUM_SAMPLES, length, 8) if dim == 0 else (length, NUM_SAMPLES, 8)
    torch.manual_seed(0)
    inputs, forward = torch.randn(shape, dtype=torch.float64), make()
    expected = by_share(forward, inputs, 3, dim)
    torch.testing.assert_close(at_once(forward, inputs, 3, dim), expected, rtol=0, atol=1e-13)
    assert not torch.allclose(forward(inputs), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_draws_the_same_numbers_again(reentrant: bool) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5)).double()
    inputs = torch.randn(NUM_SAMPLES, 4, dtype=torch.float64)

    def forward(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        hidden: Tensor = checkpoint(layers, x, use_reentrant=reentrant)
        (gradient,) = gradients_of(F.dropout(hidden, 0.5), x)
        return torch.cat([hidden.detach(), gradient], 1)

    torch.testing.assert_close(at_once(forward, inputs, 3), by_share(forward, inputs, 3))


def gradients_of(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    output.pow(2).sum().backward()
    return [one.grad for one in inputs if one.grad is not None]


def test_without_a_probe_the_first_dim_that_fits_is_taken() -> None:
    inputs = torch.randn(NUM_SAMPLES, NUM_SAMPLES)
    mode = streams(2)
    with mode:
        output = F.dropout(inputs, 0.4)
    assert torch.equal(output, by_share(lambda x: F.dropout(x, 0.4), inputs, 2))


def test_draws_that_belong_to_no_sample_are_noted() -> None:
    mode = streams(2)
    with mode:
        torch.randperm(10)
        torch.rand(5, 3)
        F.dropout(torch.ones(NUM_SAMPLES, 3), 0.5)
    assert len(mode.notes) == 2
    assert "aten.randperm" in mode.notes[0]
    assert "aten.rand.default draws numbers of shape (5, 3)" in mode.notes[1]


def test_numbers_after_an_undivided_draw_are_right_again() -> None:
    def forward(x: Tensor) -> Tensor:
        torch.randperm(10)
        return F.dropout(x, 0.5)

    inputs = torch.ones(NUM_SAMPLES, 4)
    with streams(3):
        output = forward(inputs)
    assert torch.equal(output, by_share(forward, inputs, 3))


def test_a_generator_of_the_models_own_is_noted_and_left_alone() -> None:
    mode = streams(2)
    with mode:
        drawn = torch.randn(NUM_SAMPLES, generator=torch.Generator().manual_seed(1))
    assert torch.equal(drawn, torch.randn(NUM_SAMPLES, generator=torch.Generator().manual_seed(1)))
    assert "generator of the model's own" in mode.notes[0]


def test_operations_that_could_draw_and_do_not_are_left_alone() -> None:
    query = torch.randn(NUM_SAMPLES, 2, 5, 4)
    mode = streams(2)
    before = torch.get_rng_state()
    with mode:
        attended = F.scaled_dot_product_attention(query, query, query)
        F.dropout(query, 0.0)
        F.rrelu(query, training=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(attended, F.scaled_dot_product_attention(query, query, query))
    assert mode.notes == []


def test_a_probe_leaves_the_random_state_and_may_fail() -> None:
    before = torch.get_rng_state()
    assert probe_draws(3, lambda: torch.zeros(2).reshape(3)) is None
    assert probe_draws(3, lambda: torch.zeros(2)) is None
    probe = probe_draws(3, lambda: torch.rand(3, 2))
    assert probe is not None
    assert [draw.shape for draw in probe.draws] == [(3, 2)]
    assert torch.equal(torch.get_rng_state(), before)
