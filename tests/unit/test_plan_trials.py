"""Plans that are tried before one is chosen: ``AutoStrategy(trials=...)``."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.plan.makers.data_parallel import Maker, PlanTrials
from lockstep.plan.search import tried as trying
from lockstep.plan.search.candidates import Problem
from lockstep.plan.search.ranking import Ranked, best_plans
from lockstep.plan.search.tried import tried
from lockstep.train.fault_tolerance.run_record import VARIABLE, read_record
from lockstep.train.trials import plan_trials, trial_process
from tests.thorough import core_of
from tests.unit.test_planner import cores, even_graph

LONG = 10**9


def ranked() -> list[Ranked]:
    """Plans for two cores, the best first."""
    return best_plans(Problem(graph=even_graph(), cluster=cores(2), batch_size=8))


def trials(
    times: Callable[[int, str], float | str],
    num_steps: int | None = LONG,
    free_bytes: int | None = None,
) -> tuple[PlanTrials, list[str]]:
    """Trials whose times depend on the place and the name of a plan, and the names asked for."""
    asked: list[str] = []

    def found(plans: Sequence[tuple[str, Maker]]) -> list[float | str]:
        asked.extend(name for name, _ in plans)
        return [times(place, name) for place, (name, _) in enumerate(plans)]

    return PlanTrials(times=found, num_steps=num_steps, free_bytes=free_bytes), asked


@pytest.fixture(autouse=True)
def anything_may_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying, "_MOST_ERROR", 1e9)


def test_the_fastest_in_a_trial_is_first() -> None:
    rows = ranked()
    tries, asked = trials(lambda place, name: 3.0 - place)
    after = tried(rows, tries, None)
    assert asked[0] == rows[0].candidate.name
    assert len(asked) == 3
    families = [row.candidate.family for row in rows if row.candidate.name in asked]
    assert len({*families}) == 3
    assert [row.candidate.name for row in after[:3]] == asked[::-1]
    assert [row.tried for row in after[:4]] == [1.0, 2.0, 3.0, None]
    assert (after[0].reason, after[1].reason) == ("", "a step of its trial took 2,000 ms")
    assert {row.candidate.name for row in after} == {row.candidate.name for row in rows}
    assert all(row.reason for row in after[1:])


def test_only_plans_that_may_be_faster_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying, "_MOST_ERROR", 1.0)
    rows = ranked()
    tries, asked = trials(lambda place, name: 1.0)
    assert tried(rows, tries, 5) == rows
    assert not asked


@pytest.mark.parametrize(
    ("number", "num_steps", "expected"),
    [(None, 10, 0), (None, LONG, 3), (None, None, 3), (0, LONG, 0), (1, LONG, 0), (2, 1, 2)],
)
def test_how_many_are_tried(number: int | None, num_steps: int | None, expected: int) -> None:
    tries, asked = trials(lambda place, name: 1.0 + place, num_steps)
    tried(ranked(), tries, number)
    assert len(asked) == expected


def test_nothing_is_tried_without_memory_for_a_copy() -> None:
    rows = ranked()
    tries, asked = trials(lambda place, name: 1.0, free_bytes=2**20)
    assert tried(rows, tries, 3) == rows
    assert not asked


def test_a_trial_that_fails_says_why() -> None:
    rows = ranked()
    tries, asked = trials(lambda place, name: 1.0 if place else "no room")
    after = tried(rows, tries, 2)
    assert after[0].candidate.name == asked[1]
    reasons = {row.candidate.name: row.reason for row in after}
    assert reasons[asked[0]] == "its trial failed: no room"
    best, *others = tried(rows, trials(lambda place, name: "no room")[0], 3)
    assert (best.candidate, best.failure) == (rows[0].candidate, "no room")
    assert others == rows[1:]


def test_only_plans_that_can_be_used_are_tried() -> None:
    rows = ranked()
    first, refused = rows[0].candidate, rows[1].candidate

    def attempt(maker: Maker) -> None:
        if maker is refused.maker:
            raise lockstep.LockstepError("no.", received="it", fix="Leave it.")

    tries, asked = trials(lambda place, name: 1.0 + place)
    after = tried(rows, tries, None, attempt)
    assert asked[0] == first.name
    assert refused.name not in asked
    assert after[-1].candidate is refused
    assert after[-1].is_refused
    assert after[-1].reason.startswith("cannot be used: no.")


def test_a_trial_makes_no_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trial_process, "_in_trial", True)
    trainer = trained(lockstep.AutoStrategy(devices=2, trials=2))
    assert not any("trial" in note for note in trainer.plan.notes)


class Stopping(lockstep.Callback):
    """Stops in the second epoch."""

    num_steps = 0

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.num_steps += 1
        if self.num_steps == 6:
            raise KeyboardInterrupt


KINDS = ["mirrored, 2 devices", "2 stages", "sharded parameters", "layers divided"]


@pytest.mark.parametrize("kind", core_of(KINDS, KINDS[:1], []))
def test_a_training_is_resumed_by_its_plan(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions may have changed meanwhile: by what runs on this machine have taken."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    inputs = torch.randn(36, 8)

    def fit(fastest: str, **options: Any) -> lockstep.Trainer:
        def times(self: object, plans: Sequence[tuple[str, Maker]]) -> list[float]:
            return [1.0 if name.startswith(fastest) else 2.0 for name, _ in plans]

        monkeypatch.setattr(plan_trials._Training, "times", times)
        torch.manual_seed(0)
        model = Plain()
        trainer = lockstep.Trainer(
            model,
            loss="mse",
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            strategy=lockstep.AutoStrategy(devices=2, trials=9),
            precision="fp64",
            **options,
        )
        checkpoint = lockstep.Checkpoint(tmp_path / "run", every="2 steps")
        with suppress(KeyboardInterrupt):
            data = inputs, inputs.sin()
            trainer.fit(data, batch_size=9, epochs=3, verbose=0, checkpoint=checkpoint)
        return trainer

    monkeypatch.setattr(trying, "_to_try", every_kind)
    begun = fit(kind, callbacks=[Stopping()]).plan
    assert any(note.startswith("Chosen of") and kind in note for note in begun.notes)
    resumed = fit("one device").plan
    assert trying._decision(resumed) == trying._decision(begun)
    assert not any("trial" in note for note in resumed.notes)


def every_kind(rows: Sequence[Ranked], *options: object) -> tuple[list[Ranked], list[Ranked]]:
    """All plans are tried."""
    return [*rows], [*rows]


def test_a_number_of_trials() -> None:
    with pytest.raises(lockstep.LockstepError, match="`trials` must be an integer of at least 0"):
        lockstep.AutoStrategy(trials=-1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Dropout(), nn.Linear(64, 8))
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        sys.stdout.write(f"in {os.getpid()}\n")
        out: torch.Tensor = self.layers(x)
        return out


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def trained(strategy: lockstep.Strategy | None) -> lockstep.Trainer:
    torch.manual_seed(0)
    model = Net()
    inputs = torch.randn(36, 8)
    trainer = lockstep.Trainer(
        model,
        loss="mse",
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        strategy=strategy,
        precision="fp64",
    )
    trainer.fit((inputs, inputs.sin()), batch_size=8, epochs=1, verbose=0)
    return trainer


def test_a_training_after_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights, buffers and random numbers are those without trials; a second one tries nothing.

    Trials print nothing, and leave nothing in the record.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run"))
    trainer = trained(lockstep.AutoStrategy(devices=2, trials=2))
    chosen = [note for note in trainer.plan.notes if "a step of its trial took" in note]
    assert len(chosen) == 2
    times = plan_trials.TIMES.read()
    assert times is not None
    assert len(times) == 2
    assert [event.what for event in read_record(tmp_path / "run")].count("begin") == 1
    printing = {line for line in capfd.readouterr().out.splitlines() if line.startswith("in ")}
    assert 1 <= len(printing) <= trainer.plan.num_ranks
    monkeypatch.delenv(VARIABLE)
    before = trained(None)
    for name, value in before.model.state_dict().items():
        other = trainer.model.state_dict()[name]
        assert (other - value).norm() <= 1e-12 * value.norm(), name

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(plan_trials, "Trials", refuse)
    assert (
        trained(lockstep.AutoStrategy(devices=2, trials=2)).plan.strategy == trainer.plan.strategy
    )
