"""Tensors through torch.distributed: one all-to-all per transfer, with whichever backend there is.

The group is Lockstep's own; the user's default group stays free. Its ranks find each other where
nobody else can look (``comm.meeting_point``). What the backend opens after that is as open as in
any job of torch.distributed: gloo listens on this host's loopback address, and does not ask who
connects.

A transfer is packed into one buffer for all peers and unpacked at the other end, so many small
tensors cost as much as a large one. Only data are moved: sums are the engine's own, in its fixed
order, so that the bits do not depend on the backend or on the number of ranks.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
from torch import distributed

from lockstep.comm.meeting_point import SharedStore
from lockstep.comm.transport import Buffers, Transport
from lockstep.errors import WorkerError

_LOOK_AROUND = timedelta(milliseconds=20)
_SECONDS_TO_THE_CAUSE = 3.0
_LONGEST_NAP_SECONDS = 5 * _LOOK_AROUND.total_seconds()

# Its types do not say what it exports.
_dist: Any = distributed

# A transfer ends when all have made it, or when ``look_around`` raises, and never by itself.
_NEVER = timedelta(days=365)


class ProcessGroupTransport(Transport):
    """One rank's end. The group is made at the first transfer.

    Args:
        ranks: those that take part, in ascending order.
        rank: this rank.
        name: the same on all of them, and no other group's.
        backend: see ``plan.engines.BACKENDS``.
        meeting_point: path of a ``MeetingPoint``, to be opened while it is there.
        look_around: called every 20 ms of waiting with the seconds waited so far; it raises if
            waiting on is in vain.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        rank: int,
        name: str,
        backend: str,
        meeting_point: str,
        look_around: Callable[[float], None],
    ) -> None:
        self._ranks = ranks
        self._rank = rank
        self._name = name
        self._make_group = _GROUPS[backend]
        self._meeting_point = meeting_point
        self._look_around = look_around
        self._group: Any = None
        self._buffers: dict[str, torch.Tensor] = {}

    def transfer(self, sends: Buffers, receives: Buffers) -> None:
        going = [_bytes_of(sends.get(peer, ())) for peer in self._ranks]
        coming = [_bytes_of(receives.get(peer, ())) for peer in self._ranks]
        out = self._buffer("out", going)
        into = self._buffer("in", coming)
        if any(going):
            torch.cat([part for parts in going for part in parts], out=out)
        self._all_to_all(into, [_size(parts) for parts in coming], out, [*map(_size, going)])
        targets = [part for parts in coming for part in parts]
        if targets:
            sources = into.split([len(target) for target in targets])
            torch._foreach_copy_(targets, list(sources))

    def _buffer(self, use: str, parts: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Memory for all parts, kept from one transfer to the next."""
        size = sum(map(_size, parts))
        if use not in self._buffers or len(self._buffers[use]) < size:
            self._buffers[use] = torch.empty(size, dtype=torch.uint8)
        return self._buffers[use][:size]

    def _all_to_all(
        self,
        into: torch.Tensor,
        into_sizes: Sequence[int],
        out: torch.Tensor,
        out_sizes: Sequence[int],
    ) -> None:
        if self._group is None:
            self._group = self._made_patiently()
        options = _dist.distributed_c10d.AllToAllOptions()
        work = self._group.alltoall_base(into, out, list(into_sizes), list(out_sizes), options)
        self._wait(lambda: _is_done(work))

    def _wait(self, is_done: Callable[[], bool]) -> None:
        waited, last = 0.0, monotonic()
        while not self._has_ended(is_done):
            now = monotonic()
            waited, last = waited + min(now - last, _LONGEST_NAP_SECONDS), now
            self._look_around(waited)

    def _has_ended(self, is_done: Callable[[], bool]) -> bool:
        try:
            return is_done()
        except RuntimeError as error:  # the backend's: a connection has ended
            self._look_for_the_cause()
            raise WorkerError(
                f"Rank {self._rank} cannot reach the others through torch.distributed.",
                received=str(error).splitlines()[0],
                fix="See whether another rank has ended.",
            ) from error

    def _look_for_the_cause(self) -> None:
        """``look_around`` raises if a rank has died, but perhaps does not know it yet."""
        until = monotonic() + _SECONDS_TO_THE_CAUSE
        while monotonic() < until:
            self._look_around(0.0)
            sleep(_LOOK_AROUND.total_seconds())

    def _made_patiently(self) -> Any:
        """The group. Making one waits for all other ranks, in vain if one has died."""
        made: list[Any] = []
        thread = threading.Thread(target=lambda: made.append(self._outcome()), daemon=True)
        thread.start()

        def is_done() -> bool:
            thread.join(_LOOK_AROUND.total_seconds())
            return not thread.is_alive()

        self._wait(is_done)
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]

    def _outcome(self) -> Any:
        try:
            return self._make()
        except Exception as error:
            return error

    def _make(self) -> Any:
        store = SharedStore(self._meeting_point)
        own = self._ranks.index(self._rank)
        return self._make_group(_dist.PrefixStore(self._name, store), own, len(self._ranks))


def _gloo(store: Any, rank: int, size: int) -> Any:
    """A group over TCP, on this host."""
    kind = _dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname="127.0.0.1")]
    options._timeout = _NEVER
    return kind(store, rank, size, options)


# How the group of each backend is made.
_GROUPS: dict[str, Callable[[Any, int, int], Any]] = {"gloo": _gloo}


def _is_done(work: Any) -> bool:
    """Wait a little for an operation.

    Raises:
        RuntimeError: it has failed.
    """
    try:
        work.wait(_LOOK_AROUND)
    except RuntimeError:  # time is up, or it has failed
        if not work.is_completed():
            return False
        work.wait()
    return True


def _bytes_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Dense tensors as bytes, those without any left out."""
    flat = (tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in tensors)
    return [tensor.view(torch.uint8) for tensor in flat if tensor.numel()]


def _size(parts: Sequence[torch.Tensor]) -> int:
    return sum(map(len, parts))
