"""The order of the samples and the seeds of all random streams: pure functions of the seed.

Nothing here knows how many devices there are.
"""

import hashlib
import random
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch

from lockstep import accelerators

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Who seeds the streams holds it until the last draw: they belong to the process, in which several
# threads may train, each a model of its own.
held_streams = threading.RLock()


class StreamStates(NamedTuple):
    """States of the global random streams; ``device`` is None where no accelerator is in use."""

    cpu: torch.Tensor
    device: torch.Tensor | None
    numpy: Any
    python: Any


def stream_seed(*keys: int | str) -> int:
    """A 63-bit seed that depends on every key; different keys give unrelated streams."""
    digest = hashlib.blake2b(digest_size=8)
    for key in keys:
        text = b"s" + key.encode() if isinstance(key, str) else b"i" + struct.pack("<q", key)
        digest.update(struct.pack("<q", len(text)) + text)
    return int.from_bytes(digest.digest(), "little") >> 1


def share_seed(seed: int, step: int, share: int, turn: int = 0) -> int:
    """The seed of the random stream of one share in one training step.

    If several functions train on each batch, ``turn`` is the number of the function.
    """
    return stream_seed(seed, "share", step, share, *([turn] if turn else []))


def evaluation_seed(seed: int, first: int) -> int:
    """The seed, in evaluation and prediction, of the share whose first sample is number ``first``.

    Random numbers of a sample (in a dataset that augments) depend only on data and shares.
    """
    return stream_seed(seed, "evaluation", first)


def seed_streams(seed: int) -> None:
    """Seed the global random streams of this process: torch's, its device's, NumPy's, Python's."""
    torch.default_generator.manual_seed(seed)
    if (device := accelerators.in_use()) is not None:
        device.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def stream_states() -> StreamStates:
    """The states of the global random streams, for ``restore_streams``."""
    return StreamStates(
        torch.get_rng_state(),
        accelerators.random_state(),
        np.random.get_state(),
        random.getstate(),
    )


def restore_streams(states: StreamStates) -> None:
    """Restore the global random streams to states of ``stream_states``."""
    torch.set_rng_state(states.cpu)
    accelerators.set_random_state(states.device)
    np.random.set_state(states.numpy)
    random.setstate(states.python)


def torch_streams() -> torch.Tensor:
    """The state of torch's stream, followed by its device's if one is in use; uint8."""
    own, device = torch.get_rng_state(), accelerators.random_state()
    return own if device is None else torch.cat([own, device])


def set_torch_streams(state: torch.Tensor) -> None:
    """Restore torch's streams to a state of ``torch_streams``, of this or another rank."""
    length = torch.get_rng_state().numel()
    torch.set_rng_state(state[:length].clone())
    if len(state) > length:
        accelerators.set_random_state(state[length:].clone())


def holds_streams(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A decorator of what seeds the global random streams and draws from them: others wait."""

    @wraps(function)
    def held(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with held_streams:
            return function(*args, **kwargs)

    return held


@contextmanager
def kept_streams() -> Iterator[None]:
    """After the block the global random streams are as they were before it."""
    with held_streams:
        states = stream_states()
    try:
        yield
    finally:
        with held_streams:
            restore_streams(states)


def same_streams(one: StreamStates, other: StreamStates) -> bool:
    """Whether nothing was drawn between two states."""
    return (
        torch.equal(one.cpu, other.cpu)
        and _same_state(one.device, other.device)
        and one.python == other.python
        and one.numpy[2:] == other.numpy[2:]
        and bool((one.numpy[1] == other.numpy[1]).all())
    )


def _same_state(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def epoch_order(seed: int, epoch: int, num_samples: int, *, shuffle: bool) -> torch.Tensor:
    """Sample indices of one epoch, shape (num_samples,), int64."""
    if not shuffle:
        return torch.arange(num_samples)
    generator = torch.Generator().manual_seed(stream_seed(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator)


def epoch_batches(
    seed: int,
    epoch: int,
    num_samples: int,
    batch_size: int,
    *,
    shuffle: bool,
    steps: int | None = None,
) -> Iterator[torch.Tensor]:
    """Sample indices of each global batch of an epoch.

    Args:
        seed: of the order.
        epoch: its number.
        num_samples: of a pass over the data.
        batch_size: of a global batch; the last of a pass may be short.
        shuffle: True to give every pass an order of its own.
        steps: batches of an epoch, which then begins where the one before ended, within a pass;
            None is a pass.
    """
    in_pass = -(-num_samples // batch_size)
    steps = in_pass if steps is None else steps
    order = torch.empty(0)
    for number in range(epoch * steps, (epoch + 1) * steps):
        one_pass, index = divmod(number, in_pass)
        if index == 0 or number == epoch * steps:
            order = epoch_order(seed, one_pass, num_samples, shuffle=shuffle)
        yield order[index * batch_size : (index + 1) * batch_size]


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """The order of a ``fit``'s batches, if its data is read by index.

    Attributes:
        batch_size: samples of a global batch.
        shuffle: take the samples in a new order every epoch.
        seed: of that order.
        first_epoch: epochs trained before; the orders continue from there.
        steps_per_epoch: batches of an epoch; None is a pass over the data.
    """

    batch_size: int
    shuffle: bool
    seed: int
    first_epoch: int
    steps_per_epoch: int | None

    def indices(self, epoch: int, num_samples: int) -> Iterator[torch.Tensor]:
        """The samples of each batch of an epoch."""
        return epoch_batches(
            self.seed,
            self.first_epoch + epoch,
            num_samples,
            self.batch_size,
            shuffle=self.shuffle,
            steps=self.steps_per_epoch,
        )


def batch_bounds(num_samples: int, batch_size: int) -> Iterator[tuple[int, int]]:
    """Positions ``[start, stop)`` of each global batch in the order; the last may be short."""
    for start in range(0, num_samples, batch_size):
        yield start, min(start + batch_size, num_samples)
