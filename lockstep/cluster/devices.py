"""What this host has. The only module below ``comm`` that may look at torch, and only for CUDA."""

import os
import platform
import socket
import sys
from pathlib import Path

from lockstep.cluster.environment import find_devices
from lockstep.cluster.topology import Cluster, Device, Host

_CONTROL_GROUP = Path("/sys/fs/cgroup")
_PROCESSORS = Path("/proc/cpuinfo")


def usable_cores() -> int:
    """Cores' worth of time that this process may use: its affinity and its container's share."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    match _container_limit("cpu.max"):
        case [quota, period]:  # microseconds of computing in so many of time
            return min(cores, -(-quota // period))
        case _:
            return cores


def memory_bytes() -> int:
    """Memory in bytes: the host's, or as much of it as the container may use."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_container_limit("memory.max")])


def processor_line(name: str) -> str:
    """What ``/proc/cpuinfo`` says of the first core; empty where it does not."""
    try:
        lines = _PROCESSORS.read_text().splitlines()
    except OSError:  # another system
        return ""
    found = (line.partition(":")[2] for line in lines if line.partition(":")[0].strip() == name)
    return next(found, "").strip()


def processor_name() -> str:
    """The model of this host's processor."""
    return processor_line("model name") or platform.processor() or platform.machine()


def _container_limit(name: str) -> list[int]:
    """Numbers of a control group's file (Linux, cgroup v2); none where there is no limit."""
    try:
        words = (_CONTROL_GROUP / name).read_text().split()
    except OSError:
        return []
    return [] if "max" in words else [int(word) for word in words]


def discover() -> Cluster:
    """This host alone: one CPU device per usable core, and its GPUs.

    GPUs are looked for only where torch is loaded already: planning must not wait for it.
    """
    cores = usable_cores()
    cpu = [
        Device(kind="cpu", index=index, memory_bytes=memory_bytes() // cores)
        for index in range(cores)
    ]
    host = Host(
        name=socket.gethostname(),
        num_cores=cores,
        devices=(*cpu, *_gpus()),
        num_given=find_devices(os.environ),
    )
    return Cluster(hosts=(host,))


def _gpus() -> list[Device]:
    if "torch" not in sys.modules:
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    return [
        Device(
            kind="cuda",
            index=index,
            memory_bytes=torch.cuda.get_device_properties(index).total_memory,
        )
        for index in range(torch.cuda.device_count())
    ]
