"""The doctor's verdict: what is said of which report, and what is wrong rather than notable."""

import re
from typing import Any

import msgspec
import pytest

from lockstep.cli.examination import HostReport
from lockstep.cli.verdict import format_rate, judge, network_advice
from lockstep.launch.health.network_measuring import LinkReport

SOUND = HostReport(
    name="node-a",
    system="Linux 6.1",
    processor="A processor",
    features=("avx2", "avx512f"),
    versions={"Lockstep": "0.1.0", "Python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"},
    num_cores=8,
    host_cores=8,
    torch_cores=8,
    busy_cores=0.1,
    flops_per_second=70e9,
    num_devices=8,
    accelerators=(),
    backend="",
    memory_bytes=64 << 30,
    free_bytes=60 << 30,
    threads={},
    open_files=65536,
    first_start_seconds=2.0,
    next_start_seconds=0.05,
    failures={},
)


def changed(**changes: Any) -> HostReport:
    return msgspec.structs.replace(SOUND, **changes)


def link(host: int = 1, **changes: float) -> LinkReport:
    usual = {"round_trip_seconds": 1e-4, "there": 1e9, "back": 1e9}
    return LinkReport(host=host, **{**usual, **changes})


def test_nothing_is_said_of_what_is_sound() -> None:
    assert judge([SOUND]) == []
    assert judge([SOUND, SOUND], [link()]) == []


@pytest.mark.parametrize(
    ("changes", "is_wrong", "said"),
    [
        (
            {"failures": {"torch can be imported": "ImportError: no such file"}},
            True,
            r"such that torch can be imported\. Received: ImportError: no such file\. Install",
        ),
        (
            {"failures": {"memory can be shared": "DeviceError: none"}},
            True,
            r"memory can be shared\. Received: DeviceError: none\. Free memory",
        ),
        (
            {"failures": {"helper processes start": "WorkerError: none"}},
            True,
            r"helper processes start\. Received: WorkerError: none\. Raise the limits",
        ),
        (
            {"failures": {"devices are found": "DeviceError: 99"}},
            True,
            "devices are found.*99.*Read",
        ),
        ({"failures": {"GPUs are found": "RuntimeError: old"}}, False, "GPUs are found.*old"),
        (
            {"free_bytes": 3 << 30},
            True,
            r"4\.0 GiB of free memory for 8 devices.*Received: 3\.0 GiB free",
        ),
        (
            {"torch_cores": 1, "threads": {"OMP_PROC_BIND": "true"}},
            False,
            r"same 1 core of 8: .* Received: OMP_PROC_BIND=true\. Unset",
        ),
        ({"torch_cores": 2}, False, "same 2 cores of 8: .*no variable"),
        ({"num_devices": 16}, False, "more devices than cores.*16 devices, 8 cores"),
        ({"busy_cores": 2.5}, False, r"runs other processes.*2\.5 of 8 cores busy"),
        ({"features": ()}, False, "without fast vector instructions.*A processor"),
        ({"open_files": 256}, False, "low limit of open files.*a limit of 256.*ulimit -n"),
    ],
)
def test_what_is_said_of_a_host(changes: dict[str, Any], is_wrong: bool, said: str) -> None:
    (finding,) = judge([changed(**changes)])
    assert re.search(said, finding.text), finding.text
    assert finding.text.startswith("This host ")
    assert finding.is_wrong == is_wrong
    by_host = judge([SOUND, changed(**changes)])
    assert [each.text for each in by_host if each.text.startswith("Host 1 ")] == [
        finding.text.replace("This host", "Host 1", 1)
    ]


def test_devices_may_outnumber_cores_where_there_are_gpus() -> None:
    assert judge([changed(num_devices=9, accelerators=("A GPU",))]) == []


@pytest.mark.parametrize(
    ("changes", "is_wrong", "said"),
    [
        (
            {"versions": {**SOUND.versions, "torch": "2.11.0"}},
            True,
            r"version of torch\. Received: 2\.13\.0 on host 0, 2\.11\.0 on host 1\.",
        ),
        (
            {"versions": {**SOUND.versions, "Lockstep": "0.2.0"}},
            True,
            r"version of Lockstep\. Received: 0\.1\.0 on host 0, 0\.2\.0 on host 1\.",
        ),
        (
            {"versions": {**SOUND.versions, "Python": "3.12.1"}},
            False,
            r"version of Python\. Received: 3\.11\.7 on host 0, 3\.12\.1 on host 1\.",
        ),
        (
            {"versions": {name: SOUND.versions[name] for name in ("Lockstep", "Python", "torch")}},
            False,
            r"numpy\. Received: 2\.4\.6 on host 0, missing on host 1\.",
        ),
        ({"features": ("avx2",)}, False, r"round differently.*\['avx2'\] on host 1"),
        (
            {"flops_per_second": 50e9},
            False,
            "cores are slower: .*70 GFLOP/s on host 0, 50 GFLOP/s on host 1",
        ),
    ],
)
def test_what_is_said_of_hosts_that_differ(
    changes: dict[str, Any], is_wrong: bool, said: str
) -> None:
    (finding,) = judge([SOUND, changed(**changes)], [link()])
    assert re.search(said, finding.text), finding.text
    assert finding.is_wrong == is_wrong


def test_speeds_that_are_not_known_are_not_compared() -> None:
    assert judge([SOUND, changed(flops_per_second=None)]) == []
    hosts = [SOUND, changed(flops_per_second=None), changed(flops_per_second=35e9)]
    (finding,) = judge(hosts)
    assert "70 GFLOP/s on host 0, unknown on host 1, 35 GFLOP/s on host 2" in finding.text


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (
            link(2, back=125e6),
            r"Between host 0 and host 2 the link is slow.*1 Gbit/s, most links 8 Gbit/s",
        ),
        (link(2, round_trip_seconds=0.02), "host 0 and host 2 the latency is high.*20 ms"),
    ],
)
def test_what_is_said_of_the_network(odd: LinkReport, said: str) -> None:
    (finding,) = judge([SOUND] * 4, [link(1), odd, link(3)])
    assert re.search(said, finding.text), finding.text
    assert not finding.is_wrong


def test_what_is_wrong_comes_first() -> None:
    findings = judge([changed(busy_cores=8.0, failures={"memory can be shared": "no"})])
    assert [finding.is_wrong for finding in findings] == [True, False]


def test_the_advice_counts_with_the_slower_way_of_the_slowest_link() -> None:
    advice = network_advice([link(1, back=119.4e6), link(2, there=0.5e9)])
    assert "The slowest link is that between host 0 and host 1: 955 Mbit/s." in advice
    # 2 (n - 1) / n of 100 MB at 119.4 MB/s
    assert "100 MB of parameters needs 1,117 ms there" in advice


@pytest.mark.parametrize(
    ("bytes_per_second", "shown"),
    [
        (119.4e6, "955 Mbit/s"),
        (124.98e6, "1 Gbit/s"),
        (1.25e9, "10 Gbit/s"),
        (12.345e9, "98.8 Gbit/s"),
        (1250.0, "0.01 Mbit/s"),
    ],
)
def test_rates(bytes_per_second: float, shown: str) -> None:
    assert format_rate(bytes_per_second) == shown
