"""Local SGD against synchronous training: with a slow replica, and in what is learned.

python bench/local_sgd.py                 samples/s, one replica of two slowed three times
python bench/local_sgd.py --text FILE     loss of a small GPT on the bytes of a file: DiLoCo
with an average every 50 steps, and synchronous, at each of --rates; the best of both are compared
"""

import argparse
import functools
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep

# What a replica computes in, and by how much the slow one is slower.
_SECONDS_PER_CALL, _SLOWDOWN = 0.004, 3

_TOKENS, _WIDTH, _HEADS, _LAYERS = 64, 64, 4, 2


class Uneven(nn.Module):
    """Takes a fixed time for each call; of all processes but the first, several times that."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.first = os.getpid()

    def forward(self, inputs: Tensor) -> Tensor:
        is_first = os.getpid() == self.first
        time.sleep(_SECONDS_PER_CALL * (1 if is_first else _SLOWDOWN))
        logits: Tensor = self.layers(inputs)
        return logits


class Jittery(Uneven):
    """Each process is the slow one at times: about one call in five."""

    def forward(self, inputs: Tensor) -> Tensor:
        is_slow = float(inputs[0, 0]) > 0.84
        time.sleep(_SECONDS_PER_CALL * (_SLOWDOWN if is_slow else 1))
        logits: Tensor = self.layers(inputs)
        return logits


class GPT(nn.Module):
    """A small one, on bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, _WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(_TOKENS, _WIDTH))
        layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.full((_TOKENS, _TOKENS), float("-inf")).triu(1)
        logits: Tensor = self.head(self.blocks(self.embedding(tokens) + self.positions, mask))
        return logits


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def samples_per_second(model: nn.Module, strategy: lockstep.Strategy, steps: int) -> float:
    """Of training, once the processes are there."""
    inputs, targets = torch.randn(32 * steps, 64), torch.randint(10, (32 * steps,))
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        strategy=strategy,
    )
    trainer.fit((inputs[:64], targets[:64]), batch_size=32, verbose=0)
    start = time.perf_counter()
    trainer.fit((inputs, targets), batch_size=32, verbose=0)
    seconds = time.perf_counter() - start
    trainer.close()
    return len(inputs) / seconds


def compare_speed(steps: int) -> None:
    for kind in (Uneven, Jittery):
        together = samples_per_second(kind(), lockstep.MirroredStrategy(2), steps)
        apart = samples_per_second(kind(), lockstep.LocalSGDStrategy(16, 2), steps)
        print(
            f"{kind.__name__}: synchronous {together:,.0f} samples/s, every=16 {apart:,.0f}, "
            f"ratio {apart / together:.2f}"
        )


def strategies() -> dict[str, lockstep.Strategy]:
    return {
        "synchronous": lockstep.MirroredStrategy(2),
        "DiLoCo": lockstep.LocalSGDStrategy(50, 2, outer=lockstep.Nesterov()),
    }


def held_out_loss(text: Path, strategy: lockstep.Strategy, steps: int, rate: float) -> float:
    """After training on the same batches in the same order, whatever the strategy."""
    tokens = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    rows = tokens[: len(tokens) // (_TOKENS + 1) * (_TOKENS + 1)].view(-1, _TOKENS + 1)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    held_out, rows = rows[:512], rows[512:]
    torch.manual_seed(0)
    trainer = lockstep.Trainer(
        GPT(),
        loss=token_loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=rate),
        strategy=strategy,
    )
    trainer.fit((rows[:, :-1], rows[:, 1:]), batch_size=32, steps_per_epoch=steps, verbose=0)
    loss: float = trainer.evaluate((held_out[:, :-1], held_out[:, 1:]))["loss"]
    trainer.close()
    return loss


def compare_loss(text: Path, steps: int, rates: list[float]) -> None:
    best = dict.fromkeys(strategies(), float("inf"))
    for rate in rates:
        for name, strategy in strategies().items():
            loss = held_out_loss(text, strategy, steps, rate)
            best[name] = min(best[name], loss)
            print(
                f"{name}, rate {rate:g}: loss {loss:.4f} on held-out text, {steps} steps",
                flush=True,
            )
    difference = best["DiLoCo"] / best["synchronous"] - 1
    print(f"DiLoCo's best is {difference:+.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3])
    options = parser.parse_args()
    if options.text is None:
        compare_speed(options.steps or 200)
    else:
        compare_loss(options.text, options.steps or 2000, options.rates)


if __name__ == "__main__":
    main()
