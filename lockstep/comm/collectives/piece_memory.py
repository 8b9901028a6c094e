"""The memory of whole tensors, of which a rank keeps its pieces and can free the rest.

In host memory that the ranks share, the pages of the rest are freed in place, and addresses stay.
A device frees whole storages only: there the pieces are copied to memory of their own before, and
back afterwards. The storages stay the same objects, and with them every tensor that lies there,
also what autograd has saved; their addresses change (as in PyTorch's FSDP).
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from lockstep.comm.shared_memory.shared_region import discard, pages_of


class PieceMemory(ABC):
    """The memory of some tensors.

    Args:
        tensors: the whole ones; they have memory.
        cuts: this rank's pieces of them.

    Attributes:
        kept: the pieces, in memory that stays, in their order.
    """

    kept: Sequence[torch.Tensor]

    def __init__(self, tensors: Sequence[torch.Tensor], cuts: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._cuts = cuts

    @abstractmethod
    def take(self) -> None:
        """Have memory for the whole tensors, in which the pieces have their values."""

    @abstractmethod
    def keep(self) -> None:
        """After a change of the whole tensors: the pieces have the new values."""

    @abstractmethod
    def free(self) -> None:
        """Free all but the pieces, which keep their values."""

    @abstractmethod
    def drop(self) -> None:
        """Free the pieces, too, until ``take``."""

    @torch.no_grad()
    def fill_rest(self, value: float) -> None:
        """Have the whole tensors, with a value wherever there is no piece of this rank."""
        own = [one.clone() for one in self.kept]
        self.take()
        for tensor in self._tensors:
            tensor.fill_(value)
        for place, one in zip(self._cuts, own, strict=True):
            place.copy_(one)


def piece_memory(
    tensors: Sequence[torch.Tensor], cuts: Sequence[torch.Tensor], *, keeps_on_host: bool = False
) -> PieceMemory:
    """The memory of tensors of one device.

    Args:
        tensors: see ``PieceMemory``.
        cuts: likewise.
        keeps_on_host: the pieces of a device are kept in host memory.
    """
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return DeviceStorages(tensors, cuts, keeps_on_host=keeps_on_host)
    return HostPages(tensors, cuts)


def empty_copies(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the same layout on a device, in storages without memory: see ``allocate``."""
    found = []
    for one in tensors:
        found.append(torch.empty_like(one, device=device))
        release(found[-1:])  # before there is memory for the next
    return found


def allocate(tensors: Iterable[torch.Tensor]) -> None:
    """Take memory for tensors of a device that may have none; does nothing for those of a host."""
    _allocate(_storages(one for one in tensors if one.device.type != "cpu"))


def release(tensors: Iterable[torch.Tensor]) -> None:
    """Free the memory of tensors of a device; these stay what they are."""
    _release(_storages(tensors))


class HostPages(PieceMemory):
    """Pages of shared memory: zeros after they were freed, and there again when written to."""

    def __init__(self, tensors: Sequence[torch.Tensor], cuts: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors, cuts)
        self.kept = cuts
        self._pages = [one for own in tensors for one in pages_of(own)]
        self._rest = [one for own in tensors for one in pages_of(own, cuts)]

    def take(self) -> None:
        return

    def keep(self) -> None:
        return

    def free(self) -> None:
        discard(self._rest)

    def drop(self) -> None:
        discard(self._pages)


class DeviceStorages(PieceMemory):
    """Storages of a device. Those that have nothing but pieces of this rank stay in place.

    With ``keeps_on_host`` none does: the pieces are kept in host memory, until they are kept anew.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        cuts: Sequence[torch.Tensor],
        *,
        keeps_on_host: bool = False,
    ) -> None:
        super().__init__(tensors, cuts)
        whole, own = _bytes_by_storage(tensors), _bytes_by_storage(cuts)
        staying = {key for key, num_bytes in whole.items() if own[key] == num_bytes}
        if keeps_on_host:
            staying = set()
        self.kept = [
            cut
            if storage_key(cut) in staying
            else cut.to("cpu" if keeps_on_host else cut.device, copy=True)
            for cut in cuts
        ]
        self._moved = [
            (cut, kept) for cut, kept in zip(cuts, self.kept, strict=True) if cut is not kept
        ]
        self._own_storages = [] if keeps_on_host else _storages(kept for _, kept in self._moved)
        self._storages = _storages(tensors)
        self._freed = _storages(one for one in tensors if storage_key(one) not in staying)
        self._is_whole, self._has_pieces = True, True

    def take(self) -> None:
        if self._is_whole:
            return
        _allocate(self._storages)
        self._is_whole = True
        if self._has_pieces:
            _copy([(kept, cut) for cut, kept in self._moved])

    def keep(self) -> None:
        if self._is_whole:
            _allocate(self._own_storages)
            _copy(self._moved)
            self._has_pieces = True

    def free(self) -> None:
        if self._is_whole:
            self.keep()
            _release(self._freed)
            self._is_whole = False

    def drop(self) -> None:
        _release(self._storages)
        _release(self._own_storages)
        self._is_whole = self._has_pieces = False


# A storage, and its size in bytes while it has memory.
_Sized = tuple[torch.UntypedStorage, int]


def storage_key(tensor: torch.Tensor) -> int:
    """Tells a storage from others, also while it has no memory."""
    return int(tensor.untyped_storage()._cdata)


def _bytes_by_storage(tensors: Iterable[torch.Tensor]) -> Counter[int]:
    found: Counter[int] = Counter()
    for tensor in tensors:
        found[storage_key(tensor)] += tensor.nbytes
    return found


def _storages(tensors: Iterable[torch.Tensor]) -> list[_Sized]:
    found: dict[int, _Sized] = {}
    for tensor in tensors:
        storage, stop = tensor.untyped_storage(), int(tensor.storage_offset()) + tensor.numel()
        _, before = found.get(storage_key(tensor), (storage, storage.nbytes()))
        found[storage_key(tensor)] = storage, max(before, int(stop) * tensor.element_size())
    return [*found.values()]


def _allocate(storages: Iterable[_Sized]) -> None:
    for storage, num_bytes in storages:
        if storage.nbytes() != num_bytes:
            storage.resize_(num_bytes)


def _release(storages: Iterable[_Sized]) -> None:
    for storage, _ in storages:
        storage.resize_(0)


@torch.no_grad()
def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the first of each pair to the second."""
    if pairs:
        torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])
