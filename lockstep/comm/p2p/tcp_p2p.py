"""A mail thread: messages from one rank's mailboxes to ranks of other hosts, while it computes.

Within a host a message lies in memory that its readers map. To another host it is sent, by a
thread: a stage of a pipeline must neither wait until what it sends has left, nor let what is sent
to it wait until it has time. A reader acknowledges a message when it no longer needs it, and a
sender has only so many on their way, as with the slots of a mailbox. A message for several readers
on one rank (stages that use the same value) is sent there once.

Messages are encoded (``comm.codec.message_codec``), not pickled. Both ends say goodbye when a task
is done, so that nothing of it is left on the channel for the next.
"""

import os
import select
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.channel.frames import FrameReader
from lockstep.channel.polling import LOOK_AROUND_SECONDS, Stopwatch
from lockstep.channel.sealed_channel import Channel, late, lost
from lockstep.errors import HostError
from lockstep.formatting import format_bytes

_MESSAGE, _DONE, _GOODBYE = range(3)
# Kind, mailbox, number of the message, its readers at the other end, payload bytes.
_HEADER = struct.Struct("<BIQHQ")
_MOST_BYTES = 1 << 36
_HEAD_START_SECONDS = 1.0


class MailChannels:
    """One rank's mail thread. It starts when it is made, and ends with ``close``.

    Args:
        channels: by the rank at the other end.
        names: of the hosts of these ranks, for messages.
        look_around: see ``Board``.
        timeout_seconds: longest wait for another host, after which it is named, a little later
            than where it waits itself for one of its own ranks.
    """

    def __init__(
        self,
        channels: Mapping[int, Channel],
        names: Mapping[int, str],
        look_around: Callable[[float], None],
        timeout_seconds: float,
    ) -> None:
        self._look_around = look_around
        self._timeout = timeout_seconds
        self._state = _State(channels, names)
        self._thread = threading.Thread(
            target=_run, args=(self._state,), name="lockstep-mail", daemon=True
        )
        self._thread.start()

    def put(
        self, box: int, number: int, payload: bytes, readers: Sequence[int], num_slots: int
    ) -> None:
        """Send message ``number`` of a mailbox, once the one before in its slot is done with.

        Args:
            box: the mailbox.
            number: messages are numbered from 1.
            payload: the message.
            readers: their ranks; a rank as often as it has readers.
            num_slots: messages of the mailbox that may be on their way.
        """
        state, slot = self._state, (box, number % num_slots)
        before = state.sent.get(slot, 0)
        self._wait(lambda: not state.unread[box, before], readers)
        state.unread.pop((box, before), None)
        state.sent[slot] = number
        state.unread[box, number] = len(readers)
        for rank, count in Counter(readers).items():
            state.send(rank, _MESSAGE, box, number, payload, count)

    def take(self, box: int, number: int, sender: int) -> bytes:
        """Message ``number`` of a mailbox of rank ``sender``; each reader here takes it once."""
        inbox, key = self._state.inbox, (box, number, sender)
        self._wait(lambda: key in inbox, [sender])
        arrived = inbox[key]
        arrived.num_readers -= 1
        if not arrived.num_readers:
            del inbox[key]
        return arrived.payload

    def acknowledge(self, box: int, number: int, sender: int) -> None:
        """A reader here no longer needs a message of ``sender``."""
        self._state.send(sender, _DONE, box, number)

    def close(self) -> None:
        """Send what is left, wait until the others have done so, and end."""
        state = self._state
        for rank in state.ends:
            state.send(rank, _GOODBYE, 0, 0)
        state.is_leaving = True
        state.wake()
        self._wait(lambda: state.has_ended, [])
        self._thread.join()
        state.close()
        if state.error is not None:
            raise state.error

    def abandon(self) -> None:
        """After a failure: end, even if messages are left."""
        state = self._state
        state.is_abandoned = True
        if self._thread.is_alive():
            state.wake()
            self._thread.join()
        state.close()

    def _wait(self, is_there: Callable[[], bool], ranks: Sequence[int]) -> None:
        state = self._state
        watch = Stopwatch()
        with state.news:
            while not is_there():
                if state.error is not None:
                    raise state.error
                if state.has_ended:
                    raise HostError("The mail to other hosts has ended.")
                if not state.news.wait(LOOK_AROUND_SECONDS):
                    waited = watch.tick()
                    self._look_around(waited)
                    if ranks and waited > self._timeout + _HEAD_START_SECONDS:
                        raise late([state.ends[rank].name for rank in ranks], waited, self._timeout)


@dataclass
class _Arrived:
    """A message that has arrived, and how many readers have yet to take it."""

    payload: bytes
    num_readers: int


class _State:
    """The state that ``MailChannels`` and its thread share.

    Attributes:
        ends: the channels, by rank.
        news: notified when a message has arrived, or the thread ends.
        inbox: messages that have come, by mailbox, number and sender.
        sent: by mailbox and slot, the number of the last message.
        unread: by mailbox and number, how many readers of a message have not acknowledged it.
        error: the error that ended the thread.
        is_leaving: this rank says goodbye.
        is_abandoned: nothing is sent or awaited any more.
        has_ended: the thread has ended.
    """

    def __init__(self, channels: Mapping[int, Channel], names: Mapping[int, str]) -> None:
        self.ends = {rank: _End(channel, names[rank]) for rank, channel in channels.items()}
        self.news = threading.Condition()
        self.inbox: dict[tuple[int, int, int], _Arrived] = {}
        self.sent: dict[tuple[int, int], int] = {}
        self.unread: Counter[tuple[int, int]] = Counter()
        self.error: BaseException | None = None
        self.is_leaving = False
        self.is_abandoned = False
        self.has_ended = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def send(
        self, rank: int, kind: int, box: int, number: int, payload: bytes = b"", readers: int = 0
    ) -> None:
        """Have the thread send a frame."""
        end, header = self.ends[rank], _HEADER.pack(kind, box, number, readers, len(payload))
        with self.news:
            end.channel.put(header, payload)
        self.wake()

    def wake(self) -> None:
        """Have the thread look again."""
        os.eventfd_write(self._wakeup, 1)

    @property
    def is_over(self) -> bool:
        """Whether all have said goodbye, and nothing is left to send."""
        with self.news:
            return self.is_abandoned or (
                self.is_leaving
                and all(end.has_left and not end.channel.has_unsent for end in self.ends.values())
            )

    def wait(self) -> list[int]:
        """Ranks whose channels can be read or written."""
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        ranks = {}
        for rank, end in self.ends.items():
            with self.news:
                events = (0 if end.has_left else select.POLLIN) | (
                    select.POLLOUT if end.channel.has_unsent else 0
                )
            if events:
                poller.register(end.channel, events)
                ranks[end.channel.fileno()] = rank
        ready = [descriptor for descriptor, _ in poller.poll()]
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        return [ranks[descriptor] for descriptor in ready if descriptor in ranks]

    def close(self) -> None:
        """After the thread's end."""
        wakeup, self._wakeup = self._wakeup, -1
        if wakeup >= 0:
            os.close(wakeup)


class _End:
    """One channel, and the frame that is coming in."""

    def __init__(self, channel: Channel, name: str) -> None:
        self.channel = channel
        self.name = name
        self.has_left = False
        self.frames = FrameReader(_HEADER, channel.receive, self._check_size)

    def _check_size(self, *numbers: int) -> None:
        if numbers[-1] > _MOST_BYTES:
            raise HostError(f"{self.name} announced a message of {format_bytes(numbers[-1])}.")


def _run(state: _State) -> None:
    """The thread."""
    try:
        while not state.is_over:
            for rank in state.wait():
                _serve(state, rank)
    except BaseException as error:  # raised in the threads that wait
        state.error = error
    finally:
        with state.news:
            state.has_ended = True
            state.news.notify_all()


def _serve(state: _State, rank: int) -> None:
    """Send and receive on a channel as much as possible now."""
    end = state.ends[rank]
    try:
        end.channel.flush()
        while not end.has_left:
            kind, box, number, num_readers, payload = end.frames.take()
            with state.news:
                if kind == _MESSAGE:
                    state.inbox[box, number, rank] = _Arrived(payload, num_readers)
                elif kind == _DONE:
                    state.unread[box, number] -= 1
                else:
                    end.has_left = True
                state.news.notify_all()
    except BlockingIOError:  # nothing more has come
        return
    except OSError as error:
        raise lost(end.name, error) from error
