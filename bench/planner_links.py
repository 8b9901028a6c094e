"""Does the planner pick the fastest plan when the network between two hosts gets slower?

The hosts are network namespaces of one core each, linked at a rate that the kernel keeps (``tbf``).
A socket finds what the link carries, and how long a message takes; a process measures each net's
layers; the planner gets these and nothing of the trainings. A table says for each rate which plan
it expects to be fastest, and which was. Run as root: ``python bench/planner_links.py``.
"""

import argparse
import json
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import planner
import torch
from host_contenders import PORT
from hosts import NUM_HOSTS, environments, task
from planner_nets import ALL

import lockstep
from lockstep.cluster.topology import Cluster, Link, Network
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.cost.plan_cost import cost_of
from lockstep.plan.spec import Plan

sys.path.append(str(Path(__file__).parents[1]))  # the hosts of the tests are ours, too
from tests.netns import Hosts, connected_hosts

NAMES = ("cnn", "unet", "gpt", "wide")
RATES = ("10gbit", "1gbit", "100mbit")
LOCAL = "one device"
PLANS: dict[str, Callable[[], Any]] = {
    LOCAL: lockstep.SingleDeviceStrategy,
    "replicas": lambda: lockstep.MultiWorkerMirroredStrategy(1),
    "2 stages": lambda: lockstep.PipelineStrategy(2),
}
WARM_UP_STEPS = 3
TIMEOUT_SECONDS = 600


class Clock(lockstep.Callback):
    """When each step ended, on host 0."""

    is_observer = True

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def train(name: str, plan_name: str, steps: int) -> dict[str, Any]:
    """Train a net on this host."""
    net, clock = ALL[name], Clock()
    torch.manual_seed(1)  # all hosts have the same data
    data = net.make_data(min(net.num_samples, 8 * net.batch_size))
    trainer = lockstep.Trainer(
        net.make_model(),
        loss=net.loss,
        optimizer=planner.optimizer,
        strategy=PLANS[plan_name](),
        callbacks=[clock],
    )
    count = WARM_UP_STEPS + steps
    epochs = -(-count * net.batch_size // len(data[0]))
    trainer.fit(data, batch_size=net.batch_size, epochs=epochs, verbose=0)
    times = [end - begin for begin, end in pairwise(clock.ends)]
    if not times:  # host 1
        return {}
    return {
        "net": name,
        "plan": trainer.plan,
        "seconds": statistics.median(times[WARM_UP_STEPS - 1 :][:steps]),
    }


def measure(hosts: Hosts, name: str, plan_name: str, steps: int) -> dict[str, Any]:
    """What host 0 says of a training, on one host or on both."""
    command = [sys.executable, __file__, "--train", name, plan_name, "--steps", str(steps)]
    if plan_name == LOCAL:
        started = [hosts.run(0, command, {})]
    else:
        cluster = {"worker": [f"{hosts.address(host)}:{PORT}" for host in range(NUM_HOSTS)]}
        secret = secrets.token_hex(32)
        started = [
            hosts.run(host, command, task(cluster, host, secret)) for host in range(NUM_HOSTS)
        ]
    said = [one.check(TIMEOUT_SECONDS) for one in started]
    found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return found


def network_of(hosts: Hosts) -> Network:
    """What a socket finds."""
    script = str(Path(__file__).parent / "host_contenders.py")
    command = [sys.executable, script, "link", "--seconds", "2"]
    started = [hosts.run(host, command, own) for host, own in environments(hosts, "link")]
    said = [one.check(TIMEOUT_SECONDS) for one in started]
    rate = statistics.mean(json.loads(said[0].splitlines()[-1]).values())
    return Network(link=Link(latency_seconds=LATENCY_SECONDS, bytes_per_second=rate))


LATENCY_SECONDS = 100e-6  # of a message between namespaces, to a process that waits


def host_cluster(found: dict[str, Any], network: Network) -> Cluster:
    """Two hosts with one core each, as fast as this machine's."""
    (host,) = msgspec.convert(found["cluster"], Cluster).hosts
    cores = host.devices_of("cpu")[:1]
    own = msgspec.structs.replace(host, num_cores=1, devices=cores)
    named = (msgspec.structs.replace(own, name=f"host{number}") for number in range(NUM_HOSTS))
    return Cluster(hosts=tuple(named), networks=(network,))


def predicted_seconds(found: dict[str, Any], measured: dict[str, Any], cluster: Cluster) -> float:
    """Of a training's step, by its Plan."""
    plan = msgspec.convert(measured["plan"], Plan)
    graph = msgspec.convert(found["graph"], LayerGraph)
    return cost_of(plan, graph, cluster, ALL[measured["net"]].batch_size).step.total


def row(name: str, rate: str, predicted: dict[str, float], measured: dict[str, float]) -> str:
    pick, best = min(predicted, key=predicted.__getitem__), min(measured, key=measured.__getitem__)
    times = " | ".join(f"{1e3 * predicted[one]:.0f}, {1e3 * measured[one]:.0f}" for one in PLANS)
    lost = f"{100 * (measured[pick] / measured[best] - 1):.0f} %"
    return f"| {ALL[name].title} | {rate} | {times} | {pick} | {best} | {lost} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="+", choices=ALL, default=list(NAMES))
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--train", nargs=2, metavar=("NET", "PLAN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        name, plan = options.train
        print(msgspec.json.encode(train(name, plan, options.steps)).decode())
        return
    plans = " | ".join(f"{one}: predicted, measured, ms" for one in PLANS)
    print(f"| net | link | {plans} | picked | fastest | lost |")
    print("|---" * (len(PLANS) + 5) + "|")
    for name in options.nets:
        found = planner.in_process("--profile", name)
        for rate in options.rates:
            with connected_hosts(NUM_HOSTS) as hosts:
                for host in range(NUM_HOSTS):
                    hosts.shape(host, rate)
                cluster = host_cluster(found, network_of(hosts))
                rows = {one: measure(hosts, name, one, options.steps) for one in PLANS}
            predicted = {one: predicted_seconds(found, rows[one], cluster) for one in PLANS}
            measured = {one: rows[one]["seconds"] for one in PLANS}
            print(row(name, rate, predicted, measured), flush=True)


if __name__ == "__main__":
    main()
