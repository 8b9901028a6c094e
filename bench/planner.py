"""The planner's predictions against what is measured, for plans of six nets on this machine.

A process for each net measures its layers, and a process for each pair of net and plan trains it
and measures the median step and the peak memory of all processes. All of that is kept in a folder,
and pairs that are in it are not measured again: ``--seconds`` ends a run early, and the next goes
on. A pair beside which other programs were at work is measured again; with ``--memory`` its memory
counts, which they do not change, and its time does not. Every pair is measured ``--rounds`` times,
other pairs in between; the least time counts, since what else the host does only adds, and the most
memory. Predictions are made from the folder.
``--report`` writes a table into docs/planner.md between its two marks; ``--search`` measures the
search instead. Run: ``python bench/planner.py``.
"""

import argparse
import itertools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from nets import NETS, Net
from torch import Tensor, nn

import lockstep
from lockstep.cluster.cluster_file import parse_cluster
from lockstep.cluster.devices import discover
from lockstep.cluster.topology import Cluster, Correction
from lockstep.comm.shared_memory.memory_usage import family, peak_memory
from lockstep.graph.layer_graph import (
    Flow,
    Layer,
    LayerCosts,
    LayerGraph,
    OptimizerCosts,
    ParameterInfo,
)
from lockstep.plan.cost.breakdown import PlanCost
from lockstep.plan.cost.corrections import RunCost, family_of, learned, with_correction
from lockstep.plan.cost.plan_cost import cost_of
from lockstep.plan.search.candidates import Problem
from lockstep.plan.search.ranking import best_plans
from lockstep.plan.spec import Plan

STEPS, WARM_UP_STEPS = 16, 4
RESULTS = Path(__file__).parent / "results" / "planner"

# Other programs may use so much of the cores while a pair is measured.
MOST_OTHERS = 0.03
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
    "sharded slots, 2": lambda: lockstep.FullyShardedStrategy(2, level="slots", engine="gloo"),
    "sharded parameters, 2": lambda: lockstep.FullyShardedStrategy(2, engine="gloo"),
}


# --- one net, and one pair ------------------------------------------------------------------------


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


class Probe(lockstep.Callback):
    """When each step ended, and the memory of all processes while they are at work."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.peak = 0
        self.others = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) == WARM_UP_STEPS:
            self._busy, self._own = busy_seconds()
        if len(self.ends) == WARM_UP_STEPS + STEPS:
            busy, own = busy_seconds()
            took = self.ends[-1] - self.ends[WARM_UP_STEPS - 1]
            self.others = max(busy - self._busy - own + self._own, 0.0) / took
            self.peak = peak_memory() + files_of_others()


def busy_seconds() -> tuple[float, float]:
    """Of all cores since the machine started, and of these the ones of this process's family."""
    per_second = os.sysconf("SC_CLK_TCK")
    fields = [*map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])]
    stats = [Path(f"/proc/{pid}/stat").read_text() for pid in family(os.getpid())]
    own = sum(sum(map(int, stat.rpartition(")")[2].split()[11:13])) for stat in stats)
    return (sum(fields) - fields[3] - fields[4]) / per_second, own / per_second


def wait_for_quiet() -> None:
    """Until other programs leave the cores alone, or a minute has passed."""
    for _ in range(60):
        before = busy_seconds()[0]
        time.sleep(1.0)
        if busy_seconds()[0] - before <= MOST_OTHERS:
            return


def files_of_others() -> int:
    """Bytes of libraries that count for other programs, too, which have them in memory as well."""
    mine = kilobytes("RssFile", Path("/proc/self/status"))
    pages = [
        kilobytes("Pss_File", Path(f"/proc/{pid}/smaps_rollup")) for pid in family(os.getpid())
    ]
    return 1024 * max(mine - sum(pages), 0)


def kilobytes(name: str, path: Path) -> int:
    lines = (line.split() for line in path.read_text().splitlines())
    return next(int(line[1]) for line in lines if line[0] == f"{name}:")


def profile_net(name: str) -> dict[str, Any]:
    """The net's graph with costs, and this machine."""
    from lockstep.capture.layers import capture_layers
    from lockstep.data.batch_dims import SAMPLES_FIRST
    from lockstep.frontends.plan_inputs import plan_inputs
    from lockstep.parallel.settings import num_threads
    from lockstep.train.runtime.model_profile import profile_optimizer, this_machine
    from lockstep.train.runtime.planning import Planning

    net = ALL[name]
    data = net.make_data(min(net.num_samples, 8 * net.batch_size))
    model = net.make_model()
    module, precision, samples, _ = plan_inputs(model, "fp32", data, SAMPLES_FIRST)
    cluster = this_machine(discover(), precision, capture_layers(model))
    graph = Planning(module).graph(samples, min(net.batch_size, 128), precision)
    with num_threads(1):
        graph = msgspec.structs.replace(graph, optimizer=profile_optimizer(optimizer))
    host = msgspec.structs.replace(cluster.hosts[0], speed_together=graph.speed_together)
    return {"graph": graph, "cluster": msgspec.structs.replace(cluster, hosts=(host,))}


def measure_pair(name: str, plan_name: str) -> dict[str, Any]:
    """Train one."""
    net = ALL[name]
    data = net.make_data(min(net.num_samples, 8 * net.batch_size))
    probe = Probe()
    wait_for_quiet()
    trainer = lockstep.Trainer(
        net.make_model(),
        loss=net.loss,
        optimizer=optimizer,
        strategy=PLANS[plan_name](),
        callbacks=[probe],
    )
    epochs = -(-(STEPS + WARM_UP_STEPS) * net.batch_size // len(data[0]))
    trainer.fit(data, batch_size=net.batch_size, epochs=epochs, verbose=0)
    steps = [end - begin for begin, end in pairwise(probe.ends[: WARM_UP_STEPS + STEPS])]
    return {
        "net": name,
        "name": plan_name,
        "plan": trainer.plan,
        "seconds": statistics.median(steps[WARM_UP_STEPS - 1 :]),
        "bytes": probe.peak,
        "others": probe.others,
    }


# --- all of them ----------------------------------------------------------------------------------


def in_process(*words: str) -> Any:
    """What another process of this file prints."""
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_all(
    folder: Path, nets: list[str], until: float, rounds: int, *, memory_only: bool
) -> bool:
    """Measure what the folder lacks; whether it has all of it now."""
    folder.mkdir(parents=True, exist_ok=True)
    for net in nets:
        if not (folder / f"{net}.json").exists():
            if time.monotonic() > until:
                return False
            (folder / f"{net}.json").write_text(json.dumps(in_process("--profile", net)))
    known = Counter(
        (row["net"], row["name"])
        for row in rows_in(folder)
        if memory_only or row["seconds"] is not None
    )
    for wanted, net, plan in itertools.product(range(1, rounds + 1), nets, PLANS):
        while known[net, plan] < wanted:
            if time.monotonic() > until:
                return False
            row = in_process("--pair", net, plan)
            figures = f"{1e3 * row['seconds']:.1f} ms, {row['bytes'] >> 20} MiB"
            print(f"{net}, {plan}: {figures}, others {row['others']:.2f}", flush=True)
            if row["others"] > MOST_OTHERS and memory_only:
                row["seconds"] = None
            if row["seconds"] is None or row["others"] <= MOST_OTHERS:
                known[net, plan] += 1
                with open(folder / "pairs.jsonl", "a") as file:
                    file.write(json.dumps(row) + "\n")
    return True


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """What was measured."""
    path = folder / "pairs.jsonl"
    return [*map(json.loads, path.read_text().splitlines())] if path.exists() else []


def pairs_of(folder: Path) -> list[dict[str, Any]]:
    """Each pair with the least time and the most memory that were measured of it."""
    pairs: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows_in(folder):
        found = pairs.setdefault((row["net"], row["name"]), {**row, "repeats": []})
        if row["seconds"] is not None:
            found["repeats"].append(row["seconds"])
        found["bytes"] = max(found["bytes"], row["bytes"])
        found["seconds"] = min(found["repeats"], default=None)
    return [*pairs.values()]


def predicted(folder: Path, row: dict[str, Any]) -> PlanCost:
    """What the cost model says of a pair."""
    found = json.loads((folder / f"{row['net']}.json").read_text())
    return cost_of(
        msgspec.convert(row["plan"], Plan),
        msgspec.convert(found["graph"], LayerGraph),
        msgspec.convert(found["cluster"], Cluster),
        ALL[row["net"]].batch_size,
    )


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Pairs with their predictions, without and with corrections by the runs of other nets."""
    pairs = pairs_of(folder)
    costs = [predicted(folder, row) for row in pairs]
    runs = [
        RunCost(
            family=family_of(msgspec.convert(row["plan"], Plan)),
            seconds=(cost.step.total, row["seconds"] or 0.0),
            num_bytes=(cost.all_bytes, row["bytes"]),
        )
        for row, cost in zip(pairs, costs, strict=True)
    ]
    rows = []
    for row, cost, run in zip(pairs, costs, runs, strict=True):
        others = [other for other, at in zip(runs, pairs, strict=True) if at["net"] != row["net"]]
        known = {one.family: one for one in learned(others)}
        after = with_correction(cost, known.get(run.family, Correction(family=run.family)))
        rows.append(
            {
                **row,
                "predicted": cost.step.total,
                "predicted_bytes": cost.all_bytes,
                "corrected": after.step.total,
                "corrected_bytes": after.all_bytes,
            }
        )
    return sorted(rows, key=lambda row: ([*ALL].index(row["net"]), [*PLANS].index(row["name"])))


def held_out(rows: list[dict[str, Any]]) -> str:
    """The verdict on predictions that the runs of other nets have corrected."""
    corrected = [
        {**row, "predicted": row["corrected"], "predicted_bytes": row["corrected_bytes"]}
        for row in rows
    ]
    return f"Corrected by the runs of the other nets: {verdict(corrected)}"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| net | plan | predicted, ms | measured, ms | error | predicted, MiB | measured, MiB "
        "| error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        time = "| |"
        if row["seconds"] is not None:
            times = f"{1e3 * row['predicted']:.1f} | {1e3 * row['seconds']:.1f}"
            time = f"{times} | {100 * error_of_time(row):+.0f} %"
        lines.append(
            f"| {ALL[row['net']].title} | {row['name']} | {time} | "
            f"{row['predicted_bytes'] / 2**20:.0f} | {row['bytes'] / 2**20:.0f} | "
            f"{100 * error_of_memory(row):+.0f} % |"
        )
    has_times = any(row["seconds"] is not None for row in rows)
    after = ["", held_out(rows), "", repeated(rows)] if has_times else []
    return "\n".join([*lines, "", f"As modelled: {verdict(rows)}", *after]) + "\n"


def repeated(rows: list[dict[str, Any]]) -> str:
    """How far the runs of a pair are apart."""
    slower = [max(row["repeats"]) / min(row["repeats"]) - 1 for row in rows if row["repeats"]]
    return (
        f"The slowest of a pair's runs took {100 * statistics.median(slower):.0f} % longer than "
        f"its fastest in the median, and {100 * max(slower):.0f} % at most."
    )


def error_of_time(row: dict[str, Any]) -> float:
    return float(row["predicted"] / row["seconds"] - 1)


def error_of_memory(row: dict[str, Any]) -> float:
    return float(row["predicted_bytes"] / row["bytes"] - 1)


def verdict(rows: list[dict[str, Any]]) -> str:
    sizes = statistics.median(abs(error_of_memory(row)) for row in rows)
    least = min(map(error_of_memory, rows))
    memory = (
        f"median error of memory of {len(rows)} pairs: {100 * sizes:.0f} %; it is at most "
        f"{-100 * least:.0f} % below the truth."
    )
    rows = [row for row in rows if row["seconds"] is not None]
    if not rows:
        return f"{memory} No time was measured."
    times = statistics.median(abs(error_of_time(row)) for row in rows)
    lost = []
    for net in dict.fromkeys(row["net"] for row in rows):
        own = [row for row in rows if row["net"] == net]
        pick = min(own, key=lambda row: row["predicted"])
        lost.append(pick["seconds"] / min(row["seconds"] for row in own) - 1)
    return (
        f"{memory} Of the step, of {len(rows)} pairs: {100 * times:.0f} %. The plan that is "
        f"picked takes {100 * statistics.median(lost):.0f} % longer than the fastest on the "
        f"median net, and {100 * max(lost):.0f} % on the worst."
    )


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
    parser.add_argument("--profile", metavar="NET")
    parser.add_argument("--nets", default=",".join(ALL), help="separated by commas")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of what is measured")
    parser.add_argument("--rounds", type=int, default=3, help="that a pair is measured")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing afterwards")
    parser.add_argument("--memory", action="store_true", help="while other programs are at work")
    parser.add_argument("--search", action="store_true", help="how long the search takes")
    parser.add_argument("--report", action="store_true", help="write docs/planner.md")
    options = parser.parse_args()
    if options.pair or options.profile:
        found = measure_pair(*options.pair) if options.pair else profile_net(options.profile)
        print(msgspec.json.encode(found).decode())
        return
    if options.search:
        for layers, hosts in ((100, 2), (100, 128), (1000, 512)):
            print(search_row(layers, hosts))
        return
    nets, until = options.nets.split(","), time.monotonic() + options.seconds
    if not measure_all(options.results, nets, until, options.rounds, memory_only=options.memory):
        print("Not all is measured yet: run it again.")
    rows = rows_of(options.results)
    text = table(rows) if rows else "Nothing is measured yet."
    print(text)
    if options.report:
        page = PAGE.read_text()
        head, tail = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{head}{BEGIN}{text}{END}{tail}")


if __name__ == "__main__":
    main()
