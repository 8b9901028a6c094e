"""The planner's predictions against what is measured, for plans of six nets on this machine.

Each pair of net and plan is a process of its own: it measures the net's layers, predicts, trains,
and compares the median step and the peak memory of all processes. ``--report`` writes a table into
docs/planner.md between its two marks; ``--search`` measures the search instead.
Run: ``python bench/planner.py``.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from nets import NETS, Net
from torch import Tensor, nn

import lockstep
from lockstep.cluster.cluster_file import parse_cluster
from lockstep.cluster.devices import discover
from lockstep.comm.shared_memory.memory_usage import peak_memory
from lockstep.graph.layer_graph import (
    Flow,
    Layer,
    LayerCosts,
    LayerGraph,
    OptimizerCosts,
    ParameterInfo,
)
from lockstep.launch.health.machine_measuring import measured
from lockstep.plan.cost.plan_cost import cost_of
from lockstep.plan.search.candidates import Problem
from lockstep.plan.search.ranking import best_plans

STEPS, WARM_UP_STEPS = 24, 6
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"
PAGE = Path(__file__).parent.parent / "docs" / "planner.md"


class SmallUNet(nn.Module):
    """Two levels down and up, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(1, 16), block(16, 32)])
        self.middle = block(32, 64)
        self.up = nn.ModuleList([block(96, 32), block(48, 16)])
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for layer in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = layer(torch.cat([x, kept.pop()], 1))
        out: Tensor = self.head(x)
        return out


def block(ins: int, outs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(ins, outs, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(outs, outs, 3, padding=1),
        nn.ReLU(),
    )


class Reader(nn.Module):
    """An LSTM of two layers over 64 steps, and a class for the last."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(64, 256, 2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cells(x)[0][:, -1])
        return out


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def pictures(count: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 1, 32, 32)
    return inputs, inputs.tanh()


def readings(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 64, 64), torch.randint(10, (count,))


OTHERS = {
    "unet": Net("U-Net, 32 x 32", 32, 256, lambda: seeded(SmallUNet), pictures, nn.MSELoss()),
    "lstm": Net(
        "LSTM 2 x 256, 64 steps",
        64,
        256,
        lambda: seeded(Reader),
        readings,
        nn.functional.cross_entropy,
    ),
}
ALL = {**NETS, **OTHERS}

PLANS: dict[str, Callable[[], Any]] = {
    "one device": lockstep.SingleDeviceStrategy,
    "mirrored, 2": lambda: lockstep.MirroredStrategy(2),
    "mirrored, 4": lambda: lockstep.MirroredStrategy(4),
    "2 stages": lambda: lockstep.PipelineStrategy(2),
    "sharded parameters, 2": lambda: lockstep.FullyShardedStrategy(2),
}


# --- one pair -------------------------------------------------------------------------------------


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


class Clock(lockstep.Callback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def graph_of(net: Net, model: nn.Module, data: tuple[Tensor, Tensor]) -> LayerGraph:
    from lockstep.data.batch_dims import SAMPLES_FIRST
    from lockstep.frontends.plan_inputs import plan_inputs
    from lockstep.parallel.settings import num_threads
    from lockstep.train.runtime.model_profile import profile_optimizer
    from lockstep.train.runtime.planning import Planning

    module, precision, samples = plan_inputs(model, "fp32", data, SAMPLES_FIRST)
    graph = Planning(module).graph(samples, min(net.batch_size, 128), precision)
    with num_threads(1):
        return msgspec.structs.replace(graph, optimizer=profile_optimizer(optimizer))


def measure_pair(name: str, plan_name: str) -> dict[str, Any]:
    """Predict and train one."""
    net = ALL[name]
    data = net.make_data(min(net.num_samples, 8 * net.batch_size))
    model = net.make_model()
    graph = graph_of(net, model, data)
    clock = Clock()
    trainer = lockstep.Trainer(
        model,
        loss=net.loss,
        optimizer=optimizer,
        strategy=PLANS[plan_name](),
        callbacks=[clock],
    )
    before = peak_memory()
    epochs = -(-(STEPS + WARM_UP_STEPS) * net.batch_size // len(data[0]))
    trainer.fit(data, batch_size=net.batch_size, epochs=epochs, verbose=0)
    peak = peak_memory()
    steps = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
    cost = cost_of(trainer.plan, graph, measured(discover()), net.batch_size)
    return {
        "net": net.title,
        "plan": plan_name,
        "predicted": cost.step.total,
        "measured": statistics.median(steps[WARM_UP_STEPS:]),
        "parts": msgspec.to_builtins(cost.step),
        "predicted_bytes": sum(one.total for one in cost.memory),
        "measured_bytes": peak,
        "before_bytes": before,
    }


# --- all of them ----------------------------------------------------------------------------------


def run_pair(name: str, plan_name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--pair", name, plan_name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{name}, {plan_name}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| net | plan | predicted, ms | measured, ms | error | predicted, MiB | measured, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        error = row["predicted"] / row["measured"] - 1
        lines.append(
            f"| {row['net']} | {row['plan']} | {1e3 * row['predicted']:.1f} | "
            f"{1e3 * row['measured']:.1f} | {100 * error:+.0f} % | "
            f"{row['predicted_bytes'] / 2**20:.0f} | {row['measured_bytes'] / 2**20:.0f} |"
        )
    return "\n".join([*lines, "", *verdict(rows)]) + "\n"


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    steps = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    sizes = [abs(row["predicted_bytes"] / row["measured_bytes"] - 1) for row in rows]
    lost = []
    for net in dict.fromkeys(row["net"] for row in rows):
        own = [row for row in rows if row["net"] == net]
        pick = min(own, key=lambda row: row["predicted"])
        lost.append(pick["measured"] / min(row["measured"] for row in own) - 1)
    return [
        f"Median error of {len(rows)} pairs: {100 * statistics.median(steps):.0f} % of the step, "
        f"{100 * statistics.median(sizes):.0f} % of memory. The plan that is picked takes "
        f"{100 * statistics.median(lost):.0f} % longer than the fastest on the median net, and "
        f"{100 * max(lost):.0f} % on the worst."
    ]


# --- the search -----------------------------------------------------------------------------------


def search_row(num_layers: int, num_hosts: int) -> str:
    """GPT blocks on hosts of eight H100."""
    hidden, sequence = 4096, 2048
    size = 12 * hidden * hidden
    weights = [
        ParameterInfo(name=f"{number}.weight", shape=(size,), dtype="bfloat16", trainable=True)
        for number in range(num_layers)
    ]
    costs = LayerCosts(
        forward_seconds=0.0,
        backward_seconds=0.0,
        activation_bytes=34 * sequence * hidden,
        operations=2.0 * size * sequence,
    )
    flows = (
        Flow(source=number, num_bytes=2 * sequence * hidden, users=(number + 1,))
        for number in range(num_layers - 1)
    )
    graph = LayerGraph(
        layers=tuple(
            Layer(name=str(number), kind="Block", parameters=(weight,), costs=costs)
            for number, weight in enumerate(weights)
        ),
        flows=tuple(flows),
        samples=1,
        optimizer=OptimizerCosts(slots=6.0),
    )
    hosts = f'[[hosts]]\ncount = {num_hosts}\ndevices = 8\ndevice = "H100"\nlink = "nvlink4"\n'
    cluster = parse_cluster(f'{hosts}[[networks]]\nlink = "infiniband-ndr"\n')
    began = time.perf_counter()
    best = best_plans(Problem(graph=graph, cluster=cluster, batch_size=16 * num_hosts))[0]
    took = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = f"{num_layers} | {8 * num_hosts} | {took:.1f} | {memory:.0f} MiB"
    return f"| {figures} | {best.candidate.name} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pair", nargs=2, metavar=("NET", "PLAN"))
    parser.add_argument("--nets", default=",".join(ALL), help="separated by commas")
    parser.add_argument("--search", action="store_true", help="how long the search takes")
    parser.add_argument("--report", action="store_true", help="write docs/planner.md")
    options = parser.parse_args()
    if options.pair:
        print(json.dumps(measure_pair(*options.pair)))
        return
    if options.search:
        for layers, hosts in ((100, 2), (100, 128), (1000, 512)):
            print(search_row(layers, hosts))
        return
    rows = []
    for net in options.nets.split(","):
        for plan in PLANS:
            rows.append(run_pair(net, plan))
            print(json.dumps(rows[-1]), flush=True)
    text = table(rows)
    print(text)
    if options.report:
        page = PAGE.read_text()
        head, tail = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{head}{BEGIN}{text}{END}{tail}")


if __name__ == "__main__":
    main()
