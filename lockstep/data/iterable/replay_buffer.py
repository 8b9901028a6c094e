"""A reader that keeps its last batches, to replay them.

A stream cannot be read twice. So batches since a mark are copied as they are read; ``rewind`` goes
back to the mark, and then ``read`` gives them again, in their epochs, before any new ones.

One thread reads batches ahead of their use. ``mark`` and ``use`` are for the thread that uses them;
``rewind``, like all reading, is for the one that reads.
"""

from collections import deque
from dataclasses import dataclass

import torch

from lockstep.data.iterable.stream_reader import Reading
from lockstep.data.map_style.sources import ArraySource
from lockstep.data.trees import map_tensors, tensors_of


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """The result of a read.

    Attributes:
        epoch: of the read.
        batch: the batch; None for the epoch's end.
        number: of batches read until then.
        total: their checksum; None without checksums.
    """

    epoch: int
    batch: ArraySource | None
    number: int
    total: int | None

    @property
    def num_bytes(self) -> int:
        """The batch's memory."""
        batch = self.batch
        if batch is None:
            return 0
        parts = (batch.inputs, batch.targets, batch.sample_weight)
        return sum(tensor.nbytes for tensor in tensors_of(parts))


class ReplayableReading(Reading):
    """Reads as another ``Reading``, and replays batches on demand.

    Args:
        reading: the other, of which at most a sample has been read.
    """

    def __init__(self, reading: Reading) -> None:
        self.__dict__.update(vars(reading))
        self._given: deque[_Kept] = deque()  # since the mark
        self._waiting: deque[_Kept] = deque()  # to be replayed
        self._wanted = self._epoch  # the epoch in use
        self._num_used = 0  # batches of it, since the mark
        self.kept_bytes = 0

    def begin_epoch(self, epoch: int) -> None:
        self._wanted, self._num_used = epoch, 0
        while self._waiting and self._waiting[0].epoch < epoch:
            self._given.append(self._waiting.popleft())
        if epoch > self._epoch:  # otherwise it has begun before
            super().begin_epoch(epoch)

    def read(self) -> ArraySource | None:
        if self._waiting:
            again = self._waiting.popleft()
            self._given.append(again)
            return again.batch
        return self._keep(super().read())

    @property
    def can_prefetch(self) -> bool:
        return not self._waiting and super().can_prefetch

    def prefetch(self) -> ArraySource | None:
        found = super().prefetch()
        return None if found is None else self._keep(found)  # at a pass's end, ``read`` continues

    def _keep(self, batch: ArraySource | None) -> ArraySource | None:
        copied = None
        if batch is not None:
            parts = (batch.inputs, batch.targets, batch.sample_weight)
            copied = ArraySource(*map_tensors(torch.Tensor.clone, parts))
        number = self._num_summed
        total = None if self._sums is None else Reading.checksum(self, number)
        kept = _Kept(epoch=self._epoch, batch=copied, number=number, total=total)
        self.kept_bytes += kept.num_bytes
        self._given.append(kept)
        return copied

    def checksum(self, num_batches: int) -> int | None:
        for kept in reversed(self._given.copy()):
            if kept.number == num_batches:
                return kept.total
        return super().checksum(num_batches)

    def use(self) -> None:
        """Note that the epoch's next batch is used."""
        self._num_used += 1

    def mark(self) -> None:
        """Forget the batches that were used until now."""
        given = self._given
        while given and (given[0].epoch < self._wanted or self._num_used):
            gone = given.popleft()
            self.kept_bytes -= gone.num_bytes
            self._num_used -= gone.epoch == self._wanted and gone.batch is not None

    def rewind(self) -> None:
        """Replay the batches since the mark, beginning with the next read."""
        self._waiting = self._given + self._waiting
        self._given = deque()
        self._num_used = 0
