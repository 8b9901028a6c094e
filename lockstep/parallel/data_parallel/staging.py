"""Copies batches to an accelerator while it computes on the one before.

A batch is copied to pinned memory, and from there to the device on a separate stream, so neither
the host nor the device waits for it. ``Staged.take`` makes the device's current stream wait for the
copy.
"""

from dataclasses import dataclass
from typing import Any

import torch

from lockstep import accelerators
from lockstep.data.map_style.sources import Batch, least_of
from lockstep.data.trees import map_tensors, tensors_of


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A batch that is being copied.

    Attributes:
        batch: on the device.
        device: the destination.
        copied: the event at the end of the copy.
    """

    batch: Batch
    device: torch.device
    copied: Any

    def take(self) -> Batch:
        """The batch, for work on the device's current stream."""
        stream = torch.accelerator.current_stream(self.device)
        stream.wait_event(self.copied)
        parts = self.batch.inputs, self.batch.targets, self.batch.sample_weight
        accelerators.keep_until(stream, tensors_of(parts))
        return self.batch


class Staging:
    """Copies batches to a device, in the thread that calls it.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        accelerators.use(device)
        self._device = device
        self._stream = torch.Stream(device)

    def stage(self, batch: Batch) -> Staged:
        """Begin to copy a batch."""
        with self._stream:
            on_device = moved(batch, self._device)
            copied = self._stream.record_event()
        return Staged(batch=on_device, device=self._device, copied=copied)


def moved(batch: Batch, device: torch.device) -> Batch:
    """A batch on another device."""
    if device.type == "cpu":
        return batch

    def move(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.device.type != "cpu" or tensor.layout != torch.strided
        return tensor.to(device, non_blocking=True) if plain else accelerators.sent(tensor, device)

    targets = batch.targets
    is_seen = isinstance(targets, torch.Tensor) and targets.is_cpu
    return Batch(
        inputs=map_tensors(move, batch.inputs),
        targets=map_tensors(move, targets),
        sample_weight=map_tensors(move, batch.sample_weight),
        num_samples=batch.num_samples,
        least_target=least_of(targets) if is_seen else batch.least_target,
    )
