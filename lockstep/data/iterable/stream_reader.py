"""Reading of streams: the position in a stream, and the random numbers that reading draws.

Streams may draw from torch's, NumPy's and Python's global random streams: a shuffling sampler, an
augmentation. The model draws from the same ones. Neither may disturb the other, on any number of
devices. So reading has random states of its own, functions of the seed and the epoch, which are set
before each read and reset after it.

That works only while nothing else computes. ``prefetch`` does not touch the random streams, so
that the next batch can be read while a model trains on this one. It is for streams that draw
nothing: ``can_prefetch`` is True after the first batches have drawn nothing and set no random
stream, without the first of a pass, for which a sampler makes its order. A stream whose later
batches draw, though the first do not, is not recognised.

Nothing here starts a thread or a process.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lockstep.data.iterable.stream_setting import noting_sets
from lockstep.data.iterable.streams import Stream
from lockstep.data.map_style.sources import ArraySource, named_parts
from lockstep.data.order import (
    StreamStates,
    kept_streams,
    restore_streams,
    same_streams,
    seed_streams,
    stream_seed,
    stream_states,
)
from lockstep.data.trees import bits_of
from lockstep.errors import DataError, LockstepError

_QUIET_READS = 2  # reads that must have drawn nothing
_END = object()

# Checksums are kept for so many numbers of batches: reading is at most that far ahead.
_NUM_SUMS = 8


class Reading:
    """Reads a stream, epoch by epoch.

    Args:
        stream: what to read.
        seed: of the random streams of the reading.
        purpose: each has random numbers of its own.
        first_epoch: epochs trained before.
        steps: batches of an epoch, which then begins where the one before ended; None is a pass
            over the data.
        is_summed: True to keep a checksum, which shows whether the same is read again.

    Attributes:
        stream: what is read.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        seed: int,
        purpose: str = "reading",
        first_epoch: int = 0,
        steps: int | None = None,
        is_summed: bool = False,
    ) -> None:
        self.stream = stream
        self._sums: list[tuple[int, int]] | None = None
        if is_summed:
            self._sums = [(0, 0)] * _NUM_SUMS
        self._seed = seed
        self._purpose = purpose
        self._first_epoch = first_epoch
        self._steps = steps
        self._epoch = -1
        self._index = 0  # of the next batch in the epoch
        self._is_over = False  # the epoch, before it had all its steps
        self._iterator: Iterator[Any] | None = None  # of the pass under way
        self._num_passes = 0  # begun in this epoch
        self._num_read = 0  # batches of the pass
        self._states: StreamStates | None = None  # None before the first pass
        self._num_quiet = 0
        self._draws = False
        self._sample: ArraySource | None = None
        self._next: ArraySource | None = None  # read before its time
        self._num_summed = 0
        self._is_left = False

    def peek(self, epoch: int) -> ArraySource:
        """The first batch, which the next ``read`` returns again."""
        if self._sample is None:
            self.begin_epoch(epoch)
            self._next = self._sample = self.read()
        assert self._sample is not None  # an epoch without a batch is an error
        return self._sample

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it is the one that ``peek`` has begun."""
        if epoch == self._epoch:
            return
        self._epoch, self._index, self._num_passes, self._is_over = epoch, 0, 0, False
        if self._steps is None:
            self._iterator = None

    def read(self) -> ArraySource | None:
        """The next batch of the epoch; None at its end. Nothing else may draw meanwhile.

        Raises:
            DataError: the stream fails, ends too early, or gives something that is no batch.
        """
        if self._next is not None:
            peeked, self._next = self._next, None
            return peeked
        if self._is_over or self._index == self._steps:
            return None
        if self._iterator is None:
            self._begin_pass()
        found = self._read()
        if found is None and self._num_read and not self._is_over:
            self._begin_pass()
            found = self._read()
        if found is None and not self._num_read:
            raise self._empty()
        return found

    @property
    def can_prefetch(self) -> bool:
        """Whether there may be a next batch, and the reads so far have drawn nothing."""
        is_quiet = self._num_quiet >= _QUIET_READS and not self._draws
        return is_quiet and self._iterator is not None and self._index != self._steps

    def prefetch(self) -> ArraySource | None:
        """The next batch of the pass; None at its end, where ``read`` continues.

        For a stream that draws nothing, while others draw.
        """
        return self._take()

    def skip(self, epoch: int, num_batches: int | None = None) -> int:
        """Read and drop batches of an epoch, or all, that were used before; returns their number.

        Raises:
            DataError: there are fewer.
        """
        self.begin_epoch(epoch)
        passed = 0
        while passed != num_batches and self.read() is not None:
            passed += 1
        if num_batches is not None and passed != num_batches:
            raise self.changed(f"{passed} batches in epoch {epoch}, where there were more")
        return passed

    def checksum(self, num_batches: int) -> int | None:
        """The checksum of the first batches of all; None without checksums."""
        if self._sums is None:
            return None
        number, found = self._sums[num_batches % _NUM_SUMS]
        assert number == num_batches, "the reading is too far ahead"
        return found

    def changed(self, received: str) -> DataError:
        """The error for data that differs from before."""
        return DataError(
            f"To resume, `{self.stream.name}` must give the same batches as before.",
            received=f"{self.stream.kind} with {received}",
            fix="Seed the generator that decides its order, and draw nothing else from it; or "
            "start again in another folder.",
        )

    def leave(self) -> None:
        """From any thread: abandon a running read, which then leaves the random streams alone.

        When it ends, others use them.
        """
        self._is_left = True

    def close(self) -> None:
        """Release the current pass, in the thread that has read it."""
        self._iterator = None

    def _read(self) -> ArraySource | None:
        is_first = self._num_read == 0
        is_tried = not is_first and self._num_quiet < _QUIET_READS
        with self._own_streams():
            before = stream_states()
            with noting_sets() if is_tried else nullcontext() as sets:
                found = self._take()
            if found is not None and not is_first:
                self._num_quiet += 1
                self._draws |= bool(sets) or not same_streams(before, stream_states())
        return found

    def _take(self) -> ArraySource | None:
        assert self._iterator is not None
        with self._locating_errors():
            element = next(self._iterator, _END)
            if element is _END:
                self._iterator, self._is_over = None, self._steps is None
                return None
            found = self.stream.batch(element)
        if self._sums is not None:
            before, number = self._num_summed, self._num_summed + 1
            total = _checksum(found, self._sums[before % _NUM_SUMS][1])
            self._sums[number % _NUM_SUMS] = (number, total)
            self._num_summed = number
        self._index += 1
        self._num_read += 1
        return found

    def _begin_pass(self) -> None:
        if self._states is not None and not self.stream.restarts:
            raise _ended(
                f"`{self.stream.name}` must give {self._steps} batches in every epoch, as "
                "steps_per_epoch says.",
                received=f"{self.stream.kind} that ended after {self._index} batches of epoch "
                f"{self._epoch} (from 0)",
                fix="Pass a generator function, which is called again then, or fewer epochs. "
                "The weights are those of the last step.",
            )
        keys = [self._first_epoch + self._epoch]
        if self._num_passes:
            keys.append(self._num_passes)
        self._num_passes += 1
        self._num_read = 0
        with kept_streams():
            seed_streams(stream_seed(self._seed, self._purpose, *keys))
            self._states = stream_states()
        with self._own_streams(), self._locating_errors():
            self._iterator = self.stream.begin()

    @contextmanager
    def _own_streams(self) -> Iterator[None]:
        """Within the block, the global random streams are those of the reading."""
        assert self._states is not None
        before = stream_states()
        restore_streams(self._states)
        try:
            yield
            self._states = stream_states()
        finally:
            if not self._is_left:
                restore_streams(before)

    @contextmanager
    def _locating_errors(self) -> Iterator[None]:
        """Errors within the block say where in the data they occurred."""
        place = f"batch {self._index} of epoch {self._epoch} of `{self.stream.name}` (from 0)"
        try:
            yield
        except LockstepError as error:
            error.add_note(f"It was {place}.")
            raise
        except Exception as error:
            raise DataError(
                f"Reading {place} failed.",
                received=f"{type(error).__name__}: {_first_line(error)}",
                fix="The exception above says where.",
            ) from error

    def _empty(self) -> DataError:
        return _ended(
            f"`{self.stream.name}` must give a batch in every epoch.",
            received=f"{self.stream.kind} without any in epoch {self._epoch} (from 0)",
            fix="Check its source. A function must return a new iterator at every call."
            if self.stream.restarts
            else "An iterator gives every batch once: pass a generator function.",
        )


def _checksum(batch: ArraySource, before: int) -> int:
    """The CRC-32 of a batch's bytes, continuing that of the batches before."""
    for _, tensor in named_parts(batch):
        if tensor.numel():
            before = zlib.crc32(bits_of(tensor).numpy(), before)  # type: ignore[arg-type]
    return before


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _ended(what: str, *, received: str, fix: str) -> DataError:
    error = DataError(what, received=received, fix=fix)
    error.is_end = True
    return error
