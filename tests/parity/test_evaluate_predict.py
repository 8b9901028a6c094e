"""``evaluate`` counts every sample once, ``predict`` gives every sample once and in order."""

import functools
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

import lockstep
from lockstep.data.trees import map_tensors
from lockstep.parallel.data_parallel.forward import call_model
from tests.thorough import core_of
from tests.zoo import case, cases

DEVICES = [1, 2, 3, 4]
NAMES = [one.name for one in cases()]


class Nested(nn.Module):
    """Returns a dict of a tensor and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.layer(x)
        return {"logits": y, "pair": (y[:, 0], x)}


def weighted_loss(returned: Any, num_samples: int) -> tuple[float, float]:
    """(total, weight) of a whole batch, read without Lockstep's own adapter."""
    if isinstance(returned, tuple):
        return float(returned[0]), float(returned[1])
    if returned.dim() == 1:
        return float(returned.sum()), float(num_samples)
    return float(returned) * num_samples, float(num_samples)


@functools.cache
@torch.no_grad()
def expected_loss(name: str) -> float:
    job = case(name)
    model = job.make_model().double().eval()
    returned = job.loss(call_model(model, job.inputs), job.targets)
    total, weight = weighted_loss(returned, len(job.targets))
    return total / weight


@pytest.mark.parametrize("devices", core_of(DEVICES, [1, 3]))
@pytest.mark.parametrize("name", NAMES)
def test_evaluate_equals_the_whole_data_in_one_process(name: str, devices: int) -> None:
    job = case(name)
    trainer = lockstep.Trainer(
        job.make_model(),
        loss=job.loss,
        strategy=lockstep.MirroredStrategy(devices),
        precision="fp64",
    )
    result = trainer.evaluate((job.inputs, job.targets), batch_size=job.batch_size)
    assert result["loss"] == pytest.approx(expected_loss(name), rel=1e-12)


@pytest.mark.parametrize("devices", DEVICES)
def test_metrics_equal_those_of_one_process(devices: int) -> None:
    job = case("mlp")
    metrics = {
        "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=5),
        "auroc": torchmetrics.AUROC(task="multiclass", num_classes=5),
    }
    trainer = lockstep.Trainer(
        job.make_model(),
        loss=job.loss,
        metrics=metrics,
        strategy=lockstep.MirroredStrategy(devices),
        precision="fp64",
    )
    result = trainer.evaluate((job.inputs, job.targets), batch_size=job.batch_size)
    with torch.no_grad():
        outputs = job.make_model().double().eval()(job.inputs)
    for name, metric in metrics.items():
        fresh = metric.clone()
        fresh.reset()
        assert result[name] == pytest.approx(fresh(outputs, job.targets).item(), rel=1e-12)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("num_samples", [0, 1, 7, 1000])
def test_predict_gives_every_sample_once_and_in_order(num_samples: int, devices: int) -> None:
    inputs = torch.arange(num_samples * 3, dtype=torch.float64).reshape(num_samples, 3)
    torch.manual_seed(0)
    model = Nested()
    trainer = lockstep.Trainer(model, strategy=lockstep.MirroredStrategy(devices), precision="fp64")
    outputs = trainer.predict(inputs, batch_size=96)
    with torch.no_grad():
        expected = model(inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-14, atol=1e-14)
    assert torch.equal(outputs["pair"][1], inputs)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_predict_equals_the_model(name: str, devices: int) -> None:
    job = case(name)
    model = job.make_model()
    trainer = lockstep.Trainer(model, strategy=lockstep.MirroredStrategy(devices), precision="fp64")
    outputs = trainer.predict(job.inputs, batch_size=job.batch_size)
    model.eval()
    with torch.no_grad():
        expected = call_model(model, job.inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("devices", [1, 2])
def test_evaluate_and_predict_leave_the_model_as_it_was(devices: int) -> None:
    job = case("cnn_batch_norm")
    model = job.make_model()
    frozen = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    frozen.eval()
    trainer = lockstep.Trainer(
        model, loss=job.loss, strategy=lockstep.MirroredStrategy(devices), precision="fp64"
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.evaluate((job.inputs, job.targets), batch_size=job.batch_size)
    trainer.predict(job.inputs, batch_size=job.batch_size)
    assert model.training
    assert not frozen.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("devices", [2, 3])
def test_validation_during_fit_equals_evaluate_after_it(devices: int) -> None:
    """Every rank validates with rank 0's BatchNorm statistics, whatever the last batch left it."""
    job = case("cnn_batch_norm")
    trainer = lockstep.Trainer(
        job.make_model(),
        loss=job.loss,
        optimizer=job.optimizer,
        strategy=lockstep.MirroredStrategy(devices),
        precision="fp64",
    )
    data = (job.inputs, job.targets)
    history = trainer.fit(
        data, batch_size=job.batch_size, validation_data=data, epochs=2, verbose=0
    )
    model = trainer.model.eval()
    with torch.no_grad():
        output = call_model(model, job.inputs)
        expected = job.loss(output, map_tensors(lambda tensor: tensor, job.targets)).item()
    assert history.history["val_loss"][-1] == pytest.approx(expected, rel=1e-12)


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws anew at every read."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(4) + index, torch.tensor(index % 3)


class Dropped(nn.Linear):
    """Drops in every mode."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(input), 0.5, training=True)


@pytest.mark.parametrize("layer", [nn.Linear, Dropped])
@pytest.mark.parametrize("wraps", [False, True])
def test_what_is_drawn_in_evaluation_does_not_depend_on_the_devices(
    wraps: bool, layer: type[nn.Linear]
) -> None:
    data = lockstep.data.prefetch(Noisy(), workers=1) if wraps else Noisy()
    found, outputs = [], []
    strategies = [lockstep.MirroredStrategy(devices, num_shares=3) for devices in (1, 2, 3)]
    for strategy in (*strategies, lockstep.PipelineStrategy(cuts=["1"], microbatches=3)):
        torch.manual_seed(2)
        model = nn.Sequential(layer(4, 8), layer(8, 3))
        trainer = lockstep.Trainer(
            model, loss=nn.CrossEntropyLoss(), strategy=strategy, precision="fp64"
        )
        found.append(trainer.evaluate(data, batch_size=12)["loss"])
        outputs.append(trainer.predict(torch.ones(30, 4), batch_size=12))
    assert found == pytest.approx([found[0]] * 4, rel=1e-14)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-12, atol=1e-14)
