"""GPT models of Narayanan et al. 2021, Table 1, as the planner sees them.

A device stands for a tensor parallel group of GPUs. What such a group exchanges within a layer is
given as operations: the planner has no tensor parallelism of its own.
"""

from typing import NamedTuple

from lockstep.cluster.topology import Cluster, Device, Host, Link, Network
from lockstep.graph.layer_graph import (
    Flow,
    Layer,
    LayerCosts,
    LayerGraph,
    OptimizerCosts,
    ParameterInfo,
)
from lockstep.plan.cost.placement import placement_of
from lockstep.plan.cost.profile import profile_of
from lockstep.plan.cost.staged import Layout, staged_cost

SEQUENCE, VOCABULARY, PEAK = 2048, 51_200, 312e12
NVLINK = 300e9

# Eight HDR adapters join a host of eight GPUs to the others.
NETWORK = Network(link=Link(latency_seconds=5e-6, bytes_per_second=8 * 25e9))


class Row(NamedTuple):
    """A line of the table."""

    billions: float
    hidden: int
    layers: int
    tensor: int
    pipe: int
    gpus: int
    batch: int
    teraflops: int


ROWS = (
    Row(1.7, 2304, 24, 1, 1, 32, 512, 137),
    Row(3.6, 3072, 30, 2, 1, 64, 512, 138),
    Row(7.5, 4096, 36, 4, 1, 128, 512, 142),
    Row(18.4, 6144, 40, 8, 1, 256, 1024, 135),
    Row(39.1, 8192, 48, 8, 2, 512, 1536, 138),
    Row(76.1, 10240, 60, 8, 4, 1024, 1792, 140),
    Row(145.6, 12288, 80, 8, 8, 1536, 2304, 148),
    Row(310.1, 16384, 96, 8, 16, 1920, 2160, 155),
    Row(529.6, 20480, 105, 8, 35, 2520, 2520, 163),
    Row(1008.0, 25600, 128, 8, 64, 3072, 3072, 163),
)


class Constants(NamedTuple):
    """What is fitted.

    Attributes:
        reached: of the peak, by matrices of any width.
        half_width: the hidden size at which other operations, which grow with the hidden size and
            not with its square, take as long as matrices.
        link: of NVLink's bandwidth, reached by an all-reduce.
    """

    reached: float
    half_width: float
    link: float


def predicted_teraflops(row: Row, constants: Constants) -> float:
    """Of a GPU, with the microbatch that is predicted to be best."""
    return max(_teraflops(row, constants, samples) for samples in (1, 2, 4, 8))


def _teraflops(row: Row, constants: Constants, samples: int) -> float:
    replicas = row.gpus // (row.tensor * row.pipe)
    shares = row.batch // samples
    if row.batch % (samples * replicas):
        return 0.0
    speed = PEAK * constants.reached * row.hidden / (row.hidden + constants.half_width)
    profile = profile_of(_graph(row, constants, speed))
    placement = placement_of(_cluster(row, speed))
    starts = tuple(row.layers * stage // row.pipe for stage in range(row.pipe))
    layout = Layout(starts, (replicas,) * row.pipe, shares, recompute=True)
    seconds = staged_cost(profile, placement, layout, row.batch).step.total
    return _operations(row) / seconds / row.gpus / 1e12


def _operations(row: Row) -> float:
    """Of a step, forward, again and backward: equation 3 of the paper."""
    hidden = row.hidden
    more = 1 + SEQUENCE / (6 * hidden) + VOCABULARY / (16 * row.layers * hidden)
    return 96 * row.batch * SEQUENCE * row.layers * hidden**2 * more


def _graph(row: Row, constants: Constants, speed: float) -> LayerGraph:
    parameters = 12 * row.hidden**2 // row.tensor
    forward = _operations(row) / row.batch / row.layers / 4 / row.tensor
    # Two all-reduces in a forward pass, of activations of two bytes, as many again in backward.
    activations = 2 * SEQUENCE * row.hidden
    ring = 2 * (row.tensor - 1) / row.tensor * activations / (NVLINK * constants.link)
    costs = LayerCosts(
        forward_seconds=0.0,
        backward_seconds=0.0,
        activation_bytes=activations,
        operations=forward + 1.5 * ring * speed,
    )
    layers = tuple(
        Layer(
            name=str(number),
            kind="Block",
            parameters=(
                ParameterInfo(
                    name=f"{number}.weight", shape=(parameters,), dtype="bfloat16", trainable=True
                ),
            ),
            costs=costs,
        )
        for number in range(row.layers)
    )
    flows = tuple(
        Flow(source=number, num_bytes=activations // row.tensor, users=(number + 1,))
        for number in range(row.layers - 1)
    )
    return LayerGraph(layers=layers, flows=flows, samples=1, optimizer=OptimizerCosts(slots=6.0))


def _cluster(row: Row, speed: float) -> Cluster:
    each = 8 // row.tensor
    devices = tuple(
        Device(kind="cuda", index=index, memory_bytes=0, operations_per_second=speed)
        for index in range(each)
    )
    link = Link(latency_seconds=5e-6, bytes_per_second=NVLINK)
    host = Host(name="dgx", num_cores=each, devices=devices, link=link)
    return Cluster(hosts=(host,) * (row.gpus // 8), networks=(NETWORK,))
