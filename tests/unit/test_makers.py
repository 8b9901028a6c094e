"""Makers: which Plan comes from a model, a cluster and a strategy, and what cannot be had."""

from pathlib import Path

import msgspec
import pytest

from lockstep.cluster import devices
from lockstep.cluster.devices import discover, memory_bytes, usable_cores
from lockstep.cluster.topology import MAX_CPU_REPLICAS_PER_CORE, Cluster, Device, Host
from lockstep.errors import DeviceError, OptionError
from lockstep.graph.layer_graph import Layer, LayerGraph, ParameterInfo
from lockstep.plan.decision import LocalUpdate, Pipeline, SlicedUpdate, Stage, StagedUpdate
from lockstep.plan.devices import MAX_DEFAULT_REPLICAS, device_names
from lockstep.plan.makers.data_parallel import Mirrored, SingleDevice
from lockstep.plan.makers.tensor import TensorParallel


def make_cluster(cores: int) -> Cluster:
    devices = tuple(Device(kind="cpu", index=core, memory_bytes=1 << 30) for core in range(cores))
    return Cluster(hosts=(Host(name="here", num_cores=cores, devices=devices),))


def make_graph(*, batch_norm: bool = False) -> LayerGraph:
    weight = ParameterInfo(name="0.weight", shape=(3, 4), dtype="float32", trainable=True)
    layers = [Layer(name="0", kind="Linear", parameters=(weight,))]
    if batch_norm:
        layers.append(Layer(name="1", kind="BatchNorm1d", uses_batch_statistics=True))
    return LayerGraph(layers=tuple(layers))


def test_one_device_computes_one_share_where_the_model_is() -> None:
    plan = SingleDevice(device="cpu:0", precision="fp64")(make_graph(), make_cluster(2), 32)
    assert (plan.num_ranks, plan.num_replicas, plan.num_shares) == (1, 1, 1)
    assert plan.devices == ("cpu:0",)
    assert plan.threads_per_device is None
    assert plan.update == LocalUpdate()
    assert plan.precision == "fp64"


@pytest.mark.parametrize(
    ("cores", "asked", "expected"), [(2, 2, 2), (2, None, 2), (16, None, 8), (1, 8, 8)]
)
def test_replicas_are_as_many_as_asked_for_or_cores(
    cores: int, asked: int | None, expected: int
) -> None:
    plan = Mirrored(devices=asked)(make_graph(), make_cluster(cores), 32)
    assert plan.num_ranks == plan.num_replicas == plan.num_shares == expected
    assert plan.threads_per_device == 1
    assert plan.devices == tuple(f"cpu:{rank % cores}" for rank in range(expected))


def test_the_default_number_of_replicas_is_bounded() -> None:
    assert len(device_names(None, make_cluster(64).hosts[0])) == MAX_DEFAULT_REPLICAS


def test_more_replicas_than_the_host_can_hold_are_refused() -> None:
    most = 2 * MAX_CPU_REPLICAS_PER_CORE
    assert len(device_names(most, make_cluster(2).hosts[0])) == most
    with pytest.raises(DeviceError, match=rf"2 usable cores.*devices={most + 1}.*devices=2"):
        Mirrored(devices=most + 1)(make_graph(), make_cluster(2), 32)


def test_fewer_shares_than_replicas_are_refused() -> None:
    with pytest.raises(OptionError, match=r"num_shares=2 with 3 replicas.*num_shares >= 3"):
        Mirrored(devices=3, num_shares=2)(make_graph(), make_cluster(2), 32)


@pytest.mark.parametrize("num_shares", [None, 1, 2, 5])
def test_one_replica_updates_locally_only_when_it_sees_the_whole_batch(
    num_shares: int | None,
) -> None:
    plan = Mirrored(devices=1, num_shares=num_shares)(make_graph(), make_cluster(2), 32)
    assert plan.num_shares == (num_shares or 1)
    assert plan.update == (LocalUpdate() if plan.num_shares == 1 else SlicedUpdate())


@pytest.mark.parametrize(
    ("batch_norm", "num_shares", "interleaved"),
    [(True, 4, True), (True, 2, False), (False, 4, False)],
)
def test_a_ranks_shares_run_together_only_where_batch_statistics_need_it(
    batch_norm: bool, num_shares: int, interleaved: bool
) -> None:
    maker = Mirrored(devices=2, num_shares=num_shares)
    plan = maker(make_graph(batch_norm=batch_norm), make_cluster(2), 32)
    assert plan.interleaved is interleaved


def test_layers_are_placed_by_name_in_order() -> None:
    plan = Mirrored(devices=2)(make_graph(batch_norm=True), make_cluster(2), 32)
    placed = [(layer.name, layer.kind, layer.num_parameters, layer.stage) for layer in plan.layers]
    assert placed == [("0", "Linear", 12, 0), ("1", "BatchNorm1d", 0, 0)]


def test_parameters_that_layers_have_in_common_count_once() -> None:
    def layer(name: str, *names: str) -> Layer:
        parameters = [
            ParameterInfo(name=one, shape=(3, 4), dtype="float32", trainable=True) for one in names
        ]
        return Layer(name=name, kind="Linear", parameters=tuple(parameters))

    layers = layer("a", "a.w"), layer("b", "b.w", "b.v"), layer("c", "c.w"), layer("a@2", "a.w")
    graph = LayerGraph(layers=layers, tied=(("a.w", "c.w"), ("b.w", "b.v")))
    plan = Mirrored(devices=2)(graph, make_cluster(2), 32)
    assert plan.num_parameters() == plan.num_parameters(0) == 2 * 12
    assert "Parameters: 24, tied ones counted once" in str(plan)
    places = (0, 0, 1, 1)
    placed = [
        msgspec.structs.replace(one, stage=n) for one, n in zip(plan.layers, places, strict=True)
    ]
    in_stages = msgspec.structs.replace(
        plan,
        layers=tuple(placed),
        update=StagedUpdate(),
        pipeline=Pipeline(schedule="1f1b", stages=(Stage(ranks=(0,)), Stage(ranks=(1,)))),
    )
    assert [in_stages.num_parameters(stage) for stage in (0, 1)] == [24, 12]
    assert in_stages.num_parameters() == 24


@pytest.mark.parametrize(
    ("num_devices", "batch_size", "notes"),
    [
        (2, 32, ()),
        (2, 2, ()),
        (3, 3, ("3 replicas share 2 cores: right for tests, not for speed.",)),
        (2, 1, ("Batches of 1 leave 1 of 2 shares empty.",)),
    ],
)
def test_notes_say_what_will_be_slow(
    num_devices: int, batch_size: int, notes: tuple[str, ...]
) -> None:
    assert Mirrored(devices=num_devices)(make_graph(), make_cluster(2), batch_size).notes == notes


def test_the_same_question_has_the_same_plan() -> None:
    maker = Mirrored(devices=2)
    assert maker(make_graph(), make_cluster(2), 32) == maker(make_graph(), make_cluster(2), 32)


@pytest.mark.parametrize(
    ("cpu", "memory", "cores", "num_bytes"),
    [
        ("100000 100000", "1048576", 1, 1 << 20),
        ("max 100000", "max", None, None),
        ("1 100000", "max", 1, None),  # less than a core is one
        ("99900000 100000", "9223372036854771712", None, None),  # more than there is
        (None, None, None, None),
    ],
)
def test_a_container_may_use_less_than_the_host_has(
    cpu: str | None,
    memory: str | None,
    cores: int | None,
    num_bytes: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "_CONTROL_GROUP", tmp_path)
    without = usable_cores(), memory_bytes()
    for name, text in (("cpu.max", cpu), ("memory.max", memory)):
        if text is not None:
            (tmp_path / name).write_text(f"{text}\n")
    assert (usable_cores(), memory_bytes()) == (cores or without[0], num_bytes or without[1])


def test_this_host_is_found_with_its_cores_and_memory() -> None:
    (host,) = discover().hosts
    cpus = host.devices_of("cpu")
    assert host.num_cores == usable_cores() == len(cpus)
    assert [device.name for device in cpus] == [f"cpu:{core}" for core in range(len(cpus))]
    assert 0 < sum(device.memory_bytes for device in cpus) <= memory_bytes()


def test_hosts_have_whole_replicas_of_ranks_that_divide_layers() -> None:
    host = Host(name="a", num_cores=8, devices=())
    hosts = Cluster(hosts=(host, host))
    assert TensorParallel(degree=2, replicas=4).num_tensor_shards(hosts) == 2
    with pytest.raises(DeviceError, match="must be on one host"):
        TensorParallel(degree=2, replicas=3).num_tensor_shards(hosts)
