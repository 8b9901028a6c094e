"""The devices of a Plan's ranks, from the user's option and the host's devices.

A number means accelerators where the host has some, else CPU replicas, which may outnumber the
cores. A list names them, one for each rank. What the ranks of a Plan exchange goes over one
backend, so all of them are of one kind.
"""

import re
from collections.abc import Sequence

from lockstep.cluster import tpu
from lockstep.cluster.topology import MAX_CPU_REPLICAS_PER_CORE, Host
from lockstep.errors import DeviceError, Problems

Devices = int | Sequence[str] | None

MAX_DEFAULT_REPLICAS = 8

_NAME = re.compile(r"([a-z]+)(?::(\d+))?")


def kind_of(device: str) -> str:
    """``"cuda"`` of ``"cuda:1"``."""
    return device.partition(":")[0]


def is_cpu(devices: Sequence[str]) -> bool:
    """Whether these are cores, not accelerators."""
    return all(kind_of(device) == "cpu" for device in devices)


def threads_for(devices: Sequence[str], num_cores: int) -> int | None:
    """Threads of a host's rank: on an accelerator its part of the cores, for what hosts do.

    None leaves a rank alone on its accelerator what the process has.
    """
    if is_cpu(devices):
        return 1
    return None if len(devices) == 1 else max(num_cores // len(devices), 1)


def check_devices(devices: object, name: str = "devices", *, counted_by: str | None = None) -> None:
    """Check that it is a number of devices, names of some, or None.

    Args:
        devices: what the user has passed.
        name: of the option.
        counted_by: the options from which their number follows; None: this one may be a number.

    Raises:
        DeviceError: it is not; or they are of two kinds.
    """
    problems = Problems()
    if isinstance(devices, Sequence) and not isinstance(devices, str) and len(devices):
        _check_names(problems, list(devices), name)
    elif devices is not None and counted_by is not None:
        problems.add(
            f"`{name}` must be a list of names, or None; their number follows from {counted_by}.",
            received=f"{name}={devices!r}",
            fix=f'Leave it out and set {counted_by}, or use {name}=["cuda:0", "cuda:1"].',
        )
    elif devices is not None and (type(devices) is not int or devices < 1):
        problems.add(
            f"`{name}` must be a number of devices, at least 1, or a list of their names.",
            received=f"{name}={devices!r}",
            fix=f'Use {name}=2, {name}=["cuda:0", "cuda:1"], or leave it out for all '
            "accelerators, else one CPU replica per core.",
        )
    problems.raise_if_any(DeviceError)


def _check_names(problems: Problems, names: list[object], option: str) -> None:
    strange = [name for name in names if not (isinstance(name, str) and _NAME.fullmatch(name))]
    if strange:
        problems.add(
            "A device's name is its kind, with a number if a host may have several of that kind.",
            received=f"{option}={names!r}",
            fix='Use names such as "cuda:0", "xpu:1" or "cpu".',
        )
        return
    kinds = sorted({kind_of(str(name)) for name in names})
    if len(kinds) > 1:
        problems.add(
            "The devices of one training must be of one kind: one backend connects them.",
            received=f"{option}={names!r}, of kinds {' and '.join(kinds)}",
            fix=f"Use those of one kind, such as {[n for n in names if kind_of(str(n)) != 'cpu']}.",
        )


def device_names(devices: Devices, host: Host) -> tuple[str, ...]:
    """The devices of a host's ranks, rank by rank.

    Args:
        devices: how many, or which; None is all accelerators, else a CPU replica for each core, at
            most 8.
        host: the host.

    Raises:
        DeviceError: the host has not got them, or cannot hold so many replicas.
    """
    there = [device.name for device in host.accelerators]
    if isinstance(devices, Sequence):
        return _named(devices, host)
    if not there:
        return _cores(devices, host)
    count = len(there) if devices is None else devices
    if count > len(there):
        raise DeviceError(
            f"This host has {len(there)} devices of kind {host.accelerators[0].kind}: "
            f"{', '.join(there)}.",
            received=f"{count} devices",
            fix=f"Use devices={len(there)}, or {['cpu'] * 2} for CPU replicas.",
        )
    return tuple(there[:count])


def _cores(number: int | None, host: Host) -> tuple[str, ...]:
    cores = host.num_cores
    count = min(cores, MAX_DEFAULT_REPLICAS) if number is None else number
    most = cores * MAX_CPU_REPLICAS_PER_CORE
    if count > most:
        raise DeviceError(
            f"This host has {cores} usable cores, enough for {most} CPU replicas.",
            received=f"devices={count}",
            fix=f"Use devices={cores} for one replica per core.",
        )
    return tuple(f"cpu:{rank % cores}" for rank in range(count))


def _named(names: Sequence[str], host: Host) -> tuple[str, ...]:
    if is_cpu(names):
        cores = _cores(len(names), host)
        return tuple(name if ":" in name else core for name, core in zip(names, cores, strict=True))
    full = tuple(name if ":" in name else f"{name}:0" for name in names)
    check_there(full, host)
    return full


def check_there(names: Sequence[str], host: Host) -> None:
    """Check that a host has these accelerators.

    Raises:
        DeviceError: it has not; why, if torch says so.
    """
    there = [device.name for device in host.accelerators]
    missing = [name for name in names if kind_of(name) != "cpu" and name not in there]
    if not missing:
        return
    part = tpu.missing_part() if kind_of(missing[0]) == tpu.KIND else None
    if part is not None:
        raise DeviceError(part[0], received=", ".join(missing), fix=f"Run `{part[1]}`.")
    has = f"This host's accelerators are: {', '.join(there)}." if there else host.lack
    raise DeviceError(
        has or "This host has no accelerator.",
        received=", ".join(missing),
        fix=f"Use {there[0]!r}." if there else 'Use "cpu", or correct the cause above.',
    )
