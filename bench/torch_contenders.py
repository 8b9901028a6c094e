"""Contenders in plain PyTorch: one process, and two processes of torch.distributed over gloo.

Run through ``bench/contenders.py``.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
from measuring import batches, loop
from nets import NETS, Block, Net
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

FUSED_ADAM = partial(torch.optim.Adam, lr=1e-3, fused=True)
DDP_SETTINGS: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True}
NUM_RANKS = 2

# Trains the net on this rank for so many seconds; returns its figures.
RankTraining = Callable[[Net, int, float], dict[str, float]]


def one_process(net_name: str, seconds: float, threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    net = NETS[net_name]
    step = plain_step(net, net.make_model())
    return loop(net, step, batches(net, 0, 1), seconds)


def distributed(net_name: str, seconds: float, train: RankTraining) -> dict[str, float]:
    """Let ``train`` run in two processes of one process group, one thread each."""
    return in_two_processes(net_name, seconds, partial(_on_net, train=train))


def in_two_processes(
    task: Any, seconds: float, train: Callable[[Any, int, float], dict[str, float]]
) -> dict[str, float]:
    """The same for anything that can be sent to processes."""
    results: SimpleQueue[dict[str, float]] = get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        # A rank that fails ends the others, and its error is raised here.
        spawn(_rank, (task, seconds, train, f"{folder}/store", results), nprocs=NUM_RANKS)
    ranks = [results.get() for _ in range(NUM_RANKS)]
    return {**ranks[0], "bytes": sum(figures["bytes"] for figures in ranks)}


def _on_net(net_name: str, rank: int, seconds: float, train: RankTraining) -> dict[str, float]:
    return train(NETS[net_name], rank, seconds)


def _rank(
    rank: int,
    task: Any,
    seconds: float,
    train: Callable[[Any, int, float], dict[str, float]],
    store: str,
    results: "SimpleQueue[dict[str, float]]",
) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS
    )
    figures = train(task, rank, seconds)
    torch.distributed.destroy_process_group()
    results.put(figures)


def plain_step(net: Net, model: torch.nn.Module) -> Callable[[Any, Any], float]:
    """The hand-written training step."""
    optimizer = FUSED_ADAM(model.parameters())

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = net.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def train_ddp(net: Net, rank: int, seconds: float) -> dict[str, float]:
    model = DistributedDataParallel(net.make_model(), **DDP_SETTINGS)
    return loop(net, plain_step(net, model), batches(net, rank, NUM_RANKS), seconds)


def train_ddp_compiled(net: Net, rank: int, seconds: float) -> dict[str, float]:
    """On CPUs ``torch.compile`` of the wrapper compiles nothing (torch 2.13): so, what it wraps."""
    model = DistributedDataParallel(torch.compile(net.make_model()), **DDP_SETTINGS)
    return loop(net, plain_step(net, model), batches(net, rank, NUM_RANKS), seconds)


def train_apart(net: Net, rank: int, seconds: float) -> dict[str, float]:
    """The same without any exchange: what two cores make that need nothing of each other."""
    return loop(net, plain_step(net, net.make_model()), batches(net, rank, NUM_RANKS), seconds)


def train_ddp_keeping_memory(net: Net, rank: int, seconds: float) -> dict[str, float]:
    """DDP with the allocator set as Lockstep sets it: what that alone is worth."""
    from lockstep.parallel.storage.allocator import keep_freed_memory

    if not keep_freed_memory():
        raise RuntimeError("this system's allocator has no such settings")
    return train_ddp(net, rank, seconds)


class InBfloat16(torch.nn.Module):
    """Runs a model under autocast and gives float32, so that the loss is computed in that."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output: torch.Tensor = self.model(inputs)
        return output.float()


def train_ddp_bf16(net: Net, rank: int, seconds: float) -> dict[str, float]:
    model = InBfloat16(DistributedDataParallel(net.make_model(), **DDP_SETTINGS))
    return loop(net, plain_step(net, model), batches(net, rank, NUM_RANKS), seconds)


def train_fsdp2(net: Net, rank: int, seconds: float) -> dict[str, float]:
    from torch.distributed.fsdp import fully_shard

    model = net.make_model()
    # As is usual: a transformer by its blocks, the rest with the root; others layer by layer.
    layers = [layer for layer in model.modules() if isinstance(layer, Block)] or model.children()
    for layer in layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return loop(net, plain_step(net, model), batches(net, rank, NUM_RANKS), seconds)
