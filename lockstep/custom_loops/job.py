"""The job: the processes that run the same script, each of which is a replica.

A launcher has started them. Unlike the helpers of a Trainer none serves another: each runs the
user's own loop. They meet once, and afterwards whenever they exchange something, all at the same
calls in the same order.

The processes of a host share memory. Its first one leads: it makes what they share and hands it to
the others (``launch.workers.external_workers``). The leaders of several hosts know each other
(``train.multihost.hosts``).
"""

import atexit
import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from lockstep.channel.polling import wait_on
from lockstep.cluster.environment import find_devices, find_place
from lockstep.cluster.place import Place
from lockstep.comm.codec.message_codec import decode, encode
from lockstep.comm.exchange import Exchange
from lockstep.comm.exchange_spec import ExchangeSpec
from lockstep.comm.shared_memory.gathering import gather_bytes
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.comm.transports.process_group import CPU
from lockstep.custom_loops.watchdog import LoopWatchdog
from lockstep.errors import OptionError, WorkerError
from lockstep.launch.workers.external_workers import Attachment, attach
from lockstep.launch.workers.helper import HelperContext
from lockstep.launch.workers.team import Team
from lockstep.parallel.exchange.control import open_region
from lockstep.parallel.exchange.engine import Endpoint, Neighbours
from lockstep.parallel.groups import ParameterGroup
from lockstep.parallel.storage.allocator import keep_freed_memory
from lockstep.plan.decision import LocalUpdate, SlicedUpdate
from lockstep.plan.engine_kinds import ProcessGroup, SharedMemory
from lockstep.plan.engines import backend_for, check_leave
from lockstep.plan.mesh import Axis
from lockstep.plan.spec import Plan
from lockstep.train.multihost.discovery import find_hosts
from lockstep.train.multihost.followers import host_key
from lockstep.train.multihost.host_channels import HostChannels
from lockstep.train.multihost.hosts import Hosts
from lockstep.train.runtime.helper_session import Connections

# The most numbers that a replica sends at once, in float64.
_ROW_NUMBERS = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the replicas of a host share; its leader sends the first three.

    Attributes:
        hosts: the number of replicas on each host.
        num_regions: the number of regions.
        connections: of the host's replicas.
        region: of an exchange, as this replica has it; None if there is only one replica.
        stores: descriptors of further regions, if another replica has made them.
        neighbours: this replica's connections to other hosts; None if there are none.
        kept: an object that must live as long.
    """

    hosts: tuple[int, ...]
    num_regions: int
    connections: Connections
    region: SharedRegion | None = None
    stores: Sequence[int] = ()
    neighbours: Neighbours | None = None
    kept: object = None


class Job:
    """The replicas, seen from one of them.

    Args:
        timeout_seconds: longest wait for another replica.
        engine: a backend of torch.distributed to move tensors; None for shared memory.

    Attributes:
        hosts: the number of replicas on each host.
        rank: this replica's number.
    """

    def __init__(self, timeout_seconds: float, engine: str | None) -> None:
        keep_freed_memory()
        self.timeout_seconds = timeout_seconds
        self.engine = engine
        self.hosts: tuple[int, ...] = (1,)
        self.rank = 0
        self._team: Team | None = None
        self._attachment: Attachment | None = None
        self._others: Hosts | None = None
        place = find_place(os.environ)
        if place is None or place.num_processes == 1:
            _check_devices()
        self.host = 0 if place is None else place.host
        if place is not None:
            self._meet(place)
        _check_engine(engine, self.hosts)
        self._exchange = self._open_exchange()

    @property
    def num_replicas(self) -> int:
        """The number of replicas on all hosts."""
        return sum(self.hosts)

    @property
    def leads(self) -> bool:
        """True if this replica makes what its host's replicas share."""
        return self._attachment is None

    # --- meeting ---------------------------------------------------------------------------------

    def _meet(self, place: Place) -> None:
        if not place.leads:
            self._attachment = attach(place, host_key(), timeout_seconds=self.timeout_seconds)
            return
        self._others = find_hosts(self.timeout_seconds)
        assert self._others is not None
        self.host = self._others.host  # among those that have joined
        self.hosts = tuple(self._others.from_all(place.num_processes))
        self.rank = sum(self.hosts[: self.host])
        if place.num_processes > 1:
            self._team = self._others.attach_team(self.rank + 1, self.timeout_seconds)

    def _open_exchange(self) -> Exchange:
        """The exchange for all messages of replicas that are not an optimizer's."""
        if self._attachment is not None:
            shared = self._take(self._attachment)
            self.hosts, self.rank = shared.hosts, self._attachment.rank
        spec = ExchangeSpec(
            num_ranks=self.num_replicas,
            share_ranks=tuple(range(self.num_replicas)),
            groups=(),
            row_capacity=_ROW_NUMBERS,
        )
        plan = self.plan()
        if self.leads:
            made = [spec.create(self.ranks_here)] if self.num_replicas > 1 else []
            shared = self.share(plan, made)
        return self.exchange(plan, spec, shared, lambda: "a call that all replicas make")

    @property
    def ranks_here(self) -> range:
        """The replicas of this host."""
        start = sum(self.hosts[: self.host])
        return range(start, start + self.hosts[self.host])

    def plan(self, devices: Sequence[str] | None = None) -> Plan:
        """The Plan that the replicas follow.

        Args:
            devices: the accelerator of each; None for cores.

        Raises:
            OptionError: the engine is one of other devices.
        """
        count, backend = self.num_replicas, self.engine
        if devices is not None:
            backend = backend_for(backend, devices)
        engine: SharedMemory | ProcessGroup = SharedMemory()
        if backend is not None and (count > 1 or devices is None):
            engine = ProcessGroup(backend=backend)
        return Plan(
            strategy="loop of one's own",
            mesh=(Axis(name="data", size=count),),
            devices=tuple(devices or (f"cpu:{rank}" for rank in range(count))),
            threads_per_device=None,
            num_shares=count,
            interleaved=False,
            layers=(),
            update=LocalUpdate() if count == 1 else SlicedUpdate(),
            precision="fp32",
            hosts=self.hosts if len(self.hosts) > 1 else (),
            engine=engine,
        )

    def share(
        self, plan: Plan, regions: Sequence[SharedRegion], groups: Sequence[ParameterGroup] = ()
    ) -> Shared:
        """Share the regions that each host's leader has made; every replica calls it.

        Args:
            plan: the Plan that what is shared serves.
            regions: on a leader, those that it has made; on others, empty.
            groups: parameters whose gradients are exchanged with other hosts.
        """
        if self._attachment is not None:
            return self._take(self._attachment)
        connected = HostChannels.of(self._others, plan, groups, self.timeout_seconds, reuses=False)
        shared = Shared(
            hosts=self.hosts,
            num_regions=len(regions),
            connections=connected.connections,
        )
        if self._team is not None:
            descriptors = [*(region.descriptor for region in regions), *connected.descriptors]
            self._team.call(
                take,
                pickle.dumps(shared),
                tuple(descriptors),
                position=lambda rank: "in a loop of its own",
                timeout_seconds=self.timeout_seconds,
            )
            self._team.finish(self.timeout_seconds)
        neighbours = connected.neighbours(self.rank, (), wait_on)
        for (rank, _, _), end in connected.channels.items():
            if rank != self.rank:
                end.close()  # the replica has it
        region = regions[0] if regions else None
        return replace(shared, region=region, neighbours=neighbours, kept=connected.meeting_point)

    def _take(self, attachment: Attachment) -> Shared:
        """What the leader of this host sends."""
        body, descriptors = attachment.serve_call()
        shared: Shared = pickle.loads(body)
        count = shared.num_regions
        neighbours = shared.connections.opened(attachment.rank, descriptors[count:])
        region = open_region(descriptors[0])
        return replace(shared, region=region, stores=descriptors[1:count], neighbours=neighbours)

    def exchange(
        self,
        plan: Plan,
        spec: ExchangeSpec,
        shared: Shared,
        position: Callable[[], str],
        *,
        mirrored: Sequence[torch.Tensor] = (),
        device: torch.device = CPU,
    ) -> Exchange:
        """This replica's end of an exchange.

        Args:
            plan: the Plan that it serves.
            spec: its layout.
            shared: has the memory for it.
            position: says which call all replicas must make, for messages.
            mirrored: see ``Neighbours``.
            device: of the parameters.
        """
        watchdog = LoopWatchdog(
            rank=self.rank,
            ranks_here=self.ranks_here,
            timeout_seconds=self.timeout_seconds,
            team=self._team,
            attachment=self._attachment,
            hosts=self._others,
            position=position,
        )
        neighbours = shared.neighbours
        if neighbours is not None:
            others = self._others
            crossing = None if others is None else others.crossing(watchdog.look_around)
            neighbours = replace(neighbours, mirrored=mirrored, crossing=crossing)
        endpoint = Endpoint(
            plan=plan,
            spec=spec,
            rank=self.rank,
            region=shared.region,
            look_around=watchdog.look_around,
            device=device,
            neighbours=neighbours,
            meeting=shared.connections.meeting,
        )
        # What replicas tell each other needs no groups.
        exchange = endpoint.exchange(endpoint.process_groups() if spec.groups else None)
        watchdog.watch(exchange.board)
        return exchange

    def bring(self, region: SharedRegion) -> None:
        """On leaders: copy the first host's region into those of the others."""
        if self._others is not None and len(self.hosts) > 1:
            self._others.broadcast_region(region, 0, is_current=self.host == 0)

    # --- what replicas tell each other -----------------------------------------------------------

    def all_gather(self, obj: Any) -> list[Any]:
        """Every replica's object by rank: numbers, text and tensors, in tuples, lists and dicts."""
        if self.num_replicas == 1:
            return [obj]
        self._exchange.barrier()  # all have read the rows of the last time
        self._exchange.begin_pass()
        gathered = gather_bytes(self._exchange, {self.rank: encode(obj)}, self.num_replicas)
        return [*map(decode, gathered)]

    def check_equal(self, facts: dict[str, str], obj: Any = None) -> list[Any]:
        """Check that every replica has the same facts; all raise the first difference.

        Returns:
            Every replica's ``obj``, by rank.

        Raises:
            OptionError: with the fact's name, and the values of two replicas.
        """
        gathered = self.all_gather((facts, obj))
        for name, first in gathered[0][0].items():
            for rank, (other, _) in enumerate(gathered):
                if other.get(name) != first:
                    raise OptionError(
                        f"Replicas must run the same loop; these differ in {name}.",
                        received=f"{_shortened(first)} on replica 0, "
                        f"{_shortened(str(other.get(name)))} on replica {rank}",
                        fix="Start the same script with the same arguments everywhere.",
                    )
        return [each for _, each in gathered]

    def barrier(self) -> None:
        """Wait for all replicas."""
        self._exchange.barrier()

    def close(self) -> None:
        """Disconnect from the others."""
        if self._team is not None:
            self._team.close()
        if self._attachment is not None:
            self._attachment.close()


def take(
    context: HelperContext, body: bytes, descriptors: tuple[int, ...]
) -> tuple[bytes, tuple[int, ...]]:
    """On a replica that does not lead: what its leader sends."""
    return body, descriptors


# The job of this process, once it has met the others.
_jobs: list[Job] = []


def begin(timeout_seconds: float, engine: str | None) -> Job:
    """Meet the other replicas.

    Raises:
        OptionError: they have met before, with other arguments.
    """
    if _jobs:
        (job,) = _jobs
        if (job.timeout_seconds, job.engine) != (timeout_seconds, engine):
            raise OptionError(
                "Replicas meet once.",
                received=f"init(timeout_seconds={timeout_seconds}, engine={engine!r}) after "
                f"init(timeout_seconds={job.timeout_seconds}, engine={job.engine!r})",
                fix="Call lockstep.init first of all, and once.",
            )
        return job
    _jobs.append(Job(timeout_seconds, engine))
    return _jobs[0]


def current() -> Job:
    """The job; begun with defaults if it has not begun."""
    return _jobs[0] if _jobs else begin(DEFAULT_TIMEOUT_SECONDS, None)


DEFAULT_TIMEOUT_SECONDS = 600.0


@atexit.register
def _part() -> None:
    while _jobs:
        with suppress(WorkerError):
            _jobs.pop().close()


def _check_devices() -> None:
    """Refuse several devices for a host's only process: a process is one replica.

    Raises:
        OptionError: there are several.
    """
    devices = find_devices(os.environ)
    if devices is not None and devices > 1:
        raise OptionError(
            "In a loop of one's own each process is one replica.",
            received=f"{devices} devices for one process",
            fix=f"Start them with `lockstep run --processes {devices}` or torchrun.",
        )


def check_accelerators(job: Job, devices: Sequence[tuple[str, str]]) -> None:
    """Refuse accelerators that several replicas share, and those of several hosts.

    Args:
        job: the replicas.
        devices: of each replica, the name and the identity (``accelerators.identity``).

    Raises:
        DeviceError: replicas share an accelerator, and no engine is named.
        OptionError: there are several hosts.
    """
    names, identities = zip(*devices, strict=True)
    if len(set(identities)) < len(identities):
        check_leave(names, job.engine)
    if len(job.hosts) > 1:
        raise OptionError(
            "Replicas on accelerators are joined on one host so far.",
            received=f"{names[0]!r} with {len(job.hosts)} hosts",
            fix="Use a Trainer with MultiWorkerMirroredStrategy, or keep the model on the CPU.",
        )


def _check_engine(engine: str | None, hosts: Sequence[int]) -> None:
    if engine is not None and len(hosts) > 1:
        raise OptionError(
            "A process group joins the replicas of one host so far.",
            received=f"engine={engine!r} with {len(hosts)} hosts",
            fix="Leave `engine` out: Lockstep's own channels join hosts.",
        )


def _shortened(text: str) -> str:
    return text if len(text) < 200 else f"{text[:200]}..."
