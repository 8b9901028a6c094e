"""Wires: a rank's connections to ranks of other hosts; tensors go over them as they lie in memory.

What goes over a wire has no headers: both ends know from the step what comes, how much, and in
which order. Both directions move at once, or two ranks that send to each other would wait for ever.
"""

import select
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import torch

from lockstep.errors import HostError, problem
from lockstep.units import format_seconds

# Tensors by the rank at the other end.
Buffers = Mapping[int, Sequence[torch.Tensor]]

_LOOK_AROUND_SECONDS = 0.02
_LONGEST_NAP_SECONDS = 5 * _LOOK_AROUND_SECONDS
_MOST_AT_ONCE = 64  # buffers of one call; the kernel takes 1,024


@dataclass
class _Queue:
    """Bytes on their way through one peer in one direction."""

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
    """One rank's peers.

    Args:
        sockets: connected and non-blocking, by the rank at the other end.
        names: of the hosts of these ranks, for messages.
        look_around: called every 20 ms of waiting with the seconds waited so far; it raises if
            waiting on is in vain.
        timeout_seconds: longest wait in which nothing moves.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        names: Mapping[int, str],
        look_around: Callable[[float], None],
        timeout_seconds: float,
    ) -> None:
        self._sockets = dict(sockets)
        self._names = names
        self._look_around = look_around
        self._timeout = timeout_seconds

    def transfer(self, sends: Buffers, receives: Buffers) -> None:
        """Send tensors and fill others, all at once, until everything has come and gone.

        Args:
            sends: dense tensors by rank, in the order in which the other end receives them.
            receives: dense tensors by rank, which are written to.

        Raises:
            HostError: another host is gone, or time is up.
        """
        going, coming = _queues(sends), _queues(receives)
        poller = select.poll()
        peers = {self._sockets[peer].fileno(): peer for peer in {*going, *coming}}
        for descriptor, peer in peers.items():
            poller.register(descriptor, _events(peer, going, coming))
        waited, last = 0.0, monotonic()
        while going or coming:
            ready = poller.poll(_LOOK_AROUND_SECONDS * 1000)
            for descriptor, _ in ready:
                peer = peers[descriptor]
                self._move(peer, going, coming)
                events = _events(peer, going, coming)
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
            if waited > self._timeout:
                raise self._too_late({*going, *coming}, waited)
            if not ready:
                self._look_around(waited)

    def close(self) -> None:
        """Close this rank's ends."""
        while self._sockets:
            self._sockets.popitem()[1].close()

    def _move(self, peer: int, going: dict[int, _Queue], coming: dict[int, _Queue]) -> None:
        """Send and receive over a wire what can be now."""
        try:
            if peer in coming:
                self._receive(peer, coming)
            if peer in going:
                self._send(peer, going)
        except OSError as error:
            raise self._gone(peer, error.strerror or type(error).__name__) from error

    def _receive(self, peer: int, coming: dict[int, _Queue]) -> None:
        queue, end = coming[peer], self._sockets[peer]
        while queue.views:
            try:
                count = end.recv_into(queue.views[0])
            except BlockingIOError:
                return
            if count == 0:
                raise self._gone(peer, "it has closed the connection")
            queue.advance(count)
        del coming[peer]

    def _send(self, peer: int, going: dict[int, _Queue]) -> None:
        queue, end = going[peer], self._sockets[peer]
        while queue.views:
            parts = [queue.views[index] for index in range(min(len(queue.views), _MOST_AT_ONCE))]
            try:
                queue.advance(end.sendmsg(parts))
            except BlockingIOError:
                return
        del going[peer]

    def _too_late(self, peers: Iterable[int], waited: float) -> HostError:
        names = dict.fromkeys(self._names[peer] for peer in sorted(peers))
        return HostError(
            problem(
                f"{' and '.join(names)} must come to the same step within "
                f"{format_seconds(self._timeout)}.",
                received=f"nothing for {format_seconds(waited)}",
                fix="See whether that host hangs or is cut off; raise `timeout_seconds` if steps "
                "may take so long.",
            )
        )

    def _gone(self, peer: int, reason: str) -> HostError:
        return HostError(
            problem(
                f"{self._names[peer]} no longer takes part.",
                received=reason,
                fix="Look at that host's output for the cause.",
            )
        )


def _queues(buffers: Buffers) -> dict[int, _Queue]:
    """What has bytes to move."""
    found = {
        peer: _Queue(deque(view for view in map(bytes_of, tensors) if len(view)))
        for peer, tensors in buffers.items()
    }
    return {peer: queue for peer, queue in found.items() if queue.views}


def _events(peer: int, going: Mapping[int, _Queue], coming: Mapping[int, _Queue]) -> int:
    return (select.POLLOUT if peer in going else 0) | (select.POLLIN if peer in coming else 0)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense tensor on the CPU."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    if not len(flat):
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # it has a buffer
