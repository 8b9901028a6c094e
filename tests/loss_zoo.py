"""Models whose losses are more than a function of one output and one target.

Each model is a whole job, with the points that `tests.zoo` describes: five batches in order that no
number of replicas divides, the last one short. Here, too, some shares count nothing, and in one
batch one of two losses counts nothing at all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import lockstep
from tests.zoo import IGNORED, NUM_TOKENS, VOCABULARY, WIDTH, Block, build_seeded, normal

SGD = partial(torch.optim.SGD, lr=1e-1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)

# --- own losses ---------------------------------------------------------------------------------


@dataclass
class CausalOutput:
    """As in Hugging Face's library: attributes, and a loss where there are labels."""

    loss: Tensor | None
    logits: Tensor


class CausalModel(nn.Module):
    """A language model that shifts its labels and averages over those that count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> CausalOutput:
        hidden = self.embedding(input_ids) * attention_mask[:, :, None]
        logits = self.head(self.blocks(hidden))
        if labels is None:
            return CausalOutput(loss=None, logits=logits)
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        return CausalOutput(loss=loss, logits=logits)


def padded_sequences(num_samples: int = 4 * 11 + 3) -> dict[str, Tensor]:
    """Sequences of all lengths; two have no label that counts, one of them alone in its share."""
    generator = Generator().manual_seed(21)
    start = torch.randint(VOCABULARY, (num_samples, 1), generator=generator)
    tokens = (start + 5 * torch.arange(NUM_TOKENS)) % VOCABULARY
    lengths = torch.randint(2, NUM_TOKENS + 1, (num_samples, 1), generator=generator)
    lengths[[4, num_samples - 2]] = 1
    mask = (torch.arange(NUM_TOKENS) < lengths).long()
    labels = torch.where(mask.bool(), tokens, IGNORED)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


class LastCausalModel(CausalModel):
    """As in nanoGPT: (logits, loss)."""

    def forward(self, *args: Any, **options: Any) -> Any:
        output = super().forward(*args, **options)
        return output.logits, output.loss


def causal_job(
    loss: lockstep.OwnLoss | None = None, model: type[nn.Module] = CausalModel
) -> lockstep.Job:
    return lockstep.Job(
        model=build_seeded(model),
        loss=loss or lockstep.OwnLoss.tokens(),
        optimizer=SGD,
        data=padded_sequences(),
        batch_size=11,
    )


class Regression(nn.Module):
    """Returns its loss in a form of the caller's choice."""

    def __init__(self, form: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
        self.form = form

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Any:
        prediction = self.layers(x)
        return self.form(prediction, y, mask)


def in_dict(prediction: Tensor, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {"prediction": prediction, "loss": F.mse_loss(prediction, y)}


def in_front(prediction: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return F.mse_loss(prediction, y), prediction


def alone(prediction: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return F.mse_loss(prediction, y)


def by_sample(prediction: Tensor, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {"loss": (prediction - y).square().mean(1)}


def as_pair(prediction: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return ((prediction - y).square() * mask).sum(), mask.sum()


def masked(prediction: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return ((prediction - y).square() * mask).sum() / mask.sum(), prediction


def mask_sum(inputs: tuple[Tensor, ...]) -> Tensor:
    return inputs[2].sum()


def regression_job(
    form: Callable[[Tensor, Tensor, Tensor], Any], *, seen: bool = False
) -> lockstep.Job:
    generator = Generator().manual_seed(22)
    x = normal(generator, 4 * 11 + 2, 6)
    mask = (torch.rand((len(x), 2), generator=generator) < 0.6).long()
    mask[-1] = 0
    return lockstep.Job(
        model=build_seeded(partial(Regression, form)),
        loss=lockstep.OwnLoss(mask_sum if form is masked and not seen else None),
        optimizer=ADAMW,
        data=((x, x[:, :2] * x[:, 2:4], mask),),
        batch_size=11,
    )


# --- several losses -----------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """A trunk and two heads, whose outputs come by name."""

    def __init__(self, *, normalised: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(12) if normalised else nn.Tanh()
        self.trunk = nn.Sequential(nn.Linear(8, 12, bias=not normalised), norm, nn.ReLU())
        self.digit = nn.Linear(12, 5)
        self.parity = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(x)
        return {"digit": self.digit(hidden), "parity": self.parity(hidden).squeeze(1)}


class TwoHeadsInOrder(TwoHeads):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        both = super().forward(x)
        return both["digit"], both["parity"]


LOSSES = {"digit": nn.CrossEntropyLoss(), "parity": nn.BCEWithLogitsLoss()}
FACTORS = {"digit": 1.0, "parity": 0.5}


def two_targets(*, ignored: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Some digits are unknown, in the second batch and the last but one sample all of them."""
    generator = Generator().manual_seed(23)
    x = normal(generator, 4 * 11 + 2, 8)
    digits = x[:, :5].argmax(1)
    parity = (digits % 2).double()
    if ignored:
        digits[torch.rand(len(x), generator=generator) < 0.4] = IGNORED
        digits[11:22] = IGNORED
        digits[-2] = IGNORED
    return x, {"digit": digits, "parity": parity}


def heads_job(
    *, ignored: bool = True, normalised: bool = False, weighted: bool = False
) -> lockstep.Job:
    x, targets = two_targets(ignored=ignored)
    weight = torch.linspace(0, 2, len(x), dtype=torch.float64)
    return lockstep.Job(
        model=build_seeded(partial(TwoHeads, normalised=normalised)),
        loss=LOSSES,
        optimizer=SGD if normalised else ADAMW,
        data=(x, targets, weight) if weighted else (x, targets),
        batch_size=11,
        loss_weights=FACTORS,
    )


def ordered_job() -> lockstep.Job:
    x, targets = two_targets(ignored=True)
    return lockstep.Job(
        model=build_seeded(TwoHeadsInOrder),
        loss=list(LOSSES.values()),
        optimizer=ADAMW,
        data=(x, tuple(targets.values())),
        batch_size=11,
        loss_weights=list(FACTORS.values()),
    )


JOBS: dict[str, Callable[[], lockstep.Job]] = {
    "own loss": causal_job,
    "own loss whose weight is seen": partial(causal_job, lockstep.OwnLoss()),
    "own loss at the end": partial(causal_job, lockstep.OwnLoss(output=1), LastCausalModel),
    "own loss over a mask that is seen": partial(regression_job, masked, seen=True),
    "own loss in a dict": partial(regression_job, in_dict),
    "own loss in front": partial(regression_job, in_front),
    "own loss alone": partial(regression_job, alone),
    "own loss by sample": partial(regression_job, by_sample),
    "own loss as a pair": partial(regression_job, as_pair),
    "own loss over a mask": partial(regression_job, masked),
    "two losses": heads_job,
    "two losses of one weight": partial(heads_job, ignored=False),
    "two losses with sample weights": partial(heads_job, weighted=True),
    "two losses and BatchNorm": partial(heads_job, normalised=True),
    "two losses in order": ordered_job,
}
