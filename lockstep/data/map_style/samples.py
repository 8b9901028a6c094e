"""A few samples of a source, or the same ones repeated."""

import torch

from lockstep.data.map_style.sources import ArraySource, Batch, Source
from lockstep.data.trees import map_tensors, tensors_of


class RepeatedSource(Source):
    """The first samples of a source, repeated if it has fewer."""

    def __init__(self, source: Source, num_samples: int) -> None:
        self._source = source
        self._num_samples = num_samples
        self.ahead = source.ahead

    def __len__(self) -> int:
        return self._num_samples

    def read(self, indices: torch.Tensor, dtype: torch.dtype | None) -> Batch:
        return self._source.read(indices % len(self._source), dtype)


def first_samples(source: Source, num_samples: int) -> Source:
    """The first samples of a source: arrays for helpers are copied to shared memory."""
    if num_samples >= len(source):
        return source
    if not isinstance(source, ArraySource):
        return RepeatedSource(source, num_samples)
    whole = (source.inputs, source.targets, source.sample_weight)
    return ArraySource(*map_tensors(lambda tensor: tensor[:num_samples], whole))


def array_bytes(source: Source) -> int:
    """Bytes of a source's arrays; 0 for one that reads its samples from elsewhere."""
    if not isinstance(source, ArraySource):
        return 0
    parts = (source.inputs, source.targets, source.sample_weight)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(parts))
