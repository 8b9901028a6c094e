"""Corrections of the planner's predictions by what runs have taken."""

from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep.cli.main import main
from lockstep.cluster.topology import Cluster, Device, Host
from lockstep.plan.cost.breakdown import Memory, PlanCost, StepTime
from lockstep.plan.cost.corrections import RunCost, corrected, learned
from lockstep.train.runtime.model_profile import RUNS, known_runs, remember_run

pytestmark = pytest.mark.thorough

MEGABYTE = 1 << 20


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")


def run_of(predicted: float, family: str = "replicas") -> RunCost:
    """A machine that takes 1.3 times as long and 2 ms more, and 30 MB more."""
    return RunCost(
        family=family,
        seconds=(predicted, 1.3 * predicted + 2e-3),
        num_bytes=(400 * MEGABYTE, 430 * MEGABYTE),
    )


def cost_of(seconds: float) -> PlanCost:
    memory = Memory(base=200 * MEGABYTE)
    return PlanCost(step=StepTime(forward=seconds), memory=(memory, memory))


def with_runs(*runs: RunCost) -> Cluster:
    device = Device(kind="cpu", index=0, memory_bytes=0)
    host = Host(name="host", num_cores=1, devices=(device,), corrections=learned(runs))
    return Cluster(hosts=(host,))


def test_many_runs_teach_what_a_machine_does() -> None:
    cluster = with_runs(*(run_of(1e-3 * 2**power) for power in range(9)))
    held_out = 0.05
    after = corrected(cost_of(held_out), cluster, "replicas")
    assert after.step.total == pytest.approx(1.3 * held_out + 2e-3, rel=0.06)
    assert after.all_bytes == pytest.approx(427 * MEGABYTE, rel=1e-3)
    assert after.as_modelled == (held_out, 400 * MEGABYTE)
    assert corrected(cost_of(held_out), cluster, "stages") == cost_of(held_out)


def test_one_run_is_believed_by_half() -> None:
    before, run = cost_of(0.1), run_of(0.1)
    after = corrected(before, with_runs(run), "replicas")
    assert 0.1 < after.step.total < run.seconds[1]
    assert after.all_bytes == 415 * MEGABYTE


def test_right_predictions_stay() -> None:
    right = [
        RunCost(family="stages", seconds=(one, one), num_bytes=(MEGABYTE, MEGABYTE))
        for one in (0.01, 0.2)
    ]
    (found,) = learned(right)
    assert found.factor == pytest.approx(1)
    assert found.fixed == pytest.approx(0, abs=1e-9)
    assert found.num_bytes == 0


def test_runs_are_remembered_and_a_broken_file_is_written_anew() -> None:
    remember_run(run_of(0.1))
    assert known_runs(with_runs().hosts[0])[-1] == run_of(0.1)
    RUNS.path.write_text("{")
    with pytest.warns(UserWarning, match="written anew"):
        assert known_runs(with_runs().hosts[0]) == []
    with pytest.warns(UserWarning, match="written anew"):
        remember_run(run_of(0.2))
    assert known_runs(with_runs().hosts[0]) == [run_of(0.2)]


JOB = """
import torch
from torch import nn

import lockstep


def make_job():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    inputs = torch.randn(64, 8)
    data = inputs, inputs.sin()
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    return lockstep.Job(model, loss=nn.MSELoss(), optimizer=optimizer, data=data, batch_size=8)
"""


def leave_record(folder: Path, strategy: lockstep.Strategy) -> None:
    """Train a net of the job's kind, and keep the run's record."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    inputs = torch.randn(64, 8)
    trainer = lockstep.Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=strategy,
    )
    trainer.fit((inputs, inputs.sin()), batch_size=8, epochs=3, record=folder, verbose=0)


def test_runs_of_a_strategy_correct_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, job = tmp_path / "run", tmp_path / "job.py"
    leave_record(run, lockstep.SingleDeviceStrategy())
    job.write_text(JOB)
    target = ["plan", f"{job}:make_job", "--devices", "1"]
    assert main([*target, "--save-graph", f"{tmp_path}/graph.json"]) == 0
    capsys.readouterr()
    same = ["plan", "--graph", f"{tmp_path}/graph.json", "--devices", "1", "--batch-size", "8"]
    assert main(same) == 0
    before = capsys.readouterr().out
    assert main([*same, "--run", f"{run}"]) == 0
    assert capsys.readouterr().out != before


def test_automatic_runs_are_remembered(tmp_path: Path) -> None:
    leave_record(tmp_path, lockstep.AutoStrategy("memory", devices=1))
    (run,) = known_runs(with_runs().hosts[0])
    assert run.family == "one device"
    assert min(*run.seconds, *run.num_bytes) > 0
