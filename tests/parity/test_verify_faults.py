"""``lockstep.verify`` finds faults that nobody tells it of, and says where they are.

Faults are planted in the processes where they belong: this module is imported by the helpers, a
``FaultyFit`` is shipped to them in place of the Trainer's own task and breaks the worker of one
rank. Each test also asserts that its fault fired.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.parallel.batch_run import StepBatch
from lockstep.parallel.data_parallel.batch_norm import BatchNorms
from lockstep.parallel.loss.function_losses import FunctionAdapter
from lockstep.parallel.loss.share_losses import ShareLoss
from lockstep.parallel.worker import Worker
from lockstep.proof.comparison import Comparison
from lockstep.proof.report import Report
from lockstep.train import trainer
from lockstep.train.fit import fitting
from lockstep.train.fit.fit_task import FitTask
from lockstep.train.optim import update_config
from lockstep.train.optim.updaters import TorchUpdater
from lockstep.train.runtime.runner import Runner
from tests.zoo import IGNORED, Case, TiedGPT, build_seeded, case

Fire = Callable[[], None]
Fault = Callable[[Worker, Fire], None]


# --- planting -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class FaultyFit(FitTask):
    """A FitTask that breaks one rank's worker first; None is all ranks."""

    fault: Fault
    rank: int | None
    marker: Path

    def run(self, worker: Any, control: Any, driver: Any) -> Any:
        if self.rank in (None, control.rank):
            self.fault(worker, self.marker.touch)
        return super().run(worker, control, driver)


@pytest.fixture(autouse=True)
def without_the_ranks_own_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which finds some of these before the first step."""
    monkeypatch.setattr(Runner, "_prepare_proof", lambda *options: None)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "fired"


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, marker: Path) -> Callable[[Fault, int | None], None]:
    def plant(fault: Fault, rank: int | None) -> None:
        faulty = functools.partial(FaultyFit, fault=fault, rank=rank, marker=marker)
        monkeypatch.setattr(fitting, "FitTask", faulty)

    return plant


def verify(one: Case, marker: Path, *, steps: int = 4, **changes: Any) -> Report:
    parts = {
        "model": one.make_model(),
        "loss": one.loss,
        "optimizer": one.optimizer,
        "data": (one.inputs, one.targets),
        "batch_size": one.batch_size,
    }
    report = lockstep.verify(
        lockstep.Job(**{**parts, **changes}), lockstep.MirroredStrategy(devices=2), steps=steps
    )
    assert marker.exists(), "the fault did not fire"
    assert not report.passed
    return report


def first(report: Report) -> Comparison:
    assert report.first_difference is not None
    assert f"first difference: {report.first_difference}" in " ".join(str(report).split())
    return report.first_difference


def cause(report: Report) -> tuple[str, str | None, tuple[int, ...]]:
    assert report.cause is not None
    assert f"Cause: {report.cause.kind}. {report.cause.text}" in " ".join(str(report).split())
    return report.cause.kind, report.cause.module, report.cause.ranks


def places(report: Report, kind: str, step: int) -> set[tuple[str, int | None]]:
    return {
        (one.name, one.rank) for one in report.differences if (one.kind, one.step) == (kind, step)
    }


# --- a tied weight that is two weights on a helper -----------------------------------------------


class ForgetfulGPT(TiedGPT):
    """Loses its tie when it is unpickled in another process."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.home = os.getpid()
        self.marker = marker

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if os.getpid() != self.home:
            copied = self.head.weight.detach().clone()
            self.head.weight = nn.Parameter(copied, requires_grad=False)
            self.marker.touch()


def test_a_tie_that_a_helper_loses(marker: Path) -> None:
    model = build_seeded(lambda: ForgetfulGPT(marker))
    report = verify(case("gpt_tied"), marker, model=model)
    assert (first(report).kind, first(report).name) == ("gradient", "embedding.weight")
    assert first(report).step == 0
    assert ("head.weight", 1) in places(report, "parameter", 0)
    # Rank 0's two names are one weight, wrongly updated; rank 1's second name is another weight.
    assert ("embedding.weight", 0) in places(report, "parameter", 0)


# --- means of means -----------------------------------------------------------------------------


class MeanOfMeans(FunctionAdapter):
    """Counts every share the same, however much it weighs."""

    marker: Path

    def __call__(self, *arguments: Any) -> ShareLoss:
        loss = super().__call__(*arguments)
        if not loss.weight:
            return loss
        self.marker.touch()
        weight = loss.weight
        seeds = tuple(seed / weight for seed in loss.seeds)
        return replace(loss, seeds=seeds, total=loss.total / weight, weight=1.0)


@pytest.mark.parametrize("name", ["mlp", "gpt_tied", "unused_branch"])
def test_a_mean_of_means(name: str, marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "adapt_loss", with_marker(marker))
    report = verify(case(name), marker)
    assert (first(report).kind, first(report).step) == ("loss", 0)
    assert places(report, "gradient", 0)


def with_marker(marker: Path) -> Callable[[Any, Any], MeanOfMeans]:
    def make(loss: Any, loss_weights: Any) -> MeanOfMeans:
        adapter = MeanOfMeans(loss)
        adapter.marker = marker
        return adapter

    return make


class WrongWeight(nn.Module):
    """A mistake: a mean over tokens, of which shares have unequal many, weighted by samples."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker = marker

    def forward(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        self.marker.touch()
        mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        return mean * len(logits), len(logits)


def test_a_pair_with_a_wrong_weight(marker: Path) -> None:
    """It does not add up over samples, so it is taken on the whole batch: as on one device."""
    one, loss = case("gpt_tied"), WrongWeight(marker)
    data = (one.inputs, one.targets)
    job = lockstep.Job(one.make_model(), loss, one.optimizer, data, batch_size=one.batch_size)
    assert lockstep.verify(job, lockstep.MirroredStrategy(devices=2), steps=4).passed
    assert marker.exists()


# --- BatchNorm ----------------------------------------------------------------------------------


def norms_of(worker: Worker) -> dict[str, nn.Module]:
    return {
        name: layer
        for name, layer in worker.model.named_modules()
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
    }


def put_back_first_norm(worker: Worker, fire: Fire) -> None:
    """The running statistics of one layer stay as they were before the second step."""
    train_step, norm = worker.train_step, norms_of(worker)["5"]

    def faulty(batch: StepBatch) -> Any:
        before = {name: value.clone() for name, value in norm.named_buffers()}
        result = train_step(batch)
        if batch.step == 1:
            norm.load_state_dict(before, strict=False)
            fire()
        return result

    vars(worker)["train_step"] = faulty


def test_a_stale_buffer(plant: Callable[[Fault, int | None], None], marker: Path) -> None:
    plant(put_back_first_norm, 1)
    report = verify(case("cnn_batch_norm"), marker)
    assert {one.kind for one in report.differences} == {"buffer"}
    assert places(report, "buffer", 0) == set()
    assert places(report, "buffer", 1) == {
        ("5.running_mean", 1),
        ("5.running_var", 1),
        ("5.num_batches_tracked", 1),
    }
    assert (first(report).rank, first(report).step) == (1, 1)
    assert cause(report) == ("buffers", None, (1,))


def take_own_statistics(worker: Worker, fire: Fire) -> None:
    """A running mean that saw the rank's own share only."""
    train_step, norm = worker.train_step, norms_of(worker)["1"]
    seen: list[Tensor] = []
    norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))

    def faulty(*arguments: Any) -> Any:
        before = norm.get_buffer("running_mean").clone()
        result = train_step(*arguments)
        mean = seen.pop().mean((0, 2, 3))
        norm.get_buffer("running_mean").copy_(0.9 * before + 0.1 * mean)
        fire()
        return result

    vars(worker)["train_step"] = faulty


def test_a_buffer_of_the_own_share(
    plant: Callable[[Fault, int | None], None], marker: Path
) -> None:
    plant(take_own_statistics, 1)
    report = verify(case("cnn_batch_norm"), marker)
    assert places(report, "buffer", 0) == {("1.running_mean", 1)}
    assert {one.kind for one in report.differences} == {"buffer"}


def forget_norms(worker: Worker, fire: Fire) -> None:
    """Every share is normalised by itself."""
    passes: Any = worker.passes
    assert passes._norms
    passes._norms = BatchNorms(nn.Identity())
    fire()


def test_normalisation_by_share(plant: Callable[[Fault, int | None], None], marker: Path) -> None:
    plant(forget_norms, None)
    report = verify(case("cnn_batch_norm"), marker)
    assert (first(report).kind, first(report).step) == ("loss", 0)
    assert {rank for _, rank in places(report, "buffer", 0)} == {0, 1}
    assert cause(report) == ("batch statistics", "1", ())


# --- updates ------------------------------------------------------------------------------------


class StepsUnused(TorchUpdater):
    """Gives what was not used a gradient of zero, so that it decays and keeps its momentum."""

    marker: Path

    def step(self) -> None:
        for bound in self._pieces:
            if bound.tensor.grad is None:
                bound.tensor.grad = torch.zeros_like(bound.tensor)
                self.marker.touch()
        super().step()


def test_a_step_on_unused_parameters(marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*arguments: Any, **options: Any) -> StepsUnused:
        updater = StepsUnused(*arguments, **options)
        updater.marker = marker
        return updater

    monkeypatch.setattr(update_config, "TorchUpdater", make)
    report = verify(case("unused_branch"), marker)
    assert places(report, "parameter", 0) == {
        (f"never.{kind}", rank) for kind in ("weight", "bias") for rank in (0, 1)
    }
    # The branch is used in the first batch, and by no sample of the second.
    assert {name for name, _ in places(report, "parameter", 1)} > {
        "flagged.layers.0.weight",
        "flagged.layers.2.bias",
    }
    assert first(report).kind == "slot"
    assert first(report).name.startswith("never.")
    assert places(report, "gradient", 0) == set()


def skip_an_update(worker: Worker, fire: Fire) -> None:
    """A rank forgets its slice of the third update."""
    updater = worker.updater
    assert updater is not None
    step, calls = updater.step, iter(range(100))

    def faulty() -> None:
        if next(calls) == 2:
            fire()
        else:
            step()

    vars(updater)["step"] = faulty


def test_a_slice_that_is_not_updated(
    plant: Callable[[Fault, int | None], None], marker: Path
) -> None:
    plant(skip_an_update, 1)
    report = verify(case("mlp"), marker)
    assert first(report).step == 2
    assert first(report).kind == "slot"
    assert places(report, "gradient", 2) == set()
    names = {name for name, _ in places(report, "parameter", 2)}
    assert "4.bias" in names  # rank 1 owns the second half
    assert "0.bias" not in names
    assert {rank for _, rank in places(report, "parameter", 2)} == {0, 1}  # one copy for both
    assert cause(report) == ("update", None, ())


# --- random streams -----------------------------------------------------------------------------


def take_another_seed(worker: Worker, fire: Fire) -> None:
    worker.passes._seed += 1
    fire()


def test_dropout_of_another_seed(plant: Callable[[Fault, int | None], None], marker: Path) -> None:
    plant(take_another_seed, 1)
    report = verify(case("cnn_dropout"), marker)
    assert (first(report).kind, first(report).step) == ("loss", 0)
    kind, module, ranks = cause(report)
    assert (kind, ranks) == ("random numbers", (1,))
    assert module is not None


def repeat_first_streams(worker: Worker, fire: Fire) -> None:
    """Every step drops what the first has dropped."""
    train_step = worker.train_step

    def faulty(batch: StepBatch) -> Any:
        fire()
        return train_step(replace(batch, step=0))

    vars(worker)["train_step"] = faulty


def test_dropout_that_never_changes(
    plant: Callable[[Fault, int | None], None], marker: Path
) -> None:
    plant(repeat_first_streams, None)
    report = verify(case("cnn_dropout"), marker)
    assert (first(report).kind, first(report).step) == ("loss", 1)


# --- gradients ----------------------------------------------------------------------------------


def break_gradient(
    worker: Worker, fire: Fire, breaks: Callable[[Tensor], Tensor | None], name: str, step: int
) -> None:
    names = [key for key, value in worker.model.named_parameters() if value.requires_grad]
    write, calls = worker.exchange.write, iter(range(100))

    def faulty(group: int, row: int, gradients: Any) -> None:
        if next(calls) == step:
            index = names.index(name)
            gradients = list(gradients)
            gradients[index] = breaks(gradients[index])
            fire()
        write(group, row, gradients)

    vars(worker.exchange)["write"] = faulty


def drop_gradient(worker: Worker, fire: Fire) -> None:
    break_gradient(worker, fire, lambda gradient: None, "2.weight", 2)


def test_a_gradient_that_a_share_does_not_hand_in(
    plant: Callable[[Fault, int | None], None], marker: Path
) -> None:
    plant(drop_gradient, 1)
    report = verify(case("mlp"), marker)
    assert (first(report).kind, first(report).name) == ("gradient", "2.weight")
    assert first(report).step == 2
    assert places(report, "gradient", 2) == {("2.weight", None)}
    assert places(report, "parameter", 2) == {("2.weight", 0), ("2.weight", 1)}
    assert cause(report) == ("sum of gradients", None, ())


def bend_gradient(worker: Worker, fire: Fire) -> None:
    """A fault of the twelfth digit of one element."""

    def bend(gradient: Tensor) -> Tensor:
        bent = gradient.clone()
        bent.view(-1)[3] += 1e-10
        return bent

    break_gradient(worker, fire, bend, "4.weight", 1)


def test_a_fault_of_one_element(plant: Callable[[Fault, int | None], None], marker: Path) -> None:
    plant(bend_gradient, 1)
    report = verify(case("mlp"), marker)
    assert (first(report).kind, first(report).name) == ("gradient", "4.weight")
    assert first(report).step == 1
    assert 1e-12 < first(report).relative < 1e-9


def spoil_gradient(worker: Worker, fire: Fire) -> None:
    break_gradient(worker, fire, lambda gradient: gradient * torch.nan, "0.bias", 1)


def test_numbers_that_are_none(plant: Callable[[Fault, int | None], None], marker: Path) -> None:
    """Lockstep stops at a gradient of NaN; where the reference does not, that is a difference."""
    plant(spoil_gradient, 1)
    report = verify(case("mlp"), marker)
    assert (first(report).kind, first(report).name) == ("gradient", "0.bias")
    assert first(report).step == 1
    assert "not finite" in first(report).remark


def drop_key_bias(worker: Worker, fire: Fire) -> None:
    name = "blocks.0.attention.query_key_value.bias"
    break_gradient(worker, fire, torch.zeros_like, name, 1)


def test_a_fault_beside_rounding(plant: Callable[[Fault, int | None], None], marker: Path) -> None:
    """Of this bias a third is undetermined under Adam, which must not excuse the rest."""
    plant(drop_key_bias, 1)
    optimizer = functools.partial(torch.optim.Adam, lr=1e-2)
    report = verify(case("gpt_tied"), marker, optimizer=optimizer)
    assert any("query_key_value.bias (16 of 48" in text for text in report.undetermined)
    assert first(report).name == "blocks.0.attention.query_key_value.bias"
    assert (first(report).kind, first(report).step) == ("gradient", 1)
