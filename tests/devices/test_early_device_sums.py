"""Gradients leave a device while it goes backward, in buckets that all ranks begin in one order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.comm.collectives.overlapped_reduce import OverlappedReduce
from lockstep.comm.transports.process_group_transport import ProcessGroupTransport
from tests.devices.found import ranks_on_devices
from tests.parity.test_early_sums import Patchy, Recomputed, perceptron, trained
from tests.thorough import core_of


def deep_perceptron() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 512), *(nn.Linear(512, 512) for _ in range(9)), nn.Linear(512, 3)]
    return nn.Sequential(*(one for layer in layers for one in (layer, nn.Tanh())))


def ranks(count: int) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(ranks_on_devices(count), engine="gloo")


@pytest.mark.parametrize("make_model", [perceptron, Recomputed, Patchy])
@pytest.mark.parametrize("count", core_of([2, 3], [2]))
def test_sums_in_buckets_are_those_of_one_device(
    make_model: Callable[[], nn.Module], count: int
) -> None:
    """Also where backward adds to a gradient that has left, and where samples leave some out."""
    expected = trained(make_model(), lockstep.SingleDeviceStrategy("cpu"), precision="fp64")
    found = trained(make_model(), ranks(count), precision="fp64")
    for name, value in expected.items():
        assert (found[name].cpu() - value).norm() <= 1e-12 * value.norm(), name


def test_most_bytes_leave_while_gradients_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 70 %: all but the last bucket, which is complete when backward ends."""
    steps: list[list[int]] = []
    expect, arrive, begin = (
        OverlappedReduce.expect,
        OverlappedReduce.arrive,
        ProcessGroupTransport.begin,
    )

    def begun(self: OverlappedReduce, num_rows: int) -> None:
        steps.append([])
        expect(self, num_rows)

    def arrived(self: OverlappedReduce, *args: Any, **options: Any) -> None:
        steps[-1].append(0)
        arrive(self, *args, **options)

    def sent(self: ProcessGroupTransport, sends: Any, receives: Any, *, tag: int) -> Any:
        if tag:
            steps[-1].append(sum(one.nbytes for tensors in sends.values() for one in tensors))
        return begin(self, sends, receives, tag=tag)

    monkeypatch.setattr(OverlappedReduce, "expect", begun)
    monkeypatch.setattr(OverlappedReduce, "arrive", arrived)
    monkeypatch.setattr(ProcessGroupTransport, "begin", sent)
    trained(deep_perceptron(), ranks(2))
    assert len(steps) == 6
    for events in steps:
        last_gradient = len(events) - 1 - events[::-1].index(0)
        assert sum(events[:last_gradient]) >= 0.7 * sum(events) > 0


def test_the_sums_have_the_bits_of_one_device_with_as_many_shares() -> None:
    def bits(strategy: Any) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in trained(Patchy(), strategy).items()}

    expected = bits(lockstep.MirroredStrategy(ranks_on_devices(1), num_shares=2))
    found = bits(ranks(2))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
