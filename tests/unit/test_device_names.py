"""``devices=`` as a number or names, against what a host has; and engines that fit them."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lockstep
from lockstep.cluster import devices
from lockstep.cluster.topology import Cluster, Device, Host
from lockstep.errors import DeviceError, OptionError, WorkerError
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.engines import over
from lockstep.plan.makers.data_parallel import Mirrored
from lockstep.plan.makers.many_hosts import MirroredHosts
from lockstep.plan.spec import Plan

GRAPH = LayerGraph(layers=())


def make_host(*kinds: str, cores: int = 4) -> Host:
    found = [Device(kind="cpu", index=core, memory_bytes=1) for core in range(cores)]
    found += [Device(kind=kind, index=index, memory_bytes=1) for index, kind in enumerate(kinds)]
    return Host(name="a", num_cores=cores, devices=tuple(found))


def plan_for(asked: Any, *kinds: str, engine: str | None = None) -> Plan:
    maker = over(engine, Mirrored(devices=asked))
    return maker(GRAPH, Cluster(hosts=(make_host(*kinds),)), 8)


@pytest.mark.parametrize(
    ("asked", "kinds", "found"),
    [
        (None, (), ("cpu:0", "cpu:1", "cpu:2", "cpu:3")),
        (2, (), ("cpu:0", "cpu:1")),
        (("cpu", "cpu"), ("cuda",), ("cpu:0", "cpu:1")),
        (("cpu:3", "cpu"), (), ("cpu:3", "cpu:1")),
        (None, ("cuda", "cuda"), ("cuda:0", "cuda:1")),
        (1, ("cuda", "cuda"), ("cuda:0",)),
        (("xpu:1", "xpu"), ("xpu", "xpu"), ("xpu:1", "xpu:0")),
    ],
)
def test_devices_are_those_asked_for(
    asked: Any, kinds: tuple[str, ...], found: tuple[str, ...]
) -> None:
    plan = plan_for(asked, *kinds)
    assert plan.devices == found
    assert plan.threads_per_device == {"cpu": 1}.get(found[0][:3], None if len(found) == 1 else 2)


@pytest.mark.parametrize(
    ("kind", "engine", "name"),
    [
        ("cuda", None, "nccl"),
        ("xpu", None, "xccl"),
        ("tpu", None, "gloo"),
        ("other", None, "gloo"),
        ("cuda", "gloo", "gloo"),
        ("cpu", "gloo", "gloo"),
        ("cpu", None, "shared memory"),
    ],
)
def test_the_backend_is_that_of_the_devices(kind: str, engine: str | None, name: str) -> None:
    plan = plan_for(2, *([] if kind == "cpu" else [kind] * 2), engine=engine)
    assert plan.engine.name == name
    assert name in str(plan)


def test_a_backend_of_other_devices_is_refused() -> None:
    for kinds, engine in (((), "nccl"), (("xpu", "xpu"), "nccl"), (("cuda", "cuda"), "xccl")):
        with pytest.raises(OptionError, match=rf"engine='{engine}' does not move"):
            plan_for(2, *kinds, engine=engine)


def test_hosts_have_accelerators_of_their_own() -> None:
    hosts = (make_host("cuda", "cuda"), make_host("cuda"))
    plan = over(None, MirroredHosts())(GRAPH, Cluster(hosts=hosts), 8)
    assert plan.hosts == (2, 1)
    assert plan.devices == ("cuda:0", "cuda:1", "cuda:0")
    assert plan.engine.name == "nccl"


def test_hosts_with_devices_of_two_kinds_are_refused() -> None:
    hosts = (make_host("cuda"), make_host())
    with pytest.raises(DeviceError, match=r"of one kind.*cpu and cuda"):
        over(None, MirroredHosts())(GRAPH, Cluster(hosts=hosts), 8)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["cuda:0", "cpu"], r"must be of one kind.*kinds cpu and cuda"),
        (["cuda:0", "xpu:0"], r"must be of one kind.*kinds cuda and xpu"),
        (["cuda:0", "cuda:0"], r"can have one rank.*'cuda:0' 2 times.*engine=\"gloo\""),
        (["cpu:1", "cpu:1"], r"can have one rank.*'cpu:1' 2 times"),
        (["GPU 1"], r"A device's name is its kind"),
        ([], r"a number of devices, at least 1, or a list"),
        ("cuda", r"a number of devices, at least 1, or a list"),
        (True, r"a number of devices, at least 1, or a list"),
    ],
)
def test_what_are_no_devices_is_refused(asked: Any, says: str) -> None:
    with pytest.raises(DeviceError, match=says):
        lockstep.MirroredStrategy(asked)
    if isinstance(asked, list) and asked:
        with pytest.raises(DeviceError, match=says):
            lockstep.PipelineStrategy(2, devices=asked)


@pytest.mark.parametrize(
    "make",
    [
        lockstep.PipelineStrategy,
        lockstep.TensorParallelStrategy,
        partial(lockstep.HybridStrategy, pipe=2),
        partial(lockstep.HybridStrategy, shard=2),
    ],
)
def test_a_number_of_devices_that_other_options_say_is_refused(make: Any) -> None:
    for asked in (2, "cpu"):
        with pytest.raises(DeviceError, match=rf"number follows from `.*devices={asked!r}"):
            make(devices=asked)


def test_stages_need_a_device_each() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    strategy = lockstep.PipelineStrategy(2, microbatches=1, devices=["cpu", "cpu", "cpu"])
    with pytest.raises(DeviceError, match="3 devices for 2 ranks"):
        strategy.plan(model, batch_size=2, sample=torch.ones(2, 2))


def test_cuda_without_its_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.cuda, "init", broken)
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else torch.device("cuda"),
    )
    assert devices.discover().hosts[0].accelerators == ()
    with pytest.raises(DeviceError, match=r"cannot use it: Found no NVIDIA driver.*cuda:0"):
        lockstep.MirroredStrategy(["cuda:0"])


def test_devices_are_found_without_beginning_to_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return SimpleNamespace(total_memory=7, name="GPU")

    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    found = devices.discover().hosts[0].accelerators
    assert [device.name for device in found] == ["cuda:0", "cuda:1"]
    assert asked == []
    told = [devices.described(device) for device in found]
    assert asked == [0, 1]
    assert {(device.memory_bytes, device.model) for device in told} == {(7, "GPU")}


def test_an_operation_without_a_deterministic_kernel_is_named() -> None:
    """On the ranks that run it; and whoever does not ask is not refused."""
    data = torch.ones(4, 3), torch.ones(4, 1)
    for deterministic in (False, True):
        trainer = lockstep.Trainer(
            _Puts(),
            loss=torch.nn.MSELoss(),
            optimizer=torch.optim.SGD,
            strategy=lockstep.MirroredStrategy(2),
            deterministic=deterministic,
        )
        if deterministic:
            with pytest.raises((RuntimeError, WorkerError), match=r"put_.*deterministic"):
                trainer.fit(data, verbose=0)
        else:
            trainer.fit(data, verbose=0)
        assert not torch.are_deterministic_algorithms_enabled()


class _Puts(torch.nn.Module):
    """Writes some of its inputs by an operation whose order is not fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().put_(torch.arange(x.numel()), x.flatten())
        found: torch.Tensor = self.layer(x)
        return found
