"""Leaves bad records out of a batch before its step, on all ranks alike.

Every rank first reads its part of the batch. If a rank finds bad records, all ranks take them out
of the global batch, which gets shorter, and read their parts of that, until no rank finds any. So a
step equals one on a batch that never had these samples, whatever the Plan. Ranks keep what they
read, and the state of the random streams after it: they read nothing twice.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from lockstep.data.iterable.read_ahead import Read
from lockstep.data.map_style.sources import Batch, DatasetSource, Source
from lockstep.data.order import (
    StreamStates,
    kept_streams,
    restore_streams,
    same_streams,
    seed_streams,
    stream_states,
)
from lockstep.data.records.bad_records import CheckedSource
from lockstep.errors import BadRecordError, OptionError
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.worker import Worker
from lockstep.plan.makers.data_parallel import Maker
from lockstep.plan.makers.parameter_servers import Served
from lockstep.train.callbacks.rank_sync import RankSync
from lockstep.train.input.data_adapter import DataPipeline
from lockstep.train.input.stream_broadcast import SharedStream


def skipping(feed: DataPipeline, maker: Maker, hosts: object) -> DataPipeline:
    """The same data without its bad records.

    Args:
        feed: the data.
        maker: of the Plan.
        hosts: all hosts, if there are several.

    Raises:
        OptionError: this data does not allow that.
    """
    reasons = {
        "data that can only be iterated": isinstance(feed.source, SharedStream),
        "several hosts, or processes of a launcher": hosts is not None,
        "replicas that train apart": maker.traits.is_local_sgd,
        "parameter servers": isinstance(maker, Served),
    }
    refused = next((reason for reason, is_so in reasons.items() if is_so), None)
    if refused is not None:
        raise OptionError(
            'on_bad_record="skip" needs data that is read by index, one host, and ranks that make '
            "their steps together.",
            received=f'on_bad_record="skip" with {refused}',
            fix="Leave them out where the data is read.",
        )
    if isinstance(feed.source, DatasetSource):
        return replace(feed, source=CheckedSource(feed.source.dataset))
    return feed  # rows of arrays are all alike


@dataclass(frozen=True)
class BadRecordFilter:
    """Takes the bad records out of batches.

    Attributes:
        checked: the data.
        worker: this rank's.
        control: its line to the others.
        report: on rank 0, gets the bad records of a batch, each with the reason.
    """

    checked: CheckedSource
    worker: Worker
    control: Control
    report: Callable[[Mapping[int, str]], None]

    def filtered(
        self, source: Source, indices: torch.Tensor, step: int | None = None, num_turns: int = 1
    ) -> tuple[Source, torch.Tensor]:
        """The good samples of a batch, and the source to read them from.

        Args:
            source: the data, as this rank reads it.
            indices: of the global batch.
            step: of training; None in evaluation.
            num_turns: functions that take turns with the batch, each of which reads it.
        """
        while len(indices):
            reads = [
                read for turn in range(num_turns) for read in self.worker.reads(indices, step, turn)
            ]
            ready, bad = self._read(source, reads)
            bad = self._of_all(bad)
            if not bad:
                return _Ready(source, ready), indices
            self.report(bad)
            indices = indices[~torch.isin(indices, torch.tensor(list(bad)))]
        self.worker.barrier()  # a step would have had one
        return source, indices

    def _read(self, source: Source, reads: list[Read]) -> "tuple[deque[_Done], dict[int, str]]":
        done: deque[_Done] = deque()
        bad: dict[int, str] = {}
        with kept_streams(), self.worker.passes.reading:
            for read in reads:
                try:
                    done.append(_done(source, read))
                except BadRecordError as error:
                    found = self.checked.bad_among(read.indices.tolist())
                    if not found:  # bad by chance, perhaps by a random number drawn
                        error.name_rank(self.worker.rank)
                        raise
                    bad |= found
        return done, bad

    def _of_all(self, bad: dict[int, str]) -> dict[int, str]:
        """The bad records that any rank has found."""
        board = self.worker.board
        if board is None or not any(count for (count,) in board.all_gather([len(bad)])):
            return bad
        found = [pair for own in self.control.gather(list(bad.items())) for pair in own]
        return dict(self.control.broadcast(sorted(found)))


@dataclass(frozen=True)
class _Done:
    """A finished read; ``states`` are those of the random streams after it, if they have moved."""

    read: Read
    batch: Batch
    states: StreamStates | None


def _done(source: Source, read: Read) -> _Done:
    seed_streams(read.seed)
    before = stream_states()
    batch = source.read(read.indices, read.dtype)
    after = stream_states()
    return _Done(read, batch, None if same_streams(before, after) else after)


class _Ready(Source):
    """A source whose next reads are already done."""

    def __init__(self, source: Source, done: deque[_Done]) -> None:
        self._source = source
        self._done = done

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: torch.Tensor, dtype: torch.dtype | None) -> Batch:
        if not self._done or not self._done[0].read.is_for(indices, dtype):
            return self._source.read(indices, dtype)
        done = self._done.popleft()
        if done.states is not None:
            restore_streams(done.states)
        return done.batch


def filter_of(rank_sync: RankSync, source: Source | SharedStream | None) -> BadRecordFilter | None:
    """The filter of bad records, if they are skipped and there may be some."""
    if not isinstance(source, CheckedSource):
        return None
    report = rank_sync.driver.note_bad_records
    return BadRecordFilter(source, rank_sync.worker, rank_sync.control, report)
