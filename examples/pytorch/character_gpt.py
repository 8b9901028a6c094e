"""A small GPT learns to write Python, letter by letter, in a pipeline of two stages.

    python character_gpt.py [--epochs 8]

Its text is the source of a few modules of Python's standard library, so nothing is downloaded. The
model is an ordinary module: the strategy cuts it so that both stages take equally long.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import lockstep

CONTEXT, WIDTH, HEADS, BLOCKS = 32, 64, 4, 3

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--epochs", type=int, default=8)
epochs = parser.parse_args().epochs

library = Path(argparse.__file__).parent
names = ("bisect", "calendar", "fractions", "heapq", "queue", "sched", "statistics", "textwrap")
text = "".join((library / f"{name}.py").read_text() for name in names)
letters = sorted(set(text))
tokens = torch.tensor([letters.index(letter) for letter in text])
windows = tokens.unfold(0, CONTEXT + 1, CONTEXT)


class Block(nn.Module):
    """Attention to earlier letters, then a layer for each letter."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, time, width) -> the same shape."""
        heads = self.queries_keys_values(self.norms[0](x)).unflatten(-1, (3 * HEADS, -1))
        attended = F.scaled_dot_product_attention(
            *heads.transpose(1, 2).chunk(3, 1), is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.wide(self.norms[1](x))


class GPT(nn.Module):
    """Predicts the next letter at every place of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(letters), WIDTH)
        self.places = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(letters), bias=False)
        self.head.weight = self.letters.weight  # tied, although they are in different stages

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(n, time) -> logits (n, time, letters)."""
        x = self.letters(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all letters."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def write(model: nn.Module, text: str, length: int) -> str:
    """Go on with a text, letter by letter."""
    model.eval()
    written = [letters.index(letter) for letter in text]
    while len(written) < length:
        logits = model(torch.tensor([written[-CONTEXT:]]))[0, -1]
        written.append(int(torch.multinomial(F.softmax(logits / 0.7, 0), 1)))
    return "".join(letters[token] for token in written)


torch.manual_seed(0)
model = GPT()
nn.init.normal_(model.letters.weight, std=0.02)
trainer = lockstep.Trainer(
    model,
    loss=loss_of,
    optimizer=partial(torch.optim.AdamW, lr=6e-3),
    strategy=lockstep.PipelineStrategy(stages=2, microbatches=4),
    clip_norm=1.0,
)
print(f"{len(text):,} letters, {len(windows):,} windows of {CONTEXT}")
trainer.fit((windows[:, :-1], windows[:, 1:]), epochs=epochs, batch_size=64)
print(trainer.plan)
print("\nWhat it writes now:\n")
print(write(model, "def ", 400))
