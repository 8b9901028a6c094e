"""Readers: read a rank's next batches while it trains on the current one.

A rank knows which samples it will read, in which order and after which seeding of the random
streams (``Worker.reads``). So a reader can make the same reads before the rank requests them: in a
thread of the rank, or in separate processes (torch's DataLoader, which distributes the reads among
its workers and returns the results in order).

The bits are those of a rank without a reader. A thread shares the random streams with the model, so
a dataset that draws from them is refused there. A reader process seeds its own streams as the rank
does, and sends their states after the read; the model's draws continue from these states.

The rank itself makes a read that comes in another order than expected.
"""

import errno
import os
import re
import shutil
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from lockstep import accelerators
from lockstep.data.iterable.read_ahead import Read, ReadAhead
from lockstep.data.map_style.sources import ArraySource, Batch, Source
from lockstep.data.order import (
    StreamStates,
    restore_streams,
    same_streams,
    seed_streams,
    stream_states,
)
from lockstep.data.records.device_samples import kept_on
from lockstep.data.trees import tensors_of
from lockstep.errors import DataError, WorkerError
from lockstep.formatting import format_bytes
from lockstep.launch.health.failure import add_note, pack_failure, unpack_failure
from lockstep.launch.workers.helper import die_with, leave_signals_to_script
from lockstep.parallel.data_parallel.staging import Staged, Staging
from lockstep.parallel.settings import TorchSettings

# The longest wait at the end for a read in progress; its thread ends after it in any case.
_END_TIMEOUT_SECONDS = 5.0

# torch's folder for tensors sent between processes.
_SHARED_FOLDER = "/dev/shm"

# A fork of the rank: it has the dataset's open files, and does not run __main__ again.
_START_METHOD = "fork" if sys.platform == "linux" else None


_CPU = torch.device("cpu")

_S = TypeVar("_S")


@contextmanager
def reading_ahead(
    source: _S, steps: Iterator[Sequence[Read]], device: torch.device = _CPU
) -> Iterator[_S | Source]:
    """Within the block, a source that is read ahead, if its options say so.

    Args:
        source: the source. Arrays in host memory are read ahead for an accelerator, which gets
            the next batch while it computes on the current one.
        steps: this rank's reads in each step.
        device: the batches' destination.

    Raises:
        WorkerError: a reader process has died.
    """
    source = kept_on(device, source)
    how = source.ahead if isinstance(source, Source) else None
    if how is None and isinstance(source, ArraySource) and device.type != "cpu":
        how = None if source.is_on(device) else ReadAhead(workers=0, depth=1)
    if how is None or not isinstance(source, Source):
        yield source
        return
    try:
        with closing(_SourceAhead(source, steps, how, device)) as ahead:
            yield ahead
    except RuntimeError as error:
        if (found := reader_death(error)) is error:
            raise
        raise found from error


def reader_death(error: Exception) -> Exception:
    """The WorkerError for torch's error that says that a reader process has died; others as is.

    Torch raises it from a handler of SIGCHLD, at any point of the rank's code: in callbacks, too.
    """
    dead = re.match(r"DataLoader worker \(pid\D*([\d, ]+)\)", str(error))
    is_reader = dead is not None and not _reader_pids.isdisjoint(map(int, dead[1].split(",")))
    return _ended(error) if is_reader else error


# The ids of the reader processes that this process has started.
_reader_pids: set[int] = set()


@dataclass(frozen=True, kw_only=True)
class _Result:
    """The result of a read.

    Attributes:
        batch: the samples, which may still be copied to a device; None if it failed.
        states: of the random streams after it; None if they are unchanged.
        error: its error, if it failed.
    """

    batch: Batch | Staged | None = None
    states: StreamStates | None = None
    error: BaseException | None = None


class _Reader(Protocol):
    """Makes reads in their order."""

    def take(self) -> _Result:
        """The result of the next read."""

    def close(self) -> None:
        """End the thread or the processes."""


class _SourceAhead(Source):
    """A source whose reads are known in advance."""

    def __init__(
        self,
        source: Source,
        steps: Iterator[Sequence[Read]],
        how: ReadAhead,
        device: torch.device,
    ) -> None:
        self._source = source
        self._foreseen: deque[Read] = deque()
        first = next(steps, ())
        num_ready = how.depth * max(len(first), 1)
        reads = self._noted(chain(first, chain.from_iterable(steps)))
        workers = how.workers
        self._reader: _Reader | None = (
            _Processes(source, reads, num_ready, workers, device)
            if workers
            else _Thread(source, reads, num_ready, device)
        )

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: torch.Tensor, dtype: torch.dtype | None) -> Batch:
        if self._reader is None or not self._is_foreseen(indices, dtype):
            return self._source.read(indices, dtype)
        self._foreseen.popleft()
        result = self._reader.take()
        if result.error is not None:
            raise result.error
        if result.states is not None:
            restore_streams(result.states)
        assert result.batch is not None
        return result.batch.take() if isinstance(result.batch, Staged) else result.batch

    def close(self) -> None:
        """End the reader."""
        reader, self._reader = self._reader, None
        self._foreseen.clear()
        if reader is not None:
            reader.close()

    def _is_foreseen(self, indices: torch.Tensor, dtype: torch.dtype | None) -> bool:
        # The same samples may be read again in another step, and a share's may be read twice.
        return bool(self._foreseen) and self._foreseen[0].is_for(indices, dtype)

    def _noted(self, reads: Iterator[Read]) -> Iterator[Read]:
        """The reads, each recorded when a reader gets it."""
        for read in reads:
            self._foreseen.append(read)
            yield read


class _Thread:
    """Reads in a thread, except for the first read: the rank makes and checks it."""

    def __init__(
        self, source: Source, reads: Iterator[Read], num_ready: int, device: torch.device
    ) -> None:
        self._device = device
        self._source = source
        self._reads = reads
        self._num_ready = num_ready
        self._first = next(reads, None)
        self._orders: SimpleQueue[Read | None] = SimpleQueue()
        self._results: SimpleQueue[_Result] = SimpleQueue()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def take(self) -> _Result:
        if self._thread is None:
            return self._take_first()
        result = self._results.get()
        self._order(1)
        return result

    def close(self) -> None:
        self._is_closed = True
        self._orders.put(None)
        self._reads = iter(())
        if self._thread is not None:
            self._thread.join(_END_TIMEOUT_SECONDS)

    def _take_first(self) -> _Result:
        assert self._first is not None
        before = stream_states()
        result = self._result(self._first, None)
        if not same_streams(before, stream_states()):
            raise DataError(
                "A dataset that draws random numbers cannot be read ahead in a thread: a thread "
                "shares the model's random streams.",
                received="prefetch(dataset, workers=0), whose first read drew random numbers",
                fix="Read it in processes, which have their own streams: "
                "lockstep.data.prefetch(dataset, workers=1).",
            )
        self._order(self._num_ready)
        settings = torch.is_grad_enabled(), torch.get_num_threads(), TorchSettings.current()
        self._thread = threading.Thread(
            target=self._run, args=settings, name="lockstep-reader", daemon=True
        )
        self._thread.start()
        return result

    def _order(self, count: int) -> None:
        for read in islice(self._reads, count):
            self._orders.put(read)

    def _run(self, grad: bool, threads: int, settings: TorchSettings) -> None:
        torch.set_grad_enabled(grad)  # these belong to a thread
        torch.set_num_threads(threads)
        staging = None if self._device.type == "cpu" else Staging(self._device)
        with settings.applied():
            while (read := self._orders.get()) is not None and not self._is_closed:
                self._results.put(self._result(read, staging))

    def _result(self, read: Read, staging: Staging | None) -> _Result:
        try:
            batch = self._source.read(read.indices, read.dtype)
            return _Result(batch=batch if staging is None else staging.stage(batch))
        except BaseException as error:  # the rank raises it
            return _Result(error=error)


class _Processes:
    """Reads in separate processes of the rank."""

    def __init__(
        self,
        source: Source,
        reads: Iterator[Read],
        num_ready: int,
        workers: int,
        device: torch.device,
    ) -> None:
        with warnings.catch_warnings():
            # Readers wait more than they compute, so there may be more of them than cores. And they
            # do nothing that is dangerous in a fork of a process with threads.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            warnings.filterwarnings("ignore", "This process .* is multi-threaded")
            loader = DataLoader(
                _Reading(source),
                batch_size=None,
                sampler=_Orders(reads),
                num_workers=workers,
                prefetch_factor=-(-num_ready // workers),
                collate_fn=_unchanged,
                worker_init_fn=partial(_begin, os.getpid()),
                pin_memory=device.type != "cpu",  # in a thread that starts the copy: see _Answer
                generator=torch.Generator(),  # else it draws its seed from the model's stream
                multiprocessing_context=_START_METHOD,
            )
            results: Any = iter(loader)
        _reader_pids.update(worker.pid for worker in results._workers)
        self._results = results

    def take(self) -> _Result:
        try:
            answer: _Answer | _Result = next(self._results)
            return answer if isinstance(answer, _Result) else _opened(answer)
        except (OSError, EOFError) as error:  # the process with the tensors has died
            raise _ended(error) from error

    def close(self) -> None:
        results, self._results = self._results, iter(())
        results._shutdown_workers()
        for worker in getattr(results, "_workers", ()):
            worker.kill()  # torch ends hanging workers by SIGTERM, which these ignore


class _Orders:
    """The reads, as a DataLoader's sampler; as plain values, which are cheapest to send."""

    def __init__(self, reads: Iterator[Read]) -> None:
        self._reads = reads

    def __iter__(self) -> Iterator[Any]:
        return ((read.indices.numpy(), read.dtype, read.seed) for read in self._reads)


@dataclass(frozen=True)
class _Answer:
    """A result, packed by the reader process."""

    packed: bytes

    def pin_memory(self) -> _Result:
        """The result, being copied to the device; a DataLoader's pinning thread calls this."""
        result = _opened(self)
        if isinstance(result.batch, Batch):
            device = accelerators.current(str(accelerators.kind()))
            result = replace(result, batch=Staging(device).stage(result.batch))
        return result


class _Reading(Dataset[_Answer]):
    """A source, as a DataLoader's dataset: its index is an order, its item a packed result."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, order: Any) -> _Answer:
        indices, dtype, seed = order
        try:
            return self._read(Read(indices=torch.from_numpy(indices), dtype=dtype, seed=seed))
        except Exception as error:
            return _packed((None, None, pack_failure(error)))

    def _read(self, read: Read) -> _Answer:
        seed_streams(read.seed)
        before = stream_states()
        batch = self._source.read(read.indices, read.dtype)
        after = stream_states()
        states = None if same_streams(before, after) else after
        # Packed here and not in the queue, which would drop an unpicklable result without an error.
        try:
            return _packed((batch, states, None))
        except RuntimeError as error:
            if os.strerror(errno.ENOSPC) in str(error):
                add_note(error, _shortage(batch))
            raise


def _packed(answer: tuple[Batch | None, StreamStates | None, bytes | None]) -> _Answer:
    return _Answer(bytes(ForkingPickler.dumps(answer)))


def _opened(answer: _Answer) -> _Result:
    batch, states, failure = ForkingPickler.loads(answer.packed)
    if failure is None:
        return _Result(batch=batch, states=states)
    found = unpack_failure(failure)
    if found.error is not None:
        return _Result(error=found.error)
    return _Result(
        error=DataError(f"{found.summary}\n--- traceback of the reader ---\n{found.text}")
    )


def _shortage(batch: Batch) -> str:
    parts = batch.inputs, batch.targets, batch.sample_weight
    needed = sum(tensor.nbytes for tensor in tensors_of(parts))
    free = shutil.disk_usage(_SHARED_FOLDER).free
    return (
        f"Processes that read ahead (lockstep.data.prefetch) put their batches into "
        f"{_SHARED_FOLDER}: {format_bytes(needed)} each, and {format_bytes(free)} are free there. "
        "Make it larger, or read in a thread: prefetch(dataset, workers=0)."
    )


def _unchanged(answer: Any) -> Any:
    return answer


def _begin(parent: int, worker: int) -> None:
    """Set up a reader process before its first read."""
    leave_signals_to_script()
    die_with(parent)


def _ended(error: Exception) -> WorkerError:
    return WorkerError(
        "A process that reads ahead (lockstep.data.prefetch) has ended.",
        received=f"{type(error).__name__}: {error}",
        fix="Check for exhausted memory, or for a library that does not support fork. "
        "prefetch(dataset, workers=0) reads in a thread.",
    )
