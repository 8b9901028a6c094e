"""Steps of sharded trainings on two processes over gloo: Lockstep's levels beside FSDP2.

The wide MLP and the GPT of ``nets``, and the net of ``sharded_memory``, with Adam. FSDP2 wraps each
block of the GPT, and each layer of the others. Every process has one thread. Contenders take turns;
the table has the median of the steps of all rounds, the processor time of both processes in a step,
and FSDP2's time over each. Run: ``python bench/sharded_speed.py --rounds 3``.

With ``--rate 1gbit``, as root, the processes are on two hosts, which are network namespaces with a
link that the kernel keeps at this rate. Then the table has what must be, too: the longer one of the
compute of a rank when it waits for nobody, and the transfer of 3 (n - 1) / n of the parameters'
bytes at the rate that a socket finds.
"""

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from host_contenders import PORT, lonely_step
from hosts import NUM_HOSTS, environments, task
from nets import NETS, Block, Net
from sharded_memory import BATCH, WIDTH, make_net
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # the hosts of the tests are ours, too
from tests.netns import Hosts, connected_hosts

DEEP = Net(
    "8 x Linear(3072)",
    BATCH,
    BATCH,
    make_net,
    lambda count: (torch.randn(count, WIDTH), torch.randn(count, WIDTH)),
    F.mse_loss,
)
OURS = {"wide": NETS["wide"], "gpt": NETS["gpt"], "deep": DEEP}
LEVELS = ("parameters", "gradients", "slots")
RANKS, WARM_UP, STEPS = 2, 4, 12
TIMEOUT_SECONDS = 600

Step = tuple[float, float]  # seconds, and seconds of rank 0's processor


@dataclass
class TimedLoss:
    """A loss that notes when it is computed: a callback would have parameters gathered for it."""

    net: Net
    times: list[Step] = field(default_factory=list)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.times.append((time.perf_counter(), time.process_time()))
        return self.net.loss(output, target)

    def steps(self) -> list[Step]:
        """The last steps."""
        last = self.times[-STEPS - 1 :]
        return [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(last)]


def train_lockstep(net: Net, level: str) -> list[Step]:
    """The steps of rank 0; this process is it, or the one rank of its host."""
    import lockstep

    inputs, targets = net.make_data(net.batch_size)
    loss = TimedLoss(replace(net, make_model=None, make_data=None))  # type: ignore[arg-type]
    trainer = lockstep.Trainer(
        net.make_model(),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-4),
        strategy=lockstep.FullyShardedStrategy(
            1 if "TF_CONFIG" in os.environ else RANKS, level=level
        ),
    )
    count = WARM_UP + STEPS + 1
    data = torch.cat([inputs] * count), torch.cat([targets] * count)
    trainer.fit(data, batch_size=net.batch_size, shuffle=False, verbose=0)
    return loss.steps()


def train_fsdp2(net: Net) -> list[Step]:
    """The steps of a rank, under torchrun."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    model = net.make_model()
    layers = [layer for layer in model.modules() if isinstance(layer, Block)] or model.children()
    for layer in layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    whole = net.make_data(net.batch_size)
    inputs, targets = (one.chunk(RANKS)[distributed.get_rank()] for one in whole)
    loss = TimedLoss(net)
    for _ in range(WARM_UP + STEPS + 1):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    is_first = distributed.get_rank() == 0
    distributed.destroy_process_group()
    return loss.steps() if is_first else []


def compute(net: Net) -> list[Step]:
    """The steps of a rank with its part of the batch and of the update, that exchanges nothing."""
    from lockstep.parallel.storage.allocator import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()
    torch.distributed.init_process_group("gloo")
    loss = TimedLoss(net)
    step = lonely_step(replace(net, loss=loss))
    whole = net.make_data(net.batch_size)
    inputs, targets = (one.chunk(RANKS)[torch.distributed.get_rank()] for one in whole)
    for _ in range(WARM_UP + STEPS + 1):
        step(inputs, targets)
    is_first = torch.distributed.get_rank() == 0
    torch.distributed.destroy_process_group()
    return loss.steps() if is_first else []


def measure_on_hosts(hosts: Hosts, contender: str, name: str) -> list[Step]:
    """The steps of a round, of two processes on hosts of their own."""
    command = [sys.executable, __file__, "--as", contender, "--nets", name]
    if contender in LEVELS:
        cluster = {"worker": [f"{hosts.address(host)}:{PORT}" for host in range(NUM_HOSTS)]}
        secret = secrets.token_hex(32)
        own = [(host, task(cluster, host, secret)) for host in range(NUM_HOSTS)]
    else:
        own = environments(hosts, "link")
    started = [hosts.run(host, command, {**one, "OMP_NUM_THREADS": "1"}) for host, one in own]
    first, *_ = [one.check(TIMEOUT_SECONDS) for one in started]
    return steps_in(first)


def link_rate(hosts: Hosts) -> float:
    """Bytes per second that a socket finds, the mean of both ways."""
    script = str(Path(__file__).parent / "host_contenders.py")
    command = [sys.executable, script, "link", "--seconds", "2"]
    started = [hosts.run(host, command, own) for host, own in environments(hosts, "link")]
    first, *_ = [one.check(TIMEOUT_SECONDS) for one in started]
    rates: dict[str, float] = json.loads(first.splitlines()[-1])
    return statistics.mean(rates.values())


def measure(contender: str, name: str) -> list[Step]:
    """The steps of a round."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    launcher = launcher if contender == "fsdp2" else []
    command = [sys.executable, *launcher, __file__, "--as", contender, "--nets", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "times " not in done.stdout:
        raise RuntimeError(done.stderr)
    return steps_in(done.stdout)


def steps_in(said: str) -> list[Step]:
    """What a process has printed."""
    line = next(one for one in said.splitlines() if one.startswith("times "))
    return [(float(wall), float(own)) for wall, own in (one.split(",") for one in line.split()[1:])]


def measure_in_turns(nets: Sequence[str], levels: Sequence[str], rounds: int, rate: str) -> None:
    """Print a line for each net and contender."""
    contenders = [*levels, "fsdp2", *(["compute"] if rate else [])]
    with connected_hosts(NUM_HOSTS) if rate else nullcontext(None) as hosts:
        if hosts is not None:
            for host in range(NUM_HOSTS):
                hosts.shape(host, rate)
        for name in nets:
            found: dict[str, list[Step]] = {one: [] for one in contenders}
            for _ in range(rounds):
                for contender, times in found.items():
                    times += (
                        measure(contender, name)
                        if hosts is None
                        else measure_on_hosts(hosts, contender, name)
                    )
            print_table(name, found)
            if hosts is not None:
                print_floor(OURS[name], found, link_rate(hosts))


def print_table(name: str, found: Mapping[str, list[Step]]) -> None:
    medians = {
        one: [*map(statistics.median, zip(*each, strict=True))] for one, each in found.items()
    }
    for contender, both in medians.items():
        ratios = [theirs / ours for theirs, ours in zip(medians["fsdp2"], both, strict=True)]
        text = "  ".join(
            f"{one * 1e3:7.1f} ms {ratio:5.2f}" for one, ratio in zip(both, ratios, strict=True)
        )
        print(f"{name:5} {contender:11} {text}", flush=True)


def print_floor(net: Net, found: Mapping[str, list[Step]], rate: float) -> None:
    num_bytes = sum(one.nbytes for one in net.make_model().parameters())
    transfer = 3 * (RANKS - 1) / RANKS * num_bytes / rate
    times = {one: statistics.median(wall for wall, _ in each) for one, each in found.items()}
    floor = max(times["compute"], transfer)
    reached = ", ".join(
        f"{one} {floor / seconds:.2f}" for one, seconds in times.items() if one != "compute"
    )
    print(f"      transfer {transfer * 1e3:.1f} ms; of the longer of both: {reached}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nets", nargs="+", choices=OURS, default=[*OURS])
    parser.add_argument("--levels", nargs="*", choices=LEVELS, default=LEVELS)
    parser.add_argument("--rate", default="", help="of a link between two hosts, such as 1gbit")
    parser.add_argument(
        "--as", dest="contender", choices=(*LEVELS, "fsdp2", "compute"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.contender:
        net = OURS[options.nets[0]]
        if options.contender in LEVELS:
            times = train_lockstep(net, options.contender)
        else:
            times = train_fsdp2(net) if options.contender == "fsdp2" else compute(net)
        if times:
            print("times", *(f"{wall},{own}" for wall, own in times), flush=True)
        return
    measure_in_turns(options.nets, options.levels, options.rounds, options.rate)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
