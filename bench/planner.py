"""The planner's predictions against what is measured, for plans of six nets on this machine.

In each of ``--rounds`` rounds a process measures each net's layers, and then a process for each
plan trains the net and measures the median step and the peak memory of all processes. One more
trains under ``AutoStrategy``, which tries the best plan of each kind and takes the fastest. All of
that is kept in a folder, and what is in it is not measured again: ``--seconds`` ends a run early,
and the next goes on. What ran beside other programs is measured again; with ``--memory`` its memory
counts, which they do not change, and its time does not. A prediction is made from the layers of its
round, and the round with the middle error stands in the table, beside the most memory of all.
``--report`` writes the table into docs/planner.md between its two marks. Run:
``python bench/planner.py``.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import msgspec
import torch
from planner_nets import ALL

import lockstep
from lockstep.cluster.devices import discover
from lockstep.cluster.topology import Cluster, Correction
from lockstep.comm.shared_memory.memory_usage import family, peak_memory
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.cost.breakdown import PlanCost
from lockstep.plan.cost.corrections import RunCost, family_of, learned, with_correction
from lockstep.plan.cost.plan_cost import cost_of
from lockstep.plan.spec import Plan

# Steps of a training that are timed, of nets whose steps are short; and those before them.
STEPS, FEWEST_STEPS, WARM_UP_STEPS = {"mlp": 200, "cnn": 32, "unet": 48}, 16, 4
RESULTS = Path(__file__).parent / "results" / "planner"

# Other programs may use so much of the cores while a pair is measured.
MOST_OTHERS = 0.03
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"
PAGE = Path(__file__).parent.parent / "docs" / "planner.md"

# Rows of what is measured that are no pairs: the layers, and a plan that is chosen.
LAYERS, CHOSEN = "layers", "AutoStrategy"
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
    """When each step ended, and the memory of all processes while they are at work.

    Args:
        steps: that are timed.
    """

    def __init__(self, steps: int) -> None:
        self.last = WARM_UP_STEPS + steps
        self.ends: list[float] = []
        self.peak = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) == WARM_UP_STEPS:
            self.others = Others()
        if len(self.ends) == self.last:
            self.others.stop()
            self.peak = peak_memory() + files_of_others()


class Others:
    """What other programs use of the cores from now on, as a part of one core."""

    def __init__(self) -> None:
        self._began, self._busy = time.perf_counter(), busy_seconds()

    def stop(self) -> None:
        (busy, own), (before, own_before) = busy_seconds(), self._busy
        seconds = time.perf_counter() - self._began
        self.part = max(busy - before - own + own_before, 0.0) / seconds


def busy_seconds() -> tuple[float, float]:
    """Of all cores since the machine started, and of these the ones of this process's family."""
    per_second = os.sysconf("SC_CLK_TCK")
    fields = [*map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])]
    stats = [Path(f"/proc/{pid}/stat").read_text() for pid in family(os.getpid())]
    own = sum(sum(map(int, stat.rpartition(")")[2].split()[11:15])) for stat in stats)
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
    wait_for_quiet()
    began, others = time.perf_counter(), Others()
    model = net.make_model()
    module, precision, samples, _ = plan_inputs(model, "fp32", data, SAMPLES_FIRST)
    cluster = this_machine(discover(), precision, capture_layers(model))
    graph = Planning(module).graph(samples, min(net.batch_size, 128), precision)
    with num_threads(1):
        graph = msgspec.structs.replace(graph, optimizer=profile_optimizer(optimizer))
    host = msgspec.structs.replace(cluster.hosts[0], speed_together=graph.speed_together)
    others.stop()
    return {
        "graph": graph,
        "cluster": msgspec.structs.replace(cluster, hosts=(host,)),
        "seconds": time.perf_counter() - began,
        "bytes": 0,
        "others": others.part,
    }


def chooser() -> lockstep.Strategy:
    """Chooses without what earlier runs have left."""
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    return lockstep.AutoStrategy(trials=3)


def measure_pair(name: str, plan_name: str) -> dict[str, Any]:
    """Train one."""
    net = ALL[name]
    data = net.make_data(min(net.num_samples, 8 * net.batch_size))
    probe = Probe(STEPS.get(name, FEWEST_STEPS))
    wait_for_quiet()
    trainer = lockstep.Trainer(
        net.make_model(),
        loss=net.loss,
        optimizer=optimizer,
        strategy=chooser() if plan_name == CHOSEN else PLANS[plan_name](),
        callbacks=[probe],
    )
    epochs = -(-probe.last * net.batch_size // len(data[0]))
    trainer.fit(data, batch_size=net.batch_size, epochs=epochs, verbose=0)
    steps = [end - begin for begin, end in pairwise(probe.ends[: probe.last])]
    return {
        "plan": trainer.plan,
        "seconds": statistics.median(steps[WARM_UP_STEPS - 1 :]),
        "bytes": probe.peak,
        "others": probe.others.part,
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
    known = {(row["round"], row["net"], row["name"]) for row in rows_in(folder)}
    for round_, net, name in product(range(rounds), nets, [LAYERS, *PLANS, CHOSEN]):
        while (round_, net, name) not in known:
            if time.monotonic() > until:
                return False
            words = ["--profile", net] if name == LAYERS else ["--pair", net, name]
            row = {"round": round_, "net": net, "name": name, **in_process(*words)}
            print(round_, net, name, figures(row), flush=True)
            if row["others"] > MOST_OTHERS and memory_only:
                row["seconds"] = None
            if row["seconds"] is None or row["others"] <= MOST_OTHERS:
                known.add((round_, net, name))
                with open(folder / "rows.jsonl", "a") as file:
                    file.write(json.dumps(row) + "\n")
    return True


def figures(row: dict[str, Any]) -> str:
    """What is said while it is measured."""
    return f"{1e3 * row['seconds']:.1f} ms, {row['bytes'] >> 20} MiB, others {row['others']:.2f}"


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """What was measured."""
    path = folder / "rows.jsonl"
    return [*map(json.loads, path.read_text().splitlines())] if path.exists() else []


def predicted(layers: dict[str, Any], row: dict[str, Any]) -> PlanCost:
    """What the cost model says of a pair."""
    return cost_of(
        msgspec.convert(row["plan"], Plan),
        msgspec.convert(layers["graph"], LayerGraph),
        msgspec.convert(layers["cluster"], Cluster),
        ALL[row["net"]].batch_size,
    )


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """Each round of each pair, with its prediction."""
    rows = rows_in(folder)
    layers = {(row["round"], row["net"]): row for row in rows if row["name"] == LAYERS}
    pairs = [row for row in rows if row["name"] in PLANS]
    for row in pairs:
        row["cost"] = predicted(layers[row["round"], row["net"]], row)
        row["predicted"] = row["cost"].step.total
        row["predicted_bytes"] = row["cost"].all_bytes
    return pairs


def middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a pair, the round with the middle error of the time, and the most memory of all."""
    timed = [row for row in rounds if row["seconds"] is not None]
    chosen = sorted(timed, key=error_of_time)[(len(timed) - 1) // 2] if timed else rounds[0]
    times = [row["seconds"] for row in timed]
    return {**chosen, "bytes": max(row["bytes"] for row in rounds), "repeats": times}


def rows_of(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each pair, with its prediction before and after corrections by the runs of other nets."""
    names = product(ALL, PLANS)
    found = [[row for row in rounds if (row["net"], row["name"]) == name] for name in names]
    pairs = [middle(own) for own in found if own]
    runs = [
        RunCost(
            family=family_of(msgspec.convert(row["plan"], Plan)),
            seconds=(row["predicted"], row["seconds"] or 0.0),
            num_bytes=(row["predicted_bytes"], row["bytes"]),
        )
        for row in pairs
    ]
    for row, run in zip(pairs, runs, strict=True):
        others = [other for other, at in zip(runs, pairs, strict=True) if at["net"] != row["net"]]
        known = {one.family: one for one in learned(others)}
        after = with_correction(row["cost"], known.get(run.family, Correction(family=run.family)))
        row |= {"corrected": after.step.total, "corrected_bytes": after.all_bytes}
    return pairs


def held_out(rows: list[dict[str, Any]]) -> str:
    """The verdict on predictions that the runs of other nets have corrected."""
    corrected = [
        {**row, "predicted": row["corrected"], "predicted_bytes": row["corrected_bytes"]}
        for row in rows
    ]
    return f"Corrected by the runs of the other nets: {verdict(corrected)}"


def chosen(rows: list[dict[str, Any]], folder: Path) -> str:
    """What AutoStrategy's plans take, beside the fastest of the pairs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows_in(folder):
        if row["name"] == CHOSEN and row["seconds"] is not None:
            found.setdefault(row["net"], []).append(row)
    lines, lost = [], []
    for net, own in found.items():
        seconds = statistics.median(row["seconds"] for row in own)
        taken = {r["name"]: statistics.median(r["repeats"]) for r in rows if r["net"] == net}
        best = min(taken, key=lambda name: taken[name])
        lost.append(seconds / taken[best] - 1)
        plans = Counter(msgspec.convert(row["plan"], Plan).strategy for row in own)
        picks = ", ".join(f"{plan} {count}" for plan, count in plans.items())
        times = f"{1e3 * seconds:.1f} | {best} | {1e3 * taken[best]:.1f}"
        lines.append(f"| {ALL[net].title} | {picks} | {times} | {100 * lost[-1]:+.0f} % |")
    head = "| net | chosen, times | measured, ms | fastest pair | measured, ms | lost |"
    return "\n".join(
        [
            "With trials (`AutoStrategy(trials=3)`), medians of the rounds:",
            "",
            head,
            "|---|---|---|---|---|---|",
            *lines,
            "",
            f"The plan that is chosen takes {100 * statistics.median(lost):.0f} % longer than the "
            f"fastest pair on the median net, and {100 * max(lost):.0f} % on the worst.",
        ]
    )


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
        taken = {row["name"]: statistics.median(row["repeats"]) for row in own}
        lost.append(taken[pick["name"]] / min(taken.values()) - 1)
    return (
        f"{memory} Of the step, of {len(rows)} pairs: {100 * times:.0f} %. The plan that is "
        f"picked takes {100 * statistics.median(lost):.0f} % longer than the fastest on the "
        f"median net, and {100 * max(lost):.0f} % on the worst."
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pair", nargs=2, metavar=("NET", "PLAN"))
    parser.add_argument("--profile", metavar="NET")
    parser.add_argument("--nets", default=",".join(ALL), help="separated by commas")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of what is measured")
    parser.add_argument("--rounds", type=int, default=3, help="that a pair is measured")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing afterwards")
    parser.add_argument("--memory", action="store_true", help="while other programs are at work")
    parser.add_argument("--report", action="store_true", help="write docs/planner.md")
    options = parser.parse_args()
    if options.pair or options.profile:
        found = measure_pair(*options.pair) if options.pair else profile_net(options.profile)
        print(msgspec.json.encode(found).decode())
        return
    nets, until = options.nets.split(","), time.monotonic() + options.seconds
    if not measure_all(options.results, nets, until, options.rounds, memory_only=options.memory):
        print("Not all is measured yet: run it again.")
    rows = rows_of(rounds_of(options.results))
    text = table(rows) if rows else "Nothing is measured yet."
    if any(row["name"] == CHOSEN and row["seconds"] for row in rows_in(options.results)):
        text += f"\n{chosen(rows, options.results)}\n"
    print(text)
    if options.report:
        page = PAGE.read_text()
        head, tail = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{head}{BEGIN}{text}{END}{tail}")


if __name__ == "__main__":
    main()
