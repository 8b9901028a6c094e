"""The transfer of training states from one host into the memory of another, beside the training.

Each end has a thread, and both have a channel that nothing else uses, so what comes is what the
other end has sent. A message is the number of its bytes, and these; the receiver answers when it
has kept it, or has no room for it. What it has of a message that breaks off it never keeps.

A connection that ends says nothing: hosts that train together have others, by which they learn of
each other's end.
"""

import select
import socket
import struct
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import numpy as np

from lockstep.channel.polling import Stopwatch, is_readable, wait_for, wait_on
from lockstep.channel.records import TamperedError
from lockstep.channel.sealed_channel import Channel, lost
from lockstep.checkpoint.trees import Tree, assembled, flattened
from lockstep.cluster.memory_limits import free_memory
from lockstep.comm.codec.message_codec import decode, encoded
from lockstep.errors import HostError, level_of_user
from lockstep.launch.background import Background
from lockstep.launch.health.failure import summary_of
from lockstep.train.fault_tolerance.overhead_budget import OverheadBudget

_SIZE = struct.Struct("!Q")
_KEPT, _NO_ROOM = b"+", b"-"
_PASSED_OVER_BYTES = 1 << 20


class _End:
    """One end of a transfer.

    Args:
        channel: to the other one; now this one's.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._background = Background("lockstep: states")

    def close(self) -> None:
        """End the transfer, also where it is under way."""
        self._hang_up()
        self._background.close()
        self._channel.close()

    def _hang_up(self) -> None:
        """Wake whoever waits at the channel, here and at the other end."""
        with suppress(OSError):  # the other end was first
            self._channel.socket.shutdown(socket.SHUT_RDWR)

    def _put(self, *parts: bytes | memoryview) -> None:
        self._channel.put(*parts)
        while not self._channel.flush():
            wait_for(self._channel, select.POLLOUT, Stopwatch(), wait_on)

    def _fill(self, buffer: memoryview) -> memoryview:
        """A buffer with the next bytes that come."""
        num_filled = 0
        while num_filled < len(buffer):
            try:
                num_filled += self._channel.receive_into(buffer[num_filled:])
            except BlockingIOError:
                is_readable([self._channel], None)
        return buffer


class StateSender(_End):
    """Sends states, one at a time, and not more often than their cost allows.

    Args:
        channel: to the receiver.
        name: of its host, for messages.

    Attributes:
        end: why no more is sent; empty while there may be more.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        super().__init__(channel)
        self.end = ""
        self._name = name
        self._pace = OverheadBudget()
        self._sending: Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether what was to be sent is sent."""
        return self._sending is None or self._sending.done()

    @property
    def is_due(self) -> bool:
        """Whether it is time for another."""
        return self.is_idle and self._pace.is_due

    def send(self, tree: Tree, began: float) -> None:
        """Have a state sent, whose tensors must not change until it is.

        Args:
            tree: the state.
            began: when training began to wait for it, by ``time.monotonic()``: that is a part of
                what it costs.
        """
        self._sending = self._background.submit(partial(self._send, tree, began))

    def _send(self, tree: Tree, began: float) -> None:
        try:
            parts = encoded(flattened(tree))
            self._put(_SIZE.pack(sum(map(len, parts))), *parts)
            if self._fill(memoryview(bytearray(1))) == _NO_ROOM:
                self.end = f"{self._name} has no room for it"
        except OSError as error:
            self.end = str(lost(self._name, error)).rstrip(".")
        except Exception as error:  # of want of memory, for example: training needs no copy
            self.end = summary_of(error)
            self._hang_up()
        self._pace.note(began)


class StateReceiver(_End):
    """Receives states, and has each kept once it is whole.

    Args:
        channel: to the sender.
        name: of its host, for messages.
        keep: is given what came, for ``received``; returns the one that it has kept so far and
            needs no more, whose memory is used again, if there is one.
    """

    def __init__(
        self, channel: Channel, name: str, keep: Callable[[memoryview], memoryview | None]
    ) -> None:
        super().__init__(channel)
        self._name = name
        self._keep = keep
        self._receiving = self._background.submit(self._receive_all)

    def check(self) -> None:
        """Say what the transfer has ended of, if it was no end of a connection.

        Raises:
            HostError: something has come that the other end has not sent.
        """
        error = self._receiving.exception() if self._receiving.done() else None
        if isinstance(error, HostError):
            raise error
        if error is not None:
            warnings.warn(
                f"No copy of the training was kept here any more: {summary_of(error)}.",
                stacklevel=level_of_user(),
            )

    def _receive_all(self) -> None:
        spare = None
        try:
            while True:
                size = self._fill(memoryview(bytearray(_SIZE.size)))
                spare = self._receive(_SIZE.unpack(size)[0], spare)
        except TamperedError as error:
            raise lost(self._name, error) from error
        except OSError:
            return  # the other end has closed, or this one
        finally:
            self._hang_up()

    def _receive(self, num_bytes: int, spare: memoryview | None) -> memoryview | None:
        """Receive one state; gives memory for the next."""
        if spare is None or len(spare) != num_bytes:
            spare = None  # before there is more
            spare = _new_memory(num_bytes)
        if spare is None:
            self._pass_over(num_bytes)
            self._put(_NO_ROOM)
            return None
        spare = self._keep(self._fill(spare))
        self._put(_KEPT)
        return spare

    def _pass_over(self, num_bytes: int) -> None:
        nowhere = memoryview(bytearray(_PASSED_OVER_BYTES))
        while num_bytes:
            num_bytes -= len(self._fill(nowhere[: min(num_bytes, len(nowhere))]))


def received(message: memoryview) -> Tree:
    """The state of a message, in memory of its own.

    Raises:
        HostError, CheckpointError: it is of another form.
    """
    tensors, values = decode(message)
    return assembled(tensors, values)


def _new_memory(num_bytes: int) -> memoryview | None:
    """None where there is not so much."""
    free = free_memory()
    if free is not None and num_bytes > free.num_bytes:
        return None
    try:
        return np.empty(num_bytes, np.uint8).data
    except MemoryError:
        return None
