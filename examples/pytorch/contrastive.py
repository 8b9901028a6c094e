"""Contrastive training (SimCLR): a net learns which images belong together, without their classes.

    python contrastive.py [--epochs 8]

Each digit is shown twice, at two places. For every view the loss looks for the other view of the
same digit among all others in the batch, so it is no mean over samples. Lockstep computes it on
the whole batch of both devices; under DistributedDataParallel each device would search half of the
batch, which is another and easier task. Needs scikit-learn.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import lockstep

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--epochs", type=int, default=8)
epochs = parser.parse_args().epochs

draws = torch.Generator().manual_seed(0)


def moved(images: torch.Tensor) -> torch.Tensor:
    """Each image at a random place on a field of 12 x 12, with some noise."""
    fields = 0.1 * torch.randn(len(images), 1, 12, 12, generator=draws)
    for field, image, (top, left) in zip(
        fields, images, torch.randint(5, (len(images), 2), generator=draws), strict=True
    ):
        field[:, top : top + 8, left : left + 8] += image
    return fields


digits, classes = load_digits(return_X_y=True)
digits = torch.tensor(digits / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
classes = torch.tensor(classes)
known, queries = moved(digits[360:]), moved(digits[:360])


class Encoder(nn.Module):
    """Images to points on a sphere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 3 * 3, 64),
        )

    def forward(self, views: torch.Tensor) -> torch.Tensor:
        """(n, views, 1, 12, 12) -> (n, views, 64)."""
        points = self.layers(views.flatten(0, 1)).unflatten(0, views.shape[:2])
        return F.normalize(points, dim=-1)


def contrast(points: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """NT-Xent: find the view of the same digit among all other views of the batch."""
    views = points.transpose(0, 1).flatten(0, 1)
    likeness = (views @ views.T / 0.2).fill_diagonal_(-torch.inf)
    return F.cross_entropy(likeness, torch.arange(len(views)).roll(len(points)))


def found_by_neighbours(trainer: lockstep.Trainer) -> float:
    """Part of the queries whose nearest known digit is of their class."""
    points = [trainer.predict(images[:, None])[:, 0] for images in (queries, known)]
    nearest = (points[0] @ points[1].T).argmax(1)
    return (classes[360:][nearest] == classes[:360]).float().mean().item()


torch.manual_seed(0)
trainer = lockstep.Trainer(
    Encoder(),
    loss=contrast,
    optimizer=partial(torch.optim.Adam, lr=1e-3),
    strategy=lockstep.MirroredStrategy(devices=2),
)
print(f"Before training {found_by_neighbours(trainer):.1%} have a neighbour of their class")
views = torch.cat(
    [torch.stack([moved(digits[360:]), moved(digits[360:])], dim=1) for _ in range(4)]
)
trainer.fit((views, torch.zeros(len(views))), epochs=epochs, batch_size=256)
print(f"After it {found_by_neighbours(trainer):.1%}, without any classes")
