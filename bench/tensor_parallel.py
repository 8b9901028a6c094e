"""Steps of layers divided inside by two processes: Lockstep, DTensor over gloo, and one process.

The wide MLP and the GPT of ``nets``, with Adam. DTensor's plan is written by hand: columns, then
rows. Its fused projection is cut contiguously, which is another model, of the same cost. "Parts"
are two processes that each train half of every divided layer and exchange nothing, with torch's
fused Adam: what is left of a step if exchange is free. Contenders take turns; the table has the
median of the steps of all rounds, and each time over Lockstep's.
Run: ``python bench/tensor_parallel.py --rounds 3``.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from nets import NETS, Block, Net
from torch import Tensor, nn

NAMES = ("wide", "gpt")
CONTENDERS = ("lockstep", "dtensor", "parts", "one process")
RANKS = 2
WARM_UP, STEPS = 4, 12


def train_lockstep(net: Net) -> list[float]:
    """Seconds of each step; this process is rank 0."""
    import lockstep

    class Clock(lockstep.Callback):
        times: list[float] = []  # noqa: RUF012

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.times.append(time.perf_counter())

    inputs, targets = net.make_data(net.batch_size)
    count = WARM_UP + STEPS
    trainer = lockstep.Trainer(
        net.make_model(),
        loss=net.loss,
        optimizer=partial(torch.optim.Adam, lr=1e-4),
        strategy=lockstep.TensorParallelStrategy(RANKS),
        callbacks=[Clock()],
    )
    repeats = [count] + [1] * (inputs.dim() - 1), [count] + [1] * (targets.dim() - 1)
    data = inputs.repeat(repeats[0]), targets.repeat(repeats[1])
    trainer.fit(data, batch_size=net.batch_size, shuffle=False, verbose=0)
    return [after - before for before, after in zip(Clock.times, Clock.times[1:], strict=False)]


def train_plain(net: Net, model: nn.Module) -> list[float]:
    """Seconds of each step of a plain loop."""
    inputs, targets = net.make_data(net.batch_size)
    by_kind: dict[type, list[nn.Parameter]] = defaultdict(list)  # a fused kernel takes one kind
    for parameter in model.parameters():
        by_kind[type(parameter.data)].append(parameter)
    groups = [{"params": own} for own in by_kind.values()]
    optimizer = torch.optim.Adam(groups, lr=1e-4, fused=True)
    times = []
    for _ in range(WARM_UP + STEPS):
        begun = time.perf_counter()
        optimizer.zero_grad()
        net.loss(model(inputs), targets).backward()
        optimizer.step()
        times.append(time.perf_counter() - begun)
    return times


class LocalBlock(Block):
    """A block whose attention has this rank's heads."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        size = width // self.num_heads
        fused = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, -1, size)
        query, key, value = fused.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, -1))
        fed: Tensor = self.feed(self.feed_norm(x))
        return x + fed


def train_dtensor(name: str, net: Net) -> list[float]:
    """Seconds of each step of a rank, under torchrun."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (RANKS,))
    model = net.make_model()
    last = ColwiseParallel(output_layouts=Replicate())
    if name == "wide":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": last}
        parallelize_module(model, mesh, plan)
    else:
        for block in model.blocks:  # type: ignore[union-attr]
            block.__class__ = LocalBlock
            own = {
                "qkv": ColwiseParallel(),
                "out": RowwiseParallel(),
                "feed.0": ColwiseParallel(),
                "feed.2": RowwiseParallel(),
            }
            parallelize_module(block, mesh, own)
        parallelize_module(model, mesh, {"head": last})
    times = train_plain(net, model)
    if distributed.get_rank() != 0:
        times = []
    distributed.destroy_process_group()
    return times


def parts_of(name: str, net: Net) -> nn.Module:
    """A model with a rank's part of every divided layer, whose results are wrong."""
    model = net.make_model()
    if name == "wide":
        layers = [_part(each) if isinstance(each, nn.Linear) else each for each in model.children()]
        layers[2] = nn.Linear(4096 // RANKS, 4096)
        layers[4] = nn.Linear(4096, 10)  # whole, for the targets
        return nn.Sequential(*layers)
    for block in model.blocks:  # type: ignore[union-attr]
        block.__class__ = LocalBlock
        block.qkv, block.feed[0] = _part(block.qkv), _part(block.feed[0])
        block.out, block.feed[2] = _part(block.out, rows=True), _part(block.feed[2], rows=True)
    return model


def _part(layer: nn.Linear, *, rows: bool = False) -> nn.Linear:
    inputs, outputs = layer.in_features, layer.out_features
    return nn.Linear(inputs // RANKS, outputs) if rows else nn.Linear(inputs, outputs // RANKS)


def train_parts(name: str, net: Net) -> list[float]:
    """Seconds of each step of a rank that exchanges nothing, under torchrun."""
    from torch import distributed

    distributed.init_process_group("gloo")
    model = parts_of(name, net)
    distributed.barrier()
    times = train_plain(net, model)
    rank = distributed.get_rank()
    distributed.destroy_process_group()
    return times if rank == 0 else []


def run_one(contender: str, name: str) -> None:
    net = NETS[name]
    if contender == "lockstep":
        times = train_lockstep(net)
    elif contender == "dtensor":
        torch.set_num_threads(1)
        times = train_dtensor(name, net)
    elif contender == "parts":
        torch.set_num_threads(1)
        times = train_parts(name, net)
    else:
        torch.set_num_threads(RANKS)
        times = train_plain(net, net.make_model())
    if times:
        print("times", *times[-STEPS:], flush=True)


def measure(contender: str, name: str) -> list[float]:
    """The seconds of the steps of a round."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    launcher = launcher if contender in ("dtensor", "parts") else []
    command = [sys.executable, *launcher, __file__, "--as", contender, "--net", name]
    threads = str(RANKS) if contender == "one process" else "1"
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    line = next(one for one in done.stdout.splitlines() if one.startswith("times "))
    return [float(one) for one in line.split()[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--net", choices=NETS, help=argparse.SUPPRESS)
    parser.add_argument("--as", dest="contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        run_one(options.contender, options.net)
        return
    for name in NAMES:
        found: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
        for _ in range(options.rounds):
            for contender, times in found.items():
                times += measure(contender, name)
        ours = statistics.median(found["lockstep"])
        for contender, times in found.items():
            middle = statistics.median(times)
            print(
                f"{name:5} {contender:12} {middle * 1e3:7.1f} ms  {middle / ours:.2f}", flush=True
            )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
