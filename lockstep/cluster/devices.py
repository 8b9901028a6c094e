"""What this host has. The only module below ``comm`` that may look at torch, and only for CUDA."""

import os
import socket
import sys

from lockstep.cluster.topology import Cluster, Device, Host


def usable_cores() -> int:
    """Cores that this process may run on (its affinity, not the machine's count)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory of the host in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def discover() -> Cluster:
    """This host alone: one CPU device per usable core, and its GPUs.

    GPUs are looked for only where torch is loaded already: planning must not wait for it.
    """
    cores = usable_cores()
    cpu = [
        Device(kind="cpu", index=index, memory_bytes=memory_bytes() // cores)
        for index in range(cores)
    ]
    host = Host(name=socket.gethostname(), num_cores=cores, devices=(*cpu, *_gpus()))
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
