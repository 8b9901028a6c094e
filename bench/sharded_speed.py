"""Steps of sharded trainings on two processes over gloo: Lockstep's levels beside FSDP2.

The wide MLP and the GPT of ``nets``, and the net of ``sharded_memory``, with Adam. FSDP2 wraps each
block of the GPT, and each layer of the others. Every process has one thread. Contenders take turns;
the table has the median of the steps of all rounds, the processor time of both processes in a step,
and FSDP2's time over each. Run: ``python bench/sharded_speed.py --rounds 3``.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from nets import NETS, Block, Net
from sharded_memory import BATCH, WIDTH, make_net
from torch import Tensor

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
    """The steps; this process is rank 0."""
    import lockstep

    inputs, targets = net.make_data(net.batch_size)
    loss = TimedLoss(replace(net, make_model=None, make_data=None))  # type: ignore[arg-type]
    trainer = lockstep.Trainer(
        net.make_model(),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-4),
        strategy=lockstep.FullyShardedStrategy(RANKS, level=level),
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


def measure(contender: str, name: str) -> list[Step]:
    """The steps of a round."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    launcher = launcher if contender == "fsdp2" else []
    command = [sys.executable, *launcher, __file__, "--as", contender, "--nets", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [one for one in done.stdout.splitlines() if one.startswith("times ")]
    if not lines:
        raise RuntimeError(done.stderr)
    return [
        (float(wall), float(own)) for wall, own in (one.split(",") for one in lines[0].split()[1:])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nets", nargs="+", choices=OURS, default=[*OURS])
    parser.add_argument("--levels", nargs="*", choices=LEVELS, default=LEVELS)
    parser.add_argument(
        "--as", dest="contender", choices=(*LEVELS, "fsdp2"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.contender:
        net = OURS[options.nets[0]]
        is_ours = options.contender in LEVELS
        times = train_lockstep(net, options.contender) if is_ours else train_fsdp2(net)
        if times:
            print("times", *(f"{wall},{own}" for wall, own in times), flush=True)
        return
    for name in options.nets:
        found: dict[str, list[Step]] = {one: [] for one in (*options.levels, "fsdp2")}
        for _ in range(options.rounds):
            for contender, times in found.items():
                times += measure(contender, name)
        medians = {
            one: [*map(statistics.median, zip(*each, strict=True))] for one, each in found.items()
        }
        for contender, both in medians.items():
            ratios = [theirs / ours for theirs, ours in zip(medians["fsdp2"], both, strict=True)]
            text = "  ".join(
                f"{one * 1e3:7.1f} ms {ratio:5.2f}" for one, ratio in zip(both, ratios, strict=True)
            )
            print(f"{name:5} {contender:11} {text}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
