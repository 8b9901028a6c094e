"""The order of the samples and the seeds of all random streams: pure functions of the seed.

Nothing here knows how many devices there are.
"""

import hashlib
import random
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch


class StreamStates(NamedTuple):
    """States of the global random streams; ``gpus`` is empty where CUDA is not in use."""

    cpu: torch.Tensor
    gpus: list[torch.Tensor]
    numpy: Any
    python: Any


def stream_seed(*keys: int | str) -> int:
    """A 63-bit seed that depends on every key; different keys give unrelated streams."""
    digest = hashlib.blake2b(digest_size=8)
    for key in keys:
        text = b"s" + key.encode() if isinstance(key, str) else b"i" + struct.pack("<q", key)
        digest.update(struct.pack("<q", len(text)) + text)
    return int.from_bytes(digest.digest(), "little") >> 1


def share_seed(seed: int, step: int, share: int) -> int:
    """The seed of the random stream that one share of one training step draws from."""
    return stream_seed(seed, "share", step, share)


def seed_streams(seed: int) -> None:
    """Seed torch's, NumPy's and Python's global random streams of this process."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def stream_states() -> StreamStates:
    """The states of the global random streams, for ``restore_streams``."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return StreamStates(torch.get_rng_state(), gpus, np.random.get_state(), random.getstate())


def restore_streams(states: StreamStates) -> None:
    """Put the global random streams back to where ``stream_states`` found them."""
    torch.set_rng_state(states.cpu)
    if states.gpus:
        torch.cuda.set_rng_state_all(states.gpus)
    np.random.set_state(states.numpy)
    random.setstate(states.python)


def same_streams(one: StreamStates, other: StreamStates) -> bool:
    """Whether nothing was drawn between two calls of ``stream_states``."""
    return (
        torch.equal(one.cpu, other.cpu)
        and all(map(torch.equal, one.gpus, other.gpus))
        and np.array_equal(one.numpy[1], other.numpy[1])
        and one.numpy[2:] == other.numpy[2:]
        and one.python == other.python
    )


def epoch_order(seed: int, epoch: int, num_samples: int, *, shuffle: bool) -> torch.Tensor:
    """Sample indices of one epoch, shape (num_samples,), int64."""
    if not shuffle:
        return torch.arange(num_samples)
    generator = torch.Generator().manual_seed(stream_seed(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator)


def batch_bounds(num_samples: int, batch_size: int) -> Iterator[tuple[int, int]]:
    """Positions ``[start, stop)`` of each global batch in the order; the last may be short."""
    for start in range(0, num_samples, batch_size):
        yield start, min(start + batch_size, num_samples)
