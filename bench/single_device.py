"""What the Trainer costs on one device: ``fit`` against a hand-written loop.

An MLP 784-256-256-10 in batches of 512, the same shuffled batches in both, fused Adam, no metrics,
no display. Rounds alternate, each with a fresh model; the medians and their ratio are printed.

Run: ``python bench/single_device.py [--rounds 15] [--epochs 4] [--threads 1]``
"""

import argparse
import statistics
import time
from functools import partial

import torch
from torch import nn

import lockstep
from lockstep.data.order import epoch_order

SAMPLES, BATCH = 20_480, 512


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def hand_written(x: torch.Tensor, y: torch.Tensor, epochs: int) -> tuple[float, nn.Module]:
    model, loss_function = make_model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    began = time.perf_counter()
    for epoch in range(epochs):
        order = epoch_order(0, epoch, SAMPLES, shuffle=True)
        total = 0.0
        for start in range(0, SAMPLES, BATCH):
            rows = order[start : start + BATCH]
            optimizer.zero_grad()
            loss = loss_function(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            total += loss.item()  # the epoch's loss, as fit reports it
    return time.perf_counter() - began, model


def with_trainer(x: torch.Tensor, y: torch.Tensor, epochs: int) -> tuple[float, nn.Module]:
    model = make_model()
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-3, fused=True),
        strategy=lockstep.SingleDeviceStrategy(),
    )
    began = time.perf_counter()
    trainer.fit((x, y), epochs=epochs, batch_size=BATCH, verbose=0)
    return time.perf_counter() - began, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    x, y = torch.randn(SAMPLES, 784), torch.randint(0, 10, (SAMPLES,))
    hand_written(x, y, 1)
    with_trainer(x, y, 1)
    times: dict[str, list[float]] = {"hand-written loop": [], "Trainer.fit": []}
    for _ in range(options.rounds):
        seconds, expected = hand_written(x, y, options.epochs)
        times["hand-written loop"].append(seconds)
        seconds, trained = with_trainer(x, y, options.epochs)
        times["Trainer.fit"].append(seconds)
        assert all(
            torch.equal(a, b)
            for a, b in zip(expected.parameters(), trained.parameters(), strict=True)
        ), "both must train the same weights, bit by bit"
    steps = options.epochs * SAMPLES / BATCH
    medians = {name: statistics.median(values) / steps * 1e3 for name, values in times.items()}
    for name, milliseconds in medians.items():
        print(f"{name:20} {milliseconds:.3f} ms a step")
    pairs = zip(times["Trainer.fit"], times["hand-written loop"], strict=True)
    ratio = statistics.median(fit / hand for fit, hand in pairs)
    print(f"Trainer.fit takes {ratio:.3f} of the hand-written loop (median of paired rounds)")


if __name__ == "__main__":
    main()
