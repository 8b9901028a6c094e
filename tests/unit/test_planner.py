"""The planner: costs by part, clusters from files, rankings with reasons, and its command."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import lockstep
from lockstep.cli.main import main
from lockstep.cluster.cluster_file import parse_cluster
from lockstep.cluster.hardware import operations_per_second
from lockstep.cluster.topology import Cluster, Device, Host, Link, Network
from lockstep.errors import OptionError, PlanError
from lockstep.graph.layer_graph import Flow, Layer, LayerCosts, LayerGraph, ParameterInfo
from lockstep.launch.health.machine_measuring import measured
from lockstep.plan.cost.placement import placement_of
from lockstep.plan.cost.plan_cost import cost_of
from lockstep.plan.cost.profile import profile_of
from lockstep.plan.cost.staged import HEAP, Layout, staged_cost
from lockstep.plan.decision import ServedUpdate
from lockstep.plan.engines import over
from lockstep.plan.makers.data_parallel import Mirrored, SingleDevice
from lockstep.plan.makers.many_hosts import MirroredHosts
from lockstep.plan.makers.parameter_servers import Served
from lockstep.plan.makers.sharded import FullySharded
from lockstep.plan.pipeline.pipelines import Pipelined
from lockstep.plan.search.candidates import Problem, candidates
from lockstep.plan.search.ranking import best_plans
from lockstep.train.runtime.model_profile import profile_optimizer

LINK = Link(latency_seconds=0.0, bytes_per_second=1e9)


def even_graph(layers: int = 4, *, parameters: int = 1000, norms: bool = False) -> LayerGraph:
    """Layers of 1 ms forward and 2 ms backward for 8 samples."""
    costs = LayerCosts(
        forward_seconds=1e-3, backward_seconds=2e-3, activation_bytes=8000, operations=8e6
    )
    return LayerGraph(
        layers=tuple(
            Layer(
                name=f"blocks.{number}",
                kind="Linear",
                parameters=(
                    ParameterInfo(
                        name=f"blocks.{number}.weight",
                        shape=(parameters,),
                        dtype="float32",
                        trainable=True,
                    ),
                ),
                uses_batch_statistics=norms,
                costs=costs,
            )
            for number in range(layers)
        ),
        flows=tuple(
            Flow(source=number, num_bytes=800, users=(number + 1,)) for number in range(layers - 1)
        ),
        samples=8,
    )


def cores(count: int, memory_bytes: int = 0) -> Cluster:
    devices = tuple(
        Device(kind="cpu", index=index, memory_bytes=memory_bytes) for index in range(count)
    )
    return Cluster(hosts=(Host(name="host", num_cores=count, devices=devices, link=LINK),))


# --- costs ----------------------------------------------------------------------------------------


def test_the_parts_of_a_step() -> None:
    graph, cluster = even_graph(), cores(2)
    one = cost_of(SingleDevice()(graph, cluster, 8), graph, cluster, 8)
    assert one.step.forward == pytest.approx(4e-3)
    assert one.step.backward == pytest.approx(8e-3)
    assert (one.step.exchange, one.step.bubble) == (0, 0)
    update, placement = 4000 * graph.optimizer.seconds_per_element, placement_of(cluster).all
    assert one.step.update == pytest.approx(update + placement_of(cluster, 1).all[0].step_seconds)
    two = cost_of(Mirrored(devices=2)(graph, cluster, 8), graph, cluster, 8)
    assert two.step.forward == pytest.approx(one.step.forward / 2)
    assert two.step.exchange == pytest.approx(16000 / 2 / 1e9)
    assert two.step.update == pytest.approx(update / 2 + placement[0].step_seconds)


def test_one_device_has_the_threads_of_the_process() -> None:
    graph, cluster = even_graph(), cores(2)
    faster = msgspec.structs.replace(graph, threads_speed=1.5)
    plan = SingleDevice()(graph, cluster, 8)
    slow, fast = (cost_of(plan, each, cluster, 8).step.forward for each in (graph, faster))
    assert slow == pytest.approx(1.5 * fast)
    found = next(candidates(Problem(graph=faster, cluster=cluster, batch_size=8)))
    assert found.cost.step.forward == pytest.approx(fast)
    alone = cost_of(plan, faster, cores(1), 8)  # a host with a single core
    assert alone.step.forward == pytest.approx(slow)


def test_the_bubble_of_a_pipeline_is_that_of_its_schedule() -> None:
    graph, cluster = even_graph(parameters=1), cores(2)
    graph = msgspec.structs.replace(graph, flows=())
    plan = Pipelined(stages=2, microbatches=4, cuts=("blocks.2",))(graph, cluster, 8)
    cost = cost_of(plan, graph, cluster, 8)
    assert cost.step.forward + cost.step.backward == pytest.approx(6e-3)
    assert cost.step.bubble == pytest.approx(6e-3 / 4, rel=1e-3)


def test_the_parts_of_memory() -> None:
    graph, cluster = even_graph(), cores(2)
    whole = 16000
    one = cost_of(SingleDevice()(graph, cluster, 8), graph, cluster, 8).peak
    assert (one.parameters, one.gradients, one.slots) == (whole, 2 * whole, 2 * whole)
    assert one.activations == pytest.approx(HEAP * 32000)
    two = cost_of(Mirrored(devices=2)(graph, cluster, 8), graph, cluster, 8).peak
    assert (two.parameters, two.gradients, two.slots) == (whole / 2, 2 * whole, whole)
    assert two.buffers == 3 * whole / 2  # a copy for restarts
    plan = over("gloo", Mirrored(devices=2))(graph, cluster, 8)
    assert cost_of(plan, graph, cluster, 8).peak.parameters == whole
    maker = FullySharded(maker=over("gloo", Mirrored(devices=2)), level="parameters", units=None)
    sharded = cost_of(maker(graph, cluster, 8), graph, cluster, 8).peak
    assert sharded.parameters + sharded.gradients + sharded.slots == pytest.approx(2 * whole)
    assert sharded.gathered == whole / 4


def test_servers_update_and_workers_do_not() -> None:
    graph, cluster = even_graph(), cores(3)
    maker = Served(workers=MirroredHosts(devices_per_host=2), update=ServedUpdate(servers=1))
    cost = cost_of(maker(graph, cluster, 8), graph, cluster, 8)
    assert cost.step.forward == pytest.approx(2e-3)
    assert [one.slots for one in cost.memory] == [0, 0, 32000]


def test_recomputation_takes_time_and_saves_activations() -> None:
    graph, cluster = even_graph(), cores(2)
    makers = (
        Pipelined(stages=2, microbatches=4, cuts=("blocks.2",), recompute=again)
        for again in (False, True)
    )
    kept, again = (cost_of(maker(graph, cluster, 8), graph, cluster, 8) for maker in makers)
    assert again.step.total > kept.step.total
    assert again.peak.activations < kept.peak.activations


def test_unknown_costs_are_refused() -> None:
    graph, cluster = even_graph(), cores(2)
    interleaved = Pipelined(stages=2, schedule="interleaved")(graph, cluster, 8)
    with pytest.raises(PlanError, match="several stages on a device"):
        cost_of(interleaved, graph, cluster, 8)
    with pytest.raises(PlanError, match="number of samples"):
        cost_of(
            SingleDevice()(graph, cluster, 8),
            msgspec.structs.replace(graph, samples=0),
            cluster,
            8,
        )


# --- rankings -------------------------------------------------------------------------------------


def test_every_candidate_has_the_costs_of_its_plan() -> None:
    graph, cluster = even_graph(), cores(4)
    problem = Problem(graph=graph, cluster=cluster, batch_size=16)
    found = list(candidates(problem))
    assert len(found) > 8
    for one in found:
        plan = one.plan(graph, 16)
        assert plan.num_ranks == one.num_devices
        cost = cost_of(plan, graph, one.cluster, 16)
        assert cost.step.total == pytest.approx(one.cost.step.total), one.name
        assert cost.peak.total == pytest.approx(one.cost.peak.total), one.name


def test_the_network_decides() -> None:
    graph = even_graph(parameters=1 << 22)
    slow = msgspec.structs.replace(LINK, bytes_per_second=1e8)
    fast = msgspec.structs.replace(LINK, bytes_per_second=1e12)
    names = []
    for link in (slow, fast):
        host = msgspec.structs.replace(cores(2).hosts[0], link=link)
        rows = best_plans(Problem(graph=graph, cluster=Cluster(hosts=(host,)), batch_size=16))
        names.append(rows[0].candidate.name)
        assert not rows[0].reason
        assert all(row.reason for row in rows[1:])
    assert "mirrored" not in names[0]
    assert names[1] == "mirrored, 2 devices"
    rows = best_plans(Problem(graph=graph, cluster=cores(2), batch_size=16))
    reasons = {row.candidate.name: row.reason for row in rows}
    assert "exchange" in reasons["sharded parameters, 2 devices"]


def test_a_message_between_hosts_takes_its_time_once_and_in_each_direction() -> None:
    """With a slow network, 4 messages go there one after the other, and the last gradients back."""
    graph, (host,) = even_graph(2), cores(1).hosts
    link = Link(latency_seconds=0.0, bytes_per_second=100.0)
    cluster = Cluster(hosts=(host, host), networks=(Network(link=link),))
    two = Layout(starts=(0, 1), replicas=(1, 1), shares=4)
    cost = staged_cost(profile_of(graph), placement_of(cluster), two, 8)
    assert cost.step.total == pytest.approx((4 + 1) * 200 / 100, rel=0.01)


def test_what_does_not_fit_comes_last_and_nothing_is_an_error() -> None:
    graph = even_graph(parameters=8 << 20)
    whole = 4 * 4 * (8 << 20)
    base = int(placement_of(cores(1)).all[0].base_bytes)
    cluster = cores(4, base + 3 * whole)
    rows = best_plans(Problem(graph=graph, cluster=cluster, batch_size=16))
    single = next(row for row in rows if row.candidate.name == "one device")
    assert "does not fit: rank 0 needs" in single.reason
    assert rows[0].candidate.cost.fits
    with pytest.raises(PlanError, match=r"Nothing fits.*Use devices with .* more"):
        best_plans(Problem(graph=graph, cluster=cores(4, base), batch_size=16))


def test_statistics_over_the_batch_keep_it_whole_in_stages() -> None:
    problem = Problem(graph=even_graph(norms=True), cluster=cores(4), batch_size=16)
    for one in candidates(problem):
        plan = one.plan(problem.graph, 16)
        assert plan.pipeline is None or plan.num_shares == 1


def test_the_objective_is_one_of_two() -> None:
    with pytest.raises(OptionError, match="objective='speed'"):
        best_plans(Problem(graph=even_graph(), cluster=cores(2), batch_size=8), "speed")
    with pytest.raises(OptionError, match="memory='much'"):
        lockstep.AutoStrategy(memory="much")


def test_planning_loads_no_torch() -> None:
    code = "import sys, lockstep.plan.search.automatic; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_optimizer_is_tried_on_a_parameter_of_its_own() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    adam = torch.optim.Adam([weight], lr=0.1)
    assert profile_optimizer(adam).slots == 2
    assert not adam.state
    assert profile_optimizer(functools.partial(torch.optim.SGD, lr=0.1)).slots == 0
    momentum = profile_optimizer(torch.optim.SGD([weight], lr=0.1, momentum=0.9))
    assert momentum.slots == 1
    assert momentum.seconds_per_element > 0


# --- clusters from files --------------------------------------------------------------------------

FILE = """
[[hosts]]
count = 3
devices = 8
device = "A100-80GB"
link = "nvlink3"

[[networks]]
hosts = 2
link = "infiniband-hdr"

[[networks]]
link = "slow"

[links.slow]
gigabytes_per_second = 1
latency_microseconds = 100
"""


def test_a_cluster_file() -> None:
    cluster = parse_cluster(FILE)
    assert [len(host.accelerators) for host in cluster.hosts] == [8, 8, 8]
    device = cluster.hosts[0].devices[0]
    assert (device.name, device.memory_bytes) == ("cuda:0", 80 << 30)
    assert device.operations_per_second == pytest.approx(0.45 * 312e12)
    assert [one.hosts for one in cluster.networks] == [2, 0]
    assert cluster.networks[1].link.seconds(1e9) == pytest.approx(1.0001)


WRONG = {
    "an unknown key": ('[[hosts]]\ndevice = "L4"\ncolour = "red"', "colour"),
    "no hosts": ("hosts = []", "A cluster must have hosts"),
    "an unknown device": ('[[hosts]]\ndevice = "Z80"', "'Z80'"),
    "an unknown link": ('[[hosts]]\ndevice = "L4"\nlink = "rope"', "'rope'"),
    "no bandwidth": (FILE.replace("second = 1\n", "second = 0\n"), "a bandwidth above 0"),
    "a latency that is no number": (
        FILE.replace("latency_microseconds = 100", "latency_microseconds = nan"),
        "no negative latency",
    ),
    "infinite speed": (
        '[[hosts]]\ndevice = "mine"\n[accelerators.mine]\nteraflops = inf\nmemory = "1GiB"',
        "must have a speed and a memory",
    ),
    "memory of size 0": ('[[hosts]]\ndevice = "L4"\nmemory = "0GiB"', "a size above 0"),
    "no memory": (
        '[[hosts]]\ndevice = "mine"\n[accelerators.mine]\nteraflops = 3',
        "missing required field `memory`",
    ),
    "memory that is no size": ('[[hosts]]\ndevice = "L4"\nmemory = "big"', "memory='big'"),
    "no TOML": ("[[hosts", "must describe a cluster"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_in_a_cluster_file(name: str) -> None:
    text, message = WRONG[name]
    with pytest.raises(OptionError, match="Received") as caught:
        parse_cluster(text)
    assert message in str(caught.value)


def test_accelerators_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert operations_per_second("NVIDIA H100 80GB HBM3", "bf16-mixed") == 0.45 * 989e12
    single = operations_per_second("NVIDIA A100-SXM4-80GB", "fp32")
    assert 5e12 < single < 20e12
    assert operations_per_second("NVIDIA GeForce RTX 4090", "bf16") == 0.45 * 165e12
    assert operations_per_second("NVIDIA L40S", "bf16") == 0.45 * 362e12
    assert operations_per_second("a toaster", "bf16") == 0

    def describe(device: Device) -> Device:
        return msgspec.structs.replace(device, memory_bytes=3 << 30, model="NVIDIA L4")

    monkeypatch.setattr("lockstep.launch.health.machine_measuring.described", describe)
    devices = (*cores(1).hosts[0].devices, Device(kind="cuda", index=0, memory_bytes=0))
    host = Host(name="host", num_cores=1, devices=devices)
    found = measured(Cluster(hosts=(host,)), "bf16").hosts[0]
    assert found.accelerators[0].memory_bytes == 3 << 30
    assert found.accelerators[0].operations_per_second == 0.45 * 121e12
    assert found.link is not None


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A graph and a cluster."""
    graph, cluster = tmp_path / "graph.json", tmp_path / "cluster.toml"
    even_graph(parameters=1 << 20).save(graph)
    cluster.write_text(FILE)
    return str(graph), str(cluster)


def test_the_table_and_the_best_plan(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, cluster = files
    output = tmp_path / "plan.json"
    command = ["plan", "--graph", graph, "--cluster", cluster, "--batch-size", "64"]
    assert main([*command, "--devices", "4", "--top", "3", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "the best" in shown.splitlines()[1]
    assert shown.splitlines()[-1].startswith("and ")
    plan = lockstep.Plan.load(output)
    assert json.loads(output.read_text())["version"] == plan.version
    again = tmp_path / "again.json"
    command += ["--devices", "4", "--strategy", str(output), "--output", str(again)]
    assert main(command) == 0
    assert f"plan.json ({plan.strategy})" in capsys.readouterr().out.splitlines()[1]
    assert lockstep.Plan.load(again) == plan


def test_what_if(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    graph, cluster = files
    command = ["plan", "--graph", graph, "--cluster", cluster, "--batch-size", "64"]
    command += ["--devices", "4", "--top", "1"]
    assert main(command) == 0
    before = capsys.readouterr().out
    assert main([*command, "--what-if-network", "1000"]) == 0
    assert capsys.readouterr().out != before
    assert main([*command, "--what-if-memory", "0.001"]) == 2
    assert "Nothing fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "8", "--batch-size", "4"], "Every device must have a sample"),
        (["--devices", "0"], "--devices must be a number"),
        (["--memory", "much"], "--memory must be a size"),
        (["--memory", "0 GiB"], "--memory must be a size above 0"),
        (["--what-if-network", "0"], "--what-if-network must be a factor"),
        (["--shares", "3"], "These options are a strategy's"),
        (["--strategy", "magic"], "must name a strategy, or the file of a Plan"),
        (["--cluster", "nowhere.toml"], "The cluster file must exist"),
        (["--output", "/nowhere/it"], "lockstep plan: No such file or directory: '/nowhere/it'"),
    ],
)
def test_mistakes_take_one_line(
    options: list[str],
    message: str,
    files: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph, cluster = files
    assert main(["plan", "--graph", graph, "--cluster", cluster, *options]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.strip().splitlines()) == 1


def test_a_model_or_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert "give a TARGET or a graph" in capsys.readouterr().err


# --- gradients, and what is there before the first step -------------------------------------------


def graph_of_matrices(rows_of_a_sample: float = 1.0) -> LayerGraph:
    """Two products of 512 by 512, whose gradients are 1 MiB each."""
    layers = []
    for layer in even_graph(2).layers:
        assert layer.costs is not None
        name = f"{layer.name}.weight"
        weight = ParameterInfo(name=name, shape=(512, 512), dtype="float32", trainable=True)
        operations = 2 * 512 * 512 * 8 * rows_of_a_sample
        costs = msgspec.structs.replace(layer.costs, operations=operations)
        layers.append(msgspec.structs.replace(layer, parameters=(weight,), costs=costs))
    return msgspec.structs.replace(even_graph(2), layers=tuple(layers))


def test_replicas_exchange_the_factors_of_large_weights() -> None:
    cluster, batch = cores(2), 8
    few, many = graph_of_matrices(), graph_of_matrices(1000.0)
    plan = Mirrored(devices=2)(few, cluster, batch)
    assert all(layer.row_limit >= batch for layer in plan.layers)
    factors, gradients = (cost_of(plan, graph, cluster, batch) for graph in (few, many))
    weight = 4 * 512 * 512
    assert gradients.step.exchange == pytest.approx(2 * weight / 2 / 1e9)
    assert factors.step.exchange == pytest.approx(2 * batch * 4 * (512 + 512) / 2 / 1e9)
    # A row for each rank; or each rank's part of one.
    assert gradients.peak.gradients == 2 * weight
    assert factors.peak.gradients == weight


def test_gradients_that_autograd_makes_are_there_twice() -> None:
    cluster, batch = cores(2), 8
    matrices, vectors = graph_of_matrices(1000.0), even_graph(2, parameters=512 * 512)
    plans = [Mirrored(devices=2)(graph, cluster, batch) for graph in (matrices, vectors)]
    formed, made = (
        cost_of(plan, graph, cluster, batch).peak.gradients
        for plan, graph in zip(plans, (matrices, vectors), strict=True)
    )
    assert made == 2 * formed


def test_a_script_tries_the_whole_batch_before_stages_divide_the_model() -> None:
    graph, cluster = even_graph(parameters=10), cores(2)

    def buffers(microbatches: int) -> list[float]:
        plan = Pipelined(stages=2, microbatches=microbatches, cuts=("blocks.2",))(graph, cluster, 8)
        return [one.buffers for one in cost_of(plan, graph, cluster, 8).memory]

    whole, parts = buffers(1), buffers(4)
    assert parts[0] - parts[1] > whole[0] - whole[1] + 8000
