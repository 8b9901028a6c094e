"""Checkpoints in memory: the newest copy of a training, and its way to host 1.

The user chooses the interval of those on disk. On several hosts host 0 takes copies between them,
as often as that costs little (``train.fault_tolerance.overhead_budget``), and sends them to host 1
(``train.checkpointing.state_transfer``). If one of the two is lost, the other has a state that is
about a second old: all resume from the newest that any host has, on disk or in memory
(``train.fault_tolerance.lost_hosts``). It is the same tree as that of a checkpoint on disk.

Only one other host has a copy: if both are lost at once, training resumes from the disk.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Protocol

from lockstep.launch.rendezvous.pair_channels import open_channels
from lockstep.train.checkpointing.state_transfer import StateReceiver, StateSender, received
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.multihost.hosts import Hosts
from lockstep.train.resume.fit_record import FitState

_SOURCE, _NEIGHBOUR = 0, 1


class Destination(Protocol):
    """Another host, or a folder, to which copies of a training go."""

    def is_due(self, num_steps: int) -> bool:
        """True if it needs a copy after this number of steps, those before the ``fit`` included."""

    def keep(self, copy: FitState, began: float) -> "Future[Any]":
        """Send or write a copy in the background; until that is done its tensors do not change.

        Args:
            copy: the copy.
            began: when training began to wait for it, by ``time.monotonic()``.
        """


class MemoryCheckpoints:
    """The newest copy of one ``fit`` in this process's memory, which outlives the loss of hosts.

    All copies reuse the same memory: in new memory they would take six times as long.

    Attributes:
        destinations: where copies go from here.
        is_restart: this process had begun the ``fit`` before, and has lost another host.
        facts: on which the result depends, as they were at the first begin of the ``fit``; None
            until then.
    """

    def __init__(self) -> None:
        self.destinations: list[Destination] = []
        self.is_restart = False
        self.facts: Any = None
        self._kept: FitState | None = None
        self._readers: list[Future[Any]] | None = None  # of its tensors; None if there are others
        self._message: memoryview | None = None  # the serialized tree from host 0

    def newest(self) -> FitState | None:
        """The newest complete one; None if there is none.

        Raises:
            CheckpointError: it is invalid.
        """
        if self._message is not None:
            self._kept, self._message = FitState.of(received(self._message)), None
            self._readers = None
        return self._kept

    def keep(self, copy: FitState, due: Sequence[Destination], began: float) -> None:
        """Keep a copy as the newest, and give it to some destinations.

        Args:
            copy: in memory that nothing else will write to.
            due: the destinations.
            began: when training began to wait for it, by ``time.monotonic()``.
        """
        self._kept, self._readers = copy, []
        for one in due:
            self._readers.append(one.keep(copy, began))

    @property
    def reusable(self) -> TrainingState | None:
        """The newest, if its memory can be written to, else None."""
        # One that is being sent keeps its memory: else all hosts would wait for a slow connection.
        is_free = self._readers is not None and all(one.done() for one in self._readers)
        return self._kept.state if self._kept is not None and is_free else None

    def forget(self) -> None:
        """Forget the newest."""
        self._kept = None

    @contextmanager
    def shared(self, hosts: Hosts | None, begins_with: FitState | None) -> Iterator[None]:
        """Within the block host 0 sends copies to host 1. All hosts call it.

        Args:
            hosts: of the ``fit``; None for no copies.
            begins_with: the checkpoint from which all resume; None without.

        Raises:
            HostError: they cannot connect, or a message was tampered with.
        """
        if hosts is None or hosts.control_group.num_hosts == 1:
            self._begin_with(None)
            del begins_with
            yield
            return
        group, pair = hosts.control_group, (_SOURCE, _NEIGHBOUR)
        ends = open_channels(group, {pair: 1}, hosts.timeout_seconds, hosts.look_around)
        self._begin_with(begins_with if ends else None)
        del begins_with  # hosts that keep no copy free its memory
        receiver = None
        with ExitStack() as stack:
            for other, (channel,) in ends.items():
                name = group.name_of(other)
                if hosts.host == _SOURCE:
                    sender = StateSender(channel, name, hosts.look_around)
                    self.destinations.append(stack.enter_context(closing(sender)))
                else:
                    receiver = StateReceiver(channel, name, self._exchange_message)
                    stack.enter_context(closing(receiver))
            yield
        if receiver is not None:  # unless the block has raised: then that error counts
            receiver.check()

    def _begin_with(self, kept: FitState | None) -> None:
        self._kept, self._message, self._readers = kept, None, None

    def _exchange_message(self, message: memoryview) -> memoryview | None:
        """Keep a message; returns the one before, for its memory."""
        before, self._message, self._kept = self._message, message, None
        return before
