"""How much memory a process and all that it has started have taken at most.

Pages that several processes share (parameters, gradients, the libraries of a fork) count once: the
kernel divides them among those that map them (``Pss`` in ``smaps_rollup``, man 5 proc). It keeps no
peak of that. So this is what the processes have now, plus by how much each of them had more at its
peak (``VmHWM``), and should be asked while they are at work.

Where there is no ``/proc``, only this process's own peak is known.
"""

import os
import resource
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def peak_memory() -> int:
    """Bytes that this process and its descendants have taken at most."""
    if not (_PROC / "self/smaps_rollup").exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return sum(_peak_of(pid) for pid in family(os.getpid()))


def resident_memory() -> int:
    """Bytes of memory that this process has now; 0 if it is not known."""
    path = _PROC / "self" / "status"
    return _numbers(path)["VmRSS"] if path.exists() else 0


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    children = defaultdict(list)
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                stat = (_PROC / entry / "stat").read_text()
                # The name before it, in brackets, may hold anything.
                children[int(stat.rpartition(")")[2].split()[1])].append(int(entry))
    found = [pid]
    for each in found:
        found += children[each]
    return found


def _peak_of(pid: int) -> int:
    try:
        now = _numbers(_PROC / str(pid) / "smaps_rollup")
        ever = _numbers(_PROC / str(pid) / "status")
    except OSError:  # it has ended meanwhile, and taken nothing with it that others have
        return 0
    return now["Pss"] + max(ever.get("VmHWM", 0) - now["Rss"], 0)


def _numbers(path: Path) -> dict[str, int]:
    """The lines ``name: number kB`` of a file, in bytes."""
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.endswith(" kB")}
