"""Tensor parallelism, as a Plan: replicas, by default one, whose ranks divide layers inside.

Which parameters are divided, and where, follows from how the model uses them
(``parallel.tensor.observing``). The maker says into how many shards, and refuses what cannot be.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.cluster.topology import Cluster
from lockstep.errors import DeviceError, OptionError
from lockstep.formatting import first_few
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.decision import LocalUpdate, SlicedUpdate
from lockstep.plan.devices import device_names, threads_for
from lockstep.plan.host_ranks import ranks_per_host
from lockstep.plan.makers.data_parallel import Maker, placements, ties
from lockstep.plan.mesh import Axis
from lockstep.plan.sharding import is_in
from lockstep.plan.spec import Plan
from lockstep.plan.splits import DivisionOptions, ParameterSplit, Split, TensorSplits

# Samples on which uses are observed.
TENSOR_SAMPLES = 2


def splits_of(graph: LayerGraph, num_shards: int) -> TensorSplits:
    """The divisions of a graph into so many shards, as far as they are possible."""
    found = (
        ParameterSplit(
            name=one.name,
            split=Split(dim=one.dim, sizes=one.sizes, num_shards=num_shards, unit=one.unit),
            by=one.by,
            gathered_for=one.gathered_for,
        )
        for one in graph.divisions
    )
    possible = tuple(one for one in found if one.split.is_possible)
    return TensorSplits(num_shards=num_shards, parameters=possible)


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Maker):
    """Ranks of a host divide layers; its replicas may be on several hosts.

    Attributes:
        degree: how many of a replica; None is one per device.
        devices: of the ranks, by name; None is accelerators if there are any, else cores.
        replicas: how many there are.
        num_shares: parts of each global batch; None is one per replica.
        num_shards: of each divided dim; None is the degree.
        whole: names of modules that are not divided.
        precision: of the Plan.
        splits: of the parameters, once observed.
        split: "layers", or "time", of sequences.
        dims: see ``DivisionOptions``.
    """

    degree: int | None = None
    devices: tuple[str, ...] | None = None
    replicas: int = 1
    num_shares: int | None = None
    num_shards: int | None = None
    whole: tuple[str, ...] = ()
    precision: str = "fp32"
    splits: TensorSplits | None = None
    split: str = "layers"
    dims: Callable[[Any], Mapping[str, int]] | None = None

    def sample_size(self, cluster: Cluster, batch_size: int) -> int | None:
        return TENSOR_SAMPLES if self.splits is None else None

    @property
    def division(self) -> DivisionOptions:
        return DivisionOptions(whole=self.whole, by_time=self.split == "time", dims=self.dims)

    def num_tensor_shards(self, cluster: Cluster) -> int | None:
        return self.num_shards or len(self._devices(cluster)) // self.replicas

    @property
    def most_replicas(self) -> int:
        """Replicas of the model."""
        return self.replicas

    def with_splits(self, splits: TensorSplits) -> Maker:
        return replace(self, splits=splits)

    def _devices(self, cluster: Cluster) -> tuple[str, ...]:
        return tuple(name for own in self._devices_by_host(cluster) for name in own)

    def _devices_by_host(self, cluster: Cluster) -> list[tuple[str, ...]]:
        if self.degree is None:
            return [device_names(self.devices, cluster.hosts[0])]
        counts = ranks_per_host(self.degree * self.replicas, cluster)
        if any(count % self.degree for count in counts):
            raise DeviceError(
                "The processes that divide layers of a replica must be on one host.",
                received=f"tensor={self.degree} with {first_few(counts)} processes on the hosts",
                fix="Choose `data` so that each host has whole replicas.",
            )
        return [
            device_names(self.devices or count, host)
            for host, count in zip(cluster.hosts, counts, strict=True)
        ]

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan.

        Raises:
            DeviceError: more ranks than this host can hold.
            OptionError: no layer can be divided so, or a name of none.
        """
        assert self.splits is not None
        check_splits(graph, self.splits, self.whole)
        self._check_shares(graph)
        devices = self._devices(cluster)
        hosts = tuple(map(len, self._devices_by_host(cluster)))
        num_ranks, shares = len(devices), self.num_shares or self.replicas
        tensor = Axis(name="tensor", size=num_ranks // self.replicas)
        is_hybrid = self.replicas > 1
        return Plan(
            strategy="hybrid" if is_hybrid else "tensor parallel",
            mesh=(Axis(name="data", size=self.replicas), tensor) if is_hybrid else (tensor,),
            devices=devices,
            threads_per_device=threads_for(devices, sum(host.num_cores for host in cluster.hosts)),
            hosts=hosts if len(hosts) > 1 else (),
            num_shares=shares,
            interleaved=False,
            layers=placements(graph),
            ties=ties(graph),
            update=LocalUpdate() if num_ranks == shares == 1 else SlicedUpdate(),
            precision=self.precision,
            tensor=self.splits,
        )

    def _check_shares(self, graph: LayerGraph) -> None:
        norms = [layer.name for layer in graph.layers if layer.uses_batch_statistics]
        if norms and (self.num_shares or self.replicas) > self.replicas:
            raise OptionError(
                "Layers divided inside allow one share per replica where others take statistics "
                "over the batch: several shares of a replica run together, layer by layer.",
                received=f"{self.num_shares} shares on {self.replicas} replicas with "
                f"{first_few(norms)}",
                fix="Leave `num_shares` out.",
            )


def check_splits(graph: LayerGraph, splits: TensorSplits, whole: Sequence[str]) -> None:
    """Check that a model can be divided so.

    Args:
        graph: of the model.
        splits: of its parameters.
        whole: names of modules that are not divided.

    Raises:
        OptionError: no layer is divided, or a name is that of no module.
    """
    names = [layer.name for layer in graph.layers]
    unknown = [one for one in whole if not any(is_in(name, one) for name in names)]
    if unknown:
        raise OptionError(
            "`whole` must name modules of the model that have parameters.",
            received=f"whole with {first_few(unknown)}",
            fix=f"Use names of model.named_modules(), such as {first_few(names)}.",
        )
    if splits.by_time is not None and not splits.by_time:
        raise OptionError(
            "No layer of this model takes a tensor of shape (samples, time, features) with at "
            f"least {2 * splits.num_shards} times.",
            received="split='time'",
            fix="Use split='layers'.",
        )
    if not splits.parameters and splits.by_time is None:
        reasons = [f"{name}: {reason}" for name, reason in splits.whole]
        raise OptionError(
            f"No layer of this model can be divided into {splits.num_shards} shards.",
            received=first_few(reasons) or "a model without parameters",
            fix="Use a smaller degree, or MirroredStrategy.",
        )
