"""Reading ahead: what a dataset says of it, and what a reader is told.

``prefetch`` only notes on a dataset how it is to be read. Who knows what each rank will read next
is its worker, so the readers themselves are made where the workers are
(``parallel.transfer.readers``).
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
        depth: steps whose samples are held ready.
    """

    workers: int
    depth: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Read:
    """Something that a rank is going to read.

    Attributes:
        indices: of the samples, int64, shape (n,).
        dtype: of floating numbers.
        seed: of the random streams, which the rank seeds before it reads.
    """

    indices: torch.Tensor
    dtype: torch.dtype
    seed: int

    def is_for(self, indices: torch.Tensor, dtype: torch.dtype | None) -> bool:
        """Whether it is what a rank reads now, in a stream that it has just seeded."""
        is_due = self.seed == torch.initial_seed() and self.dtype == dtype
        return is_due and torch.equal(self.indices, indices)


def prefetch(dataset: Any, workers: int = 0, depth: int = 2) -> "Prefetch":
    """A dataset that is read ahead: the next batches of each rank while the present one trains.

    Training gives the same bits as without, random augmentation included.

    Args:
        dataset: a map-style dataset.
        workers: 0 reads in a thread of each rank, which is enough where reading is waiting, for a
            disk or a network, and is refused where it draws random numbers; else the number of
            processes per rank that read, for work such as decoding and augmenting.
        depth: steps whose samples are held ready, in memory.

    Raises:
        OptionError: an argument cannot be what it is.
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
        # Datasets need not stand two threads at once, and a callback may evaluate on this one.
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
