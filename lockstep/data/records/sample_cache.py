"""A cache of samples: the process that needs a sample first reads it, once for all processes.

The copy in memory (or the file on disk) belongs to the host, not to a process: helpers get the
dataset by pickling, which sends only the place of the cache. Samples are always made from the
record, even just after reading, so that a change in place affects no other process, and all epochs
get the same samples.

A dataset that draws from the global random streams is refused: its first draws would be cached, and
the streams would advance differently afterwards.
"""

import operator
import os
import time
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from lockstep.data.iterable.read_ahead import Prefetch
from lockstep.data.map_style.map_datasets import check_map_style, read_items
from lockstep.data.order import same_streams, stream_states
from lockstep.data.records.record_file import Header, RecordFile
from lockstep.data.records.sample_records import Layout, pack_item, unpack_item
from lockstep.errors import BadRecordError, DataError, OptionError, Problems
from lockstep.options import check_flag

# How long a process waits for another that reads the sample; then it reads the sample, too.
_PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.001
# Samples that are tried if the first cannot be read.
_MOST_TRIED = 100


def cache(
    dataset: Any, path: str | os.PathLike[str] | None = None, *, device: bool = False
) -> "Cache":
    """A dataset whose samples are read once, and cached for all replicas of the host.

    The first sample is read at once: it gives the size of all. Samples must be tensors on the CPU,
    arrays and numbers of one shape and type, in plain tuples, lists or dicts, and the same at every
    read: augment at random in a dataset on top of the cached one.

    Args:
        dataset: a map-style dataset.
        path: a file, made if it does not exist, which later runs use again; None is memory, which
            grows sample by sample and is freed with the processes that use it.
        device: where ranks train on accelerators, also keep all samples in the memory of each, from
            its first batch of a call on: for small data. Batches are the same. On cores it changes
            nothing.

    Raises:
        OptionError: an argument is invalid.
        DataError: samples that cannot be cached, another dataset's file, or too little room.
    """
    problems = Problems()
    check_map_style(dataset, "cache", problems)
    if isinstance(dataset, Prefetch):
        problems.add(
            "Prefetching must read from the cache.",
            received="cache(prefetch(dataset))",
            fix="Swap them: prefetch(cache(dataset)).",
        )
    given: object = path
    if given is not None and not isinstance(given, str | os.PathLike):
        problems.add(
            "`path` must be the path of a file, or None for memory.",
            received=repr(given),
            fix="Pass a str or pathlib.Path.",
        )
    check_flag("device", device, problems, fix="Leave it out for samples in host memory.")
    problems.raise_if_any(OptionError)
    place = None if path is None else os.path.abspath(os.fspath(path))
    return Cache(dataset, place, on_device=device)


class Cache(Dataset[Any]):
    """See ``cache``.

    Args:
        dataset: the dataset to cache.
        path: of the file; None for memory.
        on_device: see ``device`` of ``cache``.

    Attributes:
        dataset: the dataset to cache.
        on_device: likewise.
        kept: this process's samples on devices (``data.records.device_samples``).
    """

    def __init__(self, dataset: Any, path: str | None, *, on_device: bool = False) -> None:
        self.dataset = dataset
        self.on_device = on_device
        self.kept: dict[Any, Any] = {}
        self._length = len(dataset)
        self._file: RecordFile | None = None
        if self._length:
            self._file = _file_of_first_sample(dataset, path, self._length)

    def __reduce__(self) -> tuple[Any, ...]:
        file = self._file
        place = None if file is None else (file.name, file.header)
        return _reopened, (self.dataset, self._length, place, self.on_device)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        (item,) = self.__getitems__([index])
        return item

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples at these indices; those that are missing are read together."""
        places = [self._place(index) for index in indices]
        missing = [place for place in dict.fromkeys(places) if not self._records.has(place)]
        if missing:
            self._fill(missing)
        return [self._load(place) for place in places]

    @property
    def num_cached(self) -> int:
        """How many samples are cached."""
        return 0 if self._file is None else self._file.num_stored

    @property
    def _records(self) -> RecordFile:
        assert self._file is not None
        return self._file

    def _place(self, index: int) -> int:
        place = operator.index(index)
        if not -self._length <= place < self._length:
            raise IndexError(f"index {place} of {self._length} samples")
        return place % self._length

    def _load(self, place: int) -> Any:
        record = self._records.load(place)
        assert record is not None
        return unpack_item(self._records.header.layout, record)

    def _fill(self, missing: Sequence[int]) -> None:
        """Read missing samples, or wait for other processes that are reading them."""
        claimed = [place for place in missing if self._records.claim(place)]
        try:
            self._read_missing(claimed)
        finally:
            for place in claimed:
                self._records.release(place)
        for place in missing:
            self._await(place)

    def _await(self, place: int) -> None:
        """Wait for a sample; read it if its reader fails, or takes too long."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._records.has(place):
            is_mine = self._records.claim(place)
            if is_mine or time.monotonic() > deadline:
                try:
                    self._read_missing([place])
                finally:
                    if is_mine:
                        self._records.release(place)
                return
            time.sleep(_POLL_SECONDS)

    def _read_missing(self, claimed: Sequence[int]) -> None:
        """Read the claimed samples, but those that another process stored before the claim."""
        places = [place for place in claimed if not self._records.has(place)]
        if not places:
            return
        for place, item in zip(places, _items(self.dataset, places), strict=True):
            layout, record = pack_item(item)
            _check_layout(self._records.header.layout, layout, place)
            self._records.store(place, record)


def _reopened(
    dataset: Any, length: int, place: tuple[str, Header] | None, on_device: bool
) -> Cache:
    """The same cache in another process."""
    cached = Cache.__new__(Cache)
    cached.dataset, cached.on_device, cached.kept = dataset, on_device, {}
    cached._length = length
    cached._file = None if place is None else RecordFile.reopened(*place)
    return cached


def _file_of_first_sample(dataset: Any, path: str | None, length: int) -> RecordFile:
    first, item = _first_item(dataset, length)
    layout, record = pack_item(item)
    if path is None:
        file = RecordFile.in_memory(length, layout)
    else:
        file = RecordFile.at(path, length, layout)
        found = file.load(first)
        if found is not None and found != record:
            raise DataError(
                f"The cache {path} must belong to this dataset.",
                received="a first sample that is not the dataset's own",
                fix="Remove the file if the data has changed, or give another path.",
            )
    file.store(first, record)
    return file


def _first_item(dataset: Any, length: int) -> tuple[int, Any]:
    """The number of the first sample that can be read, and the sample: bad ones raise later."""
    error: BadRecordError | None = None
    for place in range(min(length, _MOST_TRIED)):
        try:
            return place, _items(dataset, [place])[0]
        except BadRecordError as bad:
            error = error or bad
    assert error is not None
    raise error


def _items(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Read samples, which must draw no random numbers.

    Raises:
        DataError: one draws some.
    """
    before = stream_states()
    items = read_items(dataset, indices)
    if same_streams(before, stream_states()):
        return items
    raise DataError(
        "A cached sample must be the same whenever it is read.",
        received=f"sample {indices[0]}, which draws random numbers while it is read",
        fix="Cache what is below the random part, and augment in a dataset on top: "
        "Augmented(lockstep.data.cache(files)).",
    )


def _check_layout(expected: Layout, found: Layout, index: int) -> None:
    if found != expected:
        raise BadRecordError(
            f"All samples of a cached dataset must have the form of the first: {expected}.",
            received=f"sample {index}: {found}",
            fix="Give them one shape and type in __getitem__, padded for example.",
            index=index,
        )
