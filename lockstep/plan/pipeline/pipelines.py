"""The maker of pipelines: cuts a model into stages, and predicts their costs.

Cuts come from device scopes in the model (``lockstep.device``) or from names of modules; without
these, the slowest stage is made as fast as possible (``plan.pipeline.cuts``). Stages may have
replicas, which take turns with the microbatches, in equal numbers or a number per stage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec

from lockstep.cluster.topology import Cluster, num_devices
from lockstep.errors import DeviceError, OptionError
from lockstep.formatting import format_time
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.decision import Pipeline, Stage, StagedUpdate, StagePrediction
from lockstep.plan.devices import device_names, is_cpu, threads_for
from lockstep.plan.host_ranks import ranks_per_host
from lockstep.plan.makers.data_parallel import Maker, Traits, placements, ties
from lockstep.plan.makers.tensor import check_splits
from lockstep.plan.mesh import Axis
from lockstep.plan.pipeline.cut_places import stages_from_names, stages_from_scopes
from lockstep.plan.pipeline.cut_units import (
    SECONDS_PER_BYTE,
    costs_of,
    cut_problem,
    in_units,
    undivided,
    units_of,
    why_fewer,
)
from lockstep.plan.pipeline.cuts import Cut, CutProblem, best_cut, describe_cut
from lockstep.plan.pipeline.stage_counts import choose_num_stages
from lockstep.plan.program.lowering import predict
from lockstep.plan.spec import Plan
from lockstep.plan.splits import DivisionOptions, TensorSplits

# With m microbatches, p stages idle (p - 1) / (m + p - 1) of the time: a fifth for m = 4 p.
_MICROBATCHES_PER_STAGE = 4

CHUNKS_PER_RANK = 2


@dataclass(frozen=True, kw_only=True)
class Pipelined(Maker):
    """Layer-wise partition, with or without replicas of the stages.

    Attributes:
        stages: devices in a row, at most; None takes as many as the cuts or scopes say, or as pay.
        cuts: names of the modules at which stages begin; None cuts as scopes say, or balanced.
        microbatches: of a batch, for each replica of the pipeline; None is four for each stage, and
            one where there is one stage.
        schedule: one of ``plan.pipeline.schedules.SCHEDULES``.
        replicas: of every stage, or of each stage.
        recompute: whether activations are computed again in backward instead of kept; or the
            numbers of the stages where they are.
        memory_bytes: that a device may hold of parameters, gradients, slots and activations.
        devices: of each host's ranks, by name; None chooses those that fit.
        tensor: ranks that divide the layers of each replica of a stage; None divides none.
        num_shards: of each divided dim; None is ``tensor``.
        whole: names of modules that are not divided.
        splits: of the parameters, once observed.
        precision: see ``Plan``.
    """

    stages: int | None = None
    cuts: tuple[str, ...] | None = None
    microbatches: int | None = None
    schedule: str = "1f1b"
    replicas: int | tuple[int, ...] = 1
    recompute: bool | tuple[int, ...] = False
    memory_bytes: int | None = None
    devices: tuple[str, ...] | None = None
    tensor: int | None = None
    num_shards: int | None = None
    whole: tuple[str, ...] = ()
    splits: TensorSplits | None = None
    precision: str = "fp32"

    def num_tensor_shards(self, cluster: Cluster) -> int | None:
        return self.tensor and (self.num_shards or self.tensor)

    @property
    def division(self) -> DivisionOptions:
        return DivisionOptions(whole=self.whole)

    def with_splits(self, splits: TensorSplits) -> Maker:
        return replace(self, splits=splits)

    @property
    def _degree(self) -> int:
        return self.tensor or 1

    def check_batch_size(self, batch_size: int) -> None:
        """Refuse batches with fewer samples than microbatches.

        Raises:
            OptionError: this one has.
        """
        wanted = (self.microbatches or 1) * self.most_replicas
        if wanted > batch_size:
            raise OptionError(
                "Every microbatch needs a sample.",
                received=f"microbatches={self.microbatches} for each of "
                f"{self.most_replicas} replicas, with batch_size={batch_size}"
                if self.most_replicas > 1
                else f"microbatches={self.microbatches} with batch_size={batch_size}",
                fix=f"Use {_fewer_microbatches(batch_size // self.most_replicas)}a larger batch.",
            )

    @property
    def traits(self) -> Traits:
        return Traits(has_stages=True)

    def sample_size(self, cluster: Cluster, batch_size: int) -> int:
        """Samples of the largest microbatch, for which costs are measured."""
        return -(-batch_size // self._num_shares(cluster, batch_size))

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples.

        Raises:
            OptionError: options that contradict one another or the model.
            DeviceError: more devices than this host can hold.
            PlanError: no way to cut the model fits.
        """
        if self.splits is not None:
            check_splits(graph, self.splits, self.whole)
        num_shares = self._num_shares(cluster, batch_size)
        units = units_of(graph)
        costs = cut_problem(graph, units, self._in_flight(cluster, num_shares), self.memory_bytes)
        cut, reason = self._cut(graph, units, costs, cluster, num_shares)
        starts = [units[start][0] for start in cut.starts]
        size = 1.0  # of a microbatch, in those that were measured
        if len(starts) == 1 and self.microbatches is None and self.memory_bytes is None:
            num_shares = self.most_replicas
            size = -(-batch_size // num_shares) / self.sample_size(cluster, batch_size)
        of_layer = [
            sum(start <= layer for start in starts) - 1 for layer in range(len(graph.layers))
        ]
        ranks = self._ranks(len(starts))
        num_ranks = 1 + max(rank for held in ranks for rank in held)
        hosts = ranks_per_host(self._degree * num_ranks, cluster)
        devices = self._devices(cluster, hosts)
        cores = sum(host.num_cores for host in cluster.hosts)
        stages = tuple(
            Stage(
                ranks=held,
                needs=tuple(sorted(_needs(graph, of_layer, stage))),
                recompute=self._recomputes(stage, len(ranks)),
                predicted=_prediction(graph, of_layer, stage, cut, size),
            )
            for stage, held in enumerate(ranks)
        )
        pipeline = Pipeline(schedule=self.schedule, stages=stages)
        is_hybrid = self.most_replicas > 1 or self.tensor is not None
        return Plan(
            strategy="hybrid" if is_hybrid else "pipeline",
            mesh=self._mesh(num_ranks),
            devices=devices,
            threads_per_device=threads_for(devices, cores),
            num_shares=num_shares,
            interleaved=False,
            layers=placements(graph, of_layer),
            ties=ties(graph),
            update=StagedUpdate(),
            precision=self.precision,
            channels_last=graph.channels_last,
            pipeline=_widened(pipeline, self._degree),
            tensor=self.splits,
            hosts=hosts if len(hosts) > 1 else (),
            notes=(
                *([reason] if reason else []),
                *self._times(pipeline, num_shares, batch_size),
                *_notes(graph, devices, cores, num_shares),
            ),
        )

    def _times(self, pipeline: Pipeline, num_shares: int, batch_size: int) -> list[str]:
        """What is expected of a step; unknown if layers are divided inside."""
        if self._degree > 1:
            return [f"Times are those of whole layers; {self._degree} ranks divide each stage's."]
        timeline = predict(pipeline, num_shares)
        return [
            f"With {num_shares} x {-(-batch_size // num_shares)} samples a step is expected to "
            f"take {format_time(timeline.makespan)}, {100 * timeline.bubble_rate:.0f}% of it idle."
        ]

    def _devices(self, cluster: Cluster, hosts: Sequence[int]) -> tuple[str, ...]:
        """By rank; as many as there are on each host."""
        if self.devices is not None and {*hosts} != {len(self.devices)}:
            raise DeviceError(
                "Every rank of a host needs one device.",
                received=f"{len(self.devices)} devices for {max(hosts)} ranks",
                fix=f"Name {max(hosts)}, or leave `devices` out.",
            )
        return tuple(
            name
            for host, count in zip(cluster.hosts, hosts, strict=True)
            for name in device_names(self.devices or count, host)
        )

    # --- counts ----------------------------------------------------------------------------------

    @property
    def most_replicas(self) -> int:
        """Replicas of the stage that has most."""
        return self.replicas if isinstance(self.replicas, int) else max(self.replicas)

    @property
    def _chunks(self) -> int:
        return CHUNKS_PER_RANK if self.schedule == "interleaved" else 1

    def _num_devices(self, cluster: Cluster) -> int:
        """Devices in a row, as far as the options say, else as many as there are."""
        if self.stages is not None:
            return self.stages
        if self.cuts is not None:
            return len(self.cuts) + 1
        if isinstance(self.replicas, tuple):
            return len(self.replicas)
        return max(num_devices(cluster) // self.replicas // self._degree, 1)

    def _num_shares(self, cluster: Cluster, batch_size: int) -> int:
        microbatches = self.microbatches or _MICROBATCHES_PER_STAGE * self._num_devices(cluster)
        return max(min(microbatches * self.most_replicas, batch_size), self.most_replicas)

    def _in_flight(self, cluster: Cluster, num_shares: int) -> int:
        """Microbatches whose activations a device keeps at once, at most."""
        each = -(-num_shares // self.most_replicas)
        if self.schedule == "gpipe":
            return each
        devices = self._num_devices(cluster)
        factor = {"interleaved": self._chunks, "zb-h2": 2}.get(self.schedule, 1)
        return min(each, factor * devices)

    # --- cuts ------------------------------------------------------------------------------------

    def _cut(
        self,
        graph: LayerGraph,
        units: Sequence[tuple[int, int]],
        costs: CutProblem,
        cluster: Cluster,
        num_shares: int,
    ) -> tuple[Cut, str]:
        """The cutting, in units, and why it has as many stages."""
        names = [layer.name for layer in graph.layers]
        if self.cuts is not None:
            starts = stages_from_names(names, self.cuts, undivided(graph))
            self._check_num_stages(len(starts), "cuts")
            return describe_cut(costs, in_units(graph, units, starts)), ""
        if any(layer.device is not None for layer in graph.layers):
            starts = stages_from_scopes(
                names,
                [layer.device for layer in graph.layers],
                [bool(layer.parameters) for layer in graph.layers],
                undivided(graph),
            )
            self._check_num_stages(len(starts), "scopes")
            return describe_cut(costs, in_units(graph, units, starts)), ""
        if self.stages is None and not isinstance(self.replicas, tuple):
            microbatches = -(-num_shares // self.most_replicas)
            count, reason = choose_num_stages(costs, self._num_devices(cluster), microbatches)
            return best_cut(costs, min(count * self._chunks, len(units))), reason
        wanted = self._num_devices(cluster)
        found = min(wanted, len(units))
        reason = "" if found == wanted else why_fewer(graph, units, wanted)
        if isinstance(self.replicas, tuple):
            self._check_num_stages(found, "layers", reason)
        return best_cut(costs, min(wanted * self._chunks, len(units))), reason

    def _check_num_stages(self, found: int, source: str, reason: str = "") -> None:
        devices = self.stages
        if isinstance(self.replicas, tuple) and len(self.replicas) != found:
            raise OptionError(
                "Every stage needs its number of replicas.",
                received=f"{len(self.replicas)} numbers for the {found} stages of the {source}"
                f"{reason and f' ({reason})'}",
                fix=f"Give {found}.",
            )
        is_shared = self.schedule == "interleaved" and devices is not None and found >= devices
        if devices is not None and devices != found and not is_shared:
            raise OptionError(
                f"The {source} must make as many stages as `stages` says.",
                received=f"stages={devices}, and {source} that make {found}",
                fix="Leave `stages` out, or change one of them.",
            )

    def _recomputes(self, stage: int, num_stages: int) -> bool:
        if isinstance(self.recompute, bool):
            return self.recompute
        strange = [number for number in self.recompute if not 0 <= number < num_stages]
        if strange:
            raise OptionError(
                f"The stages are numbered from 0 to {num_stages - 1}.",
                received=f"recompute={self.recompute}",
                fix="Name these, or use recompute=True for all.",
            )
        return stage in self.recompute

    # --- ranks -----------------------------------------------------------------------------------

    def _ranks(self, num_stages: int) -> list[tuple[int, ...]]:
        """The ranks that hold each stage."""
        if isinstance(self.replicas, tuple):
            ends = [sum(self.replicas[: stage + 1]) for stage in range(num_stages)]
            return [tuple(range(low, high)) for low, high in pairwise([0, *ends])]
        devices = num_stages
        if self.schedule == "interleaved":
            devices = min(self.stages or -(-num_stages // self._chunks), num_stages)
        return [
            tuple(replica * devices + stage % devices for replica in range(self.replicas))
            for stage in range(num_stages)
        ]

    def _mesh(self, num_ranks: int) -> tuple[Axis, ...]:
        tensor = () if self.tensor is None else (Axis(name="tensor", size=self.tensor),)
        if isinstance(self.replicas, tuple):
            return (Axis(name="rank", size=num_ranks), *tensor)
        pipe = Axis(name="pipe", size=num_ranks // self.replicas)
        data = () if self.replicas == 1 else (Axis(name="data", size=self.replicas),)
        return (*data, pipe, *tensor)


@dataclass(frozen=True, kw_only=True)
class PipelinesOnHosts(Maker):
    """Replicas of a pipeline, as many on each host, none of which is on two.

    Attributes:
        on_each: each host's pipelines.
    """

    on_each: Pipelined

    def _on(self, cluster: Cluster) -> Pipelined:
        return replace(self.on_each, replicas=self.on_each.most_replicas * len(cluster.hosts))

    def sample_size(self, cluster: Cluster, batch_size: int) -> int:
        return self._on(cluster).sample_size(cluster, batch_size)

    def check_batch_size(self, batch_size: int) -> None:
        self.on_each.check_batch_size(batch_size)

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples.

        Raises:
            OptionError, DeviceError, PlanError: see ``Pipelined``.
        """
        maker = self._on(cluster)
        maker.check_batch_size(batch_size)
        return maker(graph, cluster, batch_size)


# --- stages after the cut -------------------------------------------------------------------------


def _widened(pipeline: Pipeline, degree: int) -> Pipeline:
    """Stages with ``degree`` consecutive ranks in place of each, which divide its layers."""

    def widened(stage: Stage) -> Stage:
        ranks = (degree * rank + place for rank in stage.ranks for place in range(degree))
        return msgspec.structs.replace(stage, ranks=tuple(ranks))

    return msgspec.structs.replace(pipeline, stages=tuple(map(widened, pipeline.stages)))


def _needs(graph: LayerGraph, of_layer: Sequence[int], stage: int) -> set[int]:
    """Stages whose tensors, or whose random stream, a stage continues from."""
    needed = {
        of_layer[flow.source]
        for flow in graph.flows
        if stage in {of_layer[user] for user in flow.users}
    }
    drawing = {of_layer[index] for index, layer in enumerate(graph.layers) if layer.draws}
    if drawing:
        drawing |= {max(of_layer)}
        if stage in drawing:
            needed |= {max((one for one in drawing if one < stage), default=stage)}
    return needed - {stage}


def _prediction(
    graph: LayerGraph, of_layer: Sequence[int], stage: int, cut: Cut, size: float
) -> StagePrediction:
    costs = [
        costs_of(layer)
        for layer, its_stage in zip(graph.layers, of_layer, strict=True)
        if its_stage == stage
    ]
    received, sent = cut.stage_bytes_received[stage], cut.stage_bytes_sent[stage]
    transfer = SECONDS_PER_BYTE * (received + sent)
    return StagePrediction(
        forward_seconds=size * math.fsum(one.forward_seconds for one in costs) + transfer,
        backward_seconds=size * math.fsum(one.backward_seconds for one in costs) + transfer,
        activation_bytes=round(size * sum(one.activation_bytes for one in costs)),
        received_bytes=received,
        sent_bytes=sent,
    )


def _notes(graph: LayerGraph, devices: Sequence[str], cores: int, num_shares: int) -> list[str]:
    notes = []
    if any(layer.costs is not None and layer.costs.is_estimated for layer in graph.layers):
        notes.append("Times are counted from operations: the model has no memory to be timed in.")
    if is_cpu(devices) and len(devices) > cores:
        notes.append(
            f"{len(devices)} processes share {cores} cores: right for tests, not for speed."
        )
    notes += [
        f"{name or 'The model'} runs as one piece: {reason}"
        for name, reason in undivided(graph).items()
    ]
    norms = [layer.name for layer in graph.layers if layer.uses_batch_statistics]
    if norms and num_shares > 1:
        shown = ", ".join(norms[:5]) + (", ..." if len(norms) > 5 else "")
        notes.append(
            f"{shown}: the statistics are those of each microbatch, and not of the batch as on one "
            "device. microbatches=1 makes them agree, and so does a GroupNorm instead."
        )
    return notes


def _fewer_microbatches(most: int) -> str:
    """How an error offers fewer microbatches: not at all if there is a replica without samples."""
    if most < 1:
        return "fewer replicas, or "
    return f"microbatches={most}{' or fewer' if most > 1 else ''}, or "
