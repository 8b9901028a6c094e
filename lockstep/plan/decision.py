"""The decision of a Plan: the placement of layers and work, as pure data.

It is keyed by layer names and logical ranks. It never holds the options of a search.
"""

import math

from lockstep.errors import PlanError, Problems
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.engine_kinds import Engine, SharedMemory
from lockstep.plan.mesh import Axis, coordinates
from lockstep.plan.plan_part import PlanPart
from lockstep.plan.program.compression import Compression
from lockstep.plan.sharding import Sharding
from lockstep.plan.shares import replica_of_share, shares_of_replica
from lockstep.plan.splits import TensorSplits

PLAN_VERSION = 1


class LayerPlacement(PlanPart, frozen=True, kw_only=True):
    """The stage of a layer, and what its replicas exchange.

    Attributes:
        name: fully qualified name.
        kind: the module's class name.
        num_parameters: elements of its own parameters.
        stage: data parallel plans have one, which every replica holds.
        row_limit: as long as the batch gives the layer at most this many rows, its replicas
            exchange inputs and output gradients, and each forms its own rows of the weight's
            gradient; with more rows, and with 0, they exchange and sum gradients.
    """

    name: str
    kind: str
    num_parameters: int
    stage: int
    row_limit: int = 0


class Tie(PlanPart, frozen=True, kw_only=True):
    """Parameters that two layers have in common.

    Attributes:
        first: number of the layer that has them, the last before ``second``.
        second: number of the other; the same where a layer has them under two names.
        num_parameters: how many elements.
    """

    first: int
    second: int
    num_parameters: int


class LocalUpdate(PlanPart, frozen=True, kw_only=True, tag="local"):
    """The only replica adds up and steps on its own gradients."""


class SlicedUpdate(PlanPart, frozen=True, kw_only=True, tag="sliced"):
    """Replicas of one host share the parameters' memory; each sums and steps its own slice."""


class StagedUpdate(PlanPart, frozen=True, kw_only=True, tag="staged"):
    """Each stage's parameters are updated by the ranks that hold it.

    Where several hold it, or use a parameter that stages have in common, each steps its slice.
    """


class ServedUpdate(PlanPart, frozen=True, kw_only=True, tag="served"):
    """The last ranks are servers: each updates its part of the parameters, and computes nothing.

    Attributes:
        servers: how many.
        staleness: by how many steps a worker may be ahead of the oldest batch that is not in the
            weights yet; None is without bound.
        replicas: copies of what a server updates, so that its death can be outlived with 2.
    """

    servers: int
    staleness: int | None = 0
    replicas: int = 1

    @property
    def is_synchronous(self) -> bool:
        """Whether every gradient is one of the newest weights."""
        return self.staleness == 0

    def __str__(self) -> str:
        servers = "the server updates" if self.servers == 1 else "each server updates its part"
        servers += ", with a second copy" if self.replicas > 1 else ""
        if self.is_synchronous:
            return servers
        if self.staleness is None:
            return f"{servers}, workers do not wait"
        return f"{servers}, workers at most {self.staleness} step{'s' * (self.staleness > 1)} ahead"


Update = LocalUpdate | SlicedUpdate | StagedUpdate | AveragedUpdate | ServedUpdate


class StagePrediction(PlanPart, frozen=True, kw_only=True):
    """The expected costs of a stage for one microbatch when the Plan was made.

    Attributes:
        forward_seconds: of its forward pass, its sending and receiving included.
        backward_seconds: of its backward pass, likewise.
        activation_bytes: kept from forward to backward.
        received_bytes: size of other stages' tensors that it gets in a forward pass.
        sent_bytes: size of its tensors for other stages in a forward pass.
    """

    forward_seconds: float
    backward_seconds: float
    activation_bytes: int
    received_bytes: int
    sent_bytes: int


class Stage(PlanPart, frozen=True, kw_only=True):
    """A run of layers that live together.

    Attributes:
        ranks: those that hold it; they take turns with the microbatches.
        needs: earlier stages whose values it needs.
        recompute: its activations are not kept but computed again in backward.
        predicted: its expected costs.
    """

    ranks: tuple[int, ...]
    needs: tuple[int, ...] = ()
    recompute: bool = False
    predicted: StagePrediction | None = None


class Pipeline(PlanPart, frozen=True, kw_only=True):
    """A model in stages.

    Attributes:
        schedule: the order of the passes; see ``plan.pipeline.schedules``.
        stages: in the order of the model's layers.
    """

    schedule: str
    stages: tuple[Stage, ...]


class Decision(PlanPart, frozen=True, kw_only=True):
    """How to train one model on given devices; ``Plan`` explains the attributes.

    Raises:
        PlanError: the parts contradict one another.
    """

    strategy: str
    mesh: tuple[Axis, ...]
    devices: tuple[str, ...]
    threads_per_device: int | None
    num_shares: int
    interleaved: bool
    layers: tuple[LayerPlacement, ...]
    update: Update
    precision: str
    channels_last: bool = False
    shares_per_row: int = 1
    compiled: bool = False
    pipeline: Pipeline | None = None
    hosts: tuple[int, ...] = ()
    engine: Engine = SharedMemory()
    compression: Compression | None = None
    ties: tuple[Tie, ...] = ()
    sharding: Sharding | None = None
    tensor: TensorSplits | None = None
    notes: tuple[str, ...] = ()
    version: int = PLAN_VERSION

    def __post_init__(self) -> None:
        problems = Problems()
        _check_ranks(self, problems)
        _check_shares(self, problems)
        _check_stages(self, problems)
        _check_compression(self, problems)
        _check_sharding(self, problems)
        _check_tensor(self, problems)
        problems.raise_if_any(PlanError)

    def num_parameters(self, stage: int | None = None) -> int:
        """Elements of the model's parameters, or of a stage's; tied ones count once."""
        held = {
            number for number, one in enumerate(self.layers) if stage is None or one.stage == stage
        }
        counted = sum(self.layers[number].num_parameters for number in held)
        twice = (tie.num_parameters for tie in self.ties if {tie.first, tie.second} <= held)
        return counted - sum(twice)

    @property
    def num_ranks(self) -> int:
        """Processes that take part."""
        return len(self.devices)

    @property
    def num_replicas(self) -> int:
        """Copies of the model, or of its parts, that train on different shares."""
        return math.prod(axis.size for axis in self.mesh if axis.name in ("data", "shard"))

    def ranks_along(self, axis: str, rank: int) -> list[int]:
        """A rank, and those whose place differs on one axis only, in ascending order."""
        own = coordinates(self.mesh, rank) | {axis: 0}
        ranks = range(self.num_ranks)
        return [one for one in ranks if coordinates(self.mesh, one) | {axis: 0} == own]

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that each of these has: one, or those of its stages."""
        return (self.num_ranks - self.num_servers) // self.num_replicas

    @property
    def num_servers(self) -> int:
        """The last ranks, which update and compute nothing."""
        return self.update.servers if isinstance(self.update, ServedUpdate) else 0

    @property
    def is_stale(self) -> bool:
        """Whether workers may compute with older weights than the servers have."""
        return isinstance(self.update, ServedUpdate) and not self.update.is_synchronous

    @property
    def outlives_servers(self) -> bool:
        """Whether there is a second copy of what each server updates."""
        return isinstance(self.update, ServedUpdate) and self.update.replicas > 1

    def is_server(self, rank: int) -> bool:
        """Whether a rank updates and computes nothing."""
        return rank >= self.num_ranks - self.num_servers

    @property
    def num_hosts(self) -> int:
        """Hosts that take part."""
        return max(len(self.hosts), 1)

    def ranks_of_host(self, host: int) -> range:
        """The consecutive ranks on a host."""
        hosts = self.hosts or (self.num_ranks,)
        start = sum(hosts[:host])
        return range(start, start + hosts[host])

    @property
    def domains(self) -> list[range]:
        """The ranks that share one copy of the parameters, copy by copy."""
        if isinstance(self.update, AveragedUpdate):
            return [range(rank, rank + 1) for rank in range(self.num_ranks)]
        return self.memory_domains

    @property
    def memory_domains(self) -> list[range]:
        """The ranks that can share memory: they exchange without sending."""
        return self.engine.domains([self.ranks_of_host(host) for host in range(self.num_hosts)])

    def host_of(self, rank: int) -> int:
        """The host that a rank is on."""
        return next(host for host in range(self.num_hosts) if rank in self.ranks_of_host(host))

    def shares_of(self, replica: int) -> range:
        """The consecutive shares that a replica of the whole model computes; a server none."""
        if self.is_server(replica):
            return range(0)
        return shares_of_replica(replica, self.num_replicas, self.num_shares, self.shares_per_row)

    def shares_of_rank(self, rank: int) -> range:
        """The shares that a rank without stages computes, those that divide layers the same."""
        return self.shares_of(rank // self.tensor_degree)

    @property
    def tensor_degree(self) -> int:
        """Consecutive ranks that divide layers inside, and compute the same shares."""
        return next((axis.size for axis in self.mesh if axis.name == "tensor"), 1)

    def tensor_ranks(self, number: int) -> range:
        """The ranks that divide the layers of a replica, or of one of its stages."""
        return range(number * self.tensor_degree, (number + 1) * self.tensor_degree)

    def rank_of(self, share: int) -> int:
        """The first rank without stages that computes a share."""
        return self.replica_of(share) * self.tensor_degree

    def replica_of(self, share: int) -> int:
        """The replica of the whole model that computes a share."""
        return replica_of_share(share, self.num_replicas, self.num_shares, self.shares_per_row)


def _check_ranks(plan: Decision, problems: Problems) -> None:
    sizes = [axis.size for axis in plan.mesh]
    if min(sizes, default=1) < 1 or math.prod(sizes) + plan.num_servers != plan.num_ranks:
        problems.add(
            "The sizes of the mesh's axes must multiply to the number of devices without servers.",
            received=f"axes of {sizes} with {plan.num_ranks} devices"
            + (f", {plan.num_servers} of servers" if plan.num_servers else ""),
            fix="Name one device per rank.",
        )
    if plan.hosts and (min(plan.hosts) < 1 or sum(plan.hosts) != plan.num_ranks):
        problems.add(
            "Every rank must be on a host, and every host have a rank.",
            received=f"hosts with {plan.hosts} ranks and {plan.num_ranks} devices",
            fix="Give the number of ranks on each host.",
        )
    if plan.threads_per_device is not None and plan.threads_per_device < 1:
        problems.add(
            "A device must compute with at least one thread.",
            received=f"threads_per_device={plan.threads_per_device}",
            fix="Use null for the process's own setting.",
        )


def _check_shares(plan: Decision, problems: Problems) -> None:
    if plan.num_shares < plan.num_replicas:
        problems.add(
            "Every replica must have a share of the batch.",
            received=f"num_shares={plan.num_shares} with {plan.num_replicas} replicas",
            fix=f"Use num_shares >= {plan.num_replicas}.",
        )
    if isinstance(plan.update, LocalUpdate) and (
        plan.num_ranks != 1 or plan.num_shares != plan.shares_per_row
    ):
        problems.add(
            "A local update is for one rank and one row of shares.",
            received=f"{plan.num_ranks} ranks, num_shares={plan.num_shares}, "
            f"shares_per_row={plan.shares_per_row}",
            fix='Use an update of type "sliced".',
        )
    num_rows, left_over = divmod(plan.num_shares, max(plan.shares_per_row, 1))
    if plan.shares_per_row != 1 and (
        plan.shares_per_row < 1 or left_over or num_rows < plan.num_replicas
    ):
        problems.add(
            "Shares must fill whole rows, at least one for each replica.",
            received=f"shares_per_row={plan.shares_per_row} with num_shares={plan.num_shares} on "
            f"{plan.num_replicas} replicas",
            fix="Use shares_per_row=1.",
        )


def _check_compression(plan: Decision, problems: Problems) -> None:
    if plan.compression is None:
        return
    if plan.num_hosts == 1 or not plan.engine.shares_memory:
        problems.add(
            "Compression needs several hosts that are connected by Lockstep's own channels.",
            received=f"compression with {plan.num_hosts} hosts, over {plan.engine.name}",
            fix="Use null.",
        )
    if any(layer.row_limit for layer in plan.layers):
        problems.add(
            "With compression no layer can exchange activations instead of gradients.",
            received="layers with a row_limit",
            fix="Use row_limit 0.",
        )


def _check_sharding(plan: Decision, problems: Problems) -> None:
    if plan.sharding is None:
        return
    kinds = SlicedUpdate | StagedUpdate if plan.sharding.level == "slots" else SlicedUpdate
    is_alone = plan.num_ranks == 1 and plan.sharding.offload is not None
    if not is_alone and (plan.engine.shares_memory or not isinstance(plan.update, kinds)):
        problems.add(
            "Sharding is for replicas that share no memory; those of stages divide slots only.",
            received=f"a {type(plan.update).__name__} over {plan.engine.name}",
            fix="Use null.",
        )
    if plan.sharding.shares_parameters and plan.num_hosts > 1:
        problems.add(
            "Ranks of several hosts have no memory for one copy of the parameters.",
            received=f"shares_parameters with {plan.num_hosts} hosts",
            fix="Set shares_parameters to false.",
        )
    if plan.sharding.divides_parameters and (plan.compiled or plan.interleaved):
        problems.add(
            "Sharded parameters are gathered unit by unit. A compiled model does not allow that, "
            "nor do shares that run together, layer by layer.",
            received=f"compiled={plan.compiled}, interleaved={plan.interleaved}",
            fix='Train without `compile` and with one share per device, or use level="gradients".',
        )


def _check_tensor(plan: Decision, problems: Problems) -> None:
    if plan.tensor is None:
        return
    held = [len(stage.ranks) for stage in plan.pipeline.stages] if plan.pipeline else []
    if plan.compiled or any(one % plan.tensor_degree for one in (*plan.hosts, *held)):
        problems.add(
            "Layers are divided among ranks of one host, without a compiler.",
            received=f"compiled={plan.compiled}, {plan.tensor_degree} ranks that divide layers",
            fix="Train without `compile`, with all ranks of a stage or replica on one host.",
        )
    if plan.tensor.num_shards < plan.tensor_degree:
        problems.add(
            "Every rank must have a shard of each divided layer.",
            received=f"num_shards={plan.tensor.num_shards} with {plan.tensor_degree} ranks",
            fix=f"Use num_shards >= {plan.tensor_degree}.",
        )


def _check_stages(plan: Decision, problems: Problems) -> None:
    num_stages = 1 if plan.pipeline is None else len(plan.pipeline.stages)
    strange = sorted({layer.stage for layer in plan.layers} - set(range(num_stages)))
    if strange:
        problems.add(
            "Every layer must be in one of the Plan's stages.",
            received=f"layers in stage {', '.join(map(str, strange))} of {num_stages}",
            fix="Number stages from 0.",
        )
    takes_stages = StagedUpdate if plan.pipeline is None else StagedUpdate | AveragedUpdate
    if (plan.pipeline is not None) != isinstance(plan.update, takes_stages):
        problems.add(
            "A Plan with a pipeline needs a staged or averaged update; others cannot be staged.",
            received=f"{num_stages} stages with an update of type {type(plan.update).__name__}",
            fix='Use an update of type "staged" with a pipeline, or "averaged".',
        )
    if plan.pipeline is None:
        return
    if isinstance(plan.update, AveragedUpdate):
        _check_pipelines_apart(plan, plan.pipeline, problems)
    held = {rank for stage in plan.pipeline.stages for rank in stage.ranks}
    if held != set(range(plan.num_ranks)):
        problems.add(
            "Every rank must hold a stage, and every stage be held by ranks of the Plan.",
            received=f"stages on ranks {sorted(held)} with {plan.num_ranks} devices",
            fix="Name one device per rank, and each rank in some stage.",
        )


def _check_pipelines_apart(plan: Decision, pipeline: Pipeline, problems: Problems) -> None:
    """Check that local replicas are consecutive ranks of one host, each with the whole model."""
    size = plan.ranks_per_replica
    if any(
        sorted(rank // size for rank in stage.ranks) != list(range(plan.num_replicas))
        for stage in pipeline.stages
    ):
        problems.add(
            "Each replica of an averaged pipeline must hold every stage once.",
            received=f"stages on ranks {[stage.ranks for stage in pipeline.stages]} with "
            f"{plan.num_replicas} replicas",
            fix="Give each replica consecutive ranks, one for each stage.",
        )
    if any(count % size for count in plan.hosts):
        problems.add(
            "Each replica of an averaged pipeline must be on one host.",
            received=f"hosts with {plan.hosts} ranks and pipelines of {size}",
            fix=f"Give each host a multiple of {size} ranks.",
        )
