"""The tightest limit counts, of the host and of every control group around this process."""

from pathlib import Path

import pytest

from lockstep.cluster.memory_limits import (
    FreeMemory,
    Kills,
    free_memory,
    memory_ceiling,
    memory_kills,
)
from lockstep.comm.shared_memory import shared_region
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.errors import DeviceError
from lockstep.launch.health.failure import MEMORY_RAN_OUT, describe_exit

GIB = 1 << 30


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def host(free_kib: int) -> dict[str, object]:
    return {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {free_kib} kB"}


def test_the_host_without_control_groups(tmp_path: Path) -> None:
    write(tmp_path, host(5 << 20))
    assert free_memory(tmp_path) == FreeMemory(5 * GIB, "on this host")


def test_the_outer_of_two_groups_may_be_the_tighter(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            **host(64 << 20),
            "proc/self/cgroup": "0::/pod/job",
            "sys/fs/cgroup/pod/job/memory.max": "max",
            "sys/fs/cgroup/pod/job/memory.current": GIB,
            "sys/fs/cgroup/pod/memory.max": 4 * GIB,
            "sys/fs/cgroup/pod/memory.current": 3 * GIB,
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB // 2}",
        },
    )
    free = free_memory(tmp_path)
    assert free is not None
    assert free.num_bytes == GIB + GIB // 2
    assert str(free) == "1.5 GiB free under the memory limit of 4.0 GiB (memory.max)"


def test_the_ceiling_is_the_tightest_limit_whatever_is_free(tmp_path: Path) -> None:
    assert memory_ceiling(tmp_path) is None
    write(tmp_path, host(5))
    assert memory_ceiling(tmp_path) == 99 * 1024
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/job\n2:memory:/other",
            "sys/fs/cgroup/pod/job/memory.max": "max",
            "sys/fs/cgroup/pod/memory.max": 4096,
            "sys/fs/cgroup/memory/other/memory.limit_in_bytes": 8192,
        },
    )
    assert memory_ceiling(tmp_path) == 4096


def test_version_1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            **host(64 << 20),
            "proc/self/cgroup": "3:cpu,cpuacct:/other\n2:memory:/job",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 2 * GIB,
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": 3 * GIB,
        },
    )
    free = free_memory(tmp_path)
    assert free is not None
    assert free.num_bytes == 0


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None


def test_this_system() -> None:
    free = free_memory()
    assert free is not None
    assert free.num_bytes > 1 << 20


def test_a_region_that_is_too_large_is_refused_before_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_region, "free_memory", lambda: FreeMemory(3 << 20, "in this test"))
    with pytest.raises(DeviceError, match=r"4\.0 MiB more[^$]*3\.0 MiB free in this test"):
        SharedRegion.create(4 << 20)
    region = SharedRegion.create(64 << 20, [(1 << 20, 63 << 20)])  # a hole takes nothing
    with pytest.raises(DeviceError, match=r"needs 62\.0 MiB more"):
        region.reserve(1 << 20, 62 << 20)
    region.reserve(1 << 20, 2 << 20)


def test_the_kernels_count_of_kills_is_that_of_the_innermost_group(tmp_path: Path) -> None:
    assert memory_kills(tmp_path) is None
    write(tmp_path, {"proc/vmstat": "pgfault 5\noom_kill 9\n"})
    assert memory_kills(tmp_path) == Kills(9, "this host")
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n0::/",
            "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 7",
            "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\noom_kill 2",
        },
    )
    assert memory_kills(tmp_path) == Kills(2, "this control group")
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod",
            "sys/fs/cgroup/pod/memory.events": "oom 3\noom_kill 1\noom_group_kill 0",
        },
    )
    assert memory_kills(tmp_path) == Kills(1, "this control group")


def test_a_process_that_was_killed_is_said_to_have_run_out_of_memory_where_that_is_known() -> None:
    none, one, three = (Kills(count, "this control group") for count in (0, 1, 3))
    assert describe_exit(-9, none, one) == (
        "killed by SIGKILL: memory ran out, and the kernel has killed a process of this "
        "control group meanwhile"
    )
    assert "has killed 2 processes" in describe_exit(-9, one, three)
    assert describe_exit(-9, three, three) == (
        "killed by SIGKILL (by kill -9 or the like: the kernel says that memory did not run out)"
    )
    unknown = "killed by SIGKILL (by kill -9; or by the kernel, if memory ran out)"
    assert describe_exit(-9) == describe_exit(-9, Kills(0, "this host"), one) == unknown
    assert MEMORY_RAN_OUT not in describe_exit(-9, three, three)
    assert describe_exit(-15, none, one) == "killed by SIGTERM"
    assert describe_exit(3) == "it exited with status 3"
