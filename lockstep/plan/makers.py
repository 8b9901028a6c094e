"""Makers: pure functions from (LayerGraph, Cluster, batch size) to a Plan.

A strategy holds a maker and nothing more. Makers check what they were asked for against the graph
and the cluster, so that every such error comes before any process starts.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.cluster.topology import MAX_CPU_REPLICAS_PER_CORE, Cluster
from lockstep.errors import DeviceError, OptionError, problem
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.spec import Axis, LayerPlacement, LocalUpdate, Plan, SlicedUpdate

Maker = Callable[[LayerGraph, Cluster, int], Plan]

MAX_DEFAULT_REPLICAS = 8


@dataclass(frozen=True, kw_only=True)
class SingleDevice:
    """The whole model on one device: the reference that all other plans are held to."""

    device: str = "cpu:0"
    precision: str = "fp32"

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan; ``batch_size`` does not matter here.

        Raises:
            DeviceError: a GPU that this host does not have.
        """
        _check_gpu(self.device, cluster)
        return Plan(
            strategy="single device",
            mesh=(),
            devices=(self.device,),
            threads_per_device=None,
            num_shares=1,
            interleaved=False,
            layers=_one_stage(graph),
            update=LocalUpdate(),
            precision=self.precision,
        )


@dataclass(frozen=True, kw_only=True)
class Mirrored:
    """Synchronous data parallelism on one host: every replica holds the whole model.

    Attributes:
        devices: number of CPU replicas; None is one per usable core, at most 8.
        num_shares: parts of each global batch; None is one per replica.
    """

    devices: int | None = None
    num_shares: int | None = None
    precision: str = "fp32"

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples.

        Raises:
            DeviceError: more replicas than this host can hold.
            OptionError: fewer shares than replicas.
        """
        cores = cluster.hosts[0].num_cores
        replicas = num_mirrored_replicas(self.devices, cluster)
        shares = replicas if self.num_shares is None else self.num_shares
        if shares < replicas:
            raise OptionError(
                problem(
                    "Every replica needs a share of the batch.",
                    received=f"num_shares={shares} with {replicas} replicas",
                    fix=f"Use num_shares >= {replicas}, or fewer devices.",
                )
            )
        return Plan(
            strategy="mirrored",
            mesh=(Axis(name="data", size=replicas),),
            devices=tuple(f"cpu:{rank % cores}" for rank in range(replicas)),
            threads_per_device=1,
            num_shares=shares,
            interleaved=shares > replicas
            and any(layer.uses_batch_statistics for layer in graph.layers),
            layers=_one_stage(graph),
            update=LocalUpdate() if replicas == shares == 1 else SlicedUpdate(),
            precision=self.precision,
            notes=tuple(_notes(replicas, shares, cores, batch_size)),
        )


def num_mirrored_replicas(devices: int | None, cluster: Cluster) -> int:
    """Replicas that ``devices`` asks for on the first host; None is one per core, at most 8.

    Raises:
        DeviceError: more than the host can hold.
    """
    cores = cluster.hosts[0].num_cores
    if devices is None:
        return min(cores, MAX_DEFAULT_REPLICAS)
    most = cores * MAX_CPU_REPLICAS_PER_CORE
    if devices > most:
        raise DeviceError(
            problem(
                f"This host has {cores} usable cores, enough for {most} CPU replicas.",
                received=f"devices={devices}",
                fix=f"Use devices={cores} for one replica per core.",
            )
        )
    return devices


def _check_gpu(device: str, cluster: Cluster) -> None:
    gpus = [gpu.name for gpu in cluster.hosts[0].devices_of("cuda")]
    if device.startswith("cuda") and device not in gpus:
        raise DeviceError(
            problem(
                f"This host's GPUs are: {', '.join(gpus) or 'none'}.",
                received=f"device={device!r}",
                fix=f"Use {gpus[0]!r}." if gpus else "Use 'cpu', or a torch built for the GPU.",
            )
        )


def _one_stage(graph: LayerGraph) -> tuple[LayerPlacement, ...]:
    return tuple(
        LayerPlacement(
            name=layer.name,
            kind=layer.kind,
            num_parameters=sum(parameter.size for parameter in layer.parameters),
            stage=0,
        )
        for layer in graph.layers
    )


def _notes(replicas: int, shares: int, cores: int, batch_size: int) -> list[str]:
    notes = []
    if replicas > cores:
        notes.append(f"{replicas} replicas share {cores} cores: right for tests, not for speed.")
    if batch_size < shares:
        notes.append(
            f"Batches of {batch_size} leave {shares - batch_size} of {shares} shares empty."
        )
    return notes
