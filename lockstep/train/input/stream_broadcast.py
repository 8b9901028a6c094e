"""Gives the same global batches of a task to every rank.

Every rank reads indexed data for itself, in an order that all know. Rank 0 alone reads a
stream. It copies each batch into a slot of shared memory that all ranks map, and sends the others
its layout; each rank copies its own rows out of it, as of any array.

There are two slots, so that rank 0 can read and copy the next batch while all ranks train on this
one. A slot is written again when all ranks are past the step that read it: in training the barrier
at the end of each step ensures this, elsewhere a barrier entered here. A batch that does not fit
its slot gets a larger one.

If reading draws random numbers, it is done between steps instead (see
``data.iterable.stream_reader``). One thread does all reading, so that a generator can continue to
use what it opened (a database).
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from lockstep.channel.background import Background, is_done
from lockstep.channel.polling import Stopwatch
from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.data.iterable.replay_buffer import ReplayableReading
from lockstep.data.iterable.stream_reader import Reading
from lockstep.data.map_style.sources import ArraySource, Batch, Source
from lockstep.data.order import batch_bounds
from lockstep.data.trees import Tree, map_leaves, map_tensors, tensors_of
from lockstep.errors import level_of_user
from lockstep.parallel.data_parallel.staging import Staged, Staging
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.storage.store import TensorStore, tensor_spec
from lockstep.parallel.worker import Worker
from lockstep.plan.layout import flat_offsets
from lockstep.train.input.input_wait import InputBoundWarning

# A global batch: the source of its samples, and their indices, in order.
GlobalBatch = tuple[Source, torch.Tensor]

# A batch in memory of its own, or on its way to an accelerator.
_Laid = ArraySource | Staged

_NUM_SLOTS = 2
_SPARE = 4  # a slot is larger by 1 / _SPARE than the batch it was made for


class Halt(Exception):  # noqa: N818  # no error: all ranks leave their loop here, together
    """The user has pressed Ctrl-C."""


def _never() -> bool:
    return False


def _raise(error: Exception) -> None:
    raise error


class SharedStream:
    """A stream, as all ranks of a team see it. The helpers' copies can only follow rank 0.

    Args:
        reading: rank 0's; None on the others.
    """

    def __init__(self, reading: Reading | None) -> None:
        self._reading = reading
        self._background = Background("lockstep: reading")
        self._slots = [_StreamSlot(number) for number in range(_NUM_SLOTS)]
        self._num_used = 0
        self._marked = 0  # of these, at the mark

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedStream, (None,)

    @property
    def is_read_here(self) -> bool:
        """True if this process reads it."""
        return self._reading is not None

    def peek(self, epoch: int = 0) -> ArraySource:
        """The first batch of the stream, without using it.

        Raises:
            DataError: there is none, or it cannot be read.
        """
        reading = self._reading
        assert reading is not None
        return self._background.submit(lambda: reading.peek(epoch)).result()

    @property
    def used(self) -> list[int] | None:
        """The number of used batches, and their checksum; None if they are not summed here."""
        if self._reading is None or (total := self._reading.checksum(self._num_used)) is None:
            return None
        return [self._num_used, total]

    def skip(self, epoch: int, num_batches: int | None = None) -> None:
        """Skip batches of an epoch, or all, that were used before.

        Raises:
            DataError: there are fewer, or they cannot be read.
        """
        reading = self._reading
        if reading is not None:
            skipped = self._background.submit(lambda: reading.skip(epoch, num_batches))
            self._num_used += skipped.result()

    def keep(self) -> None:
        """Before any batch is used: keep batches from now on, for ``rewind`` to repeat."""
        if self._reading is not None:
            reading = self._reading
            self._reading = self._background.submit(lambda: ReplayableReading(reading)).result()
            self._marked = self._num_used

    @property
    def kept_bytes(self) -> int:
        """Memory of the batches kept for that."""
        return self._reading.kept_bytes if isinstance(self._reading, ReplayableReading) else 0

    def mark(self) -> None:
        """Between two batches: keep those from now on."""
        if isinstance(self._reading, ReplayableReading):
            self._reading.mark()
            self._marked = self._num_used

    def rewind(self) -> None:
        """Go back to the mark."""
        if isinstance(self._reading, ReplayableReading):
            self._background.submit(self._reading.rewind).result()
            self._num_used = self._marked

    def check_used(self, before: list[int]) -> None:
        """Check that the skipped batches are those that were used before.

        Raises:
            DataError: they differ.
        """
        if self._reading is not None and self.used != before:
            raise self._reading.changed("other batches than then")

    def batches(
        self,
        worker: Worker,
        control: Control,
        epoch: int,
        *,
        gives_up: Callable[[], bool] = _never,
        fails: Callable[[Exception], None] = _raise,
        training: bool = False,
        largest: int | None = None,
    ) -> Iterator[GlobalBatch]:
        """The global batches of an epoch. Every rank must take the same number.

        Args:
            worker: this rank's.
            control: this rank's.
            epoch: its number.
            gives_up: True if the user has pressed Ctrl-C; called while rank 0 waits for data.
            fails: gets an error in reading; if it does not raise it, all ranks leave.
            training: each batch is trained on, so that its step ends with a barrier.
            largest: the most samples; a larger batch comes in parts.

        Raises:
            Halt: on all ranks, when rank 0 has given up waiting, or could not read.
            DataError: on rank 0, from ``fails``.
        """
        device = worker.passes.device
        leads = self._reading is not None
        found = self._lead(control, epoch, gives_up, fails, device) if leads else _follow(control)
        for batch in found:
            for indices in torch.arange(len(batch)).split(largest or len(batch)):
                yield batch, indices
            if not training:
                worker.barrier()

    def close(self) -> None:
        """Read no more."""
        if self._reading is not None:
            self._reading.leave()
            self._background.submit(self._reading.close)
        self._background.close()
        for slot in self._slots:
            slot.close()

    def _lead(
        self,
        control: Control,
        epoch: int,
        gives_up: Callable[[], bool],
        fails: Callable[[Exception], None],
        device: torch.device,
    ) -> Iterator[ArraySource]:
        reading = self._reading
        assert reading is not None
        # In the thread: the last epoch may have ended while a batch was read ahead.
        self._background.submit(lambda: reading.begin_epoch(epoch))
        is_alone = control.num_ranks == 1
        slots: Sequence[_StreamSlot | _CopiedBatches] = (
            [_CopiedBatches(device)] if is_alone else self._slots
        )
        for slot in slots:
            slot.begin_epoch()
        ahead: Future[_Laid | None] | None = None
        for number in count():
            slot, next_slot = slots[number % len(slots)], slots[(number + 1) % len(slots)]
            batch = None if ahead is None else self._awaited(ahead, control, gives_up, fails)
            if batch is None:  # not read ahead, or that was the end of a pass
                batch = self._awaited(self._read(reading.read, slot), control, gives_up, fails)
            if batch is None:
                break
            slot.broadcast(control)
            aside = reading.can_prefetch
            ahead = self._read(reading.prefetch, next_slot) if aside else None
            self._num_used += 1
            if isinstance(reading, ReplayableReading):
                reading.use()
            yield batch if isinstance(batch, ArraySource) else _ArrivedBatch(batch)
        control.broadcast(_BatchHeader())

    def _read(
        self, take: Callable[[], ArraySource | None], slot: "_StreamSlot | _CopiedBatches"
    ) -> "Future[_Laid | None]":
        """Have the thread read a batch, if there is one, and put it into a slot."""

        def read() -> _Laid | None:
            batch = take()
            return None if batch is None else slot.put(batch)

        return self._background.submit(read)

    def _awaited(
        self,
        batch: "Future[_Laid | None]",
        control: Control,
        gives_up: Callable[[], bool],
        fails: Callable[[Exception], None],
    ) -> "_Laid | None":
        """The batch that the thread has read.

        Warns:
            InputBoundWarning: reading takes longer than the timeout for another rank.

        Raises:
            Halt: on all ranks; the user has pressed Ctrl-C, or reading has failed.
        """
        watch, is_told = Stopwatch(), False

        def looks_up() -> bool:
            nonlocal is_told
            if watch.tick() > control.timeout_seconds and not is_told:
                is_told = True
                self._tell_of_waiting(watch.seconds)
            return gives_up()

        if not is_done(batch, looks_up):
            assert self._reading is not None
            self._reading.leave()
            control.broadcast(_BatchHeader(is_halt=True))
            raise Halt
        try:
            return batch.result()
        except Exception as error:
            fails(error)
            control.broadcast(_BatchHeader(is_halt=True))
            raise Halt from error

    def _tell_of_waiting(self, waited_seconds: float) -> None:
        warnings.warn(
            f"Rank 0 has waited {waited_seconds:.0f} s for the next batch, and waits on. The data "
            f"is being read here:\n{self._background.stack()}",
            InputBoundWarning,
            stacklevel=level_of_user(),
        )


def sample_of(source: Source | SharedStream | None) -> Source | None:
    """The data, to take samples from: all of it, or a stream's first batch.

    None without data, and for a stream that another host reads.
    """
    if isinstance(source, SharedStream):
        return source.peek() if source.is_read_here else None
    return None if source is None else source.sample


def all_batches(
    source: Source | SharedStream,
    worker: Worker,
    control: Control,
    batch_size: int,
    epoch: int = 0,
    gives_up: Callable[[], bool] = _never,
) -> Iterator[GlobalBatch]:
    """The global batches of one pass over the data, in its order."""
    if isinstance(source, SharedStream):
        # Stages have room to send batches of the expected size, and not of more samples.
        largest = None if worker.plan.pipeline is None else batch_size
        yield from source.batches(worker, control, epoch, gives_up=gives_up, largest=largest)
        return
    for start, stop in batch_bounds(len(source), batch_size):
        yield source, torch.arange(start, stop)


@dataclass(frozen=True, kw_only=True)
class _BatchHeader:
    """What rank 0 sends the others.

    Attributes:
        slot: the slot of the next batch; None if there is none.
        is_new: the slot's memory follows.
        tree: inputs, targets and weights, with a TensorSpec in the place of each tensor.
        is_halt: all ranks leave.
    """

    slot: int | None = None
    is_new: bool = False
    tree: Tree = None
    is_halt: bool = False


class _StreamSlot:
    """Shared memory for one batch at a time."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._region: SharedRegion | None = None
        self._is_known = False
        self._tree: Tree = None

    def begin_epoch(self) -> None:
        """The ranks of this epoch may not have this memory: send it again."""
        self._is_known = False

    def put(self, batch: ArraySource) -> ArraySource:
        """Copy a batch into the slot; returns the copy.

        Raises:
            DeviceError: the host lacks shared memory for it.
        """
        whole = (batch.inputs, batch.targets, batch.sample_weight)
        self._tree = map_tensors(lambda tensor: tensor_spec("", tensor), whole)
        laid = _laid_out(self._tree, self._room(self._tree))
        for view, tensor in zip(
            tensors_of((laid.inputs, laid.targets, laid.sample_weight)),
            tensors_of(whole),
            strict=True,
        ):
            view.copy_(tensor)
        return laid

    def broadcast(self, control: Control) -> None:
        """Send all ranks the batch in the slot."""
        is_new, self._is_known = not self._is_known, True
        control.broadcast(_BatchHeader(slot=self._number, is_new=is_new, tree=self._tree))
        if is_new:
            control.share(self._region)
        assert self._region is not None
        control.fill(self._region, _num_bytes(self._tree))

    def close(self) -> None:
        """Release the memory; it is freed when no process uses it."""
        if self._region is not None:
            self._region.close()
        self._region = None

    def _room(self, tree: Tree) -> SharedRegion:
        """The slot's memory, with room for all of the tree."""
        num_bytes = _num_bytes(tree)
        if self._region is None or self._region.num_bytes < num_bytes:
            self.close()
            self._region = SharedRegion.create(num_bytes + num_bytes // _SPARE)
            self._is_known = False
        return self._region


class _CopiedBatches:
    """Private copies for a rank 0 alone: an iterator may reuse the memory of its batches.

    Args:
        device: an accelerator gets the next batch while it computes on the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin_epoch(self) -> None:
        """Nothing to do: there are no other ranks."""

    def put(self, batch: ArraySource) -> ArraySource | Staged:
        """A copy of the batch."""
        whole = (batch.inputs, batch.targets, batch.sample_weight)
        inputs, targets, weight = map_tensors(torch.Tensor.clone, whole)
        if self._device.type == "cpu":
            return ArraySource(inputs, targets, weight)
        copied = Batch(inputs=inputs, targets=targets, sample_weight=weight, num_samples=len(batch))
        return Staging(self._device).stage(copied)

    def broadcast(self, control: Control) -> None:
        """Nothing to do: there are no other ranks."""


class _ArrivedBatch(ArraySource):
    """A batch on a device; what was seen of it in host memory is not read there again."""

    def __init__(self, staged: Staged) -> None:
        batch = staged.take()
        super().__init__(batch.inputs, batch.targets, batch.sample_weight)
        self._least = batch.least_target

    def least_target(self) -> int | None:
        return self._least


def _follow(control: Control) -> Iterator[ArraySource]:
    """The batches that rank 0 sends."""
    regions: dict[int, SharedRegion] = {}
    while True:
        news: _BatchHeader = control.broadcast(None)
        if news.is_halt:
            raise Halt
        if news.slot is None:
            return
        if news.is_new:
            regions[news.slot] = control.share(None)
        control.fill(regions[news.slot], _num_bytes(news.tree))
        yield _laid_out(news.tree, regions[news.slot])


def _specs_of(tree: Tree) -> list[TensorSpec]:
    specs: list[TensorSpec] = []
    map_leaves(TensorSpec, specs.append, tree)
    return specs


def _num_bytes(tree: Tree) -> int:
    """Bytes of a batch."""
    return flat_offsets([spec.extent for spec in _specs_of(tree)])[1]


def _laid_out(tree: Tree, region: SharedRegion) -> ArraySource:
    """A batch in a region, with the tree's layout."""
    views = iter(TensorStore(_specs_of(tree), region).views)
    return ArraySource(*map_leaves(TensorSpec, lambda spec: next(views), tree))
