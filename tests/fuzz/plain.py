"""The loop that all trainings are held to: plain PyTorch, which imports nothing of Lockstep."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[tuple[Tensor, ...], Any, Tensor | None]


@dataclass(kw_only=True)
class PlainTraining:
    """A model, and how it is trained.

    Attributes:
        model: it is trained in place.
        loss_of: the loss of a batch, from the model's output, its targets and sample weights.
        optimizer: over the model's parameters.
        clip_norm: longest gradient.
        clip_value: largest element of a gradient.
        decay: of a moving average of the weights.
        schedule: of the learning rate.
        schedule_every: "epoch" or "step".
        losses: of every step so far.
        average: of the weights, by name.
    """

    model: nn.Module
    loss_of: Callable[[Any, Any, Tensor | None], Tensor | None]
    optimizer: torch.optim.Optimizer
    clip_norm: float | None = None
    clip_value: float | None = None
    decay: float | None = None
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    schedule_every: str = "epoch"
    losses: list[float] = field(default_factory=list)
    average: dict[str, Tensor] = field(default_factory=dict)

    def train(self, batches: Sequence[Batch]) -> None:
        """An epoch."""
        self.model.train()
        for inputs, targets, weights in batches:
            self.model.zero_grad()
            loss = self.loss_of(self.model(*inputs), targets, weights)
            if loss is None:
                continue
            loss.backward()
            self._clip()
            self.optimizer.step()
            self._average()
            self.losses.append(loss.item())
            if self.schedule is not None and self.schedule_every == "step":
                self.schedule.step()
        if self.schedule is not None and self.schedule_every == "epoch":
            self.schedule.step()

    def predict(self, batches: Sequence[Batch]) -> Iterator[Any]:
        """The model's outputs."""
        self.model.eval()
        with torch.no_grad():
            yield from (self.model(*inputs) for inputs, _, _ in batches)
        self.model.train()

    def _clip(self) -> None:
        own = list(self.model.parameters())
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(own, self.clip_value)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(own, self.clip_norm)

    @torch.no_grad()
    def _average(self) -> None:
        if self.decay is None:
            return
        for name, weight in self.model.named_parameters():
            if not weight.requires_grad:
                continue
            before = self.average.get(name, weight.clone())
            self.average[name] = self.decay * before + (1 - self.decay) * weight


def mixed(batch: Batch, seed: int | None) -> Batch:
    """The batch's samples in another order: the same, but for rounding."""
    if seed is None:
        return batch
    inputs, targets, weights = batch
    order = torch.randperm(len(inputs[0]), generator=torch.Generator().manual_seed(seed))
    if isinstance(targets, dict):
        targets = {name: one[order] for name, one in targets.items()}
    else:
        targets = targets[order]
    own = tuple(one[order] for one in inputs)
    return own, targets, None if weights is None else weights[order]
