"""Plans for several hosts: who has which ranks, and what crosses the network."""

import msgspec
import pytest

import lockstep
from lockstep.cluster.topology import Cluster, Host
from lockstep.errors import DeviceError, OptionError, PlanError
from lockstep.graph.layer_graph import Layer, LayerGraph, ParameterInfo
from lockstep.plan.decision import LocalUpdate
from lockstep.plan.host_ranks import ranks_per_host
from lockstep.plan.makers.many_hosts import MirroredHosts
from lockstep.plan.spec import Plan


def make_cluster(*cores: int, given: tuple[int | None, ...] = (), alike: bool = True) -> Cluster:
    wanted = given or (None,) * len(cores)
    return Cluster(
        hosts=tuple(
            Host(
                name=f"node{number}",
                num_cores=count,
                devices=(),
                num_given=own,
                arithmetic="same" if alike else f"of {number}",
            )
            for number, (count, own) in enumerate(zip(cores, wanted, strict=True))
        )
    )


def make_graph(outs: int = 1024, ins: int = 1024) -> LayerGraph:
    weight = ParameterInfo(name="0.weight", shape=(outs, ins), dtype="float32", trainable=True)
    return LayerGraph(layers=(Layer(name="0", kind="Linear", parameters=(weight,)),))


def make_plan(cluster: Cluster, gbit_per_second: float = 10.0, **options: int) -> Plan:
    maker = MirroredHosts(gbit_per_second=gbit_per_second, **options)  # type: ignore[arg-type]
    return maker(make_graph(), cluster, 64)


def test_every_host_has_consecutive_ranks() -> None:
    plan = make_plan(make_cluster(2, 1, 3))
    assert plan.hosts == (2, 1, 3)
    assert plan.devices == ("cpu:0", "cpu:1", "cpu:0", "cpu:0", "cpu:1", "cpu:2")
    assert [plan.ranks_of_host(host) for host in range(3)] == [range(2), range(2, 3), range(3, 6)]
    assert [plan.host_of(rank) for rank in range(6)] == [0, 0, 1, 2, 2, 2]
    assert "host 0: cpu:0, cpu:1; host 1: cpu:0; host 2" in str(plan)


def test_launchers_and_users_say_how_many_devices_a_host_has() -> None:
    assert make_plan(make_cluster(4, 4, given=(3, None))).hosts == (3, 4)
    assert make_plan(make_cluster(4, 4, given=(3, None)), devices_per_host=2).hosts == (2, 2)


def test_one_host_has_a_plan_like_any_other() -> None:
    plan = make_plan(make_cluster(2))
    assert (plan.hosts, plan.num_hosts, plan.num_ranks) == ((), 1, 2)
    assert plan.ranks_of_host(0) == range(2)
    assert make_plan(make_cluster(1)).update == LocalUpdate()


def test_slow_networks_have_activations_in_place_of_gradients() -> None:
    cluster = make_cluster(2, 2)
    slow, fast = make_plan(cluster, 0.1), make_plan(cluster, 1000.0)
    assert slow.layers[0].row_limit > 0
    assert fast.layers[0].row_limit == 0


def test_hosts_that_compute_other_bits_do_not_compute_the_same_thing() -> None:
    assert make_plan(make_cluster(2, 2, alike=False), 0.1).layers[0].row_limit == 0


def test_a_host_cannot_hold_any_number_of_replicas() -> None:
    with pytest.raises(DeviceError, match="1 usable cores"):
        make_plan(make_cluster(4, 1), devices_per_host=9)


@pytest.mark.parametrize(
    ("num_ranks", "given", "expected"),
    [
        (4, (None, None), (2, 2)),
        (3, (None, None), (2, 1)),
        (3, (1, 2), (1, 2)),
        (4, (1, 2), (2, 2)),  # the launcher gives another number than the plan needs
        (3, (1, None), (2, 1)),
    ],
)
def test_ranks_of_stages_are_dealt_out_in_order(
    num_ranks: int, given: tuple[int | None, ...], expected: tuple[int, ...]
) -> None:
    assert ranks_per_host(num_ranks, make_cluster(2, 2, given=given)) == expected


def test_a_host_without_a_stage_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"Every host must have a rank.*2 devices on 3"):
        ranks_per_host(2, make_cluster(2, 2, 2))


def test_a_host_with_too_many_stages_is_named() -> None:
    with pytest.raises(DeviceError, match=r"Host node1 has 1 usable cores.*a plan for 9"):
        ranks_per_host(18, make_cluster(2, 1))


def test_a_plan_says_which_ranks_are_where() -> None:
    plan = make_plan(make_cluster(2, 2))
    for wrong in ((2,), (4, 0), (3, 2)):
        with pytest.raises(PlanError, match="Every rank must be on a host"):
            msgspec.structs.replace(plan, hosts=wrong)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"devices_per_host": 0}, DeviceError, "devices_per_host=0"),
        ({"devices_per_host": True}, DeviceError, "devices_per_host=True"),
        ({"num_shares": 0}, OptionError, "num_shares=0"),
        ({"channels_last": "yes"}, OptionError, "channels_last='yes'"),
        ({"network_gbit_per_second": 0}, OptionError, "network_gbit_per_second=0"),
        ({"network_gbit_per_second": "1G"}, OptionError, "network_gbit_per_second='1G'"),
        ({"timeout_seconds": -1}, OptionError, "timeout_seconds=-1"),
    ],
)
def test_options_that_cannot_be(
    options: dict[str, object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        lockstep.MultiWorkerMirroredStrategy(**options)  # type: ignore[arg-type]


def test_alone_it_has_the_replicas_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TF_CONFIG", "LOCKSTEP_HOSTS", "RANK", "SLURM_PROCID", "LOCKSTEP_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert lockstep.MultiWorkerMirroredStrategy(2).num_replicas_in_sync == 2
    monkeypatch.setenv("LOCKSTEP_DEVICES", "3")
    assert lockstep.MultiWorkerMirroredStrategy().num_replicas_in_sync == 3
