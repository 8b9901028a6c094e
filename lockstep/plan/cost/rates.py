"""How long a device computes and a group of ranks exchanges: the formulas under all Plans.

They take floats or numpy's arrays, so a search can ask for many runs of layers at once.
"""

from typing import Any

from lockstep.cluster.topology import Link
from lockstep.graph.layer_graph import OptimizerCosts
from lockstep.plan.cost.placement import Group, PlacedDevice
from lockstep.plan.cost.profile import Costs

# A backward pass multiplies twice as many numbers as a forward pass.
_BACKWARD_OPERATIONS = 2.0

# Bytes per second of an accelerator's memory per operation per second: updates are bound by it.
# An A100 has 2.0 TB/s beside 312 TFLOP/s of which half is reached.
_BYTES_PER_OPERATION = 1 / 78
_UPDATE_BYTES_PER_ELEMENT = 28  # reads and writes of Adam in float32


def forward_seconds(costs: Costs, samples: float, placed: PlacedDevice) -> Any:
    """A forward pass of ``samples``."""
    if placed.device.operations_per_second:
        return samples * costs.operations / placed.device.operations_per_second
    return (costs.forward_fixed + samples * costs.forward) / placed.speed


def backward_seconds(costs: Costs, samples: float, placed: PlacedDevice) -> Any:
    """A backward pass of ``samples``."""
    if placed.device.operations_per_second:
        return _BACKWARD_OPERATIONS * forward_seconds(costs, samples, placed)
    return (costs.backward_fixed + samples * costs.backward) / placed.speed


def update_seconds(elements: Any, optimizer: OptimizerCosts, placed: PlacedDevice) -> Any:
    """The optimizer's step on so many elements, and what every step takes without a model."""
    if placed.device.operations_per_second:
        bandwidth = placed.device.operations_per_second * _BYTES_PER_OPERATION
        return elements * _UPDATE_BYTES_PER_ELEMENT / bandwidth
    return elements * optimizer.seconds_per_element / placed.speed + placed.step_seconds


def send_seconds(num_bytes: Any, link: Link) -> Any:
    """A message of activations there, and of their gradients back; none takes no time."""
    return 2 * (num_bytes / link.bytes_per_second + (num_bytes > 0) * link.latency_seconds)


def sum_seconds(num_bytes: Any, group: Group, *, shares_memory: bool) -> Any:
    """Gradients of all ranks are summed, and every rank has what it needs to go on.

    Ranks that share memory read each other's rows, and send no parameter. Others send slices to
    one another (reduce-scatter) and updated slices back (all-gather): inside of each host, and of
    each host's sums between hosts.
    """
    inside = (1 if shares_memory else 2) * _moved(num_bytes, group.on_a_host, group.inside)
    if group.hosts == 1:
        return inside
    return inside + 2 * _moved(num_bytes, group.hosts, group.outside)


def gather_seconds(num_bytes: Any, group: Group) -> Any:
    """Every rank gets the slices of all others."""
    inside = _moved(num_bytes, group.on_a_host, group.inside)
    if group.hosts == 1:
        return inside
    return inside + _moved(num_bytes, group.hosts, group.outside)


def _moved(num_bytes: Any, ranks: int, link: Link) -> Any:
    """All but a rank's own part of ``num_bytes`` goes through its link."""
    if ranks == 1:
        return 0.0 * num_bytes
    latency = link.latency_seconds * (ranks - 1).bit_length()
    return (ranks - 1) / ranks * num_bytes / link.bytes_per_second + latency


def scatter_seconds(num_bytes: Any, group: Group) -> Any:
    """Every rank gets the sum of its slice: the way back of ``gather_seconds``, as long."""
    return gather_seconds(num_bytes, group)


def bytes_moved(num_bytes: float, group: Group, *, shares_memory: bool) -> float:
    """What all ranks of ``sum_seconds`` send, other ranks' reads of shared memory left out."""
    inside = 0.0 if shares_memory else 2 * (group.on_a_host - 1) * num_bytes * group.hosts
    return inside + 2 * (group.hosts - 1) * num_bytes
