"""Plans that divide parameters or layers, as candidates of the planner and of AutoStrategy."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs
from torch import nn

import lockstep
from lockstep.errors import OptionError, PlanError
from lockstep.graph.layer_graph import Division, Layer, LayerCosts, LayerGraph, ParameterInfo
from lockstep.plan.cost.placement import placement_of
from lockstep.plan.cost.plan_cost import cost_of
from lockstep.plan.cost.profile import profile_of
from lockstep.plan.cost.staged import Layout, simulated
from lockstep.plan.cost.tensor import grouped_cost, parts_of, tensor_cost
from lockstep.plan.engines import over
from lockstep.plan.makers.data_parallel import Mirrored
from lockstep.plan.makers.sharded import FullySharded
from lockstep.plan.makers.tensor import TensorParallel, splits_of
from lockstep.plan.pipeline.pipelines import Pipelined
from lockstep.plan.search.candidates import Problem, candidates
from lockstep.plan.search.ranking import best_plans
from tests.unit.test_planner import cores, even_graph

SAMPLES, WIDTH, HIDDEN = 4, 64, 256


def layer(name: str, kind: str, *shape: int) -> Layer:
    """1 ms forward and 2 ms backward for all samples."""
    weights = (
        (ParameterInfo(name=f"{name}.weight", shape=shape, dtype="float32", trainable=True),)
        if shape
        else ()
    )
    operations = 2.0 * SAMPLES * shape[0] * shape[1] if shape else 0.0
    costs = LayerCosts(
        forward_seconds=1e-3, backward_seconds=2e-3, activation_bytes=4000, operations=operations
    )
    return Layer(name=name, kind=kind, parameters=weights, costs=costs)


def graph_of_two_products() -> LayerGraph:
    """Columns, a function on parts, rows, and a norm that is whole."""
    return LayerGraph(
        layers=(
            layer("up", "Linear", HIDDEN, WIDTH),
            layer("act", "GELU"),
            layer("down", "Linear", WIDTH, HIDDEN),
            layer("norm", "LayerNorm"),
        ),
        samples=SAMPLES,
        divisions=(
            Division(name="up.weight", dim=0, sizes=(HIDDEN,), unit=1, by="columns"),
            Division(name="down.weight", dim=1, sizes=(HIDDEN,), unit=1, by="rows"),
        ),
    )


def test_layers_between_columns_and_rows_are_divided() -> None:
    graph = graph_of_two_products()
    parts = [*parts_of(graph, splits_of(graph, 2), 2)]
    assert [one.ways for one in parts] == [2, 2, 2, 1]
    # The gradients of the first layer's inputs, and the outputs of the last divided one.
    assert [one.summed for one in parts] == [WIDTH, 0, WIDTH, 0]
    assert [one.gathered for one in parts] == [0, 0, 0, 0]


def test_outputs_that_an_operation_needs_whole_are_gathered() -> None:
    graph = graph_of_two_products()
    up = msgspec.structs.replace(graph.divisions[0], gathered_for="layer_norm")
    graph = msgspec.structs.replace(graph, divisions=(up,))
    parts = [*parts_of(graph, splits_of(graph, 2), 2)]
    assert [one.ways for one in parts] == [2, 1, 1, 1]
    assert [one.gathered for one in parts] == [HIDDEN, 0, 0, 0]


def test_the_cost_of_divided_layers() -> None:
    graph, cluster, batch = graph_of_two_products(), cores(2), 8
    plan = TensorParallel(degree=2, splits=splits_of(graph, 2))(graph, cluster, batch)
    cost = cost_of(plan, graph, cluster, batch)
    times = batch / SAMPLES
    assert cost.step.forward == pytest.approx(times * (3 / 2 + 1) * 1e-3)
    assert cost.step.backward == pytest.approx(2 * cost.step.forward)
    # Twice each rank writes a sum of its own, and reads those of both.
    assert cost.step.exchange == pytest.approx(2 * 3 * batch * WIDTH * 4 / 1e9)
    one = cost_of(lockstep.SingleDeviceStrategy().maker()(graph, cluster, batch), graph, cluster, 8)
    assert cost.peak.parameters == one.peak.parameters / 2
    assert cost.peak.slots == one.peak.slots / 2
    assert cost.peak.activations < one.peak.activations
    assert cost_of(plan, graph, cluster, 2 * batch).step.exchange > cost.step.exchange


def test_the_cost_of_replicas_that_divide_layers() -> None:
    graph, cluster, batch = graph_of_two_products(), cores(4), 8
    divided = splits_of(graph, 2)
    plan = TensorParallel(degree=2, replicas=2, splits=divided)(graph, cluster, batch)
    cost = cost_of(plan, graph, cluster, batch)
    moved = 2 * 3 * (batch / 2) * WIDTH * 4 / 1e9  # see above; half of the batch
    compute = batch / 2 / SAMPLES * (3 / 2 + 1) * 1e-3
    assert cost.step.forward == pytest.approx(compute + moved / 2)
    assert cost.step.backward == pytest.approx(2 * compute + moved / 2)
    assert len(cost.memory) == len(cost.memory_limits) == 4
    one = cost_of(lockstep.SingleDeviceStrategy().maker()(graph, cluster, batch), graph, cluster, 8)
    assert cost.peak.parameters == one.peak.parameters / 4
    assert cost.peak.slots == one.peak.slots / 4
    assert cost.bytes_sent > 0


def test_the_cost_of_stages_that_divide_layers() -> None:
    graph, cluster, batch = graph_of_two_products(), cores(4), 8
    divided = splits_of(graph, 2)
    staged = Pipelined(stages=2, cuts=("down",), microbatches=2)
    plain = cost_of(staged(graph, cluster, batch), graph, cluster, batch)
    plan = replace(staged, tensor=2, splits=divided)(graph, cluster, batch)
    cost = cost_of(plan, graph, cluster, batch)
    assert len(cost.memory) == 4
    assert plain.peak.slots / 2 == cost.peak.slots
    # The last stage, half of which is divided, does the most; each stage exchanges once.
    assert cost.step.forward == pytest.approx(2 * (1 / 2 + 1) * 1e-3, rel=1e-2)
    assert cost.step.total < plain.step.total
    alone = TensorParallel(degree=1, num_shards=2, splits=divided)(graph, cluster, batch).tensor
    assert alone is not None
    layout, placement = Layout((0, 2), (1, 1), 2), placement_of(cluster, 2)
    whole = simulated(profile_of(graph), placement, layout, batch)
    found = grouped_cost(graph, placement, alone, layout, batch)
    assert found.step.total == pytest.approx(whole.step.total, rel=1e-2)
    assert found.memory == whole.memory


def test_the_exchanges_of_stacks_of_experts() -> None:
    experts, tokens = 5, 3  # of each sample, by all experts together
    up = ParameterInfo(name="up", shape=(experts, WIDTH, HIDDEN), dtype="float32", trainable=True)
    down = structs.replace(up, name="down", shape=(experts, HIDDEN, WIDTH))
    costs = LayerCosts(
        forward_seconds=1e-3,
        backward_seconds=2e-3,
        activation_bytes=4000,
        operations=2.0 * SAMPLES * tokens * 2 * WIDTH * HIDDEN,
    )
    layer = Layer(name="experts", kind="Experts", parameters=(up, down), costs=costs)
    inside = (
        Division(name="up", dim=2, sizes=(HIDDEN,), unit=1, by="columns"),
        Division(name="down", dim=1, sizes=(HIDDEN,), unit=1, by="rows"),
    )
    graph = LayerGraph(layers=(layer,), samples=SAMPLES, divisions=inside)
    (part,) = parts_of(graph, splits_of(graph, 2), 2)
    assert (part.ways, part.summed, part.gathered) == (2, 2 * tokens * WIDTH, 0)
    by_expert = tuple(
        Division(name=name, dim=0, sizes=(experts,), unit=1, by="matrices")
        for name in ("up", "down")
    )
    graph = structs.replace(graph, divisions=by_expert)
    (part,) = parts_of(graph, splits_of(graph, 2), 2)
    assert (part.ways, part.summed, part.gathered) == (2, 0, tokens * WIDTH)


def test_what_cannot_be_divided_is_no_candidate() -> None:
    graph = graph_of_two_products()
    names = {one.family for one in candidates(Problem(graph=graph, cluster=cores(4), batch_size=8))}
    assert "tensor" in names
    assert not splits_of(graph, HIDDEN + 1).parameters
    whole = msgspec.structs.replace(graph, divisions=())
    names = {one.family for one in candidates(Problem(graph=whole, cluster=cores(4), batch_size=8))}
    assert "tensor" not in names


def test_its_candidate_has_the_costs_of_its_plan() -> None:
    graph, cluster = graph_of_two_products(), cores(2)
    problem = Problem(graph=graph, cluster=cluster, batch_size=8)
    (found,) = (one for one in candidates(problem) if one.family == "tensor")
    plan = found.plan(graph, 8)
    assert plan.tensor_degree == 2
    assert cost_of(plan, graph, cluster, 8) == found.cost
    placement = placement_of(cluster)
    splits = splits_of(graph, 2)
    assert tensor_cost(graph, profile_of(graph), placement, splits, 8) == found.cost


# --- plans that a call cannot be made under -------------------------------------------------------


def refuse(words: str) -> Callable[[Any], None]:
    def attempt(maker: Any) -> None:
        plan = maker(even_graph(), cores(2), 8)
        if words in plan.strategy:
            raise OptionError("Not this one.", received=plan.strategy, fix="Another.")

    return attempt


def test_a_plan_that_cannot_be_used_is_not_chosen() -> None:
    problem = Problem(graph=even_graph(), cluster=cores(2), batch_size=8)
    before = best_plans(problem, "memory")
    first = before[0].candidate
    rows = best_plans(problem, "memory", attempt=refuse(first.plan(problem.graph, 8).strategy))
    assert rows[0].candidate.family != first.family
    assert len(rows) == len(before)
    reasons = {row.candidate.name: row.reason for row in rows}
    assert reasons[first.name].startswith("cannot be used: Not this one.")
    with pytest.raises(PlanError, match=r"None of the plans that fit.*cannot be used"):
        best_plans(problem, attempt=refuse(""))


def large_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))


def trained(strategy: lockstep.Strategy | None, **options: Any) -> lockstep.Trainer:
    torch.manual_seed(0)
    model = large_model()
    inputs = torch.randn(32, 8)
    trainer = lockstep.Trainer(
        model,
        loss="mse",
        optimizer=torch.optim.Adam(model.parameters()),
        strategy=strategy,
        precision="fp64",
        **options,
    )
    trainer.fit((inputs, inputs.sin()), batch_size=8, epochs=1, verbose=0)
    return trainer


@pytest.fixture
def light_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of process groups take no memory: else small models are not divided to save some."""
    monkeypatch.setattr("lockstep.plan.cost.placement._MEMBER_BYTES", 0)


@pytest.mark.thorough
@pytest.mark.usefixtures("light_groups")
def test_the_objective_memory_divides_the_training() -> None:
    trainer = trained(lockstep.AutoStrategy("memory", devices=2))
    assert trainer.plan.sharding is not None
    assert any("sharded" in note for note in trainer.plan.notes)
    one = dict(trained(None).model.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        difference = (parameter - one[name]).norm() / one[name].norm()
        assert difference < 1e-12, name


@pytest.mark.usefixtures("light_groups")
def test_a_compiled_model_is_not_divided() -> None:
    torch.manual_seed(0)
    model = large_model()
    trainer = lockstep.Trainer(
        model,
        loss="mse",
        optimizer=torch.optim.Adam(model.parameters()),
        strategy=lockstep.AutoStrategy("memory", devices=2),
        compile=True,
    )
    inputs = torch.randn(32, 8)
    chosen = trainer.plan_for((inputs, inputs), batch_size=8)
    assert chosen.sharding is None or not chosen.sharding.divides_parameters


def test_the_ranks_of_tensor_parallelism_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_tensor(problem: Problem) -> Any:
        return [one for one in candidates(problem) if one.family in ("tensor", "one device")]

    monkeypatch.setattr("lockstep.plan.search.ranking.candidates", only_tensor)
    trainer = trained(lockstep.AutoStrategy("memory", devices=2))
    assert trainer.plan.tensor_degree == 2
    one = dict(trained(None).model.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        difference = (parameter - one[name]).norm() / one[name].norm()
        assert difference < 1e-12, name


def test_sharded_cores_have_one_copy_of_the_parameters() -> None:
    graph, cluster = even_graph(), cores(2)
    inner = over("gloo", Mirrored(devices=2))
    apart, together = (
        cost_of(
            FullySharded(maker=inner, level="gradients", units=None, shares_parameters=shares)(
                graph, cluster, 8
            ),
            graph,
            cluster,
            8,
        )
        for shares in (False, True)
    )
    assert together.peak.parameters == apart.peak.parameters / 2
    assert together.peak.gradients == apart.peak.gradients
    assert together.step.exchange < apart.step.exchange
    assert together.bytes_sent == apart.bytes_sent / 2
