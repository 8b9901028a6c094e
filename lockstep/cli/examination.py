"""Examines one host: its hardware, its settings, and whether what training needs works here.

Each step that can fail is tried separately, and its error kept as text, so that the command itself
never fails. torch is imported only in such a step.
"""

import mmap
import os
import platform
import resource
import socket
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import msgspec

import lockstep
from lockstep.cli.device_examination import accelerator_lines, backend_line
from lockstep.cluster.devices import processor_line, processor_name, usable_cores
from lockstep.cluster.environment import find_devices
from lockstep.cluster.memory_limits import free_memory, memory_ceiling

_Value = TypeVar("_Value")

PACKAGES = ("torch", "numpy")

# Instruction sets that make matrix products fast, fastest last.
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")

# Variables that bind threads to cores, or set their number.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
)

_PROC = Path("/proc")

_SHARED_BYTES = 64 << 20
_SLEEP_SECONDS = 0.5
_PRODUCT_SECONDS = 0.3
_PRODUCT_SIZE = 1024


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results for one host; None is unknown.

    Attributes:
        name: the host's.
        system: operating system and kernel.
        processor: its model.
        features: its instruction sets, of ``FEATURES``.
        versions: of Python, Lockstep and the packages that it needs.
        num_cores: cores' worth of time that this process may use.
        host_cores: cores of the host.
        torch_cores: cores that this process may use once torch is loaded, which can bind it.
        busy_cores: cores' worth of time that the host spends while this process sleeps.
        flops_per_second: of one core multiplying float32 matrices.
        num_devices: replicas that a strategy would make here.
        accelerators: their names, models and memory.
        backend: the backend that moves tensors between them, and its version.
        memory_bytes: that this process could use.
        free_bytes: that it could use now.
        threads: variables that are set, of ``THREAD_VARIABLES``.
        open_files: the limit for a process.
        first_start_seconds: until the first helper process is ready, which waits for imports.
        next_start_seconds: until another one is ready, after the imports.
        failures: the failed steps, and their errors.
    """

    name: str
    system: str
    processor: str
    features: tuple[str, ...]
    versions: dict[str, str]
    num_cores: int
    host_cores: int
    torch_cores: int | None
    busy_cores: float | None
    flops_per_second: float | None
    num_devices: int
    accelerators: tuple[str, ...] | None
    backend: str | None
    memory_bytes: int | None
    free_bytes: int | None
    threads: dict[str, str]
    open_files: int
    first_start_seconds: float | None
    next_start_seconds: float | None
    failures: dict[str, str]


def examine(devices: int | None = None) -> HostReport:
    """Examine this host. Takes some seconds.

    Args:
        devices: the launcher's number of devices of this host.
    """
    num_cores = usable_cores()  # before torch is loaded
    busy = busy_cores()
    free = free_memory()
    failures: dict[str, str] = {}

    def try_to(what: str, function: Callable[[], _Value]) -> _Value | None:
        try:
            return function()
        except Exception as error:  # any error is a result
            failures[what] = f"{type(error).__name__}: {error}"
            return None

    loaded = try_to("torch can be imported", _load_torch)
    try_to("memory can be shared", _share_memory)
    starts = try_to("helper processes start", _start_helpers) if loaded else None
    return HostReport(
        name=socket.gethostname(),
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        processor=processor_name(),
        features=_features(),
        versions=_versions(),
        num_cores=num_cores,
        host_cores=os.cpu_count() or 1,
        torch_cores=usable_cores() if loaded else None,
        busy_cores=busy,
        flops_per_second=try_to("a core multiplies", _flops_per_second) if loaded else None,
        num_devices=devices or try_to("devices are found", _default_devices) or num_cores,
        accelerators=try_to("accelerators are found", accelerator_lines) if loaded else None,
        backend=try_to("accelerators have a backend", backend_line) if loaded else None,
        memory_bytes=memory_ceiling(),
        free_bytes=free.num_bytes if free else None,
        threads={name: os.environ[name] for name in THREAD_VARIABLES if os.environ.get(name)},
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        first_start_seconds=starts[0] if starts else None,
        next_start_seconds=starts[1] if starts else None,
        failures=failures,
    )


# --- what is there --------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    found = {"Lockstep": lockstep.__version__, "Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _features() -> tuple[str, ...]:
    present = {*processor_line("flags").split(), *processor_line("Features").split()}
    return tuple(feature for feature in FEATURES if feature in present)


def _default_devices() -> int:
    from lockstep.cluster.devices import discover
    from lockstep.plan.devices import device_names

    return len(device_names(find_devices(os.environ), discover().hosts[0]))


# --- what works, and how fast ---------------------------------------------------------------------


def busy_cores() -> float | None:
    """Cores' worth of time that other processes use while this one sleeps; None if unknown."""
    try:
        busy, total = _core_ticks()
        time.sleep(_SLEEP_SECONDS)
        later_busy, later_total = _core_ticks()
    except OSError:  # another system
        return None
    passed = max(later_total - total, 1)
    return (later_busy - busy) / passed * (os.cpu_count() or 1)


def _core_ticks() -> tuple[int, int]:
    """Ticks that the host's cores were busy, and all ticks (man 5 proc_stat)."""
    ticks = [int(word) for word in (_PROC / "stat").read_text().split("\n")[0].split()[1:9]]
    idle = ticks[3] + ticks[4]  # idle, and waiting for a disk
    return sum(ticks) - idle, sum(ticks)


def _load_torch() -> bool:
    import torch

    return bool(torch.__version__)


def _share_memory() -> None:
    """Allocate shared memory for a small model, and write to each page."""
    from lockstep.comm.shared_memory.shared_region import SharedRegion

    region = SharedRegion.create(_SHARED_BYTES)
    region.memory[:: mmap.PAGESIZE] = bytes(len(range(0, _SHARED_BYTES, mmap.PAGESIZE)))
    region.close()


def _start_helpers() -> tuple[float, float]:
    """Seconds until the first helper is ready, and until another one is."""
    from lockstep.launch.workers.fork_server import ForkedHelper, ForkServer
    from lockstep.launch.workers.team import Team
    from lockstep.train.runtime.session import PRELOAD

    server = ForkServer(1, PRELOAD)
    try:
        times = []
        for _ in range(2):
            began = time.perf_counter()
            team = Team(1, partial(ForkedHelper, server))
            try:
                team.wait_until_ready()
                times.append(time.perf_counter() - began)
            finally:
                team.close()
        return times[0], times[1]
    finally:
        server.close()


def _flops_per_second() -> float:
    """The speed of one core in float32: the best of some matrix products."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    left = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE)
    product = torch.empty_like(left)
    best = float("inf")
    until = time.perf_counter() + _PRODUCT_SECONDS
    while (began := time.perf_counter()) < until:
        torch.mm(left, left, out=product)
        best = min(best, time.perf_counter() - began)
    torch.set_num_threads(num_threads)
    return 2 * _PRODUCT_SIZE**3 / best
