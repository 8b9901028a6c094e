"""Layers divided inside, alone, with replicas, with slots in parts, and in stages, on all models.

Each training equals a plain loop on one device, in fp64. Heads, channels and widths are often no
multiples of the number of processes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lockstep
from tests import zoo
from tests.parity import test_architectures as architectures
from tests.thorough import core_of

HYBRID = lockstep.HybridStrategy
PRODUCTS: dict[str, Callable[[], lockstep.Strategy]] = {
    "2": partial(lockstep.TensorParallelStrategy, 2),
    "3": partial(lockstep.TensorParallelStrategy, 3),
    "3, gloo": partial(lockstep.TensorParallelStrategy, 3, engine="gloo"),
    "data 2": partial(HYBRID, 2, tensor=2),
    "data 2, gloo": partial(HYBRID, 2, tensor=2, engine="gloo"),
    "shard 2": partial(HYBRID, 1, 1, shard=2, level="slots", tensor=2, microbatches=1),
    "pipe 2": partial(HYBRID, pipe=2, tensor=2, microbatches=2),
    "pipe 2, tensor 3": partial(HYBRID, pipe=2, tensor=3, microbatches=2),
}


class Uneven(nn.Module):
    """Seven channels, three heads, and widths of 15 and 23; dropout in each."""

    def __init__(self) -> None:
        super().__init__()
        self.channels, self.mix = nn.Conv1d(3, 7, 3, padding=1), nn.Conv1d(7, 15, 1)
        self.layer = nn.TransformerEncoderLayer(15, 3, 23, 0.2, batch_first=True)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(15, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.drop(self.channels(x).relu())).transpose(1, 2)
        logits: Tensor = self.last(self.layer(x).mean(1))
        return logits


class Mixture(nn.Module):
    """Each sample goes to two of five experts, one of which is idle."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.router, self.last = nn.Linear(12, 12), nn.Linear(12, 5), nn.Linear(12, 5)
        self.up, self.down = (nn.Parameter(torch.randn(5, *size)) for size in [(12, 14), (7, 12)])
        self.router.bias.data[4] = -99.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(x)
        for expert in range(5):
            rows, column = torch.where(chosen == expert)
            gate, up = (x[rows] @ self.up[expert]).chunk(2, -1)
            output = (gate.sigmoid() * up) @ self.down[expert]
            mixed = mixed.index_add(0, rows, output * weights[rows, column, None])
        logits: Tensor = self.last(x + mixed)
        return logits


class Adapted(nn.Module):
    """A frozen layer with a low-rank addition that is trained, as LoRA has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 3, bias=False)
        self.up = nn.Linear(3, base.out_features, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.base(x) + 2.0 * self.up(self.down(self.drop(x)))
        return adapted


def adapted() -> nn.Module:
    model = zoo.make_mlp()
    for number in (0, 2):
        model[number] = Adapted(model[number])  # type: ignore[index, operator]
    return model


def job(model: nn.Module, shape: tuple[int, ...]) -> lockstep.Job:
    """Batches of 7, 7 and 3 samples, of which there are five classes."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(17, *shape, generator=generator, dtype=torch.float64)
    targets = torch.randint(5, (17,), generator=generator)
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return lockstep.Job(model, nn.CrossEntropyLoss(), optimizer, (inputs, targets), batch_size=7)


def bert() -> lockstep.Job:
    model, data = architectures.make("BertForMaskedLM")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lockstep.Job(model, architectures.loss, optimizer, data, batch_size=4)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x).logits
        return logits


def vit() -> nn.Module:
    sizes: dict[str, Any] = {
        "hidden_size": 15,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 23,
        "image_size": 6,
        "patch_size": 3,
        "num_labels": 5,
    }
    config = transformers.ViTConfig(**sizes, hidden_dropout_prob=0.1)
    return Logits(transformers.ViTForImageClassification(config)).train()


def seeded(make: Callable[[], nn.Module], *shape: int) -> lockstep.Job:
    return job(zoo.build_seeded(make), shape)


MODELS: dict[str, Callable[[], lockstep.Job]] = {
    **{one.name: partial(zoo.make_job, one) for one in zoo.cases()},
    "bert": bert,
    "vit": partial(seeded, vit, 3, 6, 6),
    "moe": partial(seeded, Mixture, 12),
    "uneven": partial(seeded, Uneven, 3, 6),
    "lora": partial(seeded, adapted, 20),
}


# CI runs each model and each product once.
IN_CI = {
    "mlp": "2",
    "cnn_batch_norm": "data 2",
    "unet": "3",
    "lstm": "data 2, gloo",
    "bert": "pipe 2",
    "vit": "3, gloo",
    "moe": "pipe 2, tensor 3",
    "uneven": "data 2",
    "lora": "shard 2",
}
CELLS = core_of(
    [
        (model, product)
        for model in MODELS
        for product in PRODUCTS
        if (model, product) != ("cnn_batch_norm", "shard 2")  # two shares, each with its statistics
    ],
    [("gpt_tied", "pipe 2")],
    IN_CI.items(),
)


@pytest.mark.parametrize(("model", "product"), CELLS)
def test_training_equals_one_device(model: str, product: str) -> None:
    strategy = PRODUCTS[product]()
    if model == "cnn_batch_norm" and "pipe" in product:  # statistics are those of a microbatch
        strategy = HYBRID(pipe=2, tensor=3 if "3" in product else 2, microbatches=1)
    report = lockstep.verify(MODELS[model](), strategy, steps=3)
    assert report.passed, str(report)
    assert not report.undivided
