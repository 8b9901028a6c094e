"""Bytes that each of two hosts sends in a step of a sharded training, as the kernel counts them.

The hosts are network namespaces with two processes each. Bytes of a step are the difference of two
trainings, one with more steps, per step; in multiples of the parameters' bytes. Run as root:
``python bench/sharded_hosts.py``.
"""

import argparse
import secrets
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from host_contenders import PORT
from hosts import NUM_HOSTS, TIMEOUT_SECONDS, task
from torch import nn

import lockstep

sys.path.append(str(Path(__file__).parents[1]))  # the hosts of the tests are ours, too
from tests.netns import connected_hosts

FEW, MANY = 2, 6  # steps
STRATEGIES: dict[str, Callable[..., lockstep.Strategy]] = {
    "sharded": partial(lockstep.FullyShardedStrategy, 2),
    "sharded, units": partial(lockstep.FullyShardedStrategy, 2, units=["0", "1", "2", "3"]),
    "sharded gradients": partial(lockstep.FullyShardedStrategy, 2, level="gradients"),
    "sharded slots": partial(lockstep.FullyShardedStrategy, 2, level="slots"),
    "data 2, shard 2": partial(lockstep.HybridStrategy, 2, shard=2),
    "mirrored": partial(lockstep.MultiWorkerMirroredStrategy, 2, num_shares=4),
    "mirrored, gloo": partial(lockstep.MultiWorkerMirroredStrategy, 2, engine="gloo"),
}


def make_model(layers: int, width: int) -> nn.Module:
    """Layers that a function makes, so that each process draws its part."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def sent_bytes() -> int:
    """What this host has sent to others."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    fields = {name.strip(): own.split() for name, _, own in (one.partition(":") for one in lines)}
    return sum(int(own[8]) for name, own in fields.items() if name != "lo")


def train(name: str, layers: int, width: int) -> None:
    """Train twice on a host, and print the bytes sent in a step over those of the parameters."""
    torch.manual_seed(0)
    make = partial(make_model, layers, width)
    trainer = lockstep.Trainer(
        make,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        strategy=STRATEGIES[name](timeout_seconds=TIMEOUT_SECONDS),
    )
    data = torch.randn(8 * MANY, width)
    trainer.fit((data[:8], data[:8]), batch_size=8, verbose=0)  # the model is tried in a first step
    sent = []
    for steps in (FEW, MANY):
        before = sent_bytes()
        part = data[: 8 * steps]
        trainer.fit((part, part), batch_size=8, verbose=0)
        sent.append(sent_bytes() - before)
    parameters = sum(one.nbytes for one in trainer.model.parameters())
    print((sent[1] - sent[0]) / (MANY - FEW) / parameters, flush=True)


def measure(name: str, layers: int, width: int) -> list[float]:
    """Of each host."""
    with connected_hosts(NUM_HOSTS) as hosts:
        cluster = {"worker": [f"{hosts.address(host)}:{PORT}" for host in range(NUM_HOSTS)]}
        secret = secrets.token_hex(32)
        command = [sys.executable, __file__, "--on-host", name, str(layers), str(width)]
        started = [
            hosts.run(host, command, task(cluster, host, secret)) for host in range(NUM_HOSTS)
        ]
        return [float(one.check(TIMEOUT_SECONDS).splitlines()[-1]) for one in started]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on-host", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    options = parser.parse_args()
    if options.on_host:
        name, layers, width = options.on_host
        train(name, int(layers), int(width))
        return
    for name in options.strategies:
        found = measure(name, options.layers, options.width)
        print(f"{name:>20}: {', '.join(f'{one:.2f}' for one in found)}", flush=True)


if __name__ == "__main__":
    main()
