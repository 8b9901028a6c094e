"""Checkpoints in memory: host 0's newest, and a copy of it in the memory of host 1.

The user chooses the interval of those on disk. Between them host 0 takes the state of the training
in the same way, as often as that costs little (``train.fault_tolerance.overhead_budget``), and
sends it to host 1 (``train.checkpointing.state_transfer``). If one of the two is lost, the other
has a state that is about a second old: all resume from the newest that any host has, on disk or in
memory (``train.fault_tolerance.lost_hosts``). It is the same tree as that of a checkpoint on disk.

Only one other host has a copy: if both are lost at once, training resumes from the disk.
"""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from lockstep.channel.polling import LookAround, wait_on
from lockstep.errors import level_of_user
from lockstep.launch.rendezvous.pair_channels import open_channels
from lockstep.train.checkpointing.state_transfer import StateReceiver, StateSender, received
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.multihost.hosts import Hosts
from lockstep.train.resume.fit_record import FitState

_SOURCE, _NEIGHBOUR = 0, 1


class MemoryCheckpoints:
    """The checkpoints of one ``fit`` in this process's memory, which outlive the loss of hosts.

    Attributes:
        is_restart: this process had begun the ``fit`` before, and has lost another host.
        facts: on which the result depends, as they were at the first begin of the ``fit``; None
            until then.
    """

    def __init__(self) -> None:
        self.is_restart = False
        self.facts: Any = None
        self._kept: FitState | None = None
        self._is_owned = False  # nothing else refers to its tensors
        self._message: memoryview | None = None  # the serialized tree from host 0
        self._sender: StateSender | None = None
        self._look_around: LookAround = wait_on

    def newest(self) -> FitState | None:
        """The newest complete one; None if there is none.

        Raises:
            CheckpointError: it is invalid.
        """
        if self._message is not None:
            self._kept, self._message = FitState.of(received(self._message)), None
            self._is_owned = False
        return self._kept

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
                    self._look_around = hosts.look_around
                    self._sender = stack.enter_context(closing(StateSender(channel, name)))
                else:
                    receiver = StateReceiver(channel, name, self._exchange_message)
                    stack.enter_context(closing(receiver))
            try:
                yield
            finally:
                self._sender = None
        if receiver is not None:  # unless the block has raised: then that error counts
            receiver.check()

    def _begin_with(self, kept: FitState | None) -> None:
        self._kept, self._message, self._is_owned = kept, None, False

    def _exchange_message(self, message: memoryview) -> memoryview | None:
        """Keep a message; returns the one before, for its memory."""
        before, self._message, self._kept = self._message, message, None
        return before

    # --- on host 0 -------------------------------------------------------------------------------

    def wants_another(self) -> bool:
        """True if another should be taken; warns once if they cannot be sent any more.

        Raises:
            HostError: the other host is lost.
        """
        sender = self._sender
        if sender is None or not sender.is_due:
            return False
        if not sender.end:
            return True
        # If the host is lost, this raises, or the training soon will: then a warning is not needed.
        self._look_around(0.0)
        self._sender = None
        warnings.warn(
            "Copies of the training are no longer kept in the memory of another host: "
            f"{sender.end}. If this host is lost, all resume from the newest checkpoint on disk.",
            stacklevel=level_of_user(),
        )
        return False

    def release(self) -> TrainingState | None:
        """Forget the newest; returns it if its memory can be reused, else None."""
        # One that is being sent keeps its memory: else all hosts would wait for a slow connection.
        is_free = self._is_owned and (self._sender is None or self._sender.is_idle)
        kept, self._kept = self._kept, None
        return kept.state if kept is not None and is_free else None

    def keep(self, copy: FitState, began: float) -> None:
        """Keep a copy of the training as the newest, and send it if that is due.

        Args:
            copy: in memory that nothing else will write to.
            began: when training began to wait for it, by ``time.monotonic()``.
        """
        self._kept, self._is_owned = copy, True
        sender = self._sender
        if sender is not None and sender.is_due and not sender.end:
            sender.send(copy.tree(), began)
