"""The nets of ``bench/gpu.py``: GPT-2 and a ResNet, of their real sizes or small ones."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class GPTSize:
    """Of a GPT-2; the defaults are those of the smallest one, with 124 million parameters."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    words: int = 50304  # 50,257, and as many as make it a multiple of 64
    batch_size: int = 32


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and around a residual."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.first_norm, self.second_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = nn.Linear(size.width, 3 * size.width)
        self.projection = nn.Linear(size.width, size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.first_norm(x)).split(width, dim=2)
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        widened: Tensor = self.down(F.gelu(self.up(self.second_norm(x)), approximate="tanh"))
        return x + widened


class GPT(nn.Module):
    """Returns its loss, the mean over all tokens, so that all of it is compiled."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.words, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.tokens(tokens) + self.places(places)))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def gpt_flops(size: GPTSize) -> float:
    """Of a token in training: 6 for each parameter, and attention's (PaLM, appendix B)."""
    block = 12 * size.width**2
    matrices = size.layers * block + size.words * size.width
    return 6.0 * matrices + 12.0 * size.layers * size.width * size.context


class Bottleneck(nn.Module):
    """Of a ResNet-50: 1x1, 3x3, 1x1, around a residual."""

    def __init__(self, ins: int, width: int, stride: int) -> None:
        super().__init__()
        outs = 4 * width
        self.body = nn.Sequential(
            *_convolution(ins, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, outs, 1),
        )
        is_same = ins == outs and stride == 1
        self.short = (
            nn.Identity() if is_same else nn.Sequential(*_convolution(ins, outs, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


def _convolution(ins: int, outs: int, size: int, stride: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(ins, outs, size, stride, padding=size // 2, bias=False)
    return [layer, nn.BatchNorm2d(outs)]


def resnet(
    depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000
) -> nn.Module:
    """A ResNet-50 by default; takes (n, 3, height, width)."""
    layers: list[nn.Module] = [
        *_convolution(3, width, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    ins = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(ins, width << stage, stride))
            ins = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ins, classes))
