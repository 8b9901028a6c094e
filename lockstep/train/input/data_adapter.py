"""Adapts the data that a user passes to a task, and refuses options that do not fit the data."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from lockstep.data.batch_dims import SAMPLES_FIRST, BatchDims
from lockstep.data.distributed_samplers import check_whole
from lockstep.data.iterable.stream_reader import Reading
from lockstep.data.iterable.streams import Stream, as_stream
from lockstep.data.map_style.sources import ArraySource, Source, as_input_source, as_source
from lockstep.errors import OptionError, Problems
from lockstep.launch.health.failure import noting_on
from lockstep.options import is_number
from lockstep.train.input.stream_broadcast import SharedStream
from lockstep.train.validation.checks import filled

DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The options of a call for its data.

    Attributes:
        name: the data's name, for messages.
        batch_size: samples of a global batch; None if the user gave none.
        default_batch_size: used if neither the user nor the data gives one.
        shuffle: None if the user did not say.
        epochs: the number of epochs.
        steps_per_epoch: batches of an epoch; None is a pass over the data.
        seed: of the random numbers that reading draws.
        purpose: see ``Reading``.
        first_epoch: epochs trained before.
        with_targets: targets are required.
        is_read_here: this process reads a stream, and not another host.
        is_summed: see ``Reading``.
        dims: the dims of the samples in the data.
    """

    name: str
    batch_size: int | None = None
    default_batch_size: int = DEFAULT_BATCH_SIZE
    shuffle: bool | None = None
    epochs: int = 1
    steps_per_epoch: int | None = None
    seed: int
    purpose: str = "reading"
    first_epoch: int = 0
    with_targets: bool = True
    is_read_here: bool = True
    is_summed: bool = False
    dims: BatchDims = SAMPLES_FIRST


@dataclass(frozen=True, kw_only=True)
class DataPipeline:
    """The data that a task runs on.

    Attributes:
        source: the data; only the inputs of ``predict`` may be empty.
        batch_size: samples of a global batch; for a stream, of its first batch.
        num_steps: batches of an epoch, if known.
        steps_per_epoch: if the user gave it.
    """

    source: Source | SharedStream
    batch_size: int
    num_steps: int | None
    steps_per_epoch: int | None = None

    @property
    def is_read_here(self) -> bool:
        """True if this process can read it."""
        return not isinstance(self.source, SharedStream) or self.source.is_read_here

    def by_index(self, name: str) -> Source:
        """The data, to be read in batches of any size.

        Raises:
            OptionError: the data comes in batches.
        """
        if isinstance(self.source, SharedStream):
            raise OptionError(
                "The batch size search needs data that is read by index.",
                received=f'`{name}` that can only be iterated, and batch_size="auto"',
                fix="Pass a number, for samples of an IterableDataset; else leave it out, and "
                "set the size where the batches are made.",
            )
        return self.source

    def resized(self, batch_size: int) -> "DataPipeline":
        """The same data in other batches."""
        num_steps = self.steps_per_epoch or -(-len(self.by_index("data")) // batch_size)
        return replace(self, batch_size=batch_size, num_steps=num_steps)

    def close(self) -> None:
        """Stop reading."""
        if isinstance(self.source, SharedStream):
            self.source.close()


def close_all(*feeds: DataPipeline | None) -> None:
    """Stop reading all of them."""
    for feed in feeds:
        if feed is not None:
            feed.close()


@contextmanager
def closing_on_error(*feeds: DataPipeline | None) -> Iterator[None]:
    """Stop reading if the block fails."""
    try:
        yield
    except BaseException as error:
        with noting_on(error):
            close_all(*feeds)
        raise


def adapt_data(data: Any, options: DataOptions) -> DataPipeline:
    """Check and adapt the data that a user passes.

    Raises:
        OptionError: an option does not fit such data.
        DataError: this is not data, or only a part, or its first batch cannot be read.
    """
    check_whole(data, options.name)
    size = options.default_batch_size if options.batch_size is None else options.batch_size
    stream = as_stream(data, name=options.name, batch_size=size, with_targets=options.with_targets)
    if stream is not None:
        if options.dims:
            stream = replace(stream, begin=options.dims.stream(stream))
        return _adapt_stream(stream, options)
    data = options.dims.data(data, with_targets=options.with_targets)
    source = (as_source if options.with_targets else as_input_source)(data, name=options.name)
    if options.with_targets:
        filled(source, options.name)
    num_steps = -(-len(source) // size)
    return DataPipeline(
        source=source,
        batch_size=size,
        num_steps=options.steps_per_epoch or num_steps,
        steps_per_epoch=options.steps_per_epoch,
    )


def adapt_validation_data(
    data: Any, options: DataOptions, feed: DataPipeline
) -> DataPipeline | None:
    """The data evaluated after every epoch; in batches of the same size, if it has none."""
    if data is None:
        return None
    return adapt_data(
        data,
        replace(
            options,
            name="validation_data",
            batch_size=None,
            default_batch_size=feed.batch_size,
            shuffle=None,
            steps_per_epoch=None,
            purpose="validation",
        ),
    )


def split_off(
    feed: DataPipeline, part: float, validation_data: Any
) -> tuple[DataPipeline, DataPipeline | None]:
    """The data without its last samples, and these samples, to evaluate after every epoch.

    Args:
        feed: the training data.
        part: the part to split off, from 0 to 1, as in Keras; 0 for none.
        validation_data: as the user passed it.

    Raises:
        OptionError: an option does not fit such data.
    """
    if not part:
        return feed, None
    source = feed.source
    size = len(source) if isinstance(source, ArraySource) else 0
    kept = math.floor(size * (1 - part)) if is_number(part) and 0 < part < 1 else 0
    if validation_data is not None or not 0 < kept < size:
        given = f"of {size} samples" if validation_data is None else "and validation_data"
        if not isinstance(source, ArraySource):
            given = "of data that is no array"
        raise OptionError(
            "`validation_split` is the part of arrays or tensors, from 0 to 1, that is evaluated "
            "and not trained on.",
            received=f"validation_split={part!r} {given}",
            fix="Use 0.2, or pass validation_data=.",
        )
    assert isinstance(source, ArraySource)
    ends = source.between(0, kept), source.between(kept, size)
    return tuple(replace(feed, source=end).resized(feed.batch_size) for end in ends)  # type: ignore[return-value]


def _adapt_stream(stream: Stream, options: DataOptions) -> DataPipeline:
    _check(stream, options)
    if not options.is_read_here:
        return read_elsewhere()
    reading = Reading(
        stream,
        seed=options.seed,
        purpose=options.purpose,
        first_epoch=options.first_epoch,
        steps=options.steps_per_epoch,
        is_summed=options.is_summed,
    )
    return replace(read_here(reading), num_steps=options.steps_per_epoch or stream.num_batches)


def read_here(reading: Reading) -> DataPipeline:
    """A stream that this process reads; reads its first batch now."""
    shared = SharedStream(reading)
    feed = DataPipeline(source=shared, batch_size=0, num_steps=None)
    with closing_on_error(feed):
        return replace(feed, batch_size=len(shared.peek()))


def read_elsewhere() -> DataPipeline:
    """A stream that another host reads; that host sends the size of its batches."""
    return DataPipeline(source=SharedStream(None), batch_size=0, num_steps=None)


def _check(stream: Stream, options: DataOptions) -> None:
    problems = Problems()
    if options.batch_size is not None and stream.has_batches:
        problems.add(
            f"`{options.name}` gives global batches of its own.",
            received=f"{stream.kind} and batch_size={options.batch_size}",
            fix="Leave batch_size out, and set the size where the batches are made.",
        )
    if options.shuffle is not None:
        problems.add(
            f"`{options.name}` has an order of its own.",
            received=f"{stream.kind} and shuffle={options.shuffle}",
            fix="Leave shuffle out, and shuffle where the samples come from.",
        )
    if options.epochs > 1 and options.steps_per_epoch is None and not stream.restarts:
        problems.add(
            f"`{options.name}` can be gone through once only, and is needed in every epoch.",
            received=f"{stream.kind} and epochs={options.epochs}",
            fix="Pass a function that makes it anew (a generator function), or, to train, "
            "steps_per_epoch: then every epoch takes as many batches.",
        )
    if options.is_summed and not stream.restarts:
        problems.add(
            f"To resume from a checkpoint, `{options.name}` is read again up to its position.",
            received=f"{stream.kind}, which can be gone through once only",
            fix="Pass a function that makes it anew (a generator function).",
        )
    if stream.is_endless and options.steps_per_epoch is None:
        problems.add(
            f"`{options.name}` never ends.",
            received=f"{stream.kind} that repeats for ever",
            fix="Say how many batches an epoch has: steps_per_epoch in fit, or .take(n) of it.",
        )
    problems.raise_if_any(OptionError)
