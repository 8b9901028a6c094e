"""Makers: pure functions from (LayerGraph, Cluster, batch size) to a Plan.

A strategy holds a maker and nothing more. Makers check what they were asked for against the graph
and the cluster, so that every such error comes before any process starts.

Here are those of data parallelism: of one device, of replicas that share every step, and of
replicas that step on their own and average what they have come to.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import msgspec

from lockstep.cluster.topology import Cluster
from lockstep.errors import OptionError
from lockstep.formatting import first_few
from lockstep.graph.layer_graph import Layer, LayerGraph, ParameterInfo
from lockstep.plan.averaging import AveragedUpdate, Nesterov
from lockstep.plan.decision import LayerPlacement, LocalUpdate, SlicedUpdate, Tie
from lockstep.plan.devices import Devices, check_there, device_names, is_cpu, threads_for
from lockstep.plan.mesh import Axis
from lockstep.plan.spec import Plan
from lockstep.plan.splits import DivisionOptions, TensorSplits

# Of so many samples: the model's graph with costs, and the devices with what is known of them.
Measure = Callable[[int], tuple[LayerGraph, Cluster]]

# Makes a maker's Plan, None where it is not known; a LockstepError says why it cannot be used.
Try = Callable[["Maker"], Plan | None]


def try_none(maker: "Maker") -> None:
    """Any Plan can be used."""


@dataclass(frozen=True, kw_only=True)
class PlanTrials:
    """Training by Plans for a few steps, with copies of everything, before one is chosen.

    Attributes:
        times: seconds of a step by the Plan of each maker, or why it cannot be trained by; given
            names and makers.
        num_steps: of the whole training; None if that is not known.
        free_bytes: memory for a trial; None if that is not known.
        begun: the Plan by which a training that is resumed was begun; None for a new one.
    """

    times: Callable[[Sequence[tuple[str, "Maker"]]], Sequence[float | str]]
    num_steps: int | None
    free_bytes: int | None
    begun: Plan | None = None


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What all Plans of a maker have in common.

    Attributes:
        outer: the outer optimizer of averaged replicas; None if there is none.
        is_local_sgd: replicas have parameters of their own.
        outlives_servers: there is a second copy of what each parameter server updates.
        divides_state: the ranks divide the training, so that none has all of it.
        has_stages: a rank has some of the model's layers, and their only copy.
    """

    outer: Nesterov | None = None
    is_local_sgd: bool = False
    outlives_servers: bool = False
    divides_state: bool = False
    has_stages: bool = False


class Maker(ABC):
    """A pure function from (LayerGraph, Cluster, batch size) to a Plan."""

    def sample_size(self, cluster: Cluster, batch_size: int) -> int | None:
        """The number of samples for which it needs each layer's costs; None if it needs none."""
        return None

    def choose(
        self,
        measure: Measure,
        cluster: Cluster,
        batch_size: int,
        attempt: Try = try_none,
        trials: PlanTrials | None = None,
    ) -> "Maker":
        """The maker that makes its Plans: itself, unless it chooses one by a model's costs.

        Args:
            measure: measures the model on so many samples.
            cluster: the devices.
            batch_size: of the global batch.
            attempt: makes the Plan of one that may be chosen.
            trials: of those between which predictions do not decide; None if there are none.
        """
        return self

    def check_batch_size(self, batch_size: int) -> None:
        """Refuse batches that cannot be trained on.

        Raises:
            OptionError: this one cannot.
        """
        return

    @property
    def traits(self) -> Traits:
        """What all its Plans have in common."""
        return Traits()

    @property
    def division(self) -> DivisionOptions:
        """What the user says of how layers are divided inside."""
        return DivisionOptions()

    def num_tensor_shards(self, cluster: Cluster) -> int | None:
        """Shards into which it divides layers, once it knows their splits; None if it does not."""
        return None

    def with_splits(self, splits: TensorSplits) -> "Maker":
        """The maker that divides layers so."""
        return self

    @abstractmethod
    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples."""


@dataclass(frozen=True, kw_only=True)
class Wrapping(Maker):
    """Another maker's Plan, with something else in it.

    Attributes:
        maker: the other maker.
    """

    maker: Maker

    def choose(
        self,
        measure: Measure,
        cluster: Cluster,
        batch_size: int,
        attempt: Try = try_none,
        trials: PlanTrials | None = None,
    ) -> Maker:
        def attempt_inner(maker: Maker) -> Plan | None:
            return attempt(replace(self, maker=maker))

        chosen = self.maker.choose(measure, cluster, batch_size, attempt_inner, trials)
        return self if chosen is self.maker else replace(self, maker=chosen)

    def sample_size(self, cluster: Cluster, batch_size: int) -> int | None:
        return self.maker.sample_size(cluster, batch_size)

    def check_batch_size(self, batch_size: int) -> None:
        self.maker.check_batch_size(batch_size)

    @property
    def division(self) -> DivisionOptions:
        return self.maker.division

    def num_tensor_shards(self, cluster: Cluster) -> int | None:
        return self.maker.num_tensor_shards(cluster)

    def with_splits(self, splits: TensorSplits) -> Maker:
        return replace(self, maker=self.maker.with_splits(splits))

    @property
    def traits(self) -> Traits:
        return self.maker.traits


@dataclass(frozen=True, kw_only=True)
class Accumulating(Wrapping):
    """Another maker's Plan with every share in parts, one after the other, to save memory.

    Attributes:
        parts: of each share.
    """

    parts: int

    def sample_size(self, cluster: Cluster, batch_size: int) -> int | None:
        return self.maker.sample_size(cluster, self._batch_of_a_part(batch_size))

    def check_batch_size(self, batch_size: int) -> None:
        self.maker.check_batch_size(self._batch_of_a_part(batch_size))

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples.

        Raises:
            OptionError: a pipeline of a model with BatchNorm, whose statistics are those of parts.
        """
        is_measured = self.maker.sample_size(cluster, batch_size) is not None
        size = self._batch_of_a_part(batch_size) if is_measured else batch_size
        plan = self.maker(graph, cluster, size)
        norms = [layer.name for layer in graph.layers if layer.uses_batch_statistics]
        uses_statistics = bool(norms)
        if plan.pipeline is not None and norms:
            raise OptionError(
                "In a pipeline, accumulation would change the result of a layer that normalises "
                "by the batch: it takes the statistics of each part.",
                received=f"accumulate={self.parts} with {first_few(norms)}",
                fix="Leave `accumulate` out, use a GroupNorm or evaluation mode there, or a data "
                "parallel strategy.",
            )
        return msgspec.structs.replace(
            plan,
            num_shares=plan.num_shares * self.parts,
            shares_per_row=self.parts if plan.pipeline is None else 1,
            interleaved=plan.pipeline is None and uses_statistics,
            notes=(*plan.notes, *_notes_on_parts(plan, self.parts, uses_statistics)),
        )

    def _batch_of_a_part(self, batch_size: int) -> int:
        return -(-batch_size // self.parts)


def _notes_on_parts(plan: Plan, parts: int, uses_statistics: bool) -> list[str]:
    if plan.pipeline is not None:
        return [f"Accumulation: {parts} times as many microbatches as without."]
    if uses_statistics:
        return [
            f"Accumulation in {parts} parts saves no activations here: BatchNorm needs the whole "
            "batch at each layer."
        ]
    return []


# Layers that multiply by a matrix, of PyTorch and of Keras, and what it is called.
_MATRICES = {"Linear": "weight", "Dense": "kernel"}

# Elements of a weight: gradients of smaller ones cost next to nothing to move.
_SMALLEST_BY_ROWS = 1 << 14


@dataclass(frozen=True, kw_only=True)
class SingleDevice(Maker):
    """The whole model on one device: the reference that all other plans are held to.

    Attributes:
        device: its name.
        channels_last: the memory format of images; None chooses, on a core.
    """

    device: str = "cpu:0"
    channels_last: bool | None = None
    precision: str = "fp32"

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan; ``batch_size`` does not matter here.

        Raises:
            DeviceError: an accelerator that this host does not have.
        """
        check_there([self.device], cluster.hosts[0])
        is_given = self.channels_last is not None
        given = self.channels_last if is_given or is_cpu([self.device]) else False
        return Plan(
            strategy="single device",
            mesh=(),
            devices=(self.device,),
            threads_per_device=None,
            num_shares=1,
            interleaved=False,
            layers=placements(graph),
            ties=ties(graph),
            update=LocalUpdate(),
            precision=self.precision,
            channels_last=_has_channels_last(given, graph, self.precision),
        )


@dataclass(frozen=True, kw_only=True)
class Mirrored(Maker):
    """Synchronous data parallelism on one host: every replica holds the whole model.

    Attributes:
        devices: of the replicas, see ``plan.devices``.
        num_shares: parts of each global batch; None is one per replica.
        channels_last: the memory format of images; None chooses.
    """

    devices: Devices = None
    num_shares: int | None = None
    channels_last: bool | None = None
    precision: str = "fp32"

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples.

        Raises:
            DeviceError: devices that this host has not, or more replicas than it can hold.
            OptionError: fewer shares than replicas.
        """
        cores = cluster.hosts[0].num_cores
        devices = device_names(self.devices, cluster.hosts[0])
        replicas = len(devices)
        shares = replicas if self.num_shares is None else self.num_shares
        if shares < replicas:
            raise OptionError(
                "Every replica needs a share of the batch.",
                received=f"num_shares={shares} with {replicas} replicas",
                fix=f"Use num_shares >= {replicas}, or fewer devices.",
            )
        return Plan(
            strategy="mirrored",
            mesh=(Axis(name="data", size=replicas),),
            devices=devices,
            threads_per_device=threads_for(devices, cores),
            num_shares=shares,
            interleaved=shares > replicas
            and any(layer.uses_batch_statistics for layer in graph.layers),
            layers=placements(graph) if shares == 1 else _with_row_limits(graph, batch_size),
            ties=ties(graph),
            update=LocalUpdate() if replicas == shares == 1 else SlicedUpdate(),
            precision=self.precision,
            channels_last=_has_channels_last(self.channels_last, graph, self.precision),
            notes=tuple(_notes(devices, shares, cores, batch_size)),
        )


def _has_channels_last(given: bool | None, graph: LayerGraph, precision: str) -> bool:
    if given is not None:
        return given
    # float64 is for proofs, and keeps to what the reference does.
    return precision != "fp64" and any(layer.kind == "Conv2d" for layer in graph.layers)


def placements(
    graph: LayerGraph, stages: Iterable[int] | None = None
) -> tuple[LayerPlacement, ...]:
    """Each layer in its stage, by default in the only one."""
    return tuple(
        LayerPlacement(
            name=layer.name,
            kind=layer.kind,
            num_parameters=sum(parameter.size for parameter in layer.parameters),
            stage=stage,
        )
        for layer, stage in zip(graph.layers, stages or repeat(0), strict=False)
    )


def ties(graph: LayerGraph) -> tuple[Tie, ...]:
    """Which layers have parameters in common."""
    first_name = {name: names[0] for names in graph.tied for name in names}
    last_owner: dict[str, int] = {}
    sizes: Counter[tuple[int, int]] = Counter()
    for number, layer in enumerate(graph.layers):
        for one in layer.parameters:
            name = first_name.get(one.name, one.name)
            if name in last_owner:
                sizes[last_owner[name], number] += one.size
            last_owner[name] = number
    return tuple(
        Tie(first=first, second=second, num_parameters=size)
        for (first, second), size in sizes.items()
    )


def matrix_of(layer: Layer) -> ParameterInfo | None:
    """The matrix that a layer multiplies by; None if it does something else."""
    name = _MATRICES.get(layer.kind)
    found = (each for each in layer.parameters if each.name.rpartition(".")[2] == name)
    return next((each for each in found if len(each.shape) == 2), None)


def _with_row_limits(graph: LayerGraph, batch_size: int) -> tuple[LayerPlacement, ...]:
    tied = {name for names in graph.tied for name in names}
    return tuple(
        msgspec.structs.replace(placement, row_limit=row_limit(layer, tied, batch_size))
        for placement, layer in zip(placements(graph), graph.layers, strict=True)
    )


def row_limit(layer: Layer, tied: Collection[str], batch_size: int) -> int:
    """Rows of a batch up to which inputs and output gradients are less to move than gradients.

    For a weight of shape (outs, ins), n rows are n (ins + outs) numbers, and every replica's
    gradient outs * ins. Half of where these are equal is a careful limit: at that many rows both
    ways were measured to take the same time. A sample gives the layer one row or more.
    """
    weight = matrix_of(layer)
    if weight is None or weight.name in tied or not weight.trainable:
        return 0
    limit = weight.size // sum(weight.shape) // 2
    return limit if weight.size >= _SMALLEST_BY_ROWS and limit >= batch_size else 0


def _notes(devices: Sequence[str], shares: int, cores: int, batch_size: int) -> list[str]:
    notes, replicas = [], len(devices)
    if is_cpu(devices) and replicas > cores:
        notes.append(f"{replicas} replicas share {cores} cores: right for tests, not for speed.")
    if batch_size < shares:
        notes.append(
            f"Batches of {batch_size} leave {shares - batch_size} of {shares} shares empty."
        )
    return notes


INEXACT = "Replicas train apart between averages: the result is not that of one device."


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Wrapping):
    """Data parallelism in which every replica has parameters of its own.

    Attributes:
        maker: makes the replicas as they would be if they shared their parameters: of one rank
            each, or pipelines.
        update: how often they average, and what they do with the average.
        on_cores: whatever accelerators there are.
    """

    update: AveragedUpdate
    on_cores: bool = True

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples.

        Raises:
            DeviceError: more replicas than a host can hold.
        """
        plan = self.maker(graph, cluster.cores if self.on_cores else cluster, batch_size)
        # There may be nothing to average.
        is_alone = plan.num_replicas == 1 and self.update.outer is None
        return msgspec.structs.replace(
            plan,
            strategy="local SGD",
            update=plan.update if is_alone else self.update,
            layers=tuple(msgspec.structs.replace(layer, row_limit=0) for layer in plan.layers),
            notes=(*plan.notes, *([] if is_alone else [INEXACT])),
        )

    @property
    def traits(self) -> Traits:
        inner = self.maker.traits  # each replica has parameters of its own
        return replace(inner, outer=self.update.outer, is_local_sgd=True, has_stages=False)
