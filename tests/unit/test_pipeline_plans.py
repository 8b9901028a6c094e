"""Plans of pipelines: where models are cut, what is said of it, and what is refused."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.capture.graph import value_bytes
from lockstep.capture.tracing import trace_modes
from lockstep.errors import LockstepError, OptionError
from lockstep.parallel.pipeline.partition import partition
from lockstep.plan.pipeline.pipelines import Pipelined
from lockstep.plan.spec import Plan
from tests.zoo import case

SAMPLE = torch.randn(16, 8)


def chain(*, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def plan_of(
    strategy: lockstep.Strategy, model: nn.Module | None = None, batch_size: int = 16
) -> Plan:
    return strategy.plan(model or chain(), batch_size=batch_size, sample=SAMPLE)


def stages_of(plan: Plan) -> dict[str, int]:
    return {layer.name: layer.stage for layer in plan.layers}


def test_only_stages_that_draw_hand_on_the_random_stream() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8), nn.Linear(8, 3))
    plan = plan_of(lockstep.PipelineStrategy(cuts=["2", "3"], microbatches=2), model)
    found = []
    for trace in trace_modes(model, SAMPLE):
        parts = partition(plan, trace, value_bytes(trace, model, SAMPLE)).parts
        found.append([part.stream_to for part in parts])
    assert found == [[2, None, None], [None, None, None]]


# --- where to cut -------------------------------------------------------------------------------


def test_names_cut_where_they_say() -> None:
    plan = plan_of(lockstep.PipelineStrategy(cuts=["2", "4"], microbatches=4))
    assert stages_of(plan) == {"0": 0, "1": 0, "2": 1, "3": 1, "4": 2}
    assert plan.pipeline is not None
    assert [stage.ranks for stage in plan.pipeline.stages] == [(0,), (1,), (2,)]
    assert [stage.needs for stage in plan.pipeline.stages] == [(), (0,), (1,)]
    assert plan.num_shares == 4


class Scoped(nn.Module):
    def __init__(self, first: int = 0, second: int = 1) -> None:
        super().__init__()
        with lockstep.device(first):
            self.encoder = nn.Sequential(nn.Linear(8, 6), nn.Tanh())
        with lockstep.device(second):
            self.decoder = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
            self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.decoder(self.encoder(x))))
        return logits


def test_scopes_cut_where_they_say() -> None:
    plan = plan_of(lockstep.PipelineStrategy(), Scoped())
    assert stages_of(plan) == {
        "encoder.0": 0,
        "encoder.1": 0,
        "decoder.0": 1,
        "decoder.1": 1,
        "head": 1,
    }


def test_skips_go_straight_to_the_stage_that_needs_them() -> None:
    job = case("unet")
    strategy = lockstep.PipelineStrategy(cuts=["bottom", "rise_half", "paint"], microbatches=2)
    plan = strategy.plan(job.make_model(), batch_size=11, sample=job.inputs.float())  # type: ignore[union-attr]
    assert plan.pipeline is not None
    assert [stage.needs for stage in plan.pipeline.stages] == [(), (0,), (0, 1), (2,)]


def test_balanced_stages_take_about_as_long() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    plan = lockstep.PipelineStrategy(2, microbatches=2).plan(
        model, batch_size=256, sample=torch.randn(128, 256)
    )
    assert 3 <= sum(stage == 0 for stage in stages_of(plan).values()) <= 5


def test_no_cut_comes_between_a_layer_and_what_changes_its_output_in_place() -> None:
    plan = plan_of(lockstep.PipelineStrategy(4, microbatches=2), chain(inplace=True))
    assert stages_of(plan) == {"0": 0, "1": 0, "2": 1, "3": 2, "4": 3}


class Repeated(nn.Module):
    """Calls one layer again and again."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(8, 8), shared, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = torch.relu(self.shared(x))
        output: Tensor = self.last(x)
        return output


class Shifted(nn.Linear):
    """Reads a buffer."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("shift", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_cut_comes_between_calls_that_change_a_buffer(device: str) -> None:
    model = Repeated(nn.BatchNorm1d(8)).to(device)
    stages = stages_of(plan_of(lockstep.PipelineStrategy(3, microbatches=2), model))
    assert {stages[name] for name in stages if name.startswith("shared")} == {1}
    plan = plan_of(lockstep.PipelineStrategy(4, microbatches=2), model)
    assert "the model has 3 layers; no cut may part 'shared' from 'shared@3'" in plan.notes[0]


@pytest.mark.parametrize("shared", [nn.Linear(8, 8), Shifted()], ids=["no buffer", "reads"])
def test_cuts_come_between_calls_that_change_no_buffer(shared: nn.Module) -> None:
    plan = plan_of(lockstep.PipelineStrategy(5, microbatches=2), Repeated(shared))
    assert set(stages_of(plan).values()) == set(range(5))


class Averaging(nn.Linear):
    """Moves an average of its own, by a rate that it has in common with others."""

    average: Tensor
    rate: Tensor

    def __init__(self, rate: Tensor) -> None:
        super().__init__(8, 8)
        self.register_buffer("average", torch.ones(8))
        self.register_buffer("rate", rate)

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(self.rate)
        return super().forward(x) * self.average


def test_cuts_come_between_layers_that_read_a_buffer_and_change_others() -> None:
    rate = torch.tensor(0.9)
    model = nn.Sequential(*(Averaging(rate) for _ in range(3)), nn.Linear(8, 3))
    plan = plan_of(lockstep.PipelineStrategy(3, microbatches=2), model)
    assert set(stages_of(plan).values()) == {0, 1, 2}


def test_cuts_are_others_when_statistics_are_thawed() -> None:
    model = Repeated(nn.BatchNorm1d(8))
    trainer = lockstep.Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        strategy=lockstep.PipelineStrategy(3, microbatches=1),
    )
    data = SAMPLE, torch.randn(16, 3)
    model.shared.eval()
    trainer.fit(data, verbose=0)
    model.train()
    trainer.fit(data, verbose=0)
    stages = stages_of(trainer.plan)
    assert len({stages[name] for name in ("shared", "shared@2", "shared@3")}) == 1


def test_replicas_may_differ_from_stage_to_stage() -> None:
    plan = plan_of(lockstep.HybridStrategy(data=(3, 1), cuts=["2"], microbatches=2))
    assert plan.pipeline is not None
    assert [stage.ranks for stage in plan.pipeline.stages] == [(0, 1, 2), (3,)]
    assert plan.num_shares == 6


def test_data_and_pipe_span_a_mesh() -> None:
    plan = plan_of(lockstep.HybridStrategy(data=2, pipe=2, microbatches=4))
    assert [(axis.name, axis.size) for axis in plan.mesh] == [("data", 2), ("pipe", 2)]
    assert plan.pipeline is not None
    assert [stage.ranks for stage in plan.pipeline.stages] == [(0, 2), (1, 3)]
    assert (plan.num_shares, plan.num_replicas) == (8, 2)


def test_interleaved_ranks_have_two_stages() -> None:
    plan = plan_of(lockstep.PipelineStrategy(2, None, 4, "interleaved"))
    assert plan.pipeline is not None
    assert [stage.ranks for stage in plan.pipeline.stages] == [(0,), (1,), (0,), (1,)]


def test_a_plan_survives_its_json() -> None:
    plan = plan_of(lockstep.HybridStrategy(data=2, pipe=2, microbatches=2))
    assert Plan.from_json(plan.to_json()) == plan


# --- what is said -------------------------------------------------------------------------------


def test_the_table_shows_the_stages() -> None:
    lines = str(plan_of(lockstep.PipelineStrategy(cuts=["2"], microbatches=4))).splitlines()
    assert lines[2].startswith("Microbatches of each batch: 4, schedule 1f1b")
    assert lines[3] == "Parameters: 171"
    assert " ".join(lines[4].split()) == (
        "stage ranks first layer layers parameters forward backward activations sends"
    )
    assert lines[5].split()[:5] == ["0", "0", "0", "2", "72"]
    assert lines[6].split()[:5] == ["1", "1", "2", "3", "99"]
    assert "a step is expected to take" in lines[-1]


def test_layers_whose_statistics_differ_are_named() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    notes = plan_of(lockstep.PipelineStrategy(2, microbatches=2), model).notes
    (note,) = [note for note in notes if "statistics" in note]
    assert note.startswith("1: ")
    assert "microbatches=1" in note
    alone = plan_of(lockstep.PipelineStrategy(2, microbatches=1), model).notes
    assert not [note for note in alone if "statistics" in note]
    model[1].eval()  # as the user leaves it for training, it uses no batch's statistics
    model[1].train = lambda mode=True: model[1]  # type: ignore[method-assign]
    evaluated = plan_of(lockstep.PipelineStrategy(2, microbatches=2), model).notes
    assert not [note for note in evaluated if "statistics" in note]


class Choosy(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(width, 8), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = self.large(x) if x.sum() > 0 else self.small(x)
        return chosen


def test_a_cut_in_what_decides_by_a_value_is_refused_with_the_module_and_the_line() -> None:
    line = inspect.getsourcelines(Choosy.forward)[1] + 1
    told = rf"runs as one piece \(.*test_pipeline_plans\.py:{line}\)"
    with pytest.raises(OptionError, match=f"'1' {told}"):
        plan_of(lockstep.PipelineStrategy(cuts=["1.small"]), nn.Sequential(chain(), Choosy(3)))
    with pytest.raises(OptionError, match=f"the model {told}"):
        plan_of(lockstep.PipelineStrategy(cuts=["small"]), Choosy())
    with pytest.raises(OptionError, match=f"Every stage needs.*the model {told}"):
        plan_of(lockstep.HybridStrategy(data=(1, 2)), Choosy())


def test_what_cannot_be_traced_is_one_layer_and_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Choosy(), nn.Linear(8, 3))
    plan = plan_of(lockstep.PipelineStrategy(3, microbatches=2), model)
    assert stages_of(plan) == {"0": 0, "1": 1, "2": 2}
    assert [note for note in plan.notes if note.startswith("1 runs as one piece: ")]


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_strategy", "message"),
    [
        (lambda: lockstep.PipelineStrategy(cuts=["5"]), "Received: '5'"),
        (lambda: lockstep.PipelineStrategy(cuts=["0"]), "Leave this cut out"),
        (lambda: lockstep.PipelineStrategy(cuts=["4", "2"]), "in the order"),
        (lambda: lockstep.PipelineStrategy(3, ["2"]), "stages=3, and cuts that make 2"),
        (lambda: lockstep.HybridStrategy((2, 2, 2), cuts=["2"]), "3 numbers for the 2 stages"),
        (lambda: lockstep.HybridStrategy((1,) * 6), "6 numbers for the 5 stages of the layers"),
        (lambda: lockstep.PipelineStrategy(2, recompute=[2]), "from 0 to 1"),
        (lambda: lockstep.PipelineStrategy(2, memory_bytes=100), "memory"),
        (lambda: lockstep.HybridStrategy(100, 5), "a plan for 500"),
    ],
)
def test_plans_that_cannot_be_are_refused(
    make_strategy: Callable[[], lockstep.Strategy], message: str
) -> None:
    with pytest.raises(LockstepError, match=message):
        plan_of(make_strategy(), batch_size=256)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Scoped(1, 0), "'decoder.0' on device 0 after 'encoder.1' on device 1"),
        (Scoped(0, 2), "devices 0, 2"),
        (nn.Sequential(Scoped(), nn.Linear(3, 3)), "'1'"),
    ],
    ids=["backwards", "a number left out", "a layer outside"],
)
def test_scopes_that_cannot_be_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plan_of(lockstep.PipelineStrategy(), model)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(8, 8), "1 stage instead of 2, on as many devices: the model has 1 layer."),
        (Choosy(), "the model has 1 layer; the model runs as one piece ("),
    ],
    ids=["one layer", "in one piece"],
)
def test_a_model_of_one_layer_runs_in_one_stage(model: nn.Module, reason: str) -> None:
    plan = plan_of(lockstep.PipelineStrategy(2), model)
    assert plan.num_ranks == plan.num_shares == 1
    assert reason in plan.notes[0]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_model_has_no_more_stages_than_layers(schedule: str) -> None:
    strategy = lockstep.HybridStrategy(data=2, pipe=6, schedule=schedule)
    plan = plan_of(strategy, batch_size=24)
    assert [stage.ranks for stage in plan.pipeline.stages] == [(n, n + 5) for n in range(5)]  # type: ignore[union-attr]
    assert plan.notes[0].startswith("5 stages instead of 6")


def test_a_cut_before_an_in_place_change_is_refused() -> None:
    with pytest.raises(OptionError, match="'1' changes the output of '0'") as caught:
        plan_of(lockstep.PipelineStrategy(cuts=["1"]), chain(inplace=True))
    assert "Cut at '2'" in str(caught.value)


def test_a_cut_between_calls_that_change_a_buffer_is_refused() -> None:
    with pytest.raises(OptionError, match="'shared' and 'shared@3' change") as caught:
        plan_of(lockstep.PipelineStrategy(cuts=["shared@2"]), Repeated(nn.BatchNorm1d(8)))
    assert "Cut at 'last'" in str(caught.value)


def test_more_microbatches_than_samples_are_refused() -> None:
    with pytest.raises(OptionError, match="microbatches=9 with batch_size=8"):
        plan_of(lockstep.PipelineStrategy(2, microbatches=9), batch_size=8)


@pytest.mark.parametrize(
    "arguments",
    [
        {"stages": 0},
        {"cuts": "decoder"},
        {"cuts": [1]},
        {"microbatches": 1.5},
        {"schedule": "2f2b"},
        {"timeout_seconds": 0},
        {"memory_bytes": -1},
        {"recompute": 1},
        {"recompute": ["0"]},
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(arguments))):
        lockstep.PipelineStrategy(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [{"data": 0}, {"data": (1, 0)}, {"data": (1, 2), "pipe": 3}, {"data": "2"}],
)
def test_replicas_that_cannot_be_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="replicas"):
        lockstep.HybridStrategy(**arguments)  # type: ignore[arg-type]


def test_a_plan_needs_a_sample() -> None:
    with pytest.raises(OptionError, match="sample=None"):
        lockstep.PipelineStrategy(2).plan(chain(), batch_size=8)


def test_costs_are_asked_for_the_largest_microbatch() -> None:
    from lockstep.cluster.devices import discover

    assert Pipelined(stages=2, microbatches=3).sample_size(discover(), 13) == 5


@pytest.mark.parametrize(
    ("batch_size", "fix"),
    [
        (1, r"Use fewer replicas, or a larger batch\."),
        (3, r"Use microbatches=1, or a larger batch\."),
        (9, r"Use microbatches=4 or fewer, or a larger batch\."),
    ],
)
def test_an_error_offers_microbatches_that_are_possible(batch_size: int, fix: str) -> None:
    maker = Pipelined(stages=2, microbatches=8, replicas=2)
    with pytest.raises(OptionError, match=fix):
        maker.check_batch_size(batch_size)
