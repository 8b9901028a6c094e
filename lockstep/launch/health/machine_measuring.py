"""Measures this host for the planner: how fast processes copy, once; and keeps its cores busy.

The result is kept in the user's cache folder, by processor and number of cores.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from lockstep.cluster.devices import described, processor_name
from lockstep.cluster.hardware import DEFAULT_LINK, operations_per_second
from lockstep.cluster.topology import Cluster, Device, Host, Link
from lockstep.disk import CacheFile

_START_SECONDS = 0.6
_SECONDS = 0.8

# Until a process that waits for a message of another goes on, with the work for it: a pipeline and
# replicas of a model without work take so much.
_LATENCY_SECONDS = 3e-4


class MachineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    Attributes:
        bytes_per_second: that a process copies while others do.
    """

    bytes_per_second: float


def measured(cluster: Cluster, precision: str = "fp32") -> Cluster:
    """This host's Cluster with what is measured of it; other hosts as they are.

    Accelerators get their memory from their driver, and their speed from a table by their name.
    """
    first, *others = cluster.hosts
    if first.link is not None:
        return cluster
    known = _with_accelerators(first, precision) if first.accelerators else _measured(first)
    return msgspec.structs.replace(cluster, hosts=(known, *others))


def _with_accelerators(host: Host, precision: str) -> Host:
    devices = [_known_device(device, precision) for device in host.devices]
    return msgspec.structs.replace(host, devices=tuple(devices), link=DEFAULT_LINK)


def _known_device(device: Device, precision: str) -> Device:
    if device.kind == "cpu":
        return device
    found = described(device)
    speed = operations_per_second(found.model, precision)
    return msgspec.structs.replace(found, operations_per_second=speed)


def _measured(host: Host) -> Host:
    speed = _known(host) or _remembered(host, measure(host.num_cores))
    link = Link(latency_seconds=_LATENCY_SECONDS, bytes_per_second=speed.bytes_per_second)
    return msgspec.structs.replace(host, link=link)


def measure(num_cores: int) -> MachineSpeed:
    """Have a process on each core copy."""
    begin = time.time() + _START_SECONDS
    with _running(num_cores, str(begin), str(_SECONDS)) as processes:
        copied = [float(process.stdout.read()) for process in processes if process.stdout]
    return MachineSpeed(bytes_per_second=statistics.median(copied))


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Within the block so many processes work, one on each core."""
    with _running(count) as processes:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
        yield


@contextmanager
def _running(count: int, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """So many processes of ``core_load``; all have ended after the block, whatever fails in it."""
    command = [sys.executable, "-m", "lockstep.launch.health.core_load", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True)
            stack.enter_context(process)  # waits for its end
            stack.callback(process.kill)
            processes.append(process)
        yield processes


# --- the cache ------------------------------------------------------------------------------------


_SPEEDS = CacheFile("machine.json", dict[str, MachineSpeed], "This machine's speed")


def _key(host: Host) -> str:
    return f"{processor_name()}, {host.num_cores} cores"


def _known(host: Host) -> MachineSpeed | None:
    return (_SPEEDS.read() or {}).get(_key(host))


def _remembered(host: Host, speed: MachineSpeed) -> MachineSpeed:
    _SPEEDS.write({**(_SPEEDS.read() or {}), _key(host): speed})
    return speed
