"""Models out of blocks, and data that fit them: both are functions of a description alone."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.blocks import BLOCKS
from tests.fuzz.layers import LENGTH, SIDE, TICKS, VOCABULARY, WIDTH
from tests.fuzz.showing import Repr

NUM_CLASSES = 4

# How inputs of each kind become a hidden tensor, and of which shape it then is.
HIDDEN = {
    "vector": "vector",
    "image": "image",
    "signal": "signal",
    "sequence": "sequence",
    "tokens": "sequence",
    "tokens, padded": "sequence",
    "tokens, sparse": "sequence",
    "bag": "vector",
    "bag, max": "vector",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Shape(Repr):
    """What a model is made of.

    Attributes:
        entry: the kind of its (first) input.
        body: names of blocks that the hidden tensor goes through in the input's shape.
        tail: names of blocks that it goes through as a vector.
        second: the kind of another input, which joins before the tail; "" is none.
        skips: pairs of blocks of the body: what the first takes is added to what the second takes.
        ties: layers of one kind in the tail share their weights.
        twice: the tail is run twice.
        unused: there is a layer that nothing uses.
        heads: 1, or 2 for a dict of two outputs.
        per_token: outputs are of tokens and not of samples; there is no tail.
    """

    entry: str = "vector"
    body: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    second: str = ""
    skips: tuple[tuple[int, int], ...] = ()
    ties: bool = False
    twice: bool = False
    unused: bool = False
    heads: int = 1
    per_token: bool = False


class Pool(nn.Module):
    """(n, ..., WIDTH, ...) to (n, WIDTH)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        size = {"image": WIDTH * SIDE * SIDE, "signal": WIDTH * TICKS}.get(kind, WIDTH)
        self.project = nn.Linear(size, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.mean(1) if self.kind == "sequence" else hidden.flatten(1)
        pooled: Tensor = self.project(flat)
        return pooled


class Net(nn.Module):
    """The model of a shape; see there."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        kind = HIDDEN[shape.entry]
        self.skips, self.twice = shape.skips, shape.twice
        self.entry = make_entry(shape.entry)
        self.body = nn.ModuleList(BLOCKS[kind][name]() for name in shape.body)
        self.pool = None if shape.per_token else Pool(kind)
        self.side = make_side(shape.second) if shape.second else None
        self.tail = nn.ModuleList(BLOCKS["vector"][name]() for name in shape.tail)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.other_head = nn.Linear(WIDTH, NUM_CLASSES) if shape.heads == 2 else None
        if shape.unused:
            self.unused = nn.Linear(3, 2)
        if shape.ties:
            plain = [one for one in self.tail if type(one) is nn.Linear]
            for one in plain[1:]:
                one.weight = plain[0].weight
        if shape.ties and isinstance(self.entry, nn.Embedding) and shape.per_token:
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.head.weight = self.entry.weight

    def forward(self, first: Tensor, second: Tensor | None = None) -> Any:
        hidden = self.entry(first)
        taken: list[Tensor] = []
        for number, block in enumerate(self.body):
            for start, stop in self.skips:
                if stop == number:
                    hidden = hidden + taken[start]
            taken.append(hidden)
            hidden = block(hidden)
        if self.pool is not None:
            hidden = self.pool(hidden)
        if self.side is not None:
            hidden = hidden + torch.tanh(self.side(second))
        for _ in range(2 if self.twice else 1):
            for block in self.tail:
                hidden = block(hidden)
        if self.other_head is not None:
            return {"main": self.head(hidden), "other": self.other_head(hidden)}
        return self.head(hidden)


class ReshapedBag(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode=mode)

    def forward(self, tokens: Tensor) -> Tensor:
        summed: Tensor = self.bag(tokens)
        return summed


def make_entry(kind: str) -> nn.Module:
    match kind:
        case "vector" | "sequence":
            return nn.Linear(5, WIDTH)
        case "signal":
            return nn.Conv1d(2, WIDTH, 3, padding=1)
        case "image":
            return nn.Conv2d(2, WIDTH, 3, padding=1)
        case "tokens":
            return nn.Embedding(VOCABULARY, WIDTH)
        case "tokens, padded":
            return nn.Embedding(VOCABULARY, WIDTH, padding_idx=2)
        case "tokens, sparse":
            return nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        case "bag":
            return ReshapedBag("mean")
        case _:
            return ReshapedBag("max")


def make_side(kind: str) -> nn.Module:
    """A branch from an input to a vector."""
    hidden = HIDDEN[kind]
    if hidden == "vector":
        return make_entry(kind)
    return nn.Sequential(make_entry(kind), nn.Tanh(), Pool(hidden))


def make_model(shape: Shape, seed: int) -> nn.Module:
    """In float64, the same weights at every call; the random streams stay where they are."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        model = Net(shape).double()
        if any(isinstance(one, nn.UninitializedParameter) for one in model.parameters()):
            with torch.no_grad():
                model.eval()(*inputs_of(shape, 2, torch.Generator()))
                model.train()
        return model


def inputs_of(shape: Shape, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    kinds = [shape.entry, *([shape.second] if shape.second else [])]
    return tuple(_drawn(kind, count, generator) for kind in kinds)


def _drawn(kind: str, count: int, generator: torch.Generator) -> Tensor:
    sizes = {
        "vector": (5,),
        "sequence": (LENGTH, 5),
        "signal": (2, TICKS),
        "image": (2, SIDE, SIDE),
    }
    if kind in sizes:
        return torch.randn(count, *sizes[kind], generator=generator, dtype=torch.float64)
    return torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
