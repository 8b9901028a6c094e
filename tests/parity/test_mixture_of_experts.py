"""Mixtures of experts: a load-balancing loss is of the whole batch, and so are the weights."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.errors import LossError
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

EXPERTS, CHOSEN, TOKENS, WIDTH, CLASSES = 4, 2, 5, 8, 3
SAMPLES, BATCH, STEPS = 22, 9, 6  # the last batch is one of four samples

STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "mirrored 2": lambda: lockstep.MirroredStrategy(2),
    "mirrored 3": lambda: lockstep.MirroredStrategy(3),
    "shares 4": lambda: lockstep.MirroredStrategy(2, num_shares=4),
    "pipeline 2": lambda: lockstep.PipelineStrategy(cuts=["cut"], microbatches=2),
    "hybrid 2 x 2": lambda: lockstep.HybridStrategy(2, cuts=["cut"], microbatches=2),
}


class Experts(nn.Module):
    """Each token goes to the experts that its router prefers, by way of lists of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the experts make of tokens, and the router's logits."""
        logits = self.router(x)
        weights, chosen = logits.softmax(-1).topk(CHOSEN, dim=-1)
        tokens = x.reshape(-1, WIDTH)
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen.reshape(-1, CHOSEN) == number)
            each = weights.reshape(-1, CHOSEN)[rows, place, None]
            made = made.index_add(0, rows, expert(tokens[rows]).tanh() * each)
        return made.reshape(x.shape), logits


class Mixture(nn.Module):
    """Two layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.second = Experts(), nn.LayerNorm(WIDTH), Experts()
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made, logits = self.first(x)
        x = self.cut(x + made)
        made, others = self.second(x)
        return {"scores": self.last(x + made), "first": logits, "second": others}


class WithItsLoss(Mixture):
    """Computes the loss itself."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": loss(super().forward(x), labels)}


def balance(logits: Tensor) -> Tensor:
    """Of all tokens: how many have an expert first, times how probable it is, over experts."""
    probabilities = logits.reshape(-1, EXPERTS).softmax(-1)
    counts = F.one_hot(probabilities.argmax(-1), EXPERTS).to(logits.dtype).mean(0)
    return EXPERTS * (counts * probabilities.mean(0)).sum()


def loss(output: dict[str, Tensor], labels: Tensor) -> Tensor:
    scores = F.cross_entropy(output["scores"].transpose(1, 2), labels)
    return scores + 0.3 * (balance(output["first"]) + balance(output["second"]))


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    x = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    return x, torch.randint(CLASSES, (SAMPLES, TOKENS))


def made(kind: Callable[[], nn.Module] = Mixture) -> nn.Module:
    torch.manual_seed(5)
    return kind().double()


def trained_by_a_loop() -> nn.Module:
    model, (x, y) = made(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(STEPS):
        start = step % 3 * BATCH
        optimizer.zero_grad()
        loss(model(x[start : start + BATCH]), y[start : start + BATCH]).backward()
        optimizer.step()
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


@pytest.mark.parametrize("strategy", core_of(STRATEGIES, ["mirrored 3", "pipeline 2"]))
def test_balance_is_of_the_whole_batch(strategy: str) -> None:
    model, wanted = made(), trained_by_a_loop()
    trainer = lockstep.Trainer(
        model, loss=loss, optimizer=sgd(model), strategy=STRATEGIES[strategy](), precision="fp64"
    )
    trainer.fit(data(), batch_size=BATCH, epochs=2, shuffle=False)
    found, whole = (
        torch.cat([one.detach().flatten() for one in each.parameters()]) for each in (model, wanted)
    )
    assert float((found - whole).norm()) <= 1e-12 * float(whole.norm())


@pytest.mark.parametrize("strategy", core_of(STRATEGIES, ["mirrored 2", "hybrid 2 x 2"]))
def test_verify_proves_a_mixture(strategy: str) -> None:
    job = lockstep.Job(made(), loss, partial(torch.optim.SGD, lr=0.2), data(), batch_size=BATCH)
    report = lockstep.verify(job, STRATEGIES[strategy](), steps=4)
    assert report.passed, str(report)


def test_a_balance_that_the_model_computes_itself_is_refused() -> None:
    model, (x, y) = made(WithItsLoss), data()
    trainer = lockstep.Trainer(
        model,
        loss=lockstep.OwnLoss(),
        optimizer=sgd(model),
        strategy=STRATEGIES["mirrored 2"](),
        precision="fp64",
    )
    with pytest.raises(LossError, match=r"(?s)weighted mean.*as a loss function"):
        trainer.fit({"x": x, "labels": y}, batch_size=BATCH)
