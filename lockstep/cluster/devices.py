"""What this host has.

The only module below ``accelerators`` that may look at torch, and only for accelerators.
"""

import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from lockstep.cluster.environment import find_devices
from lockstep.cluster.topology import Cluster, Device, Host

_CONTROL_GROUP = Path("/sys/fs/cgroup")
_PROCESSORS = Path("/proc/cpuinfo")

# What drivers of NVIDIA, AMD and Intel put there.
_DRIVERS = tuple(map(Path, ("/dev/nvidiactl", "/dev/kfd", "/dev/dri/renderD128")))


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
    """This host alone: one CPU device per usable core, and its accelerators.

    These are looked for only where torch is loaded already, or the system has a driver of one:
    planning must not wait for torch where it finds nothing.
    """
    cores = usable_cores()
    cpu = [
        Device(kind="cpu", index=index, memory_bytes=memory_bytes() // cores)
        for index in range(cores)
    ]
    accelerators = _accelerators() if _may_have_accelerators() else []
    host = Host(
        name=socket.gethostname(),
        num_cores=cores,
        devices=(*cpu, *accelerators),
        num_given=find_devices(os.environ),
        lack="" if accelerators else _lack(),
    )
    return Cluster(hosts=(host,))


def _may_have_accelerators() -> bool:
    return "torch" in sys.modules or any(path.exists() for path in _DRIVERS)


def _accelerators() -> list[Device]:
    """Those of the one kind that torch was built for. No device is initialized for it."""
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":  # Apple's has no float64, and nothing to join it
        return []
    return [
        Device(kind=kind.type, index=index, memory_bytes=0)
        for index in range(torch.accelerator.device_count())
    ]


def described(device: Device) -> Device:
    """An accelerator with its memory and model, as far as its backend tells them.

    It is initialized for it: a process that then trains on cores has it in use all the same.
    """
    import torch

    read = getattr(torch.get_device_module(device.kind), "get_device_properties", None)
    properties: Any = None if read is None else read(device.index)
    return msgspec.structs.replace(
        device,
        memory_bytes=int(getattr(properties, "total_memory", 0)),
        model=str(getattr(properties, "name", "")),
    )


def _lack() -> str:
    """Why torch finds no accelerator; empty where it is not loaded."""
    if "torch" not in sys.modules:
        return ""
    import torch

    kind = torch.accelerator.current_accelerator(check_available=False)
    if kind is None:
        return f"This torch ({torch.__version__}) is built for the CPU alone."
    if kind.type != "cuda":
        return f"torch is built for {kind.type}, but finds no device."
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch is built for CUDA, but cannot use it: {str(error).splitlines()[0]}"
    return "torch is built for CUDA, but finds no device."
