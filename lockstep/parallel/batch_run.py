"""A global batch in training, evaluation or prediction: its shares and their random seeds."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lockstep.data.map_style.sources import Batch, Source
from lockstep.data.order import evaluation_seed, share_seed
from lockstep.data.trees import Tree
from lockstep.parallel.independence.split_trial import is_tried
from lockstep.parallel.loss.share_losses import Sums
from lockstep.plan.shares import share_bounds


@dataclass(frozen=True, kw_only=True)
class ShareOutput:
    """The model's output for a share.

    Attributes:
        step: of training; None in evaluation.
        share: its number in the batch.
        num_samples: in the share.
        output: of the model, in the form that users see.
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
    """A global batch to train on, the same on every rank.

    Attributes:
        source: the data.
        indices: of its samples in the data.
        step: the number of the step.
        observe: called with the outputs.
        turn: the number of the train_step function, if several train on each batch.
        first_share: the number of its first share, if it is a part of a global batch.
        batch_size: of that global batch; 0 if it is the whole.
    """

    source: Source
    indices: torch.Tensor
    step: int
    observe: Observe | None = None
    turn: int = 0
    first_share: int = 0
    batch_size: int = 0


class Run:
    """A batch that is being processed: its shares and their results so far.

    Attributes:
        source: the data; None if no samples are read.
        indices: of its samples in the data.
        num_shares: into which the batch is divided.
        step: of training; None in evaluation and prediction.
        observe: called with the outputs.
        turn: see ``StepBatch``.
        first_share: likewise.
        batch_size: likewise.
        num_samples: in the batch.
        bounds: rows ``[start, stop)`` of each share.
        num_filled: shares with at least one sample; they come first.
        is_training: the batch is trained on.
        is_tried: the model is tested on parts of its shares.
        is_observed: outputs are passed to ``observe``.
    """

    def __init__(
        self,
        source: Source | None,
        indices: torch.Tensor,
        num_shares: int,
        *,
        step: int | None = None,
        observe: Observe | None = None,
        turn: int = 0,
        first_share: int = 0,
        batch_size: int = 0,
    ) -> None:
        self.source, self.indices, self.num_shares = source, indices, num_shares
        self.step, self.observe = step, observe
        self.turn, self.first_share = turn, first_share
        self.num_samples = indices.shape[0]
        self.batch_size = batch_size or self.num_samples
        self.bounds = share_bounds(self.num_samples, num_shares)
        self.num_filled = min(self.num_samples, num_shares)
        self.is_training = step is not None
        self.is_tried = is_tried(step)
        self.is_observed = observe is not None
        self.parts: list[Sums] = []  # of several losses, by share
        self._observed: list[ShareOutput] = []

    def show(self, share: int, output: Tree, batch: Batch) -> None:
        """Keep an output for ``observe``, which is called at the end of the batch."""
        part = ShareOutput(
            step=self.step,
            share=self.first_share + share,
            num_samples=batch.num_samples,
            output=output,
            target=batch.targets,
        )
        self._observed.append(part)

    def end_observing(self) -> None:
        """Call ``observe`` with the outputs."""
        if self.observe is not None:
            for part in self._observed:
                self.observe(part)
        self._observed.clear()

    def indices_of(self, share: int) -> torch.Tensor:
        """The samples of a share."""
        return self.indices[slice(*self.bounds[share])]

    def seed_of(self, share: int, seed: int) -> int:
        """The seed of a share's random streams."""
        if self.step is None:
            return evaluation_seed(seed, int(self.indices[self.bounds[share][0]]))
        return share_seed(seed, self.step, self.first_share + share, self.turn)

    def seed_of_batch(self, seed: int) -> int:
        """The seed of the random streams of a loss that is computed on the whole batch."""
        if self.step is None:
            return evaluation_seed(seed, int(self.indices[0]))
        return share_seed(seed, self.step, len(self.bounds), self.turn)
