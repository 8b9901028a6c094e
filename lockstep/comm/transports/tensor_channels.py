"""A rank's channels to ranks of other hosts; tensors go over them as they lie in memory.

Messages have no headers: both ends know the tensors, their sizes and their order from the step.
Both directions move at once; otherwise two ranks that send to each other would deadlock.
"""

import select
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch

from lockstep.channel.polling import LOOK_AROUND_SECONDS, Stopwatch
from lockstep.channel.sealed_channel import Channel, late, lost
from lockstep.comm.transport import Buffers, Transport


class TensorChannels(Transport):
    """One rank's peers.

    Args:
        channels: by the rank at the other end.
        names: of the hosts of these ranks, for messages.
        look_around: called every 20 ms of waiting with the seconds waited so far; it raises if
            it is useless to wait longer.
        timeout_seconds: longest wait in which nothing moves.
    """

    def __init__(
        self,
        channels: Mapping[int, Channel],
        names: Mapping[int, str],
        look_around: Callable[[float], None],
        timeout_seconds: float,
    ) -> None:
        self._channels = dict(channels)
        self._names = names
        self._look_around = look_around
        self._timeout = timeout_seconds

    def transfer(self, sends: Buffers, receives: Buffers) -> None:
        coming = {peer: _views(tensors) for peer, tensors in receives.items()}
        for peer, tensors in sends.items():
            self._channels[peer].put(*_views(tensors))
        poller = select.poll()
        peers = {self._channels[peer].fileno(): peer for peer in {*sends, *receives}}
        # Also before the first wait: bytes may have come with the last ones.
        for descriptor, peer in list(peers.items()):
            if events := self._move(peer, coming):
                poller.register(descriptor, events)
            else:
                del peers[descriptor]
        watch = Stopwatch()
        while peers:
            ready = poller.poll(LOOK_AROUND_SECONDS * 1000)
            for descriptor, _ in ready:
                if events := self._move(peers[descriptor], coming):
                    poller.modify(descriptor, events)
                else:
                    poller.unregister(descriptor)
                    del peers[descriptor]
            if ready:  # time counts as waiting only while no bytes move
                watch = Stopwatch()
                continue
            if watch.tick() > self._timeout:
                names = [self._names[peer] for peer in sorted(peers.values())]
                raise late(names, watch.seconds, self._timeout)
            self._look_around(watch.seconds)

    def _move(self, peer: int, coming: Mapping[int, deque[memoryview]]) -> int:
        """Send and receive without blocking; returns the events to poll for."""
        channel, views = self._channels[peer], coming.get(peer)
        try:
            has_received = not views or _receive(channel, views)
            has_sent = channel.flush()
        except OSError as error:
            raise lost(self._names[peer], error) from error
        return (0 if has_sent else select.POLLOUT) | (0 if has_received else select.POLLIN)


def _views(tensors: Iterable[torch.Tensor]) -> deque[memoryview]:
    """The tensors' bytes, without empty ones."""
    return deque(view for view in map(bytes_of, tensors) if len(view))


def _receive(channel: Channel, views: deque[memoryview]) -> bool:
    """Fill views with what has come; whether all are full, and none is left."""
    try:
        while views:
            num_bytes = channel.receive_into(views[0])
            views[0] = views[0][num_bytes:]
            if not views[0]:
                views.popleft()
    except BlockingIOError:
        return False
    return True


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense tensor on the CPU."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    if not len(flat):
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # it has a buffer
