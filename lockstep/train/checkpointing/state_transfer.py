"""The transfer of training states from one host into the memory of another, beside the training.

Each end has a thread, and they share a channel that nothing else uses. The sender announces the
number of a message's bytes, and the receiver answers if it has memory for them. Then the message
follows, and the receiver answers when it has kept it. It discards an incomplete message.

The end of this connection is no error: hosts that train together notice a loss by their other
connections.
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

from lockstep.channel.background import Background
from lockstep.channel.polling import LookAround, Stopwatch, is_readable, wait_for, wait_on
from lockstep.channel.records import TamperedError
from lockstep.channel.sealed_channel import Channel, lost
from lockstep.checkpoint.trees import Tree, assembled, flattened
from lockstep.cluster.memory_limits import free_memory
from lockstep.comm.codec.message_codec import decode, encoded
from lockstep.errors import HostError, level_of_user
from lockstep.launch.health.failure import summary_of
from lockstep.train.fault_tolerance.overhead_budget import OverheadBudget
from lockstep.train.resume.fit_record import FitState

_SIZE = struct.Struct("!Q")
_YES, _NO = b"+", b"-"


class _End:
    """One end of a transfer.

    Args:
        channel: to the other one; owned by this one.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._background = Background("lockstep: states")

    def close(self) -> None:
        """End the transfer, even during a message."""
        self._shut_down()
        self._background.close()
        self._channel.close()

    def _shut_down(self) -> None:
        """Wake threads that wait at the channel, here and at the other end."""
        with suppress(OSError):  # the other end has closed it
            self._channel.socket.shutdown(socket.SHUT_RDWR)

    def _put(self, *parts: bytes | memoryview) -> None:
        self._channel.put(*parts)
        while not self._channel.flush():
            wait_for(self._channel, select.POLLOUT, Stopwatch(), wait_on)

    def _fill(self, buffer: memoryview) -> memoryview:
        """Fill a buffer with the next bytes received."""
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
        look_around: raises if a host is lost.

    Attributes:
        end: why no more can be sent; empty until then.
    """

    def __init__(self, channel: Channel, name: str, look_around: LookAround = wait_on) -> None:
        super().__init__(channel)
        self.end = ""
        self._has_warned = False
        self._name = name
        self._look_around = look_around
        self._budget = OverheadBudget()
        self._sending: Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        """True if nothing is being sent."""
        return self._sending is None or self._sending.done()

    def is_due(self, num_steps: int) -> bool:
        """True if it is time for another; warns once if none can be sent any more.

        Raises:
            HostError: the other host is lost.
        """
        if self._has_warned or not (self.is_idle and self._budget.is_due):
            return False
        if not self.end:
            return True
        # If the host is lost, this raises, or the training soon will: then a warning is not needed.
        self._look_around(0.0)
        self._has_warned = True
        warnings.warn(
            "Copies of the training are no longer kept in the memory of another host: "
            f"{self.end}. If this host is lost, all resume from the newest checkpoint on disk.",
            stacklevel=level_of_user(),
        )
        return False

    def keep(self, copy: FitState, began: float) -> "Future[None]":
        """Send a copy; the wait since ``began`` is a part of its cost. See ``Destination``."""
        self._sending = self._background.submit(partial(self._send, copy.tree(), began))
        return self._sending

    def _send(self, tree: Tree, began: float) -> None:
        try:
            parts = encoded(flattened(tree))
            self._put(_SIZE.pack(sum(map(len, parts))))
            if self._fill(memoryview(bytearray(1))) == _NO:
                self.end = f"{self._name} has no memory for it"
            else:
                self._put(*parts)
                self._fill(memoryview(bytearray(1)))
        except OSError as error:
            self.end = str(lost(self._name, error)).rstrip(".")
        except Exception as error:  # out of memory, for example: training does not need the copy
            self.end = summary_of(error)
            self._shut_down()
        self._budget.note(began)


class StateReceiver(_End):
    """Receives states, and keeps each once it is complete.

    Args:
        channel: to the sender.
        name: of its host, for messages.
        keep: called with each message, which ``received`` decodes; returns the one kept before, if
            any, whose memory is reused.
    """

    def __init__(
        self, channel: Channel, name: str, keep: Callable[[memoryview], memoryview | None]
    ) -> None:
        super().__init__(channel)
        self._name = name
        self._keep = keep
        self._receiving = self._background.submit(self._receive_all)

    def check(self) -> None:
        """Report why the transfer has ended, unless the connection was closed.

        Raises:
            HostError: a message was tampered with.
        """
        error = self._receiving.exception() if self._receiving.done() else None
        if isinstance(error, HostError):
            raise error
        if error is not None:
            warnings.warn(
                f"Copies of the training are no longer kept here: {summary_of(error)}.",
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
            return  # one of the ends has closed the connection
        finally:
            self._shut_down()

    def _receive(self, num_bytes: int, spare: memoryview | None) -> memoryview | None:
        """Receive one state; returns memory for the next."""
        if spare is None or len(spare) != num_bytes:
            spare = None  # freed before more is allocated
            spare = _new_memory(num_bytes)
        self._put(_NO if spare is None else _YES)
        if spare is None:
            return None
        spare = self._keep(self._fill(spare))
        self._put(_YES)
        return spare


def received(message: memoryview) -> Tree:
    """The state of a message, in memory of its own.

    Raises:
        HostError, CheckpointError: its format is invalid.
    """
    tensors, values = decode(message)
    return assembled(tensors, values)


def _new_memory(num_bytes: int) -> memoryview | None:
    """A buffer; None if there is not enough memory."""
    free = free_memory()
    if free is not None and num_bytes > free.num_bytes:
        return None
    try:
        return np.empty(num_bytes, np.uint8).data
    except MemoryError:
        return None
