"""Jobs whose losses are no means over samples: what a share makes of its own part says too little.

Five batches in order that no number of replicas divides, the last one of two samples: some shares
are empty there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import lockstep
from tests.zoo import build_seeded, normal

SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
BATCH = 11
NUM_SAMPLES = 4 * BATCH + 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


class Siamese(Net):
    """Two views of a sample."""

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), super().forward(other)


class Clip(Siamese):
    """Two views, and a temperature that is learned: it belongs to no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, other: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        one, two = super().forward(x, other)
        return {"one": one, "two": two, "scale": self.logit_scale.exp()}


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.decoder = nn.Linear(2, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + torch.exp(0.5 * spread)), mean, spread


def late_mask(output: Tensor, target: Tensor) -> Tensor:
    """A mean over what counts; most of what counts comes early."""
    mask = (target != 0).to(output)
    return ((output - target).square() * mask).sum() / mask.sum()


def selected(output: Tensor, target: Tensor) -> Tensor:
    mask = target != 0
    return F.mse_loss(output[mask], target[mask])


def dice(output: Tensor, target: Tensor) -> Tensor:
    found, there = torch.sigmoid(output), (target > 0).to(output)
    return 1 - (2 * (found * there).sum() + 1) / (found.sum() + there.sum() + 1)


def rmse(output: Tensor, target: Tensor) -> Tensor:
    return torch.sqrt(F.mse_loss(output, target))


def weighted_bce(output: Tensor, target: Tensor) -> Tensor:
    there = (target > 0).to(output)
    weight = (there.numel() - there.sum()) / there.sum()
    return F.binary_cross_entropy_with_logits(output, there, pos_weight=weight)


def info_nce(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    one, two = (F.normalize(each, dim=1) for each in output)
    return F.cross_entropy(one @ two.T / 0.2, torch.arange(len(one)))


def clip(output: dict[str, Tensor], target: Tensor) -> Tensor:
    one, two = (F.normalize(output[name], dim=1) for name in ("one", "two"))
    logits = output["scale"] * one @ two.T
    places = torch.arange(len(one))
    return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2


def siamese(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The hardest of the batch."""
    distance = (output[0] - output[1]).square().sum(1)
    return distance.topk(min(3, len(distance))).values.mean()


def vae(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    found, mean, spread = output
    divergence = -0.5 * torch.sum(1 + spread - mean.square() - spread.exp())
    return F.mse_loss(found, target, reduction="sum") + divergence


def in_place(output: Tensor, target: Tensor) -> Tensor:
    output[target == 0] = -1.0
    return output.logsumexp((0, 1))


def classes(output: Tensor, target: Tensor) -> Tensor:
    """Some shares have no class that counts."""
    return F.cross_entropy(output, torch.where(target[:, 0] != 0, 1, -100))


def two_means(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) + 0.5 * (output - target).abs().mean()


def total(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / 10


def by_number(output: Tensor, target: Tensor) -> Tensor:
    """Known to be a mean in shares of more samples than four, and none in others."""
    return F.mse_loss(output, target) if len(target) > 4 else rmse(output, target)


def data(num_inputs: int = 1, width: int = 4) -> Any:
    """Targets of which late ones are mostly padding: 0; in the last batch all but one row."""
    generator = Generator().manual_seed(41)
    inputs = tuple(normal(generator, NUM_SAMPLES, 6) for _ in range(num_inputs))
    targets = normal(generator, NUM_SAMPLES, width)
    place = torch.arange(NUM_SAMPLES)[:, None] % BATCH
    drawn = torch.rand(targets.shape, generator=generator) * BATCH
    targets[(drawn < place) & (place > 0)] = 0.0
    return (inputs if num_inputs > 1 else inputs[0]), targets


def job(model: type[nn.Module], loss: Any, num_inputs: int = 1, width: int = 4) -> lockstep.Job:
    return lockstep.Job(
        model=build_seeded(model),
        loss=loss,
        optimizer=SGD,
        data=data(num_inputs, width),
        batch_size=BATCH,
    )


JOBS: dict[str, Callable[[], lockstep.Job]] = {
    "masked mean": partial(job, Net, late_mask),
    "mean of what is selected": partial(job, Net, selected),
    "Dice": partial(job, Net, dice),
    "RMSE": partial(job, Net, rmse),
    "BCE weighted by the batch": partial(job, Net, weighted_bce),
    "InfoNCE": partial(job, Siamese, info_nce, 2),
    "CLIP": partial(job, Clip, clip, 2),
    "siamese": partial(job, Siamese, siamese, 2),
    "VAE": partial(job, Vae, vae, 1, 6),
    "sum": partial(job, Net, nn.MSELoss(reduction="sum")),
    "changed in place": partial(job, Net, in_place),
    "by the number of samples": partial(job, Net, by_number),
    "classes": partial(job, Net, classes),
    "two means": partial(job, Net, two_means),
    "total": partial(job, Net, total),
}
# What these divide by is known: no outputs are exchanged.
KNOWN = ("sum", "two means", "total")
