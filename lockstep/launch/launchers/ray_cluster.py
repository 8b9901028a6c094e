"""``lockstep launch ray``: the script on several nodes of a Ray cluster that runs already.

A placement group reserves the cores; an actor on each node holds the script there, as a process of
its own, so it is a plain script. The secret reaches the actors as an argument of a call, and the
script through its environment: no command or dashboard shows it. When this process or the actor
ends, so does the script.

Ray starts nothing again here, and its data sets are not used.
"""

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import msgspec

from lockstep.cluster.place import Address
from lockstep.errors import HostError, Problems
from lockstep.extras import import_extra
from lockstep.launch.free_port import find_free_port
from lockstep.launch.health.diagnostics import show
from lockstep.launch.launchers.launch_spec import INTERRUPT, Orders, make_orders
from lockstep.launch.launchers.multi_host_run import (
    HOLD_SCRIPT,
    HeldProcess,
    Member,
    Progress,
    watch,
)
from lockstep.launch.notices import FIRST_NOTICE_SECONDS
from lockstep.launch.script import Script

# Each host on another node; or as many nodes as there are; or as few as will do.
SPREADS = ("STRICT_SPREAD", "SPREAD", "PACK")

# Longest silence of an actor while its script writes nothing.
_POLL_SECONDS = 0.5
_KNOCK_SECONDS = 10.0


class RayJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job for a Ray cluster.

    Attributes:
        script: what to run.
        hosts: number of them.
        devices: of each of them: Ray's CPUs.
        directory: where it runs, on every node.
        address: of the cluster: host:port, or "auto" for this host's.
        spread: one of ``SPREADS``.
        timeout_seconds: longest wait for the cores.
    """

    script: Script
    hosts: int
    devices: int
    directory: str
    address: str = "auto"
    spread: str = "STRICT_SPREAD"
    timeout_seconds: float = 300.0

    def check(self, problems: Problems) -> None:
        """Note what cannot be."""
        if not self.timeout_seconds > 0:
            problems.add(
                "--timeout must be positive.",
                received=f"--timeout {self.timeout_seconds}",
                fix="Leave it out for 300 s.",
            )
        if self.address != "auto":
            try:
                Address.parse(self.address)
            except ValueError as error:
                problems.add(
                    "--address must be auto or host:port.",
                    received=error,
                    fix="`ray start --head` says which; its port is 6379 by default.",
                )


def run_on_ray(job: RayJob) -> int:
    """Run the script on all hosts; returns the exit status of the first that failed, or 0.

    Raises:
        ExtraError: Ray is not installed.
        HostError: there is no such cluster, or it has not got the cores in time.
    """
    ray = import_extra("ray", extra="ray", user="`lockstep launch ray`")
    with _connected(ray, job.address), _reserved(ray, job) as group:
        actors = [_start_actor(ray, group, host, job.devices) for host in range(job.hosts)]
        name, port = ray.get(actors[0].find_free_address.remote())
        all_orders = make_orders(
            job.script, job.directory, Address(name=name, port=port), [job.devices] * job.hosts
        )
        members = [
            _RayMember(ray, host, actor, orders)
            for host, (actor, orders) in enumerate(zip(actors, all_orders, strict=True))
        ]
        try:
            return watch(members)
        finally:
            for member in members:
                member.close()


@contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    try:
        if address != "auto":
            _knock(Address.parse(address))
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        raise HostError(
            "There must be a Ray cluster at the address.",
            received=f"{address!r}: {error}",
            fix="Start one with `ray start --head`, or use --address.",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: Address) -> None:
    """See that somebody is there: Ray itself takes minutes to find that nobody is."""
    socket.create_connection((address.name, address.port), _KNOCK_SECONDS).close()


@contextmanager
def _reserved(ray: Any, job: RayJob) -> Iterator[Any]:
    """A placement group with the cores of all hosts."""
    bundles = [{"CPU": float(job.devices)} for _ in range(job.hosts)]
    group = ray.util.placement_group(bundles, strategy=job.spread)
    try:
        if not _is_granted(group, job):
            nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
            raise HostError(
                f"The cluster must have {job.hosts} times {job.devices} free CPUs "
                f"({job.spread}) within {job.timeout_seconds:g} s.",
                received=f"nodes with {', '.join(f'{cpus:g}' for cpus in nodes)} CPUs, free "
                "and taken",
                fix="Use fewer --hosts or --devices, another --spread, or wait longer with "
                "--timeout.",
            )
        yield group
    finally:
        with suppress(Exception):  # a cluster that is gone holds nothing
            ray.util.remove_placement_group(group)


def _is_granted(group: Any, job: RayJob) -> bool:
    """Wait for the cores, and say so."""
    first = min(FIRST_NOTICE_SECONDS, job.timeout_seconds)
    if group.wait(first):
        return True
    show(f"Waiting for {job.hosts} times {job.devices} free CPUs in the Ray cluster.\n")
    return bool(group.wait(job.timeout_seconds - first))


def _start_actor(ray: Any, group: Any, host: int, devices: int) -> Any:
    strategies = import_module("ray.util.scheduling_strategies")
    place = strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=host
    )
    remote = ray.remote(num_cpus=devices, max_restarts=0, scheduling_strategy=place)(_Holder)
    return remote.remote()


class _RayMember(Member):
    """The script on one node, as seen by this process."""

    def __init__(self, ray: Any, host: int, actor: Any, orders: Orders) -> None:
        super().__init__(f"host {host}", "" if host == 0 else f"[host {host}] ")
        self._ray = ray
        self._actor = actor
        actor.start.remote(orders)
        self._answer = actor.read.remote()

    def read(self) -> Progress | None:
        if not self._ray.wait([self._answer], timeout=0)[0]:
            return None
        try:
            progress: Progress = self._ray.get(self._answer)
        except self._ray.exceptions.RayError as error:
            return (b"", f"{self.host} is gone: {_first_line(error)}\n".encode()), 1
        self._answer = self._actor.read.remote()
        return progress

    def interrupt(self) -> None:
        self._actor.tell.remote(INTERRUPT)

    def end(self) -> None:
        self._actor.end.remote()

    def close(self) -> None:
        with suppress(Exception):  # the cluster may be gone
            self._ray.kill(self._actor)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


class _Holder:
    """The actor: holds the script on its node.

    Its calls come one after the other, on one thread that lives as long as the actor.
    """

    def __init__(self) -> None:
        self._process: HeldProcess | None = None

    def find_free_address(self) -> tuple[str, int]:
        """This node's address, and a free port there."""
        name: str = import_module("ray.util").get_node_ip_address()
        return name, find_free_port(name)

    def start(self, orders: Orders) -> None:
        """Start the script."""
        self._process = HeldProcess([sys.executable, *HOLD_SCRIPT], orders)

    def read(self) -> Progress:
        """How far it is; waits a while until there is news."""
        deadline = time.monotonic() + _POLL_SECONDS
        while True:
            written, status = self._held.read()
            if any(written) or status is not None or time.monotonic() > deadline:
                return written, status
            time.sleep(0.01)

    def tell(self, told: bytes) -> None:
        """Write to what holds the script."""
        self._held.tell(told)

    def end(self) -> None:
        """Have the script ended."""
        self._held.end()

    @property
    def _held(self) -> HeldProcess:
        assert self._process is not None
        return self._process
