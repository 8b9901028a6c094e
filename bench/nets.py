"""The four nets of the data parallel benchmark: what each contender trains, and on what."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Net:
    """A net with its data.

    Attributes:
        title: for tables.
        batch_size: of the global batch.
        num_samples: samples of the data set.
        make_model: builds the model; the same weights at every call.
        make_data: (inputs, targets) of that many samples.
        loss: (output, target) -> mean over the batch.
    """

    title: str
    batch_size: int
    num_samples: int
    make_model: Callable[[], nn.Module]
    make_data: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


def perceptron(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for ins, outs in pairwise(sizes):
        layers += [nn.Linear(ins, outs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Block(nn.Module):
    """A transformer block: causal attention and a feed-forward net, normalised before."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = self.qkv(self.attention_norm(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        fed: Tensor = self.feed(self.feed_norm(x))
        return x + fed


class GPT(nn.Module):
    """A decoder-only transformer, over bytes unless its vocabulary is larger."""

    def __init__(
        self, num_layers: int, width: int, num_heads: int, num_tokens: int, num_words: int = 256
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(num_words, width)
        self.position = nn.Embedding(num_tokens, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(num_layers=6, width=256, num_heads=8, num_tokens=128)


def vectors(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(num_samples, 784, generator=generator),
        torch.randint(0, 10, (num_samples,), generator=generator),
    )


def images(num_samples: int) -> tuple[Tensor, Tensor]:
    inputs, targets = vectors(num_samples)
    return inputs.view(-1, 1, 28, 28), targets


def gpt2() -> nn.Module:
    """As large as GPT-2's smallest, 124M parameters, whose head is the embedding."""
    torch.manual_seed(0)
    model = GPT(num_layers=12, width=768, num_heads=12, num_tokens=128, num_words=50_257)
    model.head.weight = model.token.weight
    return model


def sequences(num_samples: int, num_words: int = 256) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, num_words, (num_samples, 129), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def class_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


NETS = {
    "mlp": Net(
        "MLP 784-256-256-10",
        512,
        61_440,  # about as many as MNIST has
        lambda: perceptron(784, 256, 256, 10),
        vectors,
        class_loss,
    ),
    "wide": Net(
        "wide MLP 784-4096-4096-10",
        256,
        1_024,
        lambda: perceptron(784, 4096, 4096, 10),
        vectors,
        class_loss,
    ),
    "cnn": Net("CNN 32-64-64, 28 x 28", 256, 2_048, convolutional, images, class_loss),
    "gpt": Net("GPT 6 layers, 256 wide, 128 tokens", 16, 64, language_model, sequences, token_loss),
}
