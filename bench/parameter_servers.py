"""Parameter servers whose workers may be some steps apart, where one of three workers is slow.

The first worker sleeps five times as long as the others in every forward pass. Held to: with
``staleness=4`` and ``staleness=None`` at least 1.6 times as many samples per second as with 0, a
staleness of 4 at most in the record, and the digits of scikit-learn learned as well.

Then an embedding of 1,000,000 rows of 64 elements, of which a batch touches 256. Held to: a step at
least 20 times as fast as with dense gradients under ``MirroredStrategy``.

    python bench/parameter_servers.py
"""

import functools
import os
import time

import torch
from torch import Tensor, nn

import lockstep

_SECONDS_PER_CALL = 0.004
_SLOWDOWN = 5
_WORKERS = 3
_ROWS = 1_000_000


class Uneven(nn.Module):
    """Its first process is the slow one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.first = os.getpid()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            is_first = os.getpid() == self.first
            time.sleep(_SECONDS_PER_CALL * (_SLOWDOWN if is_first else 1))
        logits: Tensor = self.layers(inputs)
        return logits


def train(staleness: int | None, epochs: int) -> tuple[float, float, float]:
    """Samples per second, the longest lead, and the accuracy on digits that were not seen."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_out, seen = order[:360], order[360:]
    torch.manual_seed(0)
    trainer = lockstep.Trainer(
        Uneven(),
        loss=nn.CrossEntropyLoss(),
        optimizer=functools.partial(torch.optim.Adam, lr=3e-3),
        strategy=lockstep.ParameterServerStrategy(1, _WORKERS, staleness),
    )
    trainer.fit((images[seen[:64]], labels[seen[:64]]), batch_size=32, verbose=0)
    start = time.perf_counter()
    history = trainer.fit((images[seen], labels[seen]), batch_size=32, epochs=epochs, verbose=0)
    seconds = time.perf_counter() - start
    found = torch.as_tensor(trainer.predict(images[held_out])).argmax(1)
    accuracy = (found == labels[held_out]).double().mean().item()
    trainer.close()
    leads = history.history.get("staleness", [0])
    return len(seen) * epochs / seconds, max(leads), accuracy


class Lookup(nn.Module):
    """A large embedding."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(_ROWS, 64, sparse=sparse)
        self.out = nn.Linear(64, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        found: Tensor = self.out(self.rows(numbers)).squeeze(1)
        return found


def seconds_per_step(strategy: lockstep.Strategy, steps: int, *, sparse: bool) -> float:
    numbers, targets = torch.randint(_ROWS, (256 * steps,)), torch.randn(256 * steps)
    trainer = lockstep.Trainer(
        Lookup(sparse=sparse),
        loss=nn.MSELoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        strategy=strategy,
    )
    trainer.fit((numbers[:512], targets[:512]), batch_size=256, verbose=0)
    start = time.perf_counter()
    trainer.fit((numbers, targets), batch_size=256, verbose=0)
    seconds = time.perf_counter() - start
    trainer.close()
    return seconds / steps


def compare_embeddings() -> None:
    dense = seconds_per_step(lockstep.MirroredStrategy(2), 20, sparse=False)
    print(f"embedding, dense gradients: {dense * 1e3:.1f} ms per step")
    for staleness in (0, 4, None):
        strategy = lockstep.ParameterServerStrategy(1, 2, staleness)
        seconds = seconds_per_step(strategy, 400, sparse=True)
        print(
            f"embedding, staleness={staleness}: {seconds * 1e3:.1f} ms per step, "
            f"{dense / seconds:.0f} times as fast"
        )


def main() -> None:
    synchronous = 0.0
    for staleness in (0, 1, 4, None):
        speed, lead, accuracy = train(staleness, epochs=10)
        synchronous = synchronous or speed
        print(
            f"staleness={staleness}: {speed:,.0f} samples/s, {speed / synchronous:.2f} times the "
            f"synchronous; longest lead {lead:.0f}; accuracy on digits {accuracy:.3f}"
        )
    compare_embeddings()


if __name__ == "__main__":
    main()
