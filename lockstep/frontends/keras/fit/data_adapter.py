"""Data of Keras's methods, adapted for tasks.

Keras's own adapters recognise the data. Every rank reads arrays by index; rank 0 reads anything
else (a ``tf.data.Dataset``, a ``PyDataset``, a DataLoader, a generator) batch by batch, while all
ranks work on the batch before. Keras's own iterator gives the length of an epoch.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import keras
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from lockstep.data.distributed_samplers import check_whole
from lockstep.data.iterable.stream_reader import Reading
from lockstep.data.iterable.streams import Stream
from lockstep.data.map_style.sources import ArraySource, Source, array_source, check_lengths
from lockstep.data.trees import Tree
from lockstep.errors import OptionError, level_of_user
from lockstep.frontends.keras.fit.layout import Layout
from lockstep.train.input.data_adapter import DataPipeline, read_elsewhere, read_here
from lockstep.train.input.stream_broadcast import SharedStream, sample_of
from lockstep.train.validation.checks import filled

Resets = Literal["once", "always", "never"]


def adapt_data(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: bool = False,
    class_weight: Any = None,
    seed: int = 0,
    resets: Resets = "always",
    name: str = "x",
    prepare: Callable[[Any], None] | None = None,
    is_read_here: bool = True,
    is_summed: bool = False,
    layout: Layout = Layout(),  # noqa: B008  # it is frozen
) -> DataPipeline:
    """Adapt data as Keras's methods take it.

    Args:
        x: see ``keras.Model.fit``, here and for the next ones.
        y: targets.
        sample_weight: weights of samples.
        batch_size: of the global batch.
        steps: batches of a pass; as in Keras, 0 is the same as None, and a negative number is all.
        shuffle: of the batches of a ``PyDataset``; the task shuffles arrays.
        class_weight: weights by class.
        seed: of the random numbers that reading draws.
        resets: when Keras's iterator is reset, as in Keras's method: before the first pass ("once";
            then a pass with a number of steps continues where the one before ended), before every
            pass, or never.
        name: of the data, for messages.
        prepare: called with Keras's iterator before anything is read.
        is_read_here: True if this process reads streams, and not another host.
        is_summed: see ``Reading``.
        layout: where samples are in batches of a stream; arrays have them first.

    Raises:
        DataError: there are no samples, or only a part of them.
        OptionError: the batch size of arrays is unknown.
        ValueError: Keras's own, for invalid data, or parts that do not fit together.
    """
    check_whole(x, name)
    iterator = EpochIterator(
        x,
        y,
        sample_weight,
        batch_size=batch_size,
        steps_per_epoch=steps or None,
        shuffle=shuffle and isinstance(x, keras.utils.PyDataset),
        class_weight=class_weight,
    )
    adapter = iterator.data_adapter
    arrays = _array_source(adapter._inputs) if type(adapter) is ArrayDataAdapter else None
    if arrays is not None:
        filled(arrays, name)
        _check_size(adapter._batch_size, steps)
    if arrays is None and layout and class_weight is not None:
        raise OptionError(
            "With `batch_dim`, class weights need arrays: Keras adds them to a stream's batches "
            "before their samples are moved to the first dim.",
            received="class_weight, and a stream",
            fix="Have the stream yield sample weights.",
        )
    if prepare is not None:
        prepare(iterator)
    if arrays is not None:
        return DataPipeline(
            source=arrays,
            batch_size=adapter._batch_size,
            num_steps=_num_steps(iterator),
            steps_per_epoch=_positive(iterator.steps_per_epoch),
        )

    if not is_read_here:
        return read_elsewhere()

    if resets == "once":
        iterator.reset()

    def begin() -> Iterator[Any]:
        if resets == "always":
            iterator.reset()
        return _batches(iterator, layout)

    stream = _Stream(name=name, kind=type(x).__name__, begin=begin)
    feed = read_here(Reading(stream, seed=seed, purpose=name, is_summed=is_summed))
    return replace(feed, num_steps=_num_steps(iterator))


def samples_in(data: Any, layout: Layout) -> Source:
    """Samples of data as Keras's ``fit`` or ``predict`` takes it: x, or (x, y), or with weights."""
    parts = data if isinstance(data, tuple) else (data,)
    x, y, weights = data_adapter_utils.unpack_x_y_sample_weight(parts)
    feed = adapt_data(*layout.arrays(x, y), weights, layout=layout)
    try:
        samples = sample_of(feed.source)
        assert samples is not None  # this process reads them
        return samples
    finally:
        feed.close()


def _check_size(batch_size: int, steps: int | None) -> None:
    """Check a batch size that Keras has computed from the number of steps."""
    if batch_size < 1:
        raise OptionError(
            "Without a batch size, arrays are cut into as many batches as there are steps.",
            received=f"{steps} steps, and no batch size",
            fix="Pass batch_size, or a positive number of steps.",
        )


def _num_steps(iterator: EpochIterator) -> int | None:
    """The number of batches of an epoch; None if it is unknown."""
    return _positive(iterator.num_batches) or iterator.data_adapter.num_batches


def _positive(steps: int | None) -> int | None:
    """The number of steps, if there is one."""
    return steps if steps is not None and steps > 0 else None


def warn_if_short(feed: DataPipeline, num_epochs: int) -> None:
    """Warn, as Keras does, that an epoch will have fewer steps than asked for."""
    if isinstance(feed.source, SharedStream) or feed.steps_per_epoch is None:
        return
    in_pass = -(-len(feed.source) // feed.batch_size)
    if in_pass % feed.steps_per_epoch and num_epochs * feed.steps_per_epoch > in_pass:
        warnings.warn(
            f"Your input ran out of data: {feed.steps_per_epoch} steps do not divide its {in_pass} "
            "batches, so a pass, or an epoch, is shorter than that.",
            stacklevel=level_of_user(),
        )


class _Stream(Stream):
    """A stream of Keras's batches."""

    def batch(self, element: Any) -> ArraySource:
        source = _array_source(element)
        check_lengths(source, self.name)
        return source


def _batches(iterator: EpochIterator, layout: Layout) -> Iterator[Any]:
    """The batches of an epoch, with samples first."""
    for _, _, batches in iterator:
        yield from map(layout.batch, batches)


def _array_source(data: Any) -> ArraySource:
    """Samples in arrays: x, or x and y, or with weights.

    The model is called with x as the one argument; the loss gets y and the weights.
    """
    x, y, weights = data_adapter_utils.unpack_x_y_sample_weight(data)
    x, y, weights = (_tensors(part) for part in (x, y, weights))
    return ArraySource((x,), (y, weights), None)


def _tensors(part: Any) -> Tree:
    return None if part is None else keras.tree.map_structure(_tensor, part)


def _tensor(value: Any) -> Any:
    if value is None:
        return None
    if type(value).__module__.partition(".")[0] == "pandas" and value.ndim == 1:
        value = value.to_numpy()[:, None]  # Keras takes a Series for a column
    if type(value).__module__.startswith("scipy.sparse"):
        value = value.toarray()  # as Keras does, batch by batch
    return array_source(value, name="x").inputs
