"""What ``lockstep.record`` adds to a step: the four nets, with digests and without, in turns.

One process with one thread; each round makes some steps plain and as many recorded, and compares
their CPU time, which other programs on the cores disturb less than the clock. A recorded step has
its loss and the numbers of its samples; a second row has the samples themselves.

Run: ``python bench/record_overhead.py [--rounds 9] [--steps 4] [--nets mlp gpt]``
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from nets import NETS, Net

import lockstep


def seconds_of(train: Callable[[Any], None], recorder: Any, num_steps: int) -> float:
    """CPU time of a step."""
    began = time.process_time()
    for _ in range(num_steps):
        train(recorder)
    return (time.process_time() - began) / num_steps


def measure(net: Net, rounds: int, num_steps: int, *, has_inputs: bool) -> tuple[float, float]:
    """Medians over the rounds: seconds of a plain step, and a recorded step's part more."""
    model = net.make_model()
    optimizer = torch.optim.Adam(model.parameters())
    inputs, targets = net.make_data(net.batch_size)
    numbers = torch.arange(net.batch_size)

    def train(recorder: Any) -> None:
        loss = net.loss(model(inputs), targets)
        if recorder is not None:
            recorder.batch(*((inputs, targets) if has_inputs else (numbers,)))
            recorder.loss(loss, weight=net.batch_size)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(2):
        train(None)
    plain, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(rounds):
            path = f"{folder}/{index}"
            with lockstep.record(model, optimizer, path, steps=num_steps + 1) as recorder:
                train(recorder)  # the first also writes what was there before
                recorded = seconds_of(train, recorder, num_steps)
            plain.append(seconds_of(train, None, num_steps))
            ratios.append(recorded / plain[-1] - 1)
    return statistics.median(plain), statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--nets", nargs="*", default=list(NETS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'net':40} {'step':>9} {'numbers':>8} {'inputs':>8}")
    for name in options.nets:
        net = NETS[name]
        found = [
            measure(net, options.rounds, options.steps, has_inputs=has_inputs)
            for has_inputs in (False, True)
        ]
        more = " ".join(f"{100 * ratio:7.1f}%" for _, ratio in found)
        print(f"{net.title:40} {1e3 * found[0][0]:6.1f} ms {more}", flush=True)


if __name__ == "__main__":
    main()
