"""The devices, cores and memory of this host.

The only module below ``accelerators`` that may import torch, and only for accelerators.
"""

import os
import platform
import socket
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from lockstep.cluster import tpu
from lockstep.cluster.environment import find_devices
from lockstep.cluster.topology import Cluster, Device, Host

_CONTROL_GROUP = Path("/sys/fs/cgroup")
_PROCESSORS = Path("/proc/cpuinfo")

# Device files of the drivers of NVIDIA, AMD and Intel.
_DRIVERS = tuple(map(Path, ("/dev/nvidiactl", "/dev/kfd", "/dev/dri/renderD128")))


def usable_cores() -> int:
    """The number of cores that this process may use, by its affinity and its container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    match _container_limit("cpu.max"):
        case [quota, period]:  # microseconds of computing per period
            return min(cores, -(-quota // period))
        case _:
            return cores


def memory_bytes() -> int:
    """Memory in bytes: the host's, or the container's limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_container_limit("memory.max")])


def processor_line(name: str) -> str:
    """The value in ``/proc/cpuinfo`` for the first core; empty if there is none."""
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
    """Numbers of a control group's file (Linux, cgroup v2); none if there is no limit."""
    try:
        words = (_CONTROL_GROUP / name).read_text().split()
    except OSError:
        return []
    return [] if "max" in words else [int(word) for word in words]


def discover() -> Cluster:
    """This host alone: one CPU device per usable core, and its accelerators.

    These are looked for only if torch is already imported or the system has an accelerator's
    driver: without accelerators, planning must not wait for torch.
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
    has_driver = any(path.exists() for path in _DRIVERS)
    return "torch" in sys.modules or has_driver or tpu.is_installed()


def _accelerators() -> list[Device]:
    """Those of the one kind that torch was built for; initializes no device."""
    if "torch" not in sys.modules and tpu.is_installed() and tpu.missing_part() is not None:
        return []  # else the import would end this process
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":  # Apple's has no float64 and no collectives
        return []
    return [
        Device(kind=kind.type, index=index, memory_bytes=0) for index in range(_count(kind.type))
    ]


def _count(kind: str) -> int:
    import torch

    return _count_of_tpus() if kind == tpu.KIND else torch.accelerator.device_count()


@cache
def _count_of_tpus() -> int:
    """Counted once: a process that has begun to use its TPU may see no other."""
    import torch

    return torch.accelerator.device_count()


def described(device: Device) -> Device:
    """An accelerator with its memory and model, as far as its backend has them.

    This initializes the device: a process that then trains on cores still occupies it.
    """
    import torch

    read = getattr(torch.get_device_module(device.kind), "get_device_properties", None)
    properties: Any = None
    if read is not None:
        with suppress(RuntimeError):  # a backend may not know this model
            properties = read(device.index)
    return msgspec.structs.replace(
        device,
        memory_bytes=int(getattr(properties, "total_memory", 0)),
        model=str(getattr(properties, "name", "")),
    )


def _lack() -> str:
    """Why torch finds no accelerator; empty if torch is not imported."""
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
