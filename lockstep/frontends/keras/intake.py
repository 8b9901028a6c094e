"""Keras's data, as what a task runs on.

Keras's own adapters say what is given: arrays are read by index on every rank; anything else (a
``tf.data.Dataset``, a ``PyDataset``, a DataLoader, a generator) is read batch by batch on rank 0,
while all ranks work on the batch before. How long an epoch is, Keras's own iterator says.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from lockstep.data.reading import Reading
from lockstep.data.sources import ArraySource, array_source
from lockstep.data.streams import Stream
from lockstep.data.trees import Tree
from lockstep.train.feeding import SharedStream
from lockstep.train.intake import Feed


def take_in(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: bool = False,
    class_weight: Any = None,
    seed: int = 0,
    goes_on: bool = False,
    name: str = "x",
    prepare: Callable[[Any], None] | None = None,
) -> Feed:
    """Data as Keras's methods take it.

    Args:
        x: see ``keras.Model.fit``, here and for the next ones.
        y: targets.
        sample_weight: weights of samples.
        batch_size: of the global batch.
        steps: batches of a pass.
        shuffle: of the batches of a ``PyDataset``; arrays are shuffled by the task.
        class_weight: weights by class.
        seed: of the random numbers that reading draws.
        goes_on: every pass goes on in the data where the one before has ended, if it has steps.
        name: of the data, for messages.
        prepare: called with Keras's iterator before anything is read.

    Raises:
        ValueError: Keras's own, for what is no data or does not fit together.
    """
    iterator = EpochIterator(
        x,
        y,
        sample_weight,
        batch_size=batch_size,
        steps_per_epoch=steps,
        shuffle=shuffle and isinstance(x, keras.utils.PyDataset),
        class_weight=class_weight,
    )
    if prepare is not None:
        prepare(iterator)
        iterator.reset()
    adapter = iterator.data_adapter
    if type(adapter) is ArrayDataAdapter:
        return Feed(
            source=_array_source(adapter._inputs),
            batch_size=adapter._batch_size,
            num_steps=iterator.num_batches,
            steps_per_epoch=iterator.steps_per_epoch,
        )

    def begin() -> Iterator[Any]:
        if not goes_on:
            iterator.reset()
        return _batches(iterator)

    stream = _Stream(name=name, kind=type(x).__name__, begin=begin)
    shared = SharedStream(Reading(stream, seed=seed, purpose=name))
    try:
        size = len(shared.peek())
    except BaseException:
        shared.close()
        raise
    return Feed(source=shared, batch_size=size, num_steps=iterator.num_batches)


def warn_if_short(feed: Feed, num_epochs: int) -> None:
    """Tell, as Keras does, that an epoch will have fewer steps than it was to have."""
    if isinstance(feed.source, SharedStream) or feed.steps_per_epoch is None:
        return
    in_pass = -(-len(feed.source) // feed.batch_size)
    if in_pass % feed.steps_per_epoch and num_epochs * feed.steps_per_epoch > in_pass:
        warnings.warn(
            "Your input ran out of data: steps_per_epoch does not divide its "
            f"{in_pass} batches, so some epochs are shorter than {feed.steps_per_epoch} steps.",
            stacklevel=3,
        )


class _Stream(Stream):
    """Batches as Keras has them."""

    def batch(self, element: Any) -> ArraySource:
        return _array_source(element)


def _batches(iterator: EpochIterator) -> Iterator[Any]:
    """The batches of an epoch."""
    for _, _, batches in iterator:
        yield from batches


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
    return None if value is None else array_source(value, name="x").inputs
