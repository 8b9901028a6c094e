"""The order in which samples on a device are read: sent there once, and not in each step."""

import torch

from lockstep.accelerators import sent


class SentOrder:
    """An order of samples on a device; the places of a batch are a part of it.

    Args:
        indices: a part of the order, which lies in memory of its own.
        device: where to.
    """

    def __init__(self, indices: torch.Tensor, device: torch.device) -> None:
        self._memory = indices.untyped_storage()  # kept, so that no other order takes its address
        self._version = indices._version
        self._order = sent(torch.empty(0, dtype=indices.dtype).set_(self._memory), device)

    def has(self, indices: torch.Tensor, device: torch.device) -> bool:
        """Whether these indices are a part of the order, as it was sent to this device."""
        is_part = indices.untyped_storage().data_ptr() == self._memory.data_ptr()
        is_same = is_part and indices._version == self._version
        return is_same and self._order.device == device

    def part(self, indices: torch.Tensor) -> torch.Tensor:
        """A part of the order, on the device."""
        return self._order.as_strided(indices.shape, indices.stride(), indices.storage_offset())
