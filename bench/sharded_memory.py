"""Memory of each rank in a sharded training, beside FSDP2, DDP, replicas and divided layers.

8 x Linear(3072), Adam, over gloo. The memory of each process is its proportional set size, above
that after a small training and before the model is made, in multiples of the parameters' bytes. It
is looked at every 10 ms: the peak is of the whole training, the steady value the least of its
second half. Run: ``python bench/sharded_memory.py --ranks 2``; with ``--offload DIRECTORY`` sharded
ranks have their slots in a file there.
"""

import argparse
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))  # for tests.kept_teams

WIDTH, LAYERS, BATCH, STEPS = 3072, 8, 64, 12
PARAMETER_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
CONTENDERS = (
    *("parameters", "gradients", "slots"),
    *("mirrored", "tensor", "tensor gloo", "fsdp2", "ddp"),
)
READY = "ready"


def make_net() -> nn.Module:
    """The net."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


# --- a contender's processes ------------------------------------------------------------------


def wait_for_watch() -> None:
    """Tell the watching process that training begins, and wait until it watches."""
    print(READY, flush=True)
    sys.stdin.readline()


def train_lockstep(name: str, ranks: int, offload: str | None) -> None:
    """Train under one of Lockstep's strategies; this process is rank 0."""
    import lockstep
    from tests.kept_teams import keep_teams

    strategy: Any
    if name == "mirrored":
        strategy = lockstep.MirroredStrategy(ranks, engine="gloo")
    elif name == "tensor":  # on shared memory
        strategy = lockstep.TensorParallelStrategy(ranks)
    elif name == "tensor gloo":
        strategy = lockstep.TensorParallelStrategy(ranks, engine="gloo")
    else:
        strategy = lockstep.FullyShardedStrategy(ranks, level=name, offload=offload)
    make = partial(
        lockstep.Trainer,
        loss=nn.MSELoss(),
        strategy=strategy,
        optimizer=partial(torch.optim.Adam, lr=1e-4),
    )
    with keep_teams():  # the processes that are measured are those that have trained before
        warm = make(nn.Linear(2, 2))
        warm.fit((torch.zeros(8, 2), torch.zeros(8, 2)), batch_size=8, verbose=0)
        del warm
        wait_for_watch()
        data = torch.randn(BATCH, WIDTH).repeat(STEPS, 1)
        begun = time.perf_counter()
        make(make_net()).fit((data, data), batch_size=BATCH, verbose=0)
        print((time.perf_counter() - begun) / STEPS, flush=True)


def train_torch(name: str) -> None:
    """A rank of DDP or FSDP2, under torchrun."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    distributed.all_reduce(torch.zeros(1))
    if distributed.get_rank() == 0:
        wait_for_watch()
    distributed.barrier()
    net = make_net()
    if name == "fsdp2":
        for layer in net.children():
            fully_shard(layer)
        fully_shard(net)
    else:
        net = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4, fused=True)
    data = torch.randn(BATCH // distributed.get_world_size(), WIDTH)
    begun = time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(data), data).backward()
        optimizer.step()
    distributed.barrier()
    if distributed.get_rank() == 0:
        print((time.perf_counter() - begun) / STEPS, flush=True)
    distributed.destroy_process_group()


# --- the process that watches -----------------------------------------------------------------


def processes_of(mark: str) -> list[int]:
    """All processes with a mark in their environment: helpers are no descendants of the script."""
    found = []
    for one in Path("/proc").iterdir():
        if one.name.isdigit():
            try:
                environment = (one / "environ").read_bytes()
            except OSError:
                continue
            found += [int(one.name)] * (mark.encode() in environment)
    return found


def memory_of(process: int) -> int:
    """The proportional set size of a process in bytes; 0 if it has ended."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = (line.split()[1] for line in text.splitlines() if line.startswith("Pss:"))
    return int(next(found, 0)) * 1024


def measure(name: str, ranks: int, offload: str | None) -> str:
    """A line about a contender."""
    launcher = [] if name not in ("fsdp2", "ddp") else ["-m", "torch.distributed.run"]
    launcher += ["--standalone", f"--nproc-per-node={ranks}"] if launcher else []
    command = [sys.executable, *launcher, __file__, "--as", name, "--ranks", str(ranks)]
    command += [] if offload is None else ["--offload", offload]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    mark = f"WATCHED={time.time_ns()}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict([mark.split("=")])}
    with subprocess.Popen(command, env=environment, **pipes) as child:
        given, told = child.stdin, child.stdout
        assert given is not None
        assert told is not None
        while READY not in (line := told.readline()):
            if not line:
                return f"{name}: failed"
        base = {one: memory_of(one) for one in processes_of(mark)}
        lines: list[str] = []
        reader = Thread(target=lambda: lines.append(told.readline()))
        reader.start()
        given.write("\n")
        given.flush()
        seen: list[dict[int, int]] = []
        while not lines:
            seen.append({one: memory_of(one) for one in processes_of(mark)})
            for one, num_bytes in seen[-1].items():
                base.setdefault(one, num_bytes)  # a new helper, before it has anything
            time.sleep(0.01)
        if not lines[0]:
            return f"{name}: failed"
    late = seen[len(seen) // 2 : -len(seen) // 8]  # without the end, when ranks finish
    peaks = {one: max(each.get(one, 0) for each in seen) - base[one] for one in base}
    steady = {one: min(each.get(one, 0) for each in late) - base[one] for one in base}
    busy = [one for one in base if peaks[one] > PARAMETER_BYTES / 10]  # not launchers
    texts = [
        " ".join(f"{found[one] / PARAMETER_BYTES:.2f}" for one in busy) for found in (steady, peaks)
    ]
    return f"{name:10}  steady {texts[0]}  peak {texts[1]}  {float(lines[0]) * 1e3:,.0f} ms a step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--offload", help="a directory")
    parser.add_argument("--as", dest="own", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.own in ("fsdp2", "ddp"):
        train_torch(options.own)
    elif options.own:
        train_lockstep(options.own, options.ranks, options.offload)
    else:
        print(f"parameters: {PARAMETER_BYTES / 1e6:,.0f} MB; {options.ranks} ranks")
        for name in options.contenders:
            print(measure(name, options.ranks, options.offload), flush=True)


if __name__ == "__main__":
    main()
