"""Checkpoints in memory: host 0's newest, and a copy of it in the memory of host 1.

Those on a disk are as far apart as the user says. Between them host 0 takes the state of the
training in the same way, as often as that costs little (``train.fault_tolerance.overhead_budget``),
and has it sent to host 1 (``train.checkpointing.state_transfer``). After the loss of one of the two
the other one still has what is a second old, or some: all go on from the newest that anybody has,
on disk or in memory (``train.fault_tolerance.lost_hosts``). It is the tree that a checkpoint on a
disk has.

Only one other host has a copy: where both are lost at a time, there is the disk.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from lockstep.channel.polling import LookAround, wait_on
from lockstep.checkpoint.trees import Tree
from lockstep.errors import level_of_user
from lockstep.launch.rendezvous.pair_channels import open_channels
from lockstep.train.checkpointing.state_transfer import StateReceiver, StateSender, received
from lockstep.train.multihost.hosts import Hosts

_KEEPER, _NEIGHBOUR = 0, 1


class MemoryCheckpoints:
    """What this process has of one ``fit`` in memory, whatever becomes of other hosts.

    Attributes:
        is_restart: this process had begun the ``fit`` before, and has lost another host.
        facts: what the script has asked of the ``fit``, as it was when that was begun first; None
            until then.
    """

    def __init__(self) -> None:
        self.is_restart = False
        self.facts: Any = None
        self._tree: dict[str, Tree] | None = None
        self._is_ours = False  # nobody else refers to its tensors
        self._message: memoryview | None = None  # or as host 0 has sent it
        self._sender: StateSender | None = None
        self._look_around: LookAround = wait_on

    def newest(self) -> dict[str, Tree] | None:
        """The newest that is whole; None if there is none."""
        if self._message is not None:
            self._tree, self._message = received(self._message), None
            self._is_ours = False
        return self._tree

    @contextmanager
    def shared(self, hosts: Hosts | None, begins_with: dict[str, Tree] | None) -> Iterator[None]:
        """Within the block host 1 gets a copy of what host 0 takes. All hosts call it.

        Args:
            hosts: of the ``fit``; None to have no copies.
            begins_with: the checkpoint from which all go on; None where there is none.

        Raises:
            HostError: they cannot be connected; what came was not what host 0 has sent.
        """
        if hosts is None or hosts.control_group.num_hosts == 1:
            self._begin_with(None)
            del begins_with
            yield
            return
        group, pair = hosts.control_group, (_KEEPER, _NEIGHBOUR)
        ends = open_channels(group, {pair: 1}, hosts.timeout_seconds, hosts.look_around)
        self._begin_with(begins_with if ends else None)
        del begins_with  # who has no copy to keep needs none
        receiver = None
        with ExitStack() as stack:
            for other, (channel,) in ends.items():
                name = group.name_of(other)
                if hosts.host == _KEEPER:
                    self._look_around = hosts.look_around
                    self._sender = stack.enter_context(closing(StateSender(channel, name)))
                else:
                    receiver = StateReceiver(channel, name, self._take_in)
                    stack.enter_context(closing(receiver))
            try:
                yield
            finally:
                self._sender = None
        if receiver is not None:  # where the block has raised, its error is what counts
            receiver.check()

    def _begin_with(self, tree: dict[str, Tree] | None) -> None:
        self._tree, self._message, self._is_ours = tree, None, False

    def _take_in(self, message: memoryview) -> memoryview | None:
        before, self._message, self._tree = self._message, message, None
        return before

    # --- on host 0 -------------------------------------------------------------------------------

    def wants_another(self) -> bool:
        """Whether to take another one; says so where none is sent any more.

        Raises:
            HostError: the other host is lost.
        """
        sender = self._sender
        if sender is None or not sender.is_due:
            return False
        if not sender.end:
            return True
        # A host that is gone is found so by the training, if not by now: that is no warning.
        self._look_around(0.0)
        self._sender = None
        warnings.warn(
            "No copy of the training is kept in the memory of another host any more: "
            f"{sender.end}. Where this host is lost, all go on from the newest checkpoint on disk.",
            stacklevel=level_of_user(),
        )
        return False

    def given_up(self) -> Mapping[str, Tree] | None:
        """The newest, which is no more, for its memory; None if that is not ours to write to."""
        # One that is being sent keeps its memory: all hosts would wait for a slow connection.
        is_free = self._is_ours and (self._sender is None or self._sender.is_idle)
        tree, self._tree = self._tree, None
        return tree if is_free else None

    def keep(self, parts: Mapping[str, Tree], record: Mapping[str, Any], began: float) -> None:
        """Have a state of the training as the newest, and sent, if that is due.

        Args:
            parts: of the state, in memory that nobody else will write to.
            record: what is known of the ``fit`` beside.
            began: when training began to wait for it, by ``time.monotonic()``.
        """
        self._tree, self._is_ours = {**parts, "fit": record}, True
        sender = self._sender
        if sender is not None and sender.is_due and not sender.end:
            sender.send(self._tree, began)
