"""A job's data for both sides of a proof: unshuffled, repeated as often as the steps need.

Iterable data is read once, for the steps of the proof, and kept: both sides get the same batches,
Lockstep as a stream.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch

from lockstep.data.batch_dims import BatchDims
from lockstep.data.iterable.streams import Stream, as_stream
from lockstep.data.map_style.samples import first_samples
from lockstep.data.map_style.sources import Source, as_source
from lockstep.data.order import batch_bounds, epoch_order, kept_streams, seed_streams
from lockstep.proof.job import Job
from lockstep.proof.reference import DataOfBatch


@dataclass(frozen=True, kw_only=True)
class JobData:
    """The data of a proof.

    Attributes:
        given: the data for ``fit``.
        options: the options for ``fit``.
        batches: returns an iterator over the batches from the first.
        steps_per_epoch: batches of an epoch.
        size: the size of a batch, in words.
        num_batches: how many there are; None if they repeat.
    """

    given: Any
    options: dict[str, Any]
    batches: Callable[[], Iterator[DataOfBatch]]
    steps_per_epoch: int
    size: str
    num_batches: int | None = None


def data_of(job: Job, steps: int, seed: int) -> JobData:
    """The data of a job for ``steps`` steps.

    Raises:
        DataError: the data has an unknown type, or no batch.
    """
    stream = as_stream(job.data, name="data", batch_size=job.batch_size)
    if stream is None:
        data = job.dims.data(job.data, with_targets=True)
        return _indexed(as_source(data), job.batch_size, steps)
    return _iterated(stream, job.dims, steps, seed)


def _indexed(source: Source, size: int, steps: int) -> JobData:
    def batches() -> Iterator[DataOfBatch]:
        for epoch in count():
            order = epoch_order(0, epoch, len(source), shuffle=False)
            for start, stop in batch_bounds(len(order), size):
                yield source, order[start:stop]

    per_epoch = -(-len(source) // size)
    return JobData(
        given=first_samples(source, steps * size),
        options={
            "epochs": -(-steps // per_epoch) if len(source) else 1,
            "batch_size": size,
            "shuffle": False,
        },
        batches=batches,
        steps_per_epoch=per_epoch,
        size=f"{size} samples",
    )


def _iterated(stream: Stream, dims: BatchDims, steps: int, seed: int) -> JobData:
    with kept_streams():
        seed_streams(seed)
        elements = list(islice(_elements(stream), steps))
    sources = [stream.batch(dims.data(element, with_targets=True)) for element in elements]
    sizes = sorted({len(source) for source in sources})
    return JobData(
        given=lambda: iter(elements),
        options={"epochs": 1},
        batches=lambda: ((source, torch.arange(len(source))) for source in sources),
        steps_per_epoch=len(elements),
        size=f"{' to '.join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))} samples"
        if sizes
        else "no samples",
        num_batches=len(elements),
    )


def _elements(stream: Stream) -> Iterator[Any]:
    """The stream's elements, epoch after epoch."""
    while True:
        is_empty = True
        for element in stream.begin():
            is_empty = False
            yield element
        if is_empty or not stream.restarts:
            return
