"""Models whose backward pass mixes samples are refused wherever batches are divided."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.errors import ModelError
from tests.thorough import core_of
from tests.unit.test_gradient_trial import apart, mixing

pytestmark = pytest.mark.thorough

STRATEGIES: dict[str, Any] = {
    "mirrored-2": lockstep.MirroredStrategy(2),
    "mirrored-1-shares-8": lockstep.MirroredStrategy(1, num_shares=8),
    "gloo": lockstep.MirroredStrategy(2, engine="gloo"),
    "pipeline-2": lockstep.PipelineStrategy(2, microbatches=2),
    "data-2-pipe-2": lockstep.HybridStrategy(2, 2, microbatches=2),
    "in parts": lockstep.SingleDeviceStrategy(),
}


class WithLoss(nn.Module):
    """Computes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), target)


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def data_of(inputs: Tensor) -> tuple[Tensor, Tensor]:
    more = torch.randn(16, 3, generator=torch.Generator().manual_seed(2))
    x = more if inputs.is_floating_point() else inputs[torch.arange(16) % len(inputs)]
    return x, torch.randn(16, 2, generator=torch.Generator().manual_seed(3))


def fitted(model: nn.Module, data: Any, strategy: str, **options: Any) -> None:
    trainer = lockstep.Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=STRATEGIES[strategy],
        accumulate=4 if strategy == "in parts" else 1,
        **options,
    )
    try:
        trainer.fit(data, batch_size=8, shuffle=False, verbose=0)
    finally:
        trainer.close()


@pytest.mark.parametrize("strategy", core_of(STRATEGIES, ["mirrored-2", "pipeline-2", "in parts"]))
@pytest.mark.parametrize("name", ["module", "straight through"])
def test_a_mixing_model_is_refused_before_anything_is_updated(name: str, strategy: str) -> None:
    model, inputs = mixing(name)
    before = [one.detach().clone() for one in model.parameters()]
    x, targets = data_of(inputs)
    for loss in ("function", "model", "step"):
        if loss == "step" and strategy in ("pipeline-2", "data-2-pipe-2"):
            continue
        options: dict[str, Any] = {"loss": nn.MSELoss()}
        if loss != "function":
            options = {"loss": None, "train_step": step}
        own, data = model, (x, targets)
        if loss == "model":
            own, data = WithLoss(model), ((x, targets),)  # type: ignore[assignment]
            options = {"loss": lockstep.OwnLoss()}
        with pytest.raises(ModelError, match="must be the sum of its samples' gradients"):
            fitted(own, data, strategy, **options)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("strategy", core_of(STRATEGIES, ["mirrored-2", "pipeline-2"]))
def test_hooks_that_keep_samples_apart_are_exact(strategy: str) -> None:
    for name in ("hook by row", "clip by element"):
        model, inputs = apart(name)
        data = data_of(inputs)
        job = lockstep.Job(model, nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), data, 7)
        report = lockstep.verify(job, STRATEGIES[strategy], steps=2)
        assert report.passed, str(report)


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    counts = target > 0.4
    return ((output - target).square() * counts).sum(), counts.sum()


@pytest.mark.parametrize("strategy", core_of(STRATEGIES, ["mirrored-2", "pipeline-2"]))
def test_hooks_that_clip_are_refused_where_weights_are_known_too_late(strategy: str) -> None:
    model, inputs = apart("clip by element")
    with pytest.raises(ModelError, match="must be linear"):
        fitted(model, data_of(inputs), strategy, loss=counted)
    model, inputs = apart("dropout")
    fitted(model, data_of(inputs), strategy, loss=counted)
