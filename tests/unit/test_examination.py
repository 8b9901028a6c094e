"""A host examined in this process: what does not work is a finding, and no exception."""

import os
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from lockstep.cli import device_examination, examination
from lockstep.cli.examination import HostReport, examine
from lockstep.cluster import devices
from lockstep.cluster.devices import usable_cores
from lockstep.cluster.memory_limits import FreeMemory
from lockstep.cluster.topology import Device
from lockstep.comm.shared_memory import shared_region


@pytest.mark.thorough
def test_what_a_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Device(kind="xpu", index=i, memory_bytes=1 << 30, model=f"GPU {i}") for i in (0, 1)]
    monkeypatch.setattr(device_examination, "accelerators", lambda: found)
    monkeypatch.setattr(device_examination, "described", lambda device: device)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    threads = torch.get_num_threads()
    report = examine(devices=5)
    assert report.failures == {}
    assert report.accelerators == ("xpu:0 GPU 0 1.0 GiB", "xpu:1 GPU 1 1.0 GiB")
    assert report.backend == "gloo, through host memory: this torch has no xccl"
    assert report.num_devices == 5
    assert report.num_cores == report.torch_cores == usable_cores()
    assert report.threads["OMP_NUM_THREADS"] == "3"
    assert "OMP_PROC_BIND" not in report.threads
    assert report.versions["torch"] == torch.__version__
    assert report.flops_per_second is not None
    assert report.flops_per_second > 1e8
    assert report.first_start_seconds is not None
    assert report.next_start_seconds is not None
    assert report.first_start_seconds > 0
    assert report.next_start_seconds > 0
    assert torch.get_num_threads() == threads
    assert msgspec.json.decode(msgspec.json.encode(report), type=HostReport) == report


@pytest.mark.exhaustive
def test_the_second_helper_finds_the_first_ones_imports() -> None:
    """The least of two times each: whoever is held up starts later."""
    first, following = zip(*(examination._start_helpers() for _ in range(2)), strict=True)
    assert 0 < min(following) < min(first)


def test_what_does_not_work_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_driver(check_available: bool = False) -> None:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(shared_region, "free_memory", lambda: FreeMemory(1000, "in a test"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", broken_driver)
    report = examine()
    assert list(report.failures) == [
        "memory can be shared",
        "helper processes start",
        "devices are found",
        "accelerators are found",
        "accelerators have a backend",
    ]
    assert "1000 B free in a test" in report.failures["memory can be shared"]
    assert "'/nowhere/python'" in report.failures["helper processes start"]
    assert report.failures["accelerators are found"] == "RuntimeError: the driver is too old"
    assert report.accelerators is None
    assert report.first_start_seconds is None
    assert report.num_devices == usable_cores(), "the best guess"


def test_a_system_without_proc_is_examined_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(examination, "_PROC", tmp_path)
    monkeypatch.setattr(devices, "_PROCESSORS", tmp_path / "cpuinfo")
    assert examination.busy_cores() is None
    assert examination._features() == ()
    assert devices.processor_line("model name") == ""


def test_work_of_others_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The words are user, nice, system, idle, iowait, irq, softirq, steal, and guests' time."""
    monkeypatch.setattr(examination, "_PROC", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    looks = iter(["cpu  100 0 0 700 100 0 0 0 9 9\n", "cpu  200 10 20 1000 250 5 5 10 99 99\n"])

    def reload_weights(seconds: float) -> None:
        (tmp_path / "stat").write_text(next(looks))

    reload_weights(0)
    monkeypatch.setattr(time, "sleep", reload_weights)
    assert examination.busy_cores() == pytest.approx(4 * 150 / 600)


def test_instructions_are_those_that_matter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: A: B\nflags\t\t: fpu avx2 sse amx_bf16\n\n"
        "processor\t: 1\nmodel name\t: C\nflags\t\t: avx512f\n"
    )
    monkeypatch.setattr(devices, "_PROCESSORS", tmp_path / "cpuinfo")
    assert examination._features() == ("avx2", "amx_bf16")
    assert devices.processor_name() == "A: B"
