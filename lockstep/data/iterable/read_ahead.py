"""Options of reading ahead, and requests to readers.

``prefetch`` only attaches the options to a dataset. Only a rank's worker knows what the rank reads
next, so the workers make the readers (``parallel.transfer.readers``).
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from lockstep.data.map_style.map_datasets import check_map_style, read_items
from lockstep.errors import OptionError, Problems
from lockstep.options import check_count


@dataclass(frozen=True, kw_only=True)
class ReadAhead:
    """How far to read ahead.

    Attributes:
        workers: processes per rank that read; 0 is a thread of the rank.
        depth: how many steps ahead.
    """

    workers: int
    depth: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Read:
    """A read that a rank will make.

    Attributes:
        indices: of the samples, int64, shape (n,).
        dtype: of floating numbers.
        seed: of the random streams, which the rank seeds before it reads.
    """

    indices: torch.Tensor
    dtype: torch.dtype
    seed: int

    def is_for(self, indices: torch.Tensor, dtype: torch.dtype | None) -> bool:
        """Whether it is what a rank reads now, with random streams that it has just seeded."""
        is_due = self.seed == torch.initial_seed() and self.dtype == dtype
        return is_due and torch.equal(self.indices, indices)


def prefetch(dataset: Any, workers: int = 0, depth: int = 2) -> "Prefetch":
    """A dataset that is read ahead: each rank's next batches while it trains on the current one.

    Training gives the same bits as without, with random augmentation, too.

    Args:
        dataset: a map-style dataset.
        workers: processes per rank that read, for work such as decoding and augmenting. 0 reads in
            a thread of each rank, which is enough to wait for a disk or a network, and is refused
            if reading draws random numbers.
        depth: how many steps ahead samples are read, into memory.

    Raises:
        OptionError: an argument is invalid.
    """
    problems = Problems()
    check_map_style(dataset, "prefetch", problems)
    if isinstance(dataset, Prefetch):
        problems.add(
            "A dataset can be prefetched only once.",
            received="prefetch(prefetch(dataset))",
            fix="Leave one of them out.",
        )
    for name, value, least in (("workers", workers, 0), ("depth", depth, 1)):
        fix = "Use the default, or a small number."
        check_count(name, value, problems, least=least, fix=fix)
    problems.raise_if_any(OptionError)
    return Prefetch(dataset, ReadAhead(workers=workers, depth=depth))


class Prefetch(Dataset[Any]):
    """See ``prefetch``.

    Attributes:
        dataset: what is read.
        ahead: how.
    """

    def __init__(self, dataset: Any, ahead: ReadAhead) -> None:
        self.dataset = dataset
        self.ahead = ahead
        # Datasets need not be thread-safe, and a callback may evaluate on this one.
        self._turn = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Prefetch, (self.dataset, self.ahead)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        with self._turn:
            return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples at these indices."""
        with self._turn:
            return read_items(self.dataset, indices)
