"""The parity table of losses that are no means over samples, in fp64."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

import lockstep
from lockstep.errors import LossError
from tests.thorough import core_of
from tests.unit.test_loss_trial import WHOLE
from tests.whole_batch_zoo import JOBS, KNOWN, SGD, rmse
from tests.whole_batch_zoo import job as whole_batch_job

pytestmark = pytest.mark.thorough

STRATEGIES = {
    "single": lockstep.SingleDeviceStrategy(),
    "mirrored-2": lockstep.MirroredStrategy(2),
    "mirrored-3": lockstep.MirroredStrategy(3),
    "mirrored-2-shares-5": lockstep.MirroredStrategy(2, num_shares=5),
    "mirrored-2-gloo": lockstep.MirroredStrategy(2, engine="gloo"),
    "pipeline-2": lockstep.PipelineStrategy(2, microbatches=3),
    "pipeline-2-zb-h1": lockstep.PipelineStrategy(2, microbatches=4, schedule="zb-h1"),
    "data-2-pipe-2": lockstep.HybridStrategy(data=2, pipe=2, microbatches=2),
    "data-2-pipe-2-gloo": lockstep.HybridStrategy(2, 2, microbatches=2, engine="gloo"),
}
CELLS = [(job, strategy) for job in JOBS for strategy in STRATEGIES]


@pytest.mark.parametrize(
    ("job", "strategy"),
    core_of(CELLS, lambda _, strategy: strategy == "mirrored-2"),
)
def test_training_equals_one_device(job: str, strategy: str) -> None:
    report = lockstep.verify(JOBS[job](), STRATEGIES[strategy], steps=5)
    assert report.passed, str(report)
    assert not report.undetermined
    assert not report.notes


def trainer_of(job: lockstep.Job, strategy: lockstep.Strategy) -> lockstep.Trainer:
    model = copy.deepcopy(job.model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return lockstep.Trainer(
        model, loss=job.loss, optimizer=optimizer, strategy=strategy, precision="fp64"
    )


@pytest.mark.parametrize(
    "strategy",
    core_of(["mirrored-2", "mirrored-3", "pipeline-2", "data-2-pipe-2"], ["mirrored-2"]),
)
@pytest.mark.parametrize("name", ["RMSE", "CLIP", "two means", "by the number of samples"])
def test_evaluation_is_the_loss_of_each_batch(name: str, strategy: str) -> None:
    job = JOBS[name]()
    trainer = trainer_of(job, STRATEGIES[strategy])
    reference = copy.deepcopy(trainer.model).eval()
    inputs, targets = job.data
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    total, size = 0.0, len(targets)
    for start in range(0, size, job.batch_size):
        rows = slice(start, start + job.batch_size)
        with torch.no_grad():
            output = reference(*(one[rows] for one in inputs))
            total += len(targets[rows]) * job.loss(output, targets[rows]).item()
    found = trainer.evaluate(job.data, batch_size=job.batch_size)["loss"]
    assert found == pytest.approx(total / size, rel=1e-12)
    trainer.close()


@pytest.mark.parametrize("name", KNOWN)
def test_outputs_are_not_exchanged_for_what_is_known(name: str) -> None:
    job = JOBS[name]()
    trainer = trainer_of(job, STRATEGIES["mirrored-2"])
    trainer.fit(job.data, batch_size=job.batch_size, epochs=1, verbose=0)
    assert trainer._front_end.loss is not None
    assert not trainer._front_end.loss.uses_whole_batch
    trainer.close()


@pytest.mark.parametrize(
    "strategy",
    core_of(
        ["mirrored-2-shares-5", "mirrored-2-gloo", "pipeline-2", "data-2-pipe-2"],
        ["mirrored-2-shares-5", "pipeline-2"],
    ),
)
def test_losses_that_fail_on_a_share(strategy: str) -> None:
    """They need seven samples; or are something else for fewer."""
    inputs, targets = JOBS["RMSE"]().data
    for name in ("topk", "pairs", "another mean for few", "values that compare"):
        model, loss = JOBS["RMSE"]().model, WHOLE[name]
        job = lockstep.Job(model, loss, SGD, (inputs[:22, :6], targets[:22, :3]), 12)
        job.model.second = nn.Linear(8, 3)
        report = lockstep.verify(job, STRATEGIES[strategy], steps=2)
        assert report.passed, f"{name}: {report}"
        found = []
        for one in (strategy, "single"):
            trainer = trainer_of(job, STRATEGIES[one])
            found.append(trainer.evaluate(job.data, batch_size=12)["loss"])
            trainer.close()
        assert found[0] == pytest.approx(found[1], rel=1e-12), name


def never(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError(f"{len(output)} samples")


@pytest.mark.parametrize("strategy", ["mirrored-2", "pipeline-2"])
def test_what_fails_on_the_whole_batch_is_that_error(strategy: str) -> None:
    job = whole_batch_job(type(JOBS["RMSE"]().model), never)
    with pytest.raises(ValueError, match="11 samples"):
        trainer_of(job, STRATEGIES[strategy]).fit(job.data, batch_size=11, verbose=0)


class _Centered(nn.Module):
    """Compares with the mean of the outputs before, as DINO's does."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = (output - self.center).square().mean().sqrt()
        self.center = 0.9 * self.center + 0.1 * output.detach().mean()
        return loss


@pytest.mark.parametrize("strategy", ["mirrored-2", "pipeline-2"])
def test_a_loss_that_remembers_samples_is_refused(strategy: str) -> None:
    job = whole_batch_job(type(JOBS["RMSE"]().model), _Centered())
    with pytest.raises(LossError, match="must not depend on calls before"):
        trainer_of(job, STRATEGIES[strategy]).fit(job.data, batch_size=11, verbose=0)
    trainer_of(job, STRATEGIES["single"]).fit(job.data, batch_size=11, verbose=0)


class _Ragged(nn.Module):
    """Returns something of another shape for each share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), torch.zeros(len(x) + 1)


def misspelt(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return output[0].sqare().mean()  # type: ignore[attr-defined, no-any-return]


def test_an_error_on_a_share_is_told_where_outputs_cannot_be_put_together() -> None:
    trainer = trainer_of(whole_batch_job(_Ragged, misspelt), STRATEGIES["mirrored-2"])
    with pytest.raises(LossError, match="must have a row for each sample") as caught:
        trainer.fit(whole_batch_job(_Ragged, misspelt).data, batch_size=11, verbose=0)
    assert "The loss failed first on a share of the batch: AttributeError: " in str(
        caught.value.__notes__
    )


def test_the_plan_says_so() -> None:
    job = JOBS["RMSE"]()
    trainer = trainer_of(job, STRATEGIES["mirrored-2"])
    for _ in range(2):
        trainer.fit(job.data, batch_size=job.batch_size, epochs=1, verbose=0)
        (note,) = [note for note in trainer.plan.notes if "whole batch" in note]
        assert "of outputs and targets per step" in note
        assert "whole batch" in str(trainer.plan)
    trainer.close()


class Watching(lockstep.Callback):
    """Evaluates in the middle of a training."""

    def __init__(self, data: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.data = data
        self.found: list[float] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.found.append(self.trainer.evaluate(self.data, batch_size=9)["loss"])


@pytest.mark.parametrize(
    "strategy", core_of(["mirrored-2", "mirrored-3", "pipeline-2"], ["mirrored-2"])
)
def test_options_and_calls_one_after_the_other(strategy: str) -> None:
    """Streams, clipping, accumulation, metrics, validation, callbacks; calls in any order."""
    job = JOBS["RMSE"]()
    inputs, targets = job.data
    told, errors = [], []

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from zip(inputs.split(7), targets.split(7), strict=True)

    for one in (STRATEGIES[strategy], STRATEGIES["single"]):
        watching = Watching(job.data)
        model = copy.deepcopy(job.model).double()
        trainer = lockstep.Trainer(
            model,
            loss=job.loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
            metrics={"error": MeanSquaredError()},
            strategy=one,
            precision="fp64",
            clip_norm=0.1,
            accumulate=1 if strategy == "pipeline-2" else 2,
            callbacks=[watching],
        )
        fit = partial(trainer.fit, batch_size=9, verbose=0, validation_data=job.data)
        calls: list[dict[str, Any]] = [
            trainer.evaluate(job.data, batch_size=9),
            fit(job.data, epochs=2).history,
            trainer.fit(batches, epochs=1, verbose=0).history,
            trainer.evaluate(batches),
        ]
        trainer.close()
        # What torchmetrics has counted, in float32.
        errors.append([logs.pop(name) for logs in calls for name in list(logs) if "error" in name])
        told.append((calls, watching.found, list(model.parameters())))
    torch.testing.assert_close(told[0], told[1], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(errors[0], errors[1], rtol=1e-6, atol=1e-6)


class _Normed(nn.Module):
    """Its statistics are of the whole batch, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.parametrize("strategy", ["mirrored-2", "mirrored-2-shares-5", "mirrored-2-gloo"])
def test_with_batch_norm(strategy: str) -> None:
    report = lockstep.verify(whole_batch_job(_Normed, rmse), STRATEGIES[strategy], steps=5)
    assert report.passed, str(report)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "bf16"])
def test_the_same_bits_in_low_precision(precision: str) -> None:
    found = []
    for strategy in (
        lockstep.MirroredStrategy(1, num_shares=2),
        lockstep.MirroredStrategy(2),
        lockstep.MirroredStrategy(2, engine="gloo"),
    ):
        job = whole_batch_job(_Normed, rmse)
        trainer = lockstep.Trainer(
            job.model,
            loss=job.loss,
            optimizer=job.optimizer,
            strategy=strategy,
            precision=precision,
        )
        trainer.fit(job.data, batch_size=job.batch_size, verbose=0)
        found.append(trainer.model.state_dict())
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in found[0])
