"""Random models and clusters for planning, and the best layout by trying every one."""

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence

from lockstep.cluster.topology import Cluster, Device, Host, Link, Network
from lockstep.graph.layer_graph import Flow, Layer, LayerCosts, LayerGraph, ParameterInfo
from lockstep.plan.cost.breakdown import usable
from lockstep.plan.cost.placement import Placement
from lockstep.plan.cost.profile import Profile
from lockstep.plan.cost.staged import Layout, StageCost, stage_cost

SAMPLES = 16

# About what a process takes without a model, less than which a device has not.
_BASE_BYTES = 200 << 20
KILOBYTES, MEGABYTES = 1 << 10, 1 << 20


def random_graph(size: int, choice: random.Random, *, skips: bool = True) -> LayerGraph:
    """Layers of any cost; a fifth of their outputs goes to a later layer, too."""
    flows = []
    for source in range(size - 1):
        users = [source + 1]
        if skips and source + 2 < size and choice.random() < 0.2:
            users.append(choice.randrange(source + 2, size))
        flows.append(
            Flow(source=source, num_bytes=choice.randrange(4 * MEGABYTES), users=tuple(users))
        )
    layers = tuple(_random_layer(number, choice) for number in range(size))
    return LayerGraph(layers=layers, flows=tuple(flows), samples=SAMPLES)


def _random_layer(number: int, choice: random.Random) -> Layer:
    weight = ParameterInfo(
        name=f"{number}.weight",
        shape=(choice.randrange(1, 2 * MEGABYTES),),
        dtype="float32",
        trainable=choice.random() < 0.9,
    )
    costs = LayerCosts(
        forward_seconds=choice.uniform(1e-3, 1e-2),
        backward_seconds=choice.uniform(1e-3, 2e-2),
        activation_bytes=choice.randrange(16 * MEGABYTES),
        forward_fixed_seconds=choice.uniform(0, 1e-3),
    )
    return Layer(name=str(number), kind="Linear", parameters=(weight,), costs=costs)


def random_cluster(devices: int, choice: random.Random, *, has_limits: bool) -> Cluster:
    """Hosts with as many devices in all, of any speed; with limits, of little memory."""
    hosts, left = [], devices
    while left:
        count = choice.randrange(1, left + 1)
        left -= count
        cores = tuple(
            Device(kind="cpu", index=index, memory_bytes=_random_memory(choice) * has_limits)
            for index in range(count)
        )
        link = Link(latency_seconds=1e-5, bytes_per_second=choice.uniform(1e9, 1e10))
        speed = choice.uniform(0.3, 1)
        hosts.append(
            Host(name="host", num_cores=count, devices=cores, link=link, speed_together=speed)
        )
    network = Network(link=Link(latency_seconds=1e-4, bytes_per_second=choice.uniform(1e8, 1e9)))
    return Cluster(hosts=tuple(hosts), networks=(network,))


def _random_memory(choice: random.Random) -> int:
    return _BASE_BYTES + choice.randrange(10 * MEGABYTES, 120 * MEGABYTES)


def best_by_trying(
    profile: Profile, placement: Placement, batch_size: int, shares: Sequence[int]
) -> float:
    """The shortest step of all layouts that fit; infinite if none does.

    Stages are put in front of those behind them, so that layouts share the sums of these. One stage
    that does not fit is in no layout that fits.
    """

    @functools.cache
    def known(start: int, stop: int, behind: int, replicas: int, count: int) -> StageCost:
        layout = Layout((start,), (replicas,), count)
        return stage_cost(profile, placement, layout, batch_size, start, stop, behind, replicas)

    def best_before(stop: int, behind: int, turns: float, rest: float, count: int) -> float:
        """Of all layouts that end in these stages: those before take the units before ``stop``."""
        if stop == 0:
            return turns + rest
        best = math.inf
        for start in range(stop):
            for replicas in range(1, min(len(placement) - behind, count) + 1):
                one = known(start, stop, behind, replicas, count)
                if not one.limit or one.memory.total <= usable(one.limit):
                    longest = max(rest, one.rest)
                    ends = start, behind + replicas, turns + one.turn, longest, count
                    best = min(best, best_before(*ends))
        return best

    return min(best_before(profile.num_units, 0, 0.0, 0.0, count) for count in shares)


def every_layout(units: int, devices: int, shares: Sequence[int]) -> Iterator[Layout]:
    """All runs of units on all numbers of replicas, on the first devices."""
    for used in range(1, devices + 1):
        for stages in range(1, min(units, used) + 1):
            for starts in _cuts(units, stages):
                for bars in _cuts(used, stages):
                    ends = (*bars[1:], used)
                    replicas = tuple(end - bar for bar, end in zip(bars, ends, strict=True))
                    yield from (
                        Layout(starts, replicas, count)
                        for count in shares
                        if count >= max(replicas)
                    )


def _cuts(size: int, parts: int) -> Iterator[tuple[int, ...]]:
    return ((0, *one) for one in itertools.combinations(range(1, size), parts - 1))
