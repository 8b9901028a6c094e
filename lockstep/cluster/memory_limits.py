"""How much memory this process may still take: in a container, less than the host has free.

Also the number of processes that the kernel has killed for lack of memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.formatting import format_bytes


@dataclass(frozen=True)
class FreeMemory:
    """The memory that can still be taken, and what limits it."""

    num_bytes: int
    limit: str

    def __str__(self) -> str:
        return f"{format_bytes(self.num_bytes)} free {self.limit}"


@dataclass(frozen=True)
class Kills:
    """The number of processes that the kernel has killed for lack of memory, and among which."""

    count: int
    among: str


def memory_kills(root: Path = Path("/")) -> Kills | None:
    """The kernel's count, which it increases before it kills; None if unknown.

    Args:
        root: the folder of ``proc`` and ``sys``.
    """
    groups = [
        folder / name
        for folder in _control_groups(root)
        for name in ("memory.events", "memory.oom_control")  # of cgroup version 2, and of version 1
    ]
    for path in (*groups, root / "proc/vmstat"):
        counts = [line.split()[1] for line in _lines(path) if line.startswith("oom_kill ")]
        if counts:
            return Kills(int(counts[0]), "this control group" if path in groups else "this host")
    return None


def free_memory(root: Path = Path("/")) -> FreeMemory | None:
    """The tightest limit on this process; None if unknown.

    Args:
        root: the folder of ``proc`` and ``sys``.
    """
    return min(_limits(root), key=lambda free: free.num_bytes, default=None)


def memory_ceiling(root: Path = Path("/")) -> int | None:
    """Memory for this process if nothing else ran: the host's memory, or a tighter limit."""
    return min(_ceilings(root), default=None)


def _ceilings(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemTotal":
            yield int(value.split()[0]) * 1024
    for folder in _control_groups(root):
        for limit in ("memory.max", "memory.limit_in_bytes"):
            most = _number(folder / limit)
            if most is not None:
                yield most


def _limits(root: Path) -> Iterator[FreeMemory]:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield FreeMemory(int(value.split()[0]) * 1024, "on this host")
    for folder in _control_groups(root):
        # Version 2, then version 1 (Linux's admin-guide, cgroup-v2.rst and cgroup-v1/memory.rst).
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            most, taken = _number(folder / limit), _number(folder / used)
            if most is not None and taken is not None:
                free = max(most - taken + _reclaimable(folder), 0)
                yield FreeMemory(free, f"under the memory limit of {format_bytes(most)} ({limit})")


def _control_groups(root: Path) -> Iterator[Path]:
    """The folders of this process's memory control groups, up to the outermost."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        folder = mount / path.lstrip("/")
        while True:
            yield folder
            if folder in (mount, folder.parent):
                break
            folder = folder.parent


def _reclaimable(folder: Path) -> int:
    """File pages that the kernel gives up when memory is needed."""
    lines = (line.split() for line in _lines(folder / "memory.stat"))
    found = {name: int(value) for name, value in lines}
    prefix = "total_" if "total_inactive_file" in found else ""  # version 1: includes child groups
    return sum(found.get(f"{prefix}{name}_file", 0) for name in ("inactive", "active"))


def _number(path: Path) -> int | None:
    """A file's number; None if there is no file, or it says "max"."""
    return next((int(line) for line in _lines(path) if line.strip().isdigit()), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # another system, or a container that hides it
        return []
