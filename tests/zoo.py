"""The models that every parallel strategy is held to: small, and each with a point of its own.

A case is a whole training job. Its data fills five batches in order, the last one short: some of
its shares are empty on 3 or 4 replicas, in some cases on 2. No replica count from 2 to 4 divides a
batch. Floating data is float64 and models come in the default dtype: a test converts one or the
other. Models and losses are classes and functions at top level, so that they reach helper
processes by reference.

Optimizers are chosen so that a proof to 1e-12 is possible: Adam and its like turn a gradient that
is zero in exact arithmetic into full steps in the direction of its rounding error. Models with such
gradients (a bias before a batch normalisation, the bias of attention keys) train with SGD.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import lockstep

IGNORED = -100  # torch's own default for targets that do not count

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A model, and all that is needed to train it.

    ``inputs`` is one positional argument of the model, a tuple of them, or a dict of keyword
    arguments. ``make_model`` returns the same weights at every call.
    """

    name: str
    make_model: Callable[[], nn.Module]
    loss: Callable[..., Any]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    inputs: Inputs
    targets: Tensor
    batch_size: int


def cases() -> tuple[Case, ...]:
    return (
        mlp_case(),
        cnn_batch_norm_case(),
        cnn_dropout_case(),
        gpt_tied_case(),
        unet_case(),
        lstm_case(),
        two_inputs_case(),
        unused_branch_case(),
        wide_case(),
        resnet_case(),
        two_tower_case(),
        encoder_decoder_case(),
    )


def case(name: str) -> Case:
    by_name = {one.name: one for one in cases()}
    if name not in by_name:
        raise KeyError(f"no case {name!r}; there are {', '.join(by_name)}")
    return by_name[name]


def make_job(one: Case) -> lockstep.Job:
    """What ``lockstep.verify`` proves."""
    return lockstep.Job(
        model=one.make_model(),
        loss=one.loss,
        optimizer=one.optimizer,
        data=(one.inputs, one.targets),
        batch_size=one.batch_size,
    )


def build_seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Build on the CPU from a fixed seed, and leave the caller's random state as it was."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(2024)
        return build()


def normal(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def teach_classes(generator: Generator, features: Tensor, num_classes: int) -> Tensor:
    """Label samples by a random linear teacher, so that there is something to learn."""
    rows = features.flatten(1)
    return (rows @ normal(generator, rows.shape[1], num_classes)).argmax(1)


# --- mlp: the plain case; its last batch is one sample, so all replicas but one have none of it.


def make_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5)
    )


def mlp_case() -> Case:
    generator = Generator().manual_seed(1)
    inputs = normal(generator, 4 * 13 + 1, 20)
    return Case(
        name="mlp",
        make_model=partial(build_seeded, make_mlp),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        inputs=inputs,
        targets=teach_classes(generator, inputs, 5),
        batch_size=13,
    )


# --- cnn_batch_norm: statistics of the whole batch in forward and backward, buffers (one of them an
# integer), and biases whose gradient is zero in exact arithmetic.


def make_cnn_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, 4),
    )


def cnn_batch_norm_case() -> Case:
    generator = Generator().manual_seed(2)
    images = 3 * normal(generator, 4 * 13 + 3, 2, 8, 8) + 1  # far from normalised
    return Case(
        name="cnn_batch_norm",
        make_model=partial(build_seeded, make_cnn_batch_norm),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=5e-2, momentum=0.9),
        inputs=images,
        targets=teach_classes(generator, images, 4),
        batch_size=13,
    )


# --- cnn_dropout: random streams, of whole channels and of single elements. Its result depends on
# the number of shares, and on nothing else.


def make_cnn_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.Dropout2d(0.25),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(96, 4),
    )


def cnn_dropout_case() -> Case:
    generator = Generator().manual_seed(3)
    images = normal(generator, 4 * 11 + 5, 1, 8, 8)
    return Case(
        name="cnn_dropout",
        make_model=partial(build_seeded, make_cnn_dropout),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=3e-2, momentum=0.9),
        inputs=images,
        targets=teach_classes(generator, images, 4),
        batch_size=11,
    )


# --- gpt_tied: one Parameter under two names, in the first and the last layer, and a loss that
# weighs tokens: shares of equal size count differently, and some sequences count nothing.

VOCABULARY, NUM_TOKENS, WIDTH, NUM_HEADS = 23, 7, 16, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.query_key_value(hidden).chunk(3, dim=-1)
        heads = F.scaled_dot_product_attention(
            self.split_heads(query), self.split_heads(key), self.split_heads(value), is_causal=True
        )
        mixed: Tensor = self.mix(heads.transpose(1, 2).flatten(2))
        return mixed

    @staticmethod
    def split_heads(tokens: Tensor) -> Tensor:
        """(n, tokens, width) to (n, heads, tokens, width / heads)."""
        return torch.unflatten(tokens, -1, (NUM_HEADS, WIDTH // NUM_HEADS)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = hidden + self.attention(self.attention_norm(hidden))
        transformed: Tensor = mixed + self.mlp(self.mlp_norm(mixed))
        return transformed


class TiedGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(NUM_TOKENS, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks(self.embedding(tokens) + self.positions)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class TokenLoss(nn.Module):
    """The pair (sum of the losses of the tokens that count, their number)."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = nn.CrossEntropyLoss(ignore_index=IGNORED, reduction="sum")

    def forward(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total = self.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return total, (targets != IGNORED).sum()


def gpt_tied_case() -> Case:
    generator = Generator().manual_seed(4)
    num_samples = 4 * 11 + 3
    start = torch.randint(VOCABULARY, (num_samples, 1), generator=generator)
    sequences = (start + 5 * torch.arange(NUM_TOKENS + 1)) % VOCABULARY  # steps of five: learnable
    targets = sequences[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = IGNORED
    targets[[4, num_samples - 2]] = IGNORED  # alone in its share, the latter is a weight of zero
    return Case(
        name="gpt_tied",
        make_model=partial(build_seeded, TiedGPT),
        loss=TokenLoss(),
        optimizer=partial(torch.optim.SGD, lr=1e-1, momentum=0.9),
        inputs=sequences[:, :-1].contiguous(),
        targets=targets,
        batch_size=11,
    )


# --- unet: tensors that skip over many layers, and an update that also decays.


def convolve(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_in, num_out, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(num_out, num_out, 3, padding=1),
        nn.SiLU(),
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_full = convolve(1, 4)
        self.down_half = convolve(4, 6)
        self.pool = nn.MaxPool2d(2)
        self.bottom = convolve(6, 8)
        self.rise_half = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.up_half = convolve(12, 6)
        self.rise_full = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.up_full = convolve(8, 4)
        self.paint = nn.Conv2d(4, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        full = self.down_full(images)
        half = self.down_half(self.pool(full))
        bottom = self.bottom(self.pool(half))
        half = self.up_half(torch.cat([half, self.rise_half(bottom)], dim=1))
        full = self.up_full(torch.cat([full, self.rise_full(half)], dim=1))
        painted: Tensor = self.paint(full)
        return painted


def unet_case() -> Case:
    generator = Generator().manual_seed(5)
    clean = F.interpolate(normal(generator, 4 * 11 + 2, 1, 4, 4), scale_factor=2.0)
    return Case(
        name="unet",
        make_model=partial(build_seeded, UNet),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
        inputs=clean + 0.5 * normal(generator, *clean.shape),
        targets=clean,
        batch_size=11,
    )


# --- lstm: a layer that returns nested tuples, integer inputs given by keyword, and embedding rows
# that few batches touch.


class LastStepLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.classify = nn.Linear(12, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        steps, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.classify(steps[:, -1])
        return logits


def lstm_case() -> Case:
    generator = Generator().manual_seed(6)
    tokens = torch.randint(17, (4 * 13 + 4, 6), generator=generator)
    return Case(
        name="lstm",
        make_model=partial(build_seeded, LastStepLSTM),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.RMSprop, lr=3e-3),
        inputs={"tokens": tokens},
        targets=tokens[:, -1] % 3,
        batch_size=13,
    )


# --- two_inputs: positional inputs of different shapes, and an optimizer that makes its state when
# it is made, before any gradient is there.


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 10)
        self.right = nn.Conv1d(3, 10, 2)
        self.combine = nn.Linear(10, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        gate = torch.sigmoid(self.right(right).mean(-1))
        combined: Tensor = self.combine(torch.tanh(self.left(left)) * gate)
        return combined


def two_inputs_case() -> Case:
    generator = Generator().manual_seed(7)
    left, right = normal(generator, 4 * 13 + 1, 6), normal(generator, 4 * 13 + 1, 3, 5)
    return Case(
        name="two_inputs",
        make_model=partial(build_seeded, TwoInputs),
        loss=nn.SmoothL1Loss(),
        optimizer=partial(torch.optim.Adagrad, lr=5e-2),
        inputs=(left, right),
        targets=torch.stack([left[:, 0] * right[:, 0].mean(-1), left[:, 1] - left[:, 2]], dim=1),
        batch_size=13,
    )


# --- unused_branch: parameters that no replica, or only some, have a gradient for, under an update
# that decays and remembers; a frozen parameter; one loss per sample.

FLAGGED = (  # per batch in file order: which of its samples take the branch
    (1, 2, 5, 8, 12),  # on two to four replicas each one has some
    (),  # no replica uses it: no step, though there is momentum by now
    (9,),  # one replica alone uses it
    (0, 1, 2),  # the first replica alone uses it
    (5,),  # the last sample of the short batch
)


class FlaggedBranch(nn.Module):
    """Adds to the samples whose first feature is positive, whoever shares their batch.

    A layer of its own, so that what no tracer follows does not make the whole model one layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 9))

    def forward(self, hidden: Tensor, samples: Tensor) -> Tensor:
        rows = (samples[:, 0] > 0).nonzero().squeeze(1)
        if len(rows) == 0:
            return hidden
        return hidden.index_add(0, rows, self.layers(samples[rows]))


class UnusedBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 9)
        self.flagged = FlaggedBranch()
        self.never = nn.Linear(7, 9)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 9), requires_grad=False)
        self.classify = nn.Linear(9, 3)

    def forward(self, samples: Tensor) -> Tensor:
        hidden = self.flagged(self.base(samples), samples)
        logits: Tensor = self.classify(torch.tanh(hidden) * self.frozen)
        return logits


def unused_branch_case() -> Case:
    generator = Generator().manual_seed(8)
    batch_size = 13
    inputs = normal(generator, 4 * batch_size + 6, 7)
    targets = teach_classes(generator, inputs[:, 1:], 3)
    inputs[:, 0] = 0
    for index, samples in enumerate(FLAGGED):
        inputs[[index * batch_size + sample for sample in samples], 0] = 1
    return Case(
        name="unused_branch",
        make_model=partial(build_seeded, UnusedBranch),
        loss=nn.CrossEntropyLoss(reduction="none"),
        optimizer=partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
        inputs=inputs,
        targets=targets,
        batch_size=batch_size,
    )


# --- wide: weights so large, for so few samples, that inputs and output gradients are exchanged;
# one of them is used twice, and one has more rows (tokens) than that pays for.


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 400)
        self.again = nn.Linear(400, 400)
        self.each = nn.Linear(50, 400)
        self.last = nn.Linear(400, 5)

    def forward(self, samples: Tensor) -> Tensor:
        hidden = torch.relu(self.first(samples))
        hidden = torch.tanh(self.again(torch.tanh(self.again(hidden))))
        tokens = torch.relu(self.each(torch.unflatten(hidden, 1, (8, 50))))
        logits: Tensor = self.last(hidden + tokens.mean(1))
        return logits


def wide_case() -> Case:
    generator = Generator().manual_seed(9)
    inputs = normal(generator, 4 * 13 + 2, 40)
    return Case(
        name="wide",
        make_model=partial(build_seeded, Wide),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        inputs=inputs,
        targets=teach_classes(generator, inputs, 5),
        batch_size=13,
    )


# --- resnet: residual connections, activations that are changed in place, no BatchNorm.


class ResidualBlock(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_in, num_out, 3, stride=stride, padding=1)
        self.first_norm = nn.GroupNorm(2, num_out)
        self.second = nn.Conv2d(num_out, num_out, 3, padding=1)
        self.second_norm = nn.GroupNorm(2, num_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Conv2d(num_in, num_out, 1, stride=stride) if stride > 1 else None

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.relu(self.first_norm(self.first(images)))
        hidden = self.second_norm(self.second(hidden))
        hidden += images if self.shortcut is None else self.shortcut(images)
        out: Tensor = self.relu(hidden)
        return out


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.Sequential(
            ResidualBlock(4, 4, 1), ResidualBlock(4, 6, 2), ResidualBlock(6, 6, 1)
        )
        self.classify = nn.Linear(6, 4)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.blocks(self.stem(images)).mean((2, 3)))
        return logits


def resnet_case() -> Case:
    generator = Generator().manual_seed(10)
    images = normal(generator, 4 * 11 + 3, 1, 8, 8)
    return Case(
        name="resnet",
        make_model=partial(build_seeded, ResNet),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=5e-2, momentum=0.9),
        inputs=images,
        targets=teach_classes(generator, images, 4),
        batch_size=11,
    )


# --- two_tower: branches that meet only at the end, inputs by keyword, two outputs in a dict.


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.item = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 8))
        self.score = nn.Linear(8, 3)

    def forward(self, query: Tensor, item: Tensor) -> dict[str, Tensor]:
        left, right = self.query(query), self.item(item)
        return {"scores": self.score(left * right), "distances": (left - right).square().mean(1)}


def two_tower_loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs["scores"], targets, reduction="none")
    return losses + 0.1 * outputs["distances"]


def two_tower_case() -> Case:
    generator = Generator().manual_seed(11)
    query, item = normal(generator, 4 * 13 + 2, 6), normal(generator, 4 * 13 + 2, 9)
    return Case(
        name="two_tower",
        make_model=partial(build_seeded, TwoTower),
        loss=two_tower_loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        inputs={"query": query, "item": item},
        targets=teach_classes(generator, torch.cat([query, item], dim=1), 3),
        batch_size=13,
    )


# --- encoder_decoder: every layer of the decoder uses the encoder's output, which crosses many
# cuts, and a mask that is made on the way.


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.decoders = nn.ModuleList(nn.GRU(16, 16, batch_first=True) for _ in range(2))
        self.mixes = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))
        self.head = nn.Linear(16, 13)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.embedding(source))
        mask = (source == 0)[:, None, :]
        hidden = self.embedding(target)
        for decoder, mix in zip(self.decoders, self.mixes, strict=True):
            hidden, state = decoder(hidden, state)
            scores = (hidden @ memory.transpose(1, 2)).masked_fill(mask, -1e9)
            hidden = torch.tanh(mix(torch.cat([hidden, scores.softmax(-1) @ memory], dim=-1)))
        logits: Tensor = self.head(hidden)
        return logits.transpose(1, 2)


def encoder_decoder_case() -> Case:
    generator = Generator().manual_seed(12)
    source = torch.randint(13, (4 * 11 + 4, 6), generator=generator)
    return Case(
        name="encoder_decoder",
        make_model=partial(build_seeded, EncoderDecoder),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=1e-1, momentum=0.9),
        inputs=(source, source.roll(1, 1)),
        targets=source.flip(1),
        batch_size=11,
    )
