"""What the Trainer costs on one device: ``fit`` against a hand-written loop.

One of the nets, the same shuffled batches in both, fused Adam, no metrics, no display. Rounds
alternate, each with a fresh model; the medians and their ratio are printed. But for images, which
the Trainer lays out otherwise, both must train the same bits.

Run: ``python bench/single_device.py [--net mlp] [--rounds 15] [--epochs 4] [--threads 1]``
"""

import argparse
import statistics
import time
from functools import partial

import torch
from nets import NETS, Net
from torch import nn

import lockstep
from lockstep.data.order import epoch_order

STEPS = 40  # of an epoch


def hand_written(
    net: Net, x: torch.Tensor, y: torch.Tensor, epochs: int
) -> tuple[float, nn.Module]:
    model = net.make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    began = time.perf_counter()
    for epoch in range(epochs):
        order = epoch_order(0, epoch, len(x), shuffle=True)
        total = 0.0
        for rows in order.split(net.batch_size):
            optimizer.zero_grad()
            loss = net.loss(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            total += loss.item()  # the epoch's loss, as fit reports it
    return time.perf_counter() - began, model


def with_trainer(
    net: Net, x: torch.Tensor, y: torch.Tensor, epochs: int
) -> tuple[float, nn.Module]:
    model = net.make_model()
    trainer = lockstep.Trainer(
        model,
        loss=net.loss,
        optimizer=partial(torch.optim.Adam, lr=1e-3, fused=True),
        strategy=lockstep.SingleDeviceStrategy(),
    )
    began = time.perf_counter()
    trainer.fit((x, y), epochs=epochs, batch_size=net.batch_size, verbose=0)
    return time.perf_counter() - began, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--net", choices=NETS, default="mlp")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    net = NETS[options.net]
    steps = STEPS if options.net == "mlp" else STEPS // 10
    x, y = net.make_data(steps * net.batch_size)
    hand_written(net, x, y, 1)
    with_trainer(net, x, y, 1)
    times: dict[str, list[float]] = {"hand-written loop": [], "Trainer.fit": []}
    for _ in range(options.rounds):
        seconds, expected = hand_written(net, x, y, options.epochs)
        times["hand-written loop"].append(seconds)
        seconds, trained = with_trainer(net, x, y, options.epochs)
        times["Trainer.fit"].append(seconds)
        assert options.net == "cnn" or all(
            torch.equal(a, b)
            for a, b in zip(expected.parameters(), trained.parameters(), strict=True)
        ), "both must train the same weights, bit by bit"
    steps *= options.epochs
    medians = {name: statistics.median(values) / steps * 1e3 for name, values in times.items()}
    for name, milliseconds in medians.items():
        print(f"{name:20} {milliseconds:.3f} ms a step")
    pairs = zip(times["Trainer.fit"], times["hand-written loop"], strict=True)
    ratio = statistics.median(fit / hand for fit, hand in pairs)
    print(f"Trainer.fit takes {ratio:.3f} of the hand-written loop (median of paired rounds)")


if __name__ == "__main__":
    main()
