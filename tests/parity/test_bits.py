"""Same shares, same bits: on any number of replicas, and in every run."""

import functools
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor

import lockstep
from lockstep.data.trees import map_tensors
from tests.thorough import core_of
from tests.zoo import Case, case, cases

NAMES = [one.name for one in cases()]
FEW = ("mlp", "cnn_batch_norm", "gpt_tied")


def three_batches(job: Case) -> Any:
    """The last ones of a model's data, of which one is short."""
    return map_tensors(lambda rows: rows[2 * job.batch_size :], (job.inputs, job.targets))


def train(job: Case, devices: int, num_shares: int | None, precision: str) -> dict[str, Tensor]:
    model = job.make_model()
    trainer = lockstep.Trainer(
        model,
        loss=job.loss,
        optimizer=job.optimizer,
        strategy=lockstep.MirroredStrategy(devices, num_shares=num_shares),
        precision=precision,
        seed=3,
    )
    trainer.fit(three_batches(job), batch_size=job.batch_size, epochs=2, verbose=0)
    return {name: value.clone() for name, value in model.state_dict().items()}


@functools.cache
def on_one_replica(name: str, precision: str) -> dict[str, Tensor]:
    return train(case(name), 1, 4, precision)


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert different == []


# The tree of a sum does not depend on what is summed: fp64 needs no more than one row.
@pytest.mark.parametrize(
    ("devices", "precision"),
    core_of([(2, "fp32"), (3, "fp32"), (4, "fp32"), (3, "fp64")], [(3, "fp32")]),
)
@pytest.mark.parametrize("name", core_of(NAMES, ["mlp", "cnn_batch_norm", "gpt_tied"], ["lstm"]))
def test_four_shares_give_the_same_bits_on_any_number_of_replicas(
    name: str, devices: int, precision: str
) -> None:
    assert_same_bits(train(case(name), devices, 4, precision), on_one_replica(name, precision))


@pytest.mark.parametrize("name", ["cnn_batch_norm", "cnn_dropout", "gpt_tied"])
def test_two_runs_give_the_same_bits(name: str) -> None:
    first, second = (train(case(name), 2, None, "fp32") for _ in range(2))
    assert_same_bits(first, second)


def test_the_seed_matters() -> None:
    """Otherwise the tests above would pass for a trainer that ignores its random streams."""
    job = case("cnn_dropout")
    model = job.make_model()
    trainer = lockstep.Trainer(
        model,
        loss=job.loss,
        optimizer=job.optimizer,
        strategy=lockstep.MirroredStrategy(1, num_shares=4),
        seed=4,
    )
    trainer.fit(three_batches(job), batch_size=job.batch_size, epochs=2, verbose=0)
    other = on_one_replica("cnn_dropout", "fp32")
    assert any(not torch.equal(value, other[name]) for name, value in model.state_dict().items())


def histories(devices: int) -> dict[str, Any]:
    """With metrics that are sums of floating point numbers."""
    x, y = metric_data()
    torch.manual_seed(0)
    trainer = lockstep.Trainer(
        torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 1)),
        loss=torch.nn.MSELoss(),
        optimizer=torch.optim.Adam,
        metrics={"mae": torchmetrics.MeanAbsoluteError(), "r2": torchmetrics.R2Score()},
        strategy=lockstep.MirroredStrategy(devices, num_shares=4),
    )
    held_out = x[150:], y[150:]
    found = trainer.fit(
        (x[:150], y[:150]), batch_size=22, validation_data=held_out, epochs=2, verbose=0
    ).history
    trainer.close()
    return found


def metric_data() -> tuple[Tensor, Tensor]:
    """Inputs and targets of 203 samples."""
    x = torch.randn(203, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :1] * 2 + x[:, 1:2].cos() > 0.8).float()


def test_metrics_have_the_same_bits_on_any_number_of_replicas() -> None:
    alone = histories(1)
    assert alone == histories(3)
    assert {"mae", "val_mae", "r2"} <= alone.keys()
