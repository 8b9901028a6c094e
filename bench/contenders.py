"""One contender training one net for a while; prints its figures as a line of JSON.

Run by ``bench/data_parallel.py``, once per round, contender and net:
``python bench/contenders.py ddp mlp --seconds 3``. Every contender uses two cores, fused Adam, the
same data held in memory, the same batches. Warm-up steps are not counted.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from nets import NETS, Net

FUSED_ADAM = partial(torch.optim.Adam, lr=1e-3, fused=True)
WARM_UP_STEPS = 5


def batches(net: Net, rank: int, num_ranks: int) -> Callable[[int], tuple[Any, Any]]:
    """Step number -> this rank's part of the global batch."""
    inputs, targets = net.make_data(net.num_samples)
    order = torch.randperm(net.num_samples, generator=torch.Generator().manual_seed(0))
    local = net.batch_size // num_ranks

    def batch(step: int) -> tuple[Any, Any]:
        start = step * net.batch_size % net.num_samples + rank * local
        rows = order[start : start + local]
        return inputs[rows], targets[rows]

    return batch


def loop(
    net: Net, step: Callable[[int], float], seconds: float, barrier: Callable[[], None]
) -> dict[str, float]:
    """Call ``step`` for a while; every rank makes the same number of steps."""
    for number in range(WARM_UP_STEPS):
        step(number)
    began = time.perf_counter()
    step(WARM_UP_STEPS)
    guess = time.perf_counter() - began
    steps = agreed(max(3, round(seconds / guess)))
    barrier()
    began = time.perf_counter()
    for number in range(steps):
        loss = step(WARM_UP_STEPS + 1 + number)
    barrier()
    elapsed = time.perf_counter() - began
    return {"samples_per_second": steps * net.batch_size / elapsed, "loss": loss}


def agreed(steps: int) -> int:
    """Rank 0's number of steps."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return steps
    shared = torch.tensor([steps])
    torch.distributed.broadcast(shared, 0)
    return int(shared.item())


def plain_step(
    net: Net, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any
) -> Callable[[int], float]:
    def step(number: int) -> float:
        inputs, targets = batch(number)
        optimizer.zero_grad()
        loss = net.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


# --- contenders ----------------------------------------------------------------------------------


def one_process(net: Net, seconds: float, threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    model = net.make_model()
    step = plain_step(net, model, FUSED_ADAM(model.parameters()), batches(net, 0, 1))
    return {**loop(net, step, seconds, lambda: None), "bytes": pss_bytes([os.getpid()])}


def distributed(net: Net, seconds: float, wrap: Callable[..., torch.nn.Module]) -> dict[str, float]:
    """Two processes of torch.distributed over gloo."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe()
        arguments = (net.title, seconds, wrap, f"{folder}/store", theirs)
        processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
        for process in processes:
            process.start()
        result: dict[str, float] = ours.recv()
        result["bytes"] = pss_bytes([process.pid or 0 for process in processes])
        ours.send("done")
        ours.send("done")
        for process in processes:
            process.join()
    return result


def _rank(
    rank: int,
    title: str,
    seconds: float,
    wrap: Callable[..., torch.nn.Module],
    store: str,
    connection: Connection,
) -> None:
    torch.set_num_threads(1)
    net = next(net for net in NETS.values() if net.title == title)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    model = wrap(net.make_model())
    step = plain_step(net, model, FUSED_ADAM(model.parameters()), batches(net, rank, 2))
    figures = loop(net, step, seconds, torch.distributed.barrier)
    if rank == 0:
        connection.send(figures)
    connection.recv()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def wrap_ddp(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True
    )


def wrap_fsdp(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.modules():
        if layer is not model and any(True for _ in layer.parameters(recurse=False)):
            fully_shard(layer)
    fully_shard(model)
    return model


def lockstep_mirrored(net: Net, seconds: float) -> dict[str, float]:
    import lockstep

    class Clock(lockstep.Callback):
        """Counts epochs, and lets as many of them pass as fill the time."""

        def __init__(self) -> None:
            self.times: list[float] = []
            self.losses: list[float] = []

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            assert logs is not None
            self.times.append(time.perf_counter())
            self.losses.append(logs["loss"])
            if len(self.times) > 1 and self.times[-1] - self.times[0] > seconds:
                self.trainer.stop_training = True

    clock = Clock()
    trainer = lockstep.Trainer(
        net.make_model(),
        loss=net.loss,
        optimizer=FUSED_ADAM,
        strategy=lockstep.MirroredStrategy(2),
        callbacks=[clock],
    )
    trainer.fit(
        net.make_data(net.num_samples), epochs=100_000, batch_size=net.batch_size, verbose=0
    )
    samples = (len(clock.times) - 1) * net.num_samples
    family = [os.getpid(), *descendants(os.getpid())]
    return {
        "samples_per_second": samples / (clock.times[-1] - clock.times[0]),
        "loss": clock.losses[-1],
        "bytes": pss_bytes(family),
    }


CONTENDERS: dict[str, Callable[[Net, float], dict[str, float]]] = {
    "lockstep": lockstep_mirrored,
    "ddp": partial(distributed, wrap=wrap_ddp),
    "fsdp2": partial(distributed, wrap=wrap_fsdp),
    "one process, 1 thread": partial(one_process, threads=1),
    "one process, 2 threads": partial(one_process, threads=2),
}


# --- memory ---------------------------------------------------------------------------------------


def pss_bytes(pids: list[int]) -> float:
    """Memory of some processes, what they share counted once: their proportional set sizes."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return children + [below for child in children for below in descendants(child)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("net", choices=NETS)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    figures = CONTENDERS[options.contender](NETS[options.net], options.seconds)
    json.dump(figures, sys.stdout)
    print()


if __name__ == "__main__":
    main()
