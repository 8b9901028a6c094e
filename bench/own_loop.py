"""The same hand-written loop with DistributedDataParallel and with ``CrossReplicaOptimizer``.

Both train in the same processes, in turns of a few steps, so that whatever else the machine does
meets both. Prints rank 0's figures as a line of JSON. Run:
``python -m torch.distributed.run --nproc-per-node 2 bench/own_loop.py mlp``
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from nets import NETS

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("net", choices=NETS)
parser.add_argument("--engine", choices=["gloo"], help="None is shared memory")
parser.add_argument("--turns", type=int, default=9)
parser.add_argument("--seconds", type=float, default=1.0, help="of a turn, about")
options = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
lockstep.init(engine=options.engine)
net = NETS[options.net]
inputs, targets = net.make_data(net.num_samples)
order = torch.randperm(net.num_samples, generator=torch.Generator().manual_seed(0))
batches = order.split(net.batch_size)

# Trains for so many steps.
Train = Callable[[int], None]


def with_ddp() -> Train:
    model = torch.nn.parallel.DistributedDataParallel(
        net.make_model(), gradient_as_bucket_view=True, static_graph=True
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def train(steps: int) -> None:
        for step in range(steps):
            rows = lockstep.share(batches[step % len(batches)])
            optimizer.zero_grad()
            loss = net.loss(model(inputs[rows]), targets[rows])
            loss.backward()
            optimizer.step()
            loss.item()

    return train


def with_lockstep() -> Train:
    model = net.make_model()
    optimizer = lockstep.CrossReplicaOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-3, fused=True), model
    )

    def train(steps: int) -> None:
        for step in range(steps):
            rows = lockstep.share(batches[step % len(batches)])
            optimizer.zero_grad()
            loss = net.loss(model(inputs[rows]), targets[rows])
            loss.backward()
            optimizer.step(weight=len(rows))
            loss.item()

    return train


def seconds_of(train: Train, steps: int) -> tuple[float, float]:
    """By the clock; and of both processes' processor time."""
    dist.barrier()
    began, busy = time.perf_counter(), time.process_time()
    train(steps)
    used = lockstep.all_mean(time.process_time() - busy) * lockstep.num_replicas()
    dist.barrier()
    return time.perf_counter() - began, used


contenders = {"DDP": with_ddp(), "Lockstep": with_lockstep()}
for train in contenders.values():
    train(3)
steps = torch.tensor([max(2, round(options.seconds / seconds_of(contenders["DDP"], 2)[0] * 2))])
dist.broadcast(steps, 0)
count = int(steps.item())
seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
for _ in range(options.turns):
    for name, train in contenders.items():
        seconds[name].append(seconds_of(train, count))
if dist.get_rank() == 0:
    pairs = list(zip(seconds["DDP"], seconds["Lockstep"], strict=True))
    ratios, of_processors = ([ddp[each] / own[each] for ddp, own in pairs] for each in (0, 1))
    figures = {
        "net": options.net,
        "engine": options.engine or "shared memory",
        "ratio": round(statistics.median(ratios), 2),
        "from": round(min(ratios), 2),
        "to": round(max(ratios), 2),
        "ratio of processor time": round(statistics.median(of_processors), 2),
        **{
            f"{name} {what} ms": round(statistics.median(own) / count * 1000, 2)
            for name, both in seconds.items()
            for what, own in zip(("clock", "processor"), zip(*both, strict=True), strict=True)
        },
    }
    print(json.dumps(figures))
dist.destroy_process_group()
