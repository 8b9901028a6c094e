"""Transfers and messages between the ranks of one group of torch.distributed."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed

from lockstep.comm.transport import Buffers, Transport
from lockstep.comm.transports.process_group import ProcessGroups

# torch's types do not declare its exports.
_dist: Any = distributed

# An operation under way, and the memory that it works on.
Message = tuple[Any, torch.Tensor]


class ProcessGroupTransport(Transport):
    """All-to-all within one group, and messages between two of its ranks.

    A transfer is packed into one buffer for all peers and unpacked at the other end, so many small
    tensors cost as much as a large one. A message goes from where a tensor lies to where it
    belongs, without a copy, and may be on its way while this rank computes; those of one tag
    between two ranks come in the order in which they were sent.

    Args:
        ranks: those that take part, as they are ordered in the group.
        name: of the group.
        groups: this rank's.
    """

    def __init__(self, ranks: Sequence[int], name: str, groups: ProcessGroups) -> None:
        self._ranks = ranks
        self._name = name
        self._groups = groups
        self._buffers: dict[tuple[str, torch.device], torch.Tensor] = {}

    def transfer(self, sends: Buffers, receives: Buffers) -> None:
        going = [_bytes_of(sends.get(peer, ())) for peer in self._ranks]
        coming = [_bytes_of(receives.get(peer, ())) for peer in self._ranks]
        device = self._groups.own_device
        out = self._buffer("out", going, device)
        into = self._buffer("in", coming, device)
        if any(going):
            torch.cat([part for parts in going for part in parts], out=out)
        sizes = [_size(parts) for parts in coming], [*map(_size, going)]
        if self._groups.is_staged:
            staged = self._buffer("in", coming, self._groups.device)
            sent = self._buffer("out", going, self._groups.device).copy_(out)
            self._all_to_all(staged, sizes[0], sent, sizes[1])
            into.copy_(staged)  # done when it returns: the next transfer overwrites what was staged
        else:
            self._all_to_all(into, sizes[0], out, sizes[1])
        targets = [part for parts in coming for part in parts]
        if targets:
            sources = into.split([len(target) for target in targets])
            torch._foreach_copy_(targets, list(sources))

    def _buffer(
        self, use: str, parts: Sequence[Sequence[torch.Tensor]], device: torch.device
    ) -> torch.Tensor:
        """Memory for all parts, kept from one transfer to the next."""
        size = sum(map(_size, parts))
        kept = self._buffers.get((use, device))
        if kept is None or len(kept) < size:
            kept = self._buffers[use, device] = self._groups.buffer(size, device)
        return kept[:size]

    def _all_to_all(
        self,
        into: torch.Tensor,
        into_sizes: Sequence[int],
        out: torch.Tensor,
        out_sizes: Sequence[int],
    ) -> None:
        self._groups.wait(self._begun(into, into_sizes, out, out_sizes))

    def _begun(
        self,
        into: torch.Tensor,
        into_sizes: Sequence[int],
        out: torch.Tensor,
        out_sizes: Sequence[int],
    ) -> Any:
        options = _dist.distributed_c10d.AllToAllOptions()
        with self._groups.naming_lost_rank():
            return self._group.alltoall_base(into, out, list(into_sizes), list(out_sizes), options)

    # --- while this rank computes ----------------------------------------------------------------

    @property
    def is_ordered(self) -> bool:
        """Whether all ranks must ``begin`` in one order: a transfer of a device is a collective."""
        return self._groups.own_device.type != "cpu"

    def begin(self, sends: Buffers, receives: Buffers, *, tag: int) -> Callable[[], None]:
        """Begin to send tensors and to fill others; the result waits until all have come and gone.

        All ranks that take part begin the same with each tag, in the same order.

        Args:
            sends: as of ``transfer``; in host memory they must not change until then.
            receives: as of ``transfer``; on a device they need memory only when that is called.
            tag: of the messages.
        """
        if self.is_ordered:
            return (self._begin_by_host if self._groups.is_staged else self._begin_on_device)(
                sends, receives
            )
        messages = [
            one for peer, tensors in receives.items() for one in self.receive(peer, tensors, tag)
        ]
        messages += [
            one for peer, tensors in sends.items() for one in self.send(peer, tensors, tag)
        ]
        return partial(self.finish, messages)

    def _begin_by_host(self, sends: Buffers, receives: Buffers) -> Callable[[], None]:
        """By way of host memory."""
        going = [_bytes_of(sends.get(peer, ())) for peer in self._ranks]
        sizes = [sum(one.nbytes for one in receives.get(peer, ())) for peer in self._ranks]
        out = self._groups.buffer(sum(map(_size, going)), self._groups.device)
        into = self._groups.buffer(sum(sizes), self._groups.device)
        _fill(out, [part for parts in going for part in parts])
        work = self._begun(into, sizes, out, [*map(_size, going)])

        def finish() -> None:
            self._groups.wait(work)
            _unpack(into, [one for peer in self._ranks for one in receives.get(peer, ())])

        return finish

    def _begin_on_device(self, sends: Buffers, receives: Buffers) -> Callable[[], None]:
        """Device to device. The host need not wait for it: see ``ProcessGroups.follow``."""
        device = self._groups.own_device
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        packed = {
            id(tensors): torch.cat([nothing, *_bytes_of(tensors)]) for tensors in sends.values()
        }
        out = [packed[id(sends[peer])] if peer in sends else nothing for peer in self._ranks]
        into = [
            nothing.new_empty(sum(one.nbytes for one in receives.get(peer, ())))
            for peer in self._ranks
        ]
        options = _dist.distributed_c10d.AllToAllOptions()
        with self._groups.naming_lost_rank():
            work = self._group.alltoall(into, out, options)

        def finish() -> None:
            self._groups.follow(work)
            for peer, buffer in zip(self._ranks, into, strict=True):
                _unpack(buffer, receives.get(peer, ()))

        return finish

    # --- one by one ------------------------------------------------------------------------------

    def send(self, peer: int, tensors: Sequence[torch.Tensor], tag: int) -> list[Message]:
        """Begin to send dense tensors, which must not change until the messages are finished."""
        place = self._ranks.index(peer)
        with self._groups.naming_lost_rank():
            return [(self._group.send([one], place, tag), one) for one in _bytes_of(tensors)]

    def receive(self, peer: int, tensors: Sequence[torch.Tensor], tag: int) -> list[Message]:
        """Begin to fill dense tensors."""
        place = self._ranks.index(peer)
        with self._groups.naming_lost_rank():
            return [(self._group.recv([one], place, tag), one) for one in _bytes_of(tensors)]

    def finish(self, messages: Iterable[Message]) -> None:
        """Wait until they are sent or received.

        Raises:
            WorkerError: another rank is gone, or hangs.
        """
        self._groups.finish([work for work, _ in messages])

    @property
    def _group(self) -> Any:
        return self._groups[self._name]


def _bytes_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Dense tensors as bytes, those without any left out."""
    flat = (tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in tensors)
    return [tensor.view(torch.uint8) for tensor in flat if tensor.numel()]


@torch.no_grad()
def _fill(buffer: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Pack bytes, from any device."""
    if parts:
        torch._foreach_copy_(list(buffer.split([*map(len, parts)])), list(parts))


@torch.no_grad()
def _unpack(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Fill dense tensors, on any device."""
    parts = _bytes_of(tensors)
    if parts:
        torch._foreach_copy_(parts, list(buffer.split([*map(len, parts)])))


def _size(parts: Sequence[torch.Tensor]) -> int:
    return sum(map(len, parts))
