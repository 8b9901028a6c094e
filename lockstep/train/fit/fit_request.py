"""The arguments of a ``fit``, and the data adapted from them."""

import os
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.data.records.bad_records import OnBadRecord
from lockstep.parallel.loss.share_losses import LossAdapter
from lockstep.train.batch_size_search.batch_size import BatchSizeSearch
from lockstep.train.checkpointing.checkpoints import Checkpoint
from lockstep.train.input.data_adapter import DataOptions, DataPipeline, close_all
from lockstep.train.optim.rate_rules import RateRule


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """The arguments of a ``fit``: see ``Trainer.fit``."""

    data: Any
    epochs: int
    batch_size: int | Literal["auto"] | BatchSizeSearch | None
    steps_per_epoch: int | None
    validation_data: Any
    validation_split: float
    shuffle: bool | None
    verbose: int
    rule: RateRule | None
    checkpoint: Checkpoint | None
    restarts: int
    on_bad_record: OnBadRecord
    record: str | os.PathLike[str] | None
    on_snapshot: Any


@dataclass(frozen=True, kw_only=True)
class FitData:
    """The adapted data of a ``fit``.

    Attributes:
        loss: None if the step computes it.
        options: the options for the data.
        feed: the training data.
        validation: the data evaluated after every epoch, or None.
    """

    loss: LossAdapter | None
    options: DataOptions
    feed: DataPipeline
    validation: DataPipeline | None

    def close(self) -> None:
        """Stop reading."""
        close_all(self.feed, self.validation)
