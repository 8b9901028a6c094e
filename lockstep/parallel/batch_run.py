"""A global batch in training, evaluation or prediction: its shares and their random seeds."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from lockstep.data.map_style.sources import Batch, Source
from lockstep.data.order import evaluation_seed, share_seed
from lockstep.data.trees import Tree
from lockstep.parallel.loss.share_losses import Sums
from lockstep.plan.shares import num_filled_shares, share_bounds


@dataclass(frozen=True, kw_only=True)
class ShareOutput:
    """What the model has made of a share.

    Attributes:
        step: of training; None in evaluation.
        share: its number in the batch.
        num_samples: how many it has.
        output: of the model, as users see it.
        target: of its samples.
    """

    step: int | None
    share: int
    num_samples: int
    output: Tree
    target: Tree


# Called with every share whose output this rank computes.
Observe = Callable[[ShareOutput], None]

# Called with the share, its batch, and the model's output for it.
Take = Callable[[int, Batch, Tree], None]


@dataclass(frozen=True)
class StepBatch:
    """A global batch to train on, which every rank is given alike.

    Attributes:
        source: where its samples are.
        indices: theirs.
        step: the number of the step.
        observe: is shown the outputs.
        turn: where several functions train on each batch, whose turn it is.
    """

    source: Source
    indices: torch.Tensor
    step: int
    observe: Observe | None = None
    turn: int = 0


@dataclass(eq=False)
class Run:
    """A batch on its way: its shares, and what has come of them so far.

    Attributes:
        source: where its samples are; None where none are going to be read.
        indices: theirs.
        num_shares: it is divided into.
        step: of training; None in evaluation and prediction.
        observe: is shown the outputs.
        turn: of several functions that train on it, the one that does now.
        first_share: the number of its first share, where the batch is a part of another.
        batch_size: samples of that other one; 0 where it is whole.
    """

    source: Source | None
    indices: torch.Tensor
    num_shares: int
    _: KW_ONLY
    step: int | None = None
    observe: Observe | None = None
    turn: int = 0
    first_share: int = 0
    batch_size: int = 0
    parts: list[Sums] = field(default_factory=list, init=False)  # of several losses, by share
    _observed: list[ShareOutput] = field(default_factory=list, init=False)

    @classmethod
    def of_step(cls, batch: StepBatch, num_shares: int, **part: int) -> "Run":
        """A batch that is trained on; ``part`` has ``first_share`` and ``batch_size``."""
        options: dict[str, Any] = {"step": batch.step, "observe": batch.observe, **part}
        return cls(batch.source, batch.indices, num_shares, turn=batch.turn, **options)

    def __post_init__(self) -> None:
        self.num_samples = len(self.indices)
        self.batch_size = self.batch_size or self.num_samples
        self.bounds = share_bounds(self.num_samples, self.num_shares)
        self.num_filled = num_filled_shares(self.num_samples, self.num_shares)

    @property
    def is_training(self) -> bool:
        """Whether it is trained on."""
        return self.step is not None

    @property
    def is_observed(self) -> bool:
        """Whether somebody looks at the outputs."""
        return self.observe is not None

    def show(self, share: int, output: Tree, batch: Batch) -> None:
        """What is to be observed once the batch is through."""
        part = ShareOutput(
            step=self.step,
            share=self.first_share + share,
            num_samples=batch.num_samples,
            output=output,
            target=batch.targets,
        )
        self._observed.append(part)

    def end_observing(self) -> None:
        """Have it observed."""
        if self.observe is not None:
            for part in self._observed:
                self.observe(part)
        self._observed.clear()

    def indices_of(self, share: int) -> torch.Tensor:
        """The samples of a share."""
        return self.indices[slice(*self.bounds[share])]

    def seed_of(self, share: int, seed: int) -> int:
        """Of a share's random streams."""
        if self.step is None:
            return evaluation_seed(seed, int(self.indices[self.bounds[share][0]]))
        return share_seed(seed, self.step, self.first_share + share, self.turn)

    def seed_of_batch(self, seed: int) -> int:
        """Of the random streams of a loss that is taken on the whole batch."""
        if self.step is None:
            return evaluation_seed(seed, int(self.indices[0]))
        return share_seed(seed, self.step, len(self.bounds), self.turn)
