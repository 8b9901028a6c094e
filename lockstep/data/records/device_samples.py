"""Samples that lie on an accelerator: datasets of ``lockstep.data.cache(dataset, device=True)``.

A rank reads all of them from its host's cache when it first needs some, and picks the rows of its
batches on the device from then on. Batches have the bits that they have when they are read sample
by sample: rows are stacked in the same way, and numbers converted afterwards.
"""

from typing import Any

import torch

from lockstep.data.iterable.read_ahead import Prefetch
from lockstep.data.map_style.sources import ArraySource, Batch, DatasetSource, Source
from lockstep.data.records.sample_cache import Cache
from lockstep.data.trees import map_tensors, tensors_of

# Samples that are on the host at a time.
_NUM_ROWS = 1024


def kept_on(device: torch.device, source: Any) -> Any:
    """What reads a source's samples on a device, if their cache keeps them there; else the source.

    It stays with the cache, for all later calls with it in this process.
    """
    if type(source) is not DatasetSource or device.type == "cpu":
        return source
    cached = source.dataset
    while isinstance(cached, Prefetch):
        cached = cached.dataset
    if not (isinstance(cached, Cache) and cached.on_device):
        return source
    return cached.kept.setdefault((device, source.with_targets), DeviceSamples(source, device))


class DeviceSamples(Source):
    """All samples of a dataset, on a device from the first read on.

    Args:
        source: the dataset.
        device: this rank's.
    """

    def __init__(self, source: DatasetSource, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._samples: ArraySource | None = None

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: torch.Tensor, dtype: torch.dtype | None) -> Batch:
        if self._samples is None:
            self._samples = self._sent()
        return self._samples.read(indices, dtype)

    def _sent(self) -> ArraySource:
        """All samples, copied to the device."""

        def room(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.new_empty((len(self), *tensor.shape[1:]), device=self._device)

        parts: Any = None
        for rows in torch.arange(len(self)).split(_NUM_ROWS):
            batch = self._source.read(rows, None)
            found = batch.inputs, batch.targets, batch.sample_weight
            parts = map_tensors(room, found) if parts is None else parts
            for whole, part in zip(tensors_of(parts), tensors_of(found), strict=True):
                whole[rows[0] : rows[-1] + 1] = part
        return ArraySource(*parts)
