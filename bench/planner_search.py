"""How long the planner searches, and in how much memory, on clusters that are not at hand.

Run: ``python bench/planner_search.py``.
"""

import resource
import time

from lockstep.cluster.cluster_file import parse_cluster
from lockstep.graph.layer_graph import (
    Flow,
    Layer,
    LayerCosts,
    LayerGraph,
    OptimizerCosts,
    ParameterInfo,
)
from lockstep.plan.search.candidates import Problem
from lockstep.plan.search.ranking import best_plans


def row(num_layers: int, num_hosts: int) -> str:
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


if __name__ == "__main__":
    for layers, hosts in ((100, 2), (100, 128), (1000, 512)):
        print(row(layers, hosts), flush=True)
