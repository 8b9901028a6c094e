"""``lockstep.verify`` and ``lockstep.Job``: what is trained, what is left alone, what is said."""

import copy
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import Dataset

import lockstep
from lockstep.data.order import stream_states
from lockstep.errors import LossError, ModelError, NonFiniteLossError, OptionError
from lockstep.proof.job import copy_job
from lockstep.proof.report import Report
from lockstep.train.fit import fitting
from lockstep.train.fit.fit_task import FitTask
from tests.thorough import core_of
from tests.zoo import Case, build_seeded, case

# One process, but the batch is divided all the same.
TWO_SHARES = lockstep.MirroredStrategy(devices=1, num_shares=2)


def job_of(one: Case, **changes: Any) -> lockstep.Job:
    parts: dict[str, Any] = {
        "model": one.make_model(),
        "loss": one.loss,
        "optimizer": one.optimizer,
        "data": (one.inputs, one.targets),
        "batch_size": one.batch_size,
    }
    return lockstep.Job(**{**parts, **changes})


def kinds(report: Report) -> dict[str, int]:
    return {summary.kind: summary.count for summary in report.kinds}


# --- what is compared ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    core_of(
        ["mlp", "cnn_batch_norm", "cnn_dropout", "gpt_tied", "lstm"], ["cnn_dropout", "gpt_tied"]
    ),
)
@pytest.mark.parametrize(
    "strategy",
    [lockstep.SingleDeviceStrategy(), TWO_SHARES, lockstep.MirroredStrategy(devices=2)],
    ids=["single", "two shares", "two devices"],
)
def test_it_passes_where_all_is_well(name: str, strategy: Any) -> None:
    report = lockstep.verify(job_of(case(name)), strategy)
    assert report.passed, str(report)
    assert report.undetermined == ()
    assert report.notes == ()
    assert kinds(report)["loss"] == 5


def test_one_device_has_the_bits_of_the_plain_loop() -> None:
    report = lockstep.verify(job_of(case("cnn_dropout")), lockstep.SingleDeviceStrategy())
    assert [summary.worst.relative for summary in report.kinds] == [0.0] * 4


@pytest.mark.parametrize("steps", [1, 5, 7, 10, 11])
def test_it_makes_as_many_steps_as_asked_for(steps: int) -> None:
    """An epoch has five."""
    report = lockstep.verify(job_of(case("mlp")), TWO_SHARES, steps=steps)
    assert report.passed, str(report)
    assert kinds(report)["loss"] == steps


def test_steps_that_are_not_made_are_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(**options: Any) -> FitTask:
        return FitTask(**{**options, "epochs": 1})

    monkeypatch.setattr(fitting, "FitTask", make)
    report = lockstep.verify(job_of(case("mlp")), TWO_SHARES, steps=7)
    assert not report.passed
    assert "5 steps were made instead of 7" in str(report)


def test_it_counts_every_rank() -> None:
    one, strategy = case("cnn_batch_norm"), lockstep.MirroredStrategy(devices=2)
    found = kinds(lockstep.verify(job_of(one), strategy, steps=1))
    model = one.make_model()
    assert found["parameter"] == 2 * len(list(model.parameters()))
    assert found["buffer"] == 2 * len(list(model.buffers()))
    assert found["gradient"] == len(list(model.parameters()))


def test_data_that_is_augmented_at_random_is_the_same_on_both_sides() -> None:
    """Dropout goes on in the stream that reading the share has left."""
    model = build_seeded(lambda: nn.Sequential(nn.Dropout(0.3), nn.Linear(20, 5)))
    report = lockstep.verify(job_of(case("mlp"), model=model, data=Noisy()), TWO_SHARES)
    assert report.passed, str(report)


class Noisy(Dataset[tuple[Tensor, int]]):
    """Draws from all three random streams for every item."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.randn(20) + np.random.rand() + random.random()
        return noise + index / 10, index % 5


def test_sample_weight_and_batches_of_no_weight() -> None:
    one = case("mlp")
    weight = torch.linspace(0, 2, len(one.targets), dtype=torch.float64)
    weight[one.batch_size : 2 * one.batch_size] = 0
    data = (one.inputs, one.targets, weight)
    report = lockstep.verify(job_of(one, data=data), TWO_SHARES)
    assert report.passed, str(report)
    assert kinds(report)["gradient"] == 4 * 6  # of four batches


def test_nothing_but_batches_of_no_weight_is_noted() -> None:
    one = case("mlp")
    data = (one.inputs, torch.full_like(one.targets, -100))
    report = lockstep.verify(job_of(one, data=data), TWO_SHARES)
    assert report.passed
    assert "nothing was updated" in report.notes[0]


def test_modules_in_evaluation_mode_stay_there() -> None:
    one = case("cnn_batch_norm")
    model = one.make_model()
    model[1].eval()  # type: ignore[index]  # a Sequential
    assert lockstep.verify(job_of(one, model=model), TWO_SHARES).passed
    model.eval()
    report = lockstep.verify(job_of(one, model=model), TWO_SHARES)
    assert report.passed, str(report)
    assert not model.training


class WithExtraState(nn.Sequential):
    """State that is no tensor, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(20, 5))
        self.register_buffer("mask", torch.ones(5), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 1}


def test_state_that_is_no_tensor_is_left_out() -> None:
    report = lockstep.verify(job_of(case("mlp"), model=WithExtraState()), TWO_SHARES)
    assert report.passed, str(report)


def test_class_weights_may_have_any_precision() -> None:
    weight = torch.tensor([1.0, 2.0, 0.5, 0.0, 1.0])
    for loss in (nn.CrossEntropyLoss(weight=weight), partial(F.cross_entropy, weight=weight)):
        report = lockstep.verify(job_of(case("mlp"), loss=loss), TWO_SHARES)
        assert report.passed, str(report)


# --- what is undetermined -----------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [optim.Adam, optim.RMSprop, optim.Rprop])
def test_gradients_that_are_only_rounding_are_named_and_spoil_nothing(optimizer: Any) -> None:
    job = job_of(case("cnn_batch_norm"), optimizer=partial(optimizer, lr=1e-2))
    report = lockstep.verify(job, TWO_SHARES)
    assert report.passed, str(report)
    assert {text.split()[0] for text in report.undetermined} == {"0.bias", "4.bias", "9.bias"}
    assert "Undetermined: 0.bias" in str(report)


def test_a_part_of_a_parameter_may_be_undetermined() -> None:
    job = job_of(case("gpt_tied"), optimizer=partial(optim.AdamW, lr=1e-2))
    report = lockstep.verify(job, TWO_SHARES)
    assert report.passed, str(report)
    assert set(report.undetermined) == {
        f"blocks.{block}.attention.query_key_value.bias (16 of 48 elements)" for block in (0, 1)
    }


# --- what cannot be exact -----------------------------------------------------------------------


def test_a_loss_that_compares_samples_is_exact() -> None:
    def contrast(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output @ output.t(), torch.arange(len(output)))

    report = lockstep.verify(job_of(case("mlp"), loss=contrast), TWO_SHARES)
    assert report.passed, str(report)


class Shuffles(nn.Module):
    """Draws numbers that belong to no sample."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 5)
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * (1 + self.source())
        return y


@pytest.mark.parametrize(
    ("source", "note"),
    [
        (lambda: torch.rand(3).sum(), "aten.rand.default draws numbers of shape (3,)"),
        (random.random, "Python's or NumPy's random numbers"),
        (lambda: np.random.rand(), "Python's or NumPy's random numbers"),
    ],
)
def test_random_numbers_that_belong_to_no_sample_are_noted(source: Any, note: str) -> None:
    model = build_seeded(lambda: Shuffles(source))
    report = lockstep.verify(job_of(case("mlp"), model=model), TWO_SHARES)
    assert not report.passed
    assert note in report.notes[0]
    assert lockstep.verify(job_of(case("mlp"), model=model), lockstep.SingleDeviceStrategy()).passed


# --- what is left alone -------------------------------------------------------------------------


def test_model_optimizer_and_random_states_are_left_alone() -> None:
    one = case("cnn_dropout")
    model = one.make_model()
    optimizer = optim.Adam(model.parameters())
    model(torch.ones(2, 1, 8, 8)).sum().backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    states = stream_states()

    report = lockstep.verify(job_of(one, model=model, optimizer=optimizer), TWO_SHARES)

    assert report.passed, str(report)
    after = model.state_dict(), optimizer.state_dict()["state"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    found = stream_states()
    assert torch.equal(found.cpu, states.cpu)
    assert np.array_equal(found.numpy[1], states.numpy[1])
    assert found.python == states.python


class Counting(optim.SGD):
    """An optimizer with an attribute that torch's own copying drops."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.factor = 0.5

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * self.factor
        return super().step(closure)


def test_a_copy_is_whole_and_apart() -> None:
    model = build_seeded(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = Counting(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    job = lockstep.Job(model, nn.MSELoss(), optimizer, (torch.ones(2, 2), torch.ones(2, 2)), 2)

    copied = copy_job(job)

    assert isinstance(copied.optimizer, Counting)
    assert copied.optimizer.factor == 0.5
    held = copied.optimizer.param_groups[0]["params"]
    assert [id(one) for one in held] == [id(one) for one in copied.model.parameters()]
    momentum = copied.optimizer.state[held[0]]["momentum_buffer"]
    assert momentum.dtype == torch.float64
    first = next(model.parameters())
    assert torch.equal(momentum.float(), optimizer.state[first]["momentum_buffer"])


def test_a_loss_that_holds_the_model_holds_its_copy() -> None:
    class Penalised(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            penalty = sum(value.pow(2).sum() for value in self.model.parameters())
            return F.cross_entropy(output, target) + 1e-2 * penalty

    one = case("mlp")
    model = one.make_model()
    job = job_of(one, model=model, loss=Penalised(model))
    copied = copy_job(job)
    assert copied.loss.model is copied.model
    assert copied.model is not model
    report = lockstep.verify(job, TWO_SHARES)
    assert report.passed, str(report)
    assert all(value.grad is None for value in model.parameters())


# --- errors -------------------------------------------------------------------------------------


def test_a_job_says_everything_that_is_wrong_with_it() -> None:
    with pytest.raises(OptionError, match="4 problems") as caught:
        lockstep.Job(nn.Linear, 3, None, None, 0)  # type: ignore[arg-type]
    for part in ("model", "loss", "optimizer", "batch_size"):
        assert f"A Job's {part}" in str(caught.value)


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="2 problems"):
        lockstep.verify(job_of(case("mlp")), TWO_SHARES, steps=0, seed=-1)


def test_a_model_that_cannot_be_copied() -> None:
    model = nn.Linear(20, 5)
    model.cached = model.weight * 2  # as old weight norms do
    with pytest.raises(ModelError, match=r"copy\.deepcopy fails"):
        lockstep.verify(job_of(case("mlp"), model=model), TWO_SHARES)


class SinglePrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(torch.zeros(x.shape, dtype=torch.float32))
        return y


def test_a_model_that_computes_in_single_precision_only() -> None:
    with pytest.raises(ModelError, match=r"x\.new_zeros"):
        lockstep.verify(job_of(case("mlp"), model=SinglePrecision()), TWO_SHARES)


def test_an_optimizer_that_is_none() -> None:
    with pytest.raises(OptionError, match="returns a int"):
        lockstep.verify(job_of(case("mlp"), optimizer=lambda parameters: 3), TWO_SHARES)


def test_what_the_trainer_refuses_is_refused() -> None:
    with pytest.raises(LossError):
        lockstep.verify(job_of(case("mlp"), loss=lambda output, target: 3), TWO_SHARES)


def test_a_loss_that_is_not_finite_on_either_side_is_an_error_of_the_job() -> None:
    one = case("mlp")
    job = job_of(one, optimizer=partial(optim.SGD, lr=1e200))
    with pytest.raises(NonFiniteLossError, match="step"):
        lockstep.verify(job, TWO_SHARES)


# --- the name -----------------------------------------------------------------------------------

NAMES = """
import lockstep
assert callable(lockstep.verify), lockstep.verify
lockstep.Job
import lockstep.cli.verify
import lockstep.proof.job, lockstep.proof.verification
assert callable(lockstep.verify), lockstep.verify
from lockstep import verify
assert callable(verify)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "first",
    ["", "import lockstep.proof.report", "import lockstep.cli.verify"],
)
def test_verify_is_a_function_whatever_was_imported_before(first: str) -> None:
    root = Path(lockstep.__file__).parents[1]
    subprocess.run([sys.executable, "-c", f"{first}\n{NAMES}"], check=True, cwd=root)


# --- parameters of other kinds ------------------------------------------------------------------


class Rotation(nn.Module):
    """A complex parameter, one without elements, and one unlike both."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_real(x.to(self.phases.dtype) @ self.phases)
        return turned.pow(2).sum(-1) + self.bias + self.empty.sum(0)


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Adam])
@pytest.mark.parametrize("devices", [1, 2])
def test_complex_parameters_and_those_without_elements(optimizer: Any, devices: int) -> None:
    torch.manual_seed(0)
    options = {"momentum": 0.9} if optimizer is optim.SGD else {}
    x, y = torch.randn(26, 4), torch.randint(0, 3, (26,))
    job = lockstep.Job(
        Rotation(), nn.CrossEntropyLoss(), partial(optimizer, lr=0.01, **options), (x, y), 13
    )
    report = lockstep.verify(job, lockstep.MirroredStrategy(devices, num_shares=2))
    assert report.passed, str(report)


@pytest.mark.parametrize("wrong", [lambda: None, nn.Linear(4, 3)], ids=["function", "model"])
def test_what_is_no_job_is_told_at_once(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"verify needs a lockstep.Job.*make_job\(\)"):
        lockstep.verify(wrong, TWO_SHARES)


@pytest.mark.parametrize("wrong", ["mirrored", lockstep.MirroredStrategy])
def test_what_is_no_strategy_is_told_at_once(wrong: Any) -> None:
    with pytest.raises(OptionError, match="`strategy` must be a strategy"):
        lockstep.verify(job_of(case("mlp")), wrong)
