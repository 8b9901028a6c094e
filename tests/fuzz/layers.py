"""Layers as users write them, which keep a hidden tensor's shape.

At top level, so that they reach helper processes by reference.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH, TICKS, SIDE = 6, 5, 8, 6
VOCABULARY = 11


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(hidden)


class Residual(nn.Module):
    """What a layer returns, added to what it takes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.inner(hidden))


class Transposed(nn.Module):
    """A layer over (n, channels, length) for (n, length, channels)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        moved: Tensor = self.inner(hidden.transpose(1, 2))
        return moved.transpose(1, 2)


class Checkpointed(nn.Module):
    """A layer whose activations are computed again in backward."""

    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, hidden, use_reentrant=self.use_reentrant)
        return result


class First(nn.Module):
    """The first of what a layer returns, made as wide as its input again."""

    def __init__(self, inner: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.inner, self.back = inner, nn.Linear(width, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        narrowed: Tensor = self.back(self.inner(hidden)[0])
        return narrowed


class SelfAttention(nn.Module):
    def __init__(self, *, causal: bool = False, **options: Any) -> None:
        super().__init__()
        self.causal = causal
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)

    def forward(self, hidden: Tensor) -> Tensor:
        mask = hidden.new_ones(LENGTH, LENGTH).triu(1).bool() if self.causal else None
        mixed: Tensor = self.attention(hidden, hidden, hidden, attn_mask=mask, need_weights=False)[
            0
        ]
        return hidden + mixed


class TimeFirst(nn.Module):
    """A recurrent layer that wants time first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        states: Tensor = self.inner(hidden.transpose(0, 1))[0]
        return states.transpose(0, 1)


class Stateful(nn.Module):
    """An LSTM whose first state is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.state = nn.Parameter(torch.randn(2, 1, 1, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        first, cell = self.state.expand(2, 1, len(hidden), WIDTH).unbind()
        states, _ = self.inner(hidden, (first.contiguous(), cell.contiguous()))
        return states  # type: ignore[no-any-return]


class CellLoop(nn.Module):
    """A cell in a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        state, states = hidden.new_zeros(len(hidden), WIDTH), []
        for tick in range(hidden.shape[1]):
            state = self.cell(hidden[:, tick], state)
            states.append(state)
        return torch.stack(states, 1)


class Decoder(nn.Module):
    """A decoder layer whose memory is its own input, reversed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.layer(hidden, hidden.flip(1))
        return result


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, LENGTH)[:, None], persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.get_buffer("scale") + self.table


class SelfBilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = self.inner(hidden, torch.tanh(hidden))
        return product


class Scalars(nn.Module):
    """Parameters without dims, in a list and in a dict; one has no elements, one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.tensor(0.7), torch.tensor([0.1])])
        self.named = nn.ParameterDict({"gain": torch.tensor(1.1), "idle": torch.randn(3)})
        self.void = nn.Parameter(torch.empty(0, 4))

    def forward(self, hidden: Tensor) -> Tensor:
        scaled = self.listed[0] * hidden * self.named["gain"]
        result: Tensor = scaled + self.listed[1] + self.void.sum()
        return result


class Complex(nn.Module):
    """A filter with complex weights in the space of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))

    def forward(self, hidden: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(hidden, dim=1) * torch.view_as_complex(self.weight)
        filtered: Tensor = torch.fft.irfft(spectrum, n=WIDTH, dim=1)
        return filtered


class Experts(nn.Module):
    """Every sample goes to the expert that it scores best; an expert may have no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        share, best = self.router(hidden).softmax(1).max(1)
        mixed = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            chosen = (best == number).nonzero()[:, 0]
            mixed = mixed.index_add(0, chosen, share[chosen, None] * expert(hidden[chosen]))
        return hidden + mixed


class Masked(nn.Module):
    """All experts on all samples, by a mask of one-hot choices."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        gates = self.router(hidden).softmax(1)
        return torch.einsum("ni,eio,ne->no", hidden, self.experts, gates)


class CountingCalls(nn.Module):
    """A buffer that changes with every batch, whatever the samples are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("calls").add_(1)
        result: Tensor = self.inner(hidden)
        return result


class PerSampleFunction(torch.autograd.Function):
    """A rounding that passes gradients on, and limits them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return (hidden * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        hidden: Tensor = ctx.saved_tensors[0]
        return gradients[0] * (hidden.abs() < 2)


def straight_through(hidden: Tensor) -> Tensor:
    result: Tensor = PerSampleFunction.apply(hidden)  # type: ignore[no-untyped-call]
    return result + 0.5 * hidden


def in_place(hidden: Tensor) -> Tensor:
    copy = hidden * 1.25
    copy += 0.1
    copy[:, 0] = copy[:, 1] * 2
    copy.mul_(0.5).clamp_(-3, 3)
    return F.leaky_relu_(copy, 0.2)


def masked_in_place(hidden: Tensor) -> Tensor:
    copy = hidden.clone()
    copy[hidden < -0.5] = 0.25
    return copy


def detached_part(hidden: Tensor) -> Tensor:
    with torch.no_grad():
        scale = hidden.abs().amax(1, keepdim=True).clamp(min=1)
    return hidden / scale + hidden.detach()


def sorted_along(hidden: Tensor) -> Tensor:
    return hidden.sort(1).values.cumsum(1) / hidden.shape[1]


def halved_gradient(hidden: Tensor) -> Tensor:
    shifted = hidden + 0
    if shifted.requires_grad:
        shifted.register_hook(_halve)
    return shifted


def _halve(gradient: Tensor) -> Tensor:
    return gradient / 2


def _scale_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 0.9


def _shift_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0] + 0.1,)


def _scale_gradient(module: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor, ...]:
    return (inputs[0] * 0.8,)


def hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(_scale_output)
    layer.register_forward_pre_hook(_shift_input)
    return layer


def hooked_backward() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_full_backward_hook(_scale_gradient)
    return layer


def parameter_hook() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.register_hook(_halve)
    return layer


def frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def frozen_bias() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.bias.requires_grad_(False)
    return layer


def channel_shuffle(hidden: Tensor) -> Tensor:
    return F.channel_shuffle(hidden, 2)


def up_and_down(hidden: Tensor) -> Tensor:
    return F.avg_pool2d(F.interpolate(hidden, scale_factor=2, mode="bilinear"), 2)


def pixel_shuffled(hidden: Tensor) -> Tensor:
    return F.pixel_unshuffle(F.pixel_shuffle(hidden.repeat(1, 2, 1, 1)[:, :8], 2), 2)[:, :WIDTH]


def folded(hidden: Tensor) -> Tensor:
    columns = F.unfold(hidden, 3, padding=1)
    return F.fold(columns, (SIDE, SIDE), 3, padding=1) / 9


def attended(hidden: Tensor) -> Tensor:
    return hidden + F.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
