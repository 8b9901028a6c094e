"""``lockstep launch ray``: the script on several nodes of a running Ray cluster.

A placement group reserves the cores; an actor on each node starts the script there as a process, so
it is a plain script. The secret reaches the actors as an argument of a call, and the script through
its environment: no command or dashboard shows it. When this process or the actor ends, so does the
script.

Ray restarts nothing here, and its data sets are not used.
"""

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

import msgspec

from lockstep.cluster.place import Address
from lockstep.errors import HostError, Problems
from lockstep.extras import import_extra
from lockstep.launch.free_port import find_free_port
from lockstep.launch.health.diagnostics import show
from lockstep.launch.launchers.launch_spec import LaunchSpec, make_host_specs
from lockstep.launch.launchers.multi_host_run import (
    AGENT_ARGUMENTS,
    AgentProcess,
    Progress,
    run_members,
)
from lockstep.launch.notices import FIRST_NOTICE_SECONDS
from lockstep.launch.script import Script

# Each host on another node; hosts on as many nodes as possible; on as few as possible.
SPREADS = ("STRICT_SPREAD", "SPREAD", "PACK")

# Longest silence of an actor while its script writes nothing.
_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 10.0


class RayJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job for a Ray cluster.

    Attributes:
        script: the script.
        hosts: the number of hosts.
        devices: Ray's CPUs of each host.
        directory: the script's working directory on every node.
        address: the cluster's: host:port, or "auto" for this host's.
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
        """Note invalid options."""
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
                    fix="`ray start --head` shows it; its port is 6379 by default.",
                )


def run_on_ray(job: RayJob) -> int:
    """Run the script on all hosts; returns the exit status of the first that failed, or 0.

    Raises:
        ExtraError: Ray is not installed.
        HostError: there is no such cluster, or it did not have the cores in time.
    """
    ray = import_extra("ray", extra="ray", user="`lockstep launch ray`")
    with _connected(ray, job.address), _reserved(ray, job) as group:
        actors = [_start_actor(ray, group, host, job.devices) for host in range(job.hosts)]
        name, port = ray.get(actors[0].find_free_address.remote())
        specs = make_host_specs(
            job.script, job.directory, Address(name=name, port=port), [job.devices] * job.hosts
        )
        return run_members(
            (f"host {host}", partial(_RayAgent, ray, f"host {host}", actor, spec))
            for host, (actor, spec) in enumerate(zip(actors, specs, strict=True))
        )


@contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    try:
        if address != "auto":
            _check_listener(Address.parse(address))
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


def _check_listener(address: Address) -> None:
    """Raise OSError if no process listens there: Ray itself takes minutes to notice."""
    socket.create_connection((address.name, address.port), _CONNECT_SECONDS).close()


@contextmanager
def _reserved(ray: Any, job: RayJob) -> Iterator[Any]:
    """A placement group with the cores of all hosts."""
    bundles = [{"CPU": float(job.devices)} for _ in range(job.hosts)]
    group = ray.util.placement_group(bundles, strategy=job.spread)
    try:
        if not _wait_for_cores(group, job):
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
        with suppress(Exception):  # the cluster may have ended
            ray.util.remove_placement_group(group)


def _wait_for_cores(group: Any, job: RayJob) -> bool:
    """Wait for the cores, with a notice; False if they did not become free in time."""
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
    remote = ray.remote(num_cpus=devices, max_restarts=0, scheduling_strategy=place)(_Actor)
    return remote.remote()


class _RayAgent:
    """The agent of one node, reached through its actor.

    Args:
        ray: the module.
        host: the host's name, for messages.
        actor: the node's.
        spec: for the agent.
    """

    def __init__(self, ray: Any, host: str, actor: Any, spec: LaunchSpec) -> None:
        self._ray = ray
        self._host = host
        self._actor = actor
        actor.start.remote(spec)
        self._answer = actor.read.remote()

    def read(self) -> Progress | None:
        """New output, and the exit status; None if the actor has not answered yet."""
        if not self._ray.wait([self._answer], timeout=0)[0]:
            return None
        try:
            progress: Progress = self._ray.get(self._answer)
        except self._ray.exceptions.RayError as error:
            return (b"", f"{self._host} is lost: {_first_line(error)}\n".encode()), 1
        self._answer = self._actor.read.remote()
        return progress

    def write(self, data: bytes) -> None:
        """Write to its input."""
        self._actor.write.remote(data)

    def end(self) -> None:
        """Request the script's end; does not wait."""
        self._actor.end.remote()

    def close(self) -> None:
        """End the actor."""
        with suppress(Exception):  # the cluster may have ended
            self._ray.kill(self._actor)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


class _Actor:
    """The actor, which runs an agent on its node.

    Its calls run one after the other, on one thread that lives as long as the actor.
    """

    def __init__(self) -> None:
        self._process: AgentProcess | None = None

    def find_free_address(self) -> tuple[str, int]:
        """This node's address, and a free port there."""
        name: str = import_module("ray.util").get_node_ip_address()
        return name, find_free_port(name)

    def start(self, spec: LaunchSpec) -> None:
        """Start the script."""
        self._process = AgentProcess([sys.executable, *AGENT_ARGUMENTS], spec)

    def read(self) -> Progress:
        """New output, and the exit status; waits a moment for some."""
        deadline = time.monotonic() + _POLL_SECONDS
        while True:
            written, status = self._running_agent.read()
            if any(written) or status is not None or time.monotonic() > deadline:
                return written, status
            time.sleep(0.01)

    def write(self, data: bytes) -> None:
        """Write to the agent's input."""
        self._running_agent.write(data)

    def end(self) -> None:
        """End the script."""
        self._running_agent.end()

    @property
    def _running_agent(self) -> AgentProcess:
        assert self._process is not None
        return self._process
