"""Wires: a rank's connections to ranks of other hosts, over which tensors go as they lie in memory.

Of every two hosts, wire k joins a rank of the one with a rank of the other (``wire_ends``). What
goes over it has no headers: both ends know from the step what comes, how much, and in which order.
Both directions move at once, or two ranks that send to each other would wait for ever.
"""

import select
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import torch

from lockstep.errors import HostError, problem

# A wire: the other host, and the number among the wires of the two hosts.
Wire = tuple[int, int]
Buffers = Mapping[Wire, Sequence[torch.Tensor]]

_LOOK_AROUND_SECONDS = 0.02
_LONGEST_NAP_SECONDS = 5 * _LOOK_AROUND_SECONDS
_MOST_AT_ONCE = 64  # buffers of one call; the kernel takes 1,024


def num_wires(hosts: Sequence[int], one: int, other: int) -> int:
    """Wires between two hosts with so many ranks each: each rank has one at least."""
    return max(hosts[one], hosts[other])


def wire_end(hosts: Sequence[int], host: int, number: int) -> int:
    """Which of a host's ranks, counted from 0 on that host, has wire ``number`` to another host."""
    return number % hosts[host]


@dataclass
class _Queue:
    """Bytes on their way through one wire in one direction."""

    views: deque[memoryview] = field(default_factory=deque)

    def advance(self, num_bytes: int) -> None:
        while num_bytes:
            head = self.views[0]
            taken = min(num_bytes, len(head))
            num_bytes -= taken
            self.views.popleft()
            if taken < len(head):
                self.views.appendleft(head[taken:])


class Wires:
    """One rank's wires.

    Args:
        sockets: connected and non-blocking, by wire.
        names: of the hosts, for messages, by number.
        look_around: called every 20 ms of waiting with the seconds waited so far; it raises if
            waiting on is in vain.
    """

    def __init__(
        self,
        sockets: Mapping[Wire, socket.socket],
        names: Sequence[str],
        look_around: Callable[[float], None],
    ) -> None:
        self._sockets = dict(sockets)
        self._names = names
        self._look_around = look_around

    def __iter__(self) -> Iterator[Wire]:
        return iter(self._sockets)

    def transfer(self, sends: Buffers, receives: Buffers) -> None:
        """Send tensors and fill others, all at once, until everything has come and gone.

        Args:
            sends: dense tensors by wire, in the order in which the other end receives them.
            receives: dense tensors by wire, which are written to.

        Raises:
            HostError: another host is gone.
        """
        going, coming = _queues(sends), _queues(receives)
        poller = select.poll()
        wires = {self._sockets[wire].fileno(): wire for wire in {*going, *coming}}
        for descriptor, wire in wires.items():
            poller.register(descriptor, _events(wire, going, coming))
        waited, last = 0.0, monotonic()
        while going or coming:
            ready = poller.poll(_LOOK_AROUND_SECONDS * 1000)
            for descriptor, _ in ready:
                wire = wires[descriptor]
                self._move(wire, going, coming)
                events = _events(wire, going, coming)
                if events:
                    poller.modify(descriptor, events)
                else:
                    poller.unregister(descriptor)
            now = monotonic()
            # Where bytes move nobody waits.
            waited, last = (
                0.0 if ready else waited + min(now - last, _LONGEST_NAP_SECONDS),
                now,
            )
            if not ready:
                self._look_around(waited)

    def close(self) -> None:
        """Close this rank's ends."""
        while self._sockets:
            self._sockets.popitem()[1].close()

    def _move(self, wire: Wire, going: dict[Wire, _Queue], coming: dict[Wire, _Queue]) -> None:
        """Send and receive on a wire what can be now."""
        try:
            if wire in coming:
                self._receive(wire, coming)
            if wire in going:
                self._send(wire, going)
        except OSError as error:
            raise self._gone(wire, error.strerror or type(error).__name__) from error

    def _receive(self, wire: Wire, coming: dict[Wire, _Queue]) -> None:
        queue, end = coming[wire], self._sockets[wire]
        while queue.views:
            try:
                count = end.recv_into(queue.views[0])
            except BlockingIOError:
                return
            if count == 0:
                raise self._gone(wire, "it has closed the connection")
            queue.advance(count)
        del coming[wire]

    def _send(self, wire: Wire, going: dict[Wire, _Queue]) -> None:
        queue, end = going[wire], self._sockets[wire]
        while queue.views:
            parts = [queue.views[index] for index in range(min(len(queue.views), _MOST_AT_ONCE))]
            try:
                queue.advance(end.sendmsg(parts))
            except BlockingIOError:
                return
        del going[wire]

    def _gone(self, wire: Wire, reason: str) -> HostError:
        host = wire[0]
        return HostError(
            problem(
                f"Host {host} ({self._names[host]}) no longer takes part.",
                received=reason,
                fix="Look at that host's output for the cause.",
            )
        )


def _queues(buffers: Buffers) -> dict[Wire, _Queue]:
    """What has bytes to move."""
    found = {
        wire: _Queue(deque(view for view in map(bytes_of, tensors) if len(view)))
        for wire, tensors in buffers.items()
    }
    return {wire: queue for wire, queue in found.items() if queue.views}


def _events(wire: Wire, going: Mapping[Wire, _Queue], coming: Mapping[Wire, _Queue]) -> int:
    return (select.POLLOUT if wire in going else 0) | (select.POLLIN if wire in coming else 0)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense tensor on the CPU."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    if not len(flat):
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # it has a buffer
