"""One process of one contender that trains on several hosts; the first prints figures as JSON.

Run by ``bench/hosts.py`` on every host, with torchrun's variables or ``TF_CONFIG``. All train the
wide MLP on the same batches, with fused Adam and one thread per process.
"""

import argparse
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import batches, loop
from nets import NETS, Net
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_contenders import DDP_SETTINGS, FUSED_ADAM, plain_step

NET = NETS["wide"]
PORT = 29400  # the namespaces are ours alone
DEVICES_PER_HOST = 2
NETWORK_GBIT_PER_SECOND = 1.0
STEPS_PER_EPOCH = 8

Figures = dict[str, float]


# --- ranks that a launcher has started, one per device --------------------------------------------


def train_rank(seconds: float, make_step: Callable[[Net], Callable[[Any, Any], float]]) -> Figures:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")  # all that it needs is in the environment
    figures = loop(NET, make_step(NET), batches(NET, rank, num_ranks), seconds)
    torch.distributed.destroy_process_group()
    return {"step_seconds": NET.batch_size / figures["samples_per_second"], **figures}


def ddp(seconds: float) -> Figures:
    return train_rank(seconds, ddp_step)


def ddp_keeping_memory(seconds: float) -> Figures:
    """DDP with the allocator set as Lockstep sets it."""
    keep_memory()
    return train_rank(seconds, ddp_step)


def ddp_step(net: Net) -> Callable[[Any, Any], float]:
    return plain_step(net, DistributedDataParallel(net.make_model(), **DDP_SETTINGS))


def compute(seconds: float) -> Figures:
    """What the cores need for a step when nobody waits for anybody, and nothing is exchanged.

    Each rank goes forward and backward with its part of the batch, and steps its part of the
    parameters. The process group only agrees on the number of steps, and on when they are done.
    """
    keep_memory()
    return train_rank(seconds, lonely_step)


def lonely_step(net: Net) -> Callable[[Any, Any], float]:
    model = net.make_model()
    parts = [(parameter, *own_part(parameter)) for parameter in model.parameters()]
    optimizer = FUSED_ADAM([own for _, own, _ in parts])

    def step(inputs: Tensor, targets: Tensor) -> float:
        model.zero_grad()
        loss = net.loss(model(inputs), targets)
        loss.backward()
        for parameter, own, rows in parts:
            assert parameter.grad is not None
            own.grad = parameter.grad.view(-1)[rows]
        optimizer.step()
        return loss.item()

    return step


def own_part(parameter: nn.Parameter) -> tuple[nn.Parameter, slice]:
    """This rank's elements of a parameter, in the same memory, and which they are."""
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    size = parameter.numel()
    rows = slice(size * rank // num_ranks, size * (rank + 1) // num_ranks)
    return nn.Parameter(parameter.detach().view(-1)[rows]), rows


def keep_memory() -> None:
    from lockstep.parallel.storage.allocator import keep_freed_memory

    if not keep_freed_memory():
        raise RuntimeError("this system's allocator has no such settings")


# --- one process per host, which starts its own helpers -------------------------------------------


def lockstep(seconds: float) -> Figures | None:
    from lockstep_contenders import EpochClock

    import lockstep

    torch.set_num_threads(1)
    clock = EpochClock(seconds)
    trainer = lockstep.Trainer(
        NET.make_model(),
        loss=NET.loss,
        optimizer=FUSED_ADAM,
        strategy=lockstep.MultiWorkerMirroredStrategy(
            devices_per_host=DEVICES_PER_HOST, network_gbit_per_second=NETWORK_GBIT_PER_SECOND
        ),
        callbacks=[clock],
    )
    # Between epochs all hosts wait for host 0's clock: not more often than need be.
    num_samples = STEPS_PER_EPOCH * NET.batch_size
    data = NET.make_data(num_samples)
    trainer.fit(data, epochs=100_000, batch_size=NET.batch_size, verbose=0)
    if not clock.times:  # callbacks run on host 0
        return None
    steps = (len(clock.times) - 1) * STEPS_PER_EPOCH
    step_seconds = (clock.times[-1] - clock.times[0]) / steps
    return {"step_seconds": step_seconds, "loss": clock.loss, "bytes": clock.bytes}


# --- the link -------------------------------------------------------------------------------------


def link(seconds: float) -> Figures:
    """Bytes per second that a plain socket carries, each way while the other is idle."""
    address = os.environ["MASTER_ADDR"], PORT
    if os.environ["RANK"] == "0":
        with socket.create_server(address) as listener:
            peer, _ = listener.accept()
        with peer:
            received = count(peer)
            pour(peer, seconds)
            return {"to_host_0": received, "to_host_1": float(peer.makefile().readline())}
    with connected(address) as peer:
        pour(peer, seconds)
        received = count(peer)
        peer.sendall(f"{received}\n".encode())
        return {}


def connected(address: tuple[str, int], patience_seconds: float = 30.0) -> socket.socket:
    """A connection to who may not be there yet."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


CHUNK = 1 << 20
LAST = b"."


def pour(peer: socket.socket, seconds: float) -> None:
    chunk = bytes(CHUNK)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        peer.sendall(chunk)
    peer.sendall(LAST)


def count(peer: socket.socket) -> float:
    """Bytes per second from the first to the last that comes."""
    buffer = bytearray(CHUNK)
    peer.recv(1)
    began, num_bytes = time.perf_counter(), 0
    while True:
        num_read = peer.recv_into(buffer)
        num_bytes += num_read
        if num_read == 0 or buffer[num_read - 1] == LAST[0]:
            return num_bytes / (time.perf_counter() - began)


CONTENDERS: dict[str, Callable[[float], Figures | None]] = {
    "lockstep": lockstep,
    "ddp": ddp,
    "ddp, memory kept": ddp_keeping_memory,
    "compute": compute,
    "link": link,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    print(json.dumps(CONTENDERS[options.contender](options.seconds)))


if __name__ == "__main__":
    main()
