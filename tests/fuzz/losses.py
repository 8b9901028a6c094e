"""Losses of every kind, with what a plain loop on the whole batch makes of each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss as users give it.

    Attributes:
        make: the loss.
        target: kind of the targets: "classes", "values", "chances" (values between 0 and 1 that add
            up to 1), "signs", or "tokens" (classes of tokens).
        values: the same, sample by sample, as far as it is a mean over samples; for sample weights.
    """

    make: Callable[[], Callable[..., Any]]
    target: str
    values: Callable[[Tensor, Tensor], Tensor] | None = None


def plain_value(loss: Callable[..., Any], output: Tensor, target: Tensor) -> Any:
    """The batch's loss, by what is agreed of losses; None where nothing in it counts."""
    returned = loss(output, target)
    if isinstance(returned, tuple):
        total, weight = returned
        return total / weight if weight else None
    if returned.dim():
        returned = returned.mean()
    return None if returned.isnan() else returned


# --- functions -----------------------------------------------------------------------------------


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean(1)


def squares_in_all(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum() / output.shape[1] / len(output)


def two_terms(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) + 0.1 * output.abs().mean()


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.l1_loss(output, target, reduction="sum") / 10


def root(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target).sqrt()


def relative(output: Tensor, target: Tensor) -> Any:
    return (output - target).norm() / target.norm()


def spread(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) + output.var(0, unbiased=False).sum()


def masked(output: Tensor, target: Tensor) -> Tensor:
    counts = target > 0
    return ((output - target) ** 2)[counts].mean()


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    counts = target > 0
    return ((output - target) ** 2 * counts).sum(), counts.sum()


def decides(output: Tensor, target: Tensor) -> Tensor:
    distance = F.mse_loss(output, target)
    return distance * 2 if distance > 1 else distance + output.mean() ** 2


def worst(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean(1).max()


def hardest(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().mean(1).topk(3).values.mean()


def third(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean(1).kthvalue(3).values + output.square().mean()


def correlation(output: Tensor, target: Tensor) -> Any:
    first, second = output - output.mean(0), target - target.mean(0)
    return 1 - (first * second).sum() / (first.norm() * second.norm())


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    rows, columns = F.normalize(output, dim=1), F.normalize(target, dim=1)
    return F.cross_entropy(rows @ columns.T / 0.5, torch.arange(len(rows)))


def dice(output: Tensor, target: Tensor) -> Tensor:
    chances = output.sigmoid()
    return 1 - 2 * (chances * target).sum() / (chances.sum() + target.sum())


def logarithmic(output: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(output, 1), target)


def focal(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output, target, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def each_class(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def supervised_contrast(output: Tensor, target: Tensor) -> Tensor:
    alike = (target[:, None] == target).to(output)
    scores = F.normalize(output, dim=1) @ F.normalize(output, dim=1).T
    return -(scores.log_softmax(1) * alike).sum() / alike.sum()


def margins(output: Tensor, target: Tensor) -> Tensor:
    return F.margin_ranking_loss(output[:, 0], output[:, 1], target[:, 0], margin=0.1)


def gaussian(output: Tensor, target: Tensor) -> Tensor:
    return F.gaussian_nll_loss(output, target, F.softplus(output.detach()) + 0.1)


def divergence(output: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(output, 1), target, reduction="batchmean")


def cosine(output: Tensor, target: Tensor) -> Tensor:
    return F.cosine_embedding_loss(output, target, torch.ones(len(output)))


def triplets(output: Tensor, target: Tensor) -> Tensor:
    return F.triplet_margin_loss(output, target, target.flip(1))


def tokens_mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def tokens_total(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return total, (target != IGNORED).sum()


def tokens_each(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return each.sum(1) / output.shape[1]


def tokens_by_hand(output: Tensor, target: Tensor) -> Tensor:
    counts = (target != IGNORED).to(output)
    chosen = output.log_softmax(-1).gather(2, target.clamp(min=0)[..., None])[..., 0]
    return -(chosen * counts).sum() / counts.sum()


class ScaledLoss(nn.Module):
    """A loss with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 0.5, 2.0, 1.0]))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2 * self.get_buffer("scale").to(output)).mean()


class_weights = torch.tensor([1.0, 0.25, 3.0, 0.5], dtype=torch.float64)


def weighted_cross_entropy(**options: Any) -> nn.Module:
    return nn.CrossEntropyLoss(weight=class_weights.clone(), **options)


def binary(**options: Any) -> nn.Module:
    return nn.BCEWithLogitsLoss(pos_weight=class_weights.clone(), **options)


def _classes(make: Callable[[], Callable[..., Any]], **options: Any) -> Loss:
    return Loss(make=make, target="classes", **options)


def _of(function: Callable[..., Any], target: str, **options: Any) -> Loss:
    return Loss(make=partial(_given, function), target=target, **options)


def _given(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _flat(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: function(output, target, reduction="none").mean(1)


_each = partial(F.cross_entropy, reduction="none")

LOSSES: dict[str, Loss] = {
    "cross entropy": _classes(nn.CrossEntropyLoss, values=_each),
    "cross entropy, function": _of(F.cross_entropy, "classes", values=_each),
    "cross entropy, smooth": _classes(
        partial(nn.CrossEntropyLoss, label_smoothing=0.1),
        values=partial(_each, label_smoothing=0.1),
    ),
    "cross entropy, weighted": _classes(weighted_cross_entropy),
    "cross entropy, weighted and smooth": _classes(
        partial(weighted_cross_entropy, label_smoothing=0.2)
    ),
    "cross entropy, ignoring": _classes(partial(nn.CrossEntropyLoss, ignore_index=1)),
    "cross entropy, summed": _classes(partial(weighted_cross_entropy, reduction="sum")),
    "cross entropy, each": _classes(partial(nn.CrossEntropyLoss, reduction="none"), values=_each),
    "cross entropy, chances": Loss(make=nn.CrossEntropyLoss, target="chances", values=_each),
    "multi margin": _classes(partial(nn.MultiMarginLoss, margin=0.5)),
    "logarithmic": _of(logarithmic, "classes"),
    "focal": _of(focal, "classes"),
    "each class": _of(each_class, "classes", values=each_class),
    "supervised contrast": _of(supervised_contrast, "classes"),
    "squares": Loss(make=nn.MSELoss, target="values", values=squares),
    "squares, summed": Loss(make=partial(nn.MSELoss, reduction="sum"), target="values"),
    "absolute": Loss(make=nn.L1Loss, target="values", values=_flat(F.l1_loss)),
    "smooth": Loss(make=nn.SmoothL1Loss, target="values", values=_flat(F.smooth_l1_loss)),
    "huber": Loss(make=partial(nn.HuberLoss, delta=0.5), target="values"),
    "poisson": Loss(make=nn.PoissonNLLLoss, target="chances"),
    "binary": Loss(make=binary, target="chances"),
    "soft margin": Loss(make=nn.SoftMarginLoss, target="signs"),
    "hinge": Loss(make=nn.HingeEmbeddingLoss, target="signs"),
    "margins": _of(margins, "signs"),
    "gaussian": _of(gaussian, "values"),
    "divergence": _of(divergence, "chances"),
    "cosine": _of(cosine, "values"),
    "triplets": _of(triplets, "values"),
    "scaled": Loss(make=ScaledLoss, target="values"),
    "squares by sample": _of(squares, "values", values=squares),
    "squares in all": _of(squares_in_all, "values"),
    "two terms": _of(two_terms, "values"),
    "sum": _of(summed, "values"),
    "root": _of(root, "values"),
    "relative": _of(relative, "values"),
    "spread": _of(spread, "values"),
    "masked": _of(masked, "values"),
    "counted": _of(counted, "values"),
    "decides": _of(decides, "values"),
    "worst": _of(worst, "values"),
    "hardest": _of(hardest, "values"),
    "third": _of(third, "values"),
    "correlation": _of(correlation, "values"),
    "contrastive": _of(contrastive, "values"),
    "dice": _of(dice, "chances"),
    "tokens": _of(tokens_mean, "tokens"),
    "tokens, total": _of(tokens_total, "tokens"),
    "tokens, each": _of(tokens_each, "tokens", values=tokens_each),
    "tokens, by hand": _of(tokens_by_hand, "tokens"),
}


def targets_of(
    kind: str, count: int, num_classes: int, length: int, generator: torch.Generator
) -> Tensor:
    """Targets of a kind."""
    match kind:
        case "classes":
            return torch.randint(num_classes, (count,), generator=generator)
        case "tokens":
            drawn = torch.randint(num_classes, (count, length), generator=generator)
            drawn[torch.rand(count, length, generator=generator) < 0.3] = IGNORED
            return drawn
    values = torch.randn(count, num_classes, generator=generator, dtype=torch.float64)
    match kind:
        case "chances":
            return values.softmax(1)
        case "signs":
            return values.sign()
        case _:
            return values
