"""Planning: what layers are timed on, and again after a call has left the model elsewhere."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.capture.graph import profile_graph
from lockstep.data.map_style.sources import as_source
from lockstep.launch.health.machine_measuring import busy_cores
from lockstep.train.runtime import model_profile, planning
from lockstep.train.runtime.planning import Planning, _place_of


class _Elsewhere(nn.Module):
    """A model that says it is on a device which is not there."""

    def parameters(self, recurse: bool = True) -> object:  # type: ignore[override]
        return iter([_On()])


class _On:
    device = torch.device("cuda", 1)


def test_samples_go_where_the_model_is() -> None:
    assert _place_of(nn.Linear(2, 2)) == torch.device("cpu")
    assert _place_of(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    partly = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert _place_of(partly) == torch.device("meta")
    assert _place_of(_Elsewhere()) == torch.device("cuda:1")
    assert _place_of(nn.ReLU()) == torch.device("cpu")


def test_a_trace_holds_for_one_kind_of_device() -> None:
    planning, one = Planning(nn.Linear(2, 2)), torch.ones(2, 2)
    assert planning._digest(one) == planning._digest(torch.zeros(2, 2))
    assert planning._digest(one) != planning._digest(one.to("meta"))


def test_layers_are_timed_in_memory_that_the_process_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks have it: else the kernel gives each layer new memory, which takes as long as it."""
    order: list[str] = []

    def profiled(*args: Any, **options: Any) -> Any:
        order.append("timed")
        return profile_graph(*args, **options)

    monkeypatch.setattr(planning, "keep_freed_memory", lambda: order.append("kept"))
    monkeypatch.setattr(planning, "profile_graph", profiled)
    Planning(nn.Linear(2, 2)).graph(as_source((torch.ones(4, 2),)), 4, "fp32")
    assert order == ["kept", "timed"]


def test_no_process_that_keeps_a_core_busy_is_left_where_another_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []
    start = subprocess.Popen

    def once(*args: Any, **options: Any) -> Any:
        if started:
            raise BlockingIOError("no more processes")
        started.append(start(*args, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", once)
    with pytest.raises(BlockingIOError), busy_cores(2):
        raise AssertionError
    assert started[0].returncode == -signal.SIGKILL


def test_the_model_is_timed_again_while_other_cores_work(monkeypatch: pytest.MonkeyPatch) -> None:
    working: list[int] = []

    @contextmanager
    def busy(count: int) -> Iterator[None]:
        with busy_cores(count):
            working.append(count)
            yield

    monkeypatch.setattr(model_profile, "usable_cores", lambda: 2)
    monkeypatch.setattr(model_profile, "busy_cores", busy)
    graph = Planning(nn.Linear(2, 2)).graph(as_source((torch.ones(4, 2),)), 4, "fp32")
    assert working == [1]
    assert 0 < graph.speed_together <= 1
