"""Sharded data parallelism, as a Plan.

It is the Plan of replicas that share no memory, with what they divide, and the units in which their
parameters are gathered. By default a unit is an entry of a list of modules (``blocks.3``), or a
layer outside of lists. Small ones stay on every rank: to gather them takes longer than they save.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from lockstep.cluster.topology import Cluster
from lockstep.errors import OptionError
from lockstep.formatting import first_few
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.decision import SlicedUpdate
from lockstep.plan.devices import is_cpu
from lockstep.plan.makers.data_parallel import Traits, Wrapping
from lockstep.plan.mesh import Axis
from lockstep.plan.sharding import IN_HOST_MEMORY, Sharding, is_in
from lockstep.plan.spec import Plan

# The part of the mean size of units below which a unit stays on every rank.
_SMALL = 1 / 8

Units = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class FullySharded(Wrapping):
    """Another maker's Plan, whose ranks divide the training.

    Attributes:
        level: see ``Sharding``.
        units: names of modules, unit by unit; None chooses them.
        data: groups of consecutive ranks; each group has all parameters.
        shard: ranks of each group; None is all ranks in one group.
        recompute: names of modules whose activations are computed again in backward; True for
            those of all units.
        shares_parameters: ranks have one copy of the parameters if all are cores of one host.
        offload: see ``Sharding``; what is in host memory anyway is not offloaded.
        small_bytes: on cores, default units of so many bytes together are small: see ``Sharding``.
    """

    level: str
    units: Units | None
    recompute: bool | tuple[str, ...] = False
    shares_parameters: bool = False
    offload: str | None = None
    small_bytes: int = 0
    data: int = 1
    shard: int | None = None

    @property
    def traits(self) -> Traits:
        return replace(self.maker.traits, divides_state=True)

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples.

        Raises:
            OptionError: a unit that the model does not have; accelerators of several hosts; ranks
                that are not ``data`` groups of ``shard``; or BatchNorm with several shares of a
                rank, which would use all units at once.
        """
        plan = self.maker(graph, cluster, batch_size)
        if plan.tensor is not None and not _divides(plan):
            return plan
        units = self._units(graph)
        if self.level == "slots":
            units = ()
        # Factors of gradients would go to all ranks, and each would have the whole gradient.
        layers = tuple(msgspec.structs.replace(layer, row_limit=0) for layer in plan.layers)
        plan = msgspec.structs.replace(plan, layers=layers)
        self._check_groups(plan)
        if plan.tensor is None:
            strategy = "fully sharded" if self.shard is None else "hybrid"
            mesh = self._mesh(plan.num_ranks)
            plan = msgspec.structs.replace(plan, strategy=strategy, mesh=mesh)
        is_there = is_cpu(plan.devices) and self.offload in IN_HOST_MEMORY
        offload = None if is_there else self.offload
        if plan.num_ranks == 1 and offload == "parameters":
            plan = msgspec.structs.replace(plan, update=SlicedUpdate())
        elif plan.num_ranks == 1:
            alone = Sharding(level="slots", offload=offload) if offload else None
            return msgspec.structs.replace(plan, sharding=alone)
        if plan.num_hosts > 1 and not is_cpu(plan.devices):
            raise OptionError(
                "Sharded training runs on the cores of several hosts, or on the accelerators of "
                "one.",
                received=f"{plan.num_hosts} hosts with {plan.devices[0]}",
                fix="Use MultiWorkerMirroredStrategy, or one host.",
            )
        sharding = Sharding(
            level=self.level,
            units=units,
            recompute=self._recomputed(graph),
            shares_parameters=self._has_one_copy(plan),
            offload=offload,
            is_small=self._is_small(plan, graph),
        )
        norms = [layer.name for layer in graph.layers if layer.uses_batch_statistics]
        if sharding.divides_parameters and norms and plan.num_shares > plan.num_replicas:
            raise OptionError(
                "Sharded parameters allow one share per device where layers take statistics over "
                "the batch: several shares of a device run together, layer by layer.",
                received=f"{plan.num_shares} shares on {plan.num_ranks} devices with "
                f"{first_few(norms)}",
                fix='Leave `num_shares` and `accumulate` out, or use level="gradients".',
            )
        return msgspec.structs.replace(plan, sharding=sharding)

    def _check_groups(self, plan: Plan) -> None:
        if self.shard is not None and self.data * self.shard != plan.num_ranks:
            raise OptionError(
                "Sharded replicas need `data` times `shard` devices.",
                received=f"data={self.data} and shard={self.shard} with {plan.num_ranks} devices",
                fix=f"Use {self.data * self.shard} devices, those of all hosts together.",
            )

    def _mesh(self, num_ranks: int) -> tuple[Axis, ...]:
        shard = Axis(name="shard", size=num_ranks // self.data)
        return (shard,) if self.shard is None else (Axis(name="data", size=self.data), shard)

    def _has_one_copy(self, plan: Plan) -> bool:
        return self.shares_parameters and plan.num_hosts == 1 and is_cpu(plan.devices)

    def _is_small(self, plan: Plan, graph: LayerGraph) -> bool:
        has_default_units = self.units is None and self.level != "slots" and plan.tensor is None
        sizes = {one.name: one.num_bytes for layer in graph.layers for one in layer.parameters}
        fits = sum(sizes.values()) <= self.small_bytes
        return has_default_units and fits and is_cpu(plan.devices)

    def _recomputed(self, graph: LayerGraph) -> tuple[str, ...]:
        if isinstance(self.recompute, bool):
            every = self._units(graph) if self.recompute else ()
            return _innermost([name for unit in every for name in unit])
        _check_modules("A module to recompute", "recompute", self.recompute, graph)
        return self.recompute

    def _units(self, graph: LayerGraph) -> Units:
        if self.units is None:
            return default_units(graph)
        given = [name for unit in self.units for name in unit]
        _check_modules("A unit", "units", given, graph)
        return self.units


@dataclass(frozen=True, kw_only=True)
class ShardedStages(Wrapping):
    """Another maker's Plan with stages, whose replicas divide the optimizer's slots.

    Where ranks share memory, replicas of a stage have one copy of its slots anyway.

    Attributes:
        data: groups of replicas.
        shard: replicas of each group.
    """

    data: int
    shard: int

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples."""
        plan = self.maker(graph, cluster, batch_size)
        axes = {"data": self.data, "shard": self.shard}
        own = tuple(Axis(name=name, size=size) for name, size in axes.items() if size > 1)
        return msgspec.structs.replace(
            plan,
            strategy="hybrid",
            mesh=(*own, *(axis for axis in plan.mesh if axis.name != "data")),
            sharding=None if plan.engine.shares_memory else Sharding(level="slots"),
        )


def _divides(plan: Plan) -> bool:
    """Whether ranks that divide layers keep only their part of the parameters, too."""
    return not plan.engine.shares_memory and (plan.num_hosts == 1 or is_cpu(plan.devices))


def _check_modules(what: str, option: str, given: Sequence[str], graph: LayerGraph) -> None:
    names = [layer.name for layer in graph.layers]
    unknown = [name for name in given if not any(is_in(layer, name) for layer in names)]
    if unknown:
        raise OptionError(
            f"{what} must be a module of the model that has parameters.",
            received=f"{option} with {first_few(unknown)}",
            fix="Use names of model.named_modules(), such as "
            f"{first_few([name for name in names if name])}.",
        )


def default_units(graph: LayerGraph) -> Units:
    """The entries of lists of modules, and layers outside of lists, but for small ones."""
    tied = {name for names in graph.tied for name in names}
    sizes: dict[str, int] = {}
    for layer in graph.layers:
        unit = _unit_of(layer.name)
        own = [one for one in layer.parameters if one.trainable and one.name not in tied]
        size = sum(one.num_bytes for one in own)
        if unit and size:
            sizes[unit] = sizes.get(unit, 0) + size
    least = sum(sizes.values()) / max(len(sizes), 1) * _SMALL
    return tuple((name,) for name, size in sizes.items() if size >= least)


def _innermost(names: Sequence[str]) -> tuple[str, ...]:
    """Those that have no other within them, as a module with parameters of its own has."""
    within = [{name for name in names if name != outer and is_in(name, outer)} for outer in names]
    return tuple(name for name, others in zip(names, within, strict=True) if not others)


def _unit_of(layer: str) -> str:
    """The entry of the outermost list that a layer is in, or the layer that it parametrizes."""
    parts = layer.partition(".parametrizations.")[0].split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])


def as_units(units: Sequence[str | Sequence[str]] | None) -> Units | None:
    """Units as users give them: a name, or several, for each."""
    if units is None:
        return None
    return tuple((unit,) if isinstance(unit, str) else tuple(unit) for unit in units)
