"""Followers: processes that a launcher has started beside the one that leads their host.

Each runs the user's script, too. While the leader trains, they serve it within their own call of
``fit``. When the leader's call ends, it sends them its result, and their call returns it.
"""

import os
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.cluster.place import Place
from lockstep.errors import WorkerError
from lockstep.launch.health.failure import as_raised
from lockstep.launch.security.secret import find_secret, has_secret
from lockstep.launch.workers.external_workers import Attachment, attach
from lockstep.launch.workers.helper import HelperContext
from lockstep.launch.workers.team import Team
from lockstep.parallel.exchange.control import unpacked
from lockstep.parallel.transfer.serialization import pack
from lockstep.train.callbacks.interrupt import held_interrupts
from lockstep.train.callbacks.state_values import set_values, values_of


@dataclass(frozen=True)
class _Conclusion:
    """The end of a leader's call: its result, and the model's values (``values_of``)."""

    result: Any
    values: Any


def host_key() -> bytes | None:
    """The key with which the processes of a host authenticate each other, if the job has a secret.

    Raises:
        HostError: the given secret cannot be used.
    """
    if not has_secret(os.environ):  # a job on one host needs none
        return None
    return find_secret(os.environ).key(b"processes of a host")


class Follower:
    """This process, which follows its host's leader.

    Args:
        place: of this process.
        timeout_seconds: longest wait for the leader.
    """

    def __init__(self, place: Place, timeout_seconds: float) -> None:
        self._place = place
        self._timeout = timeout_seconds
        self._attachment: Attachment | None = None

    def serve(self, model: nn.Module) -> Any:
        """Serve the leader until its call ends; returns the result of that call.

        Args:
            model: gets the leader's weights at the end.

        Raises:
            WorkerError: the leader has exited, or given up.
            BaseException: the error that has ended the leader's call, if it could send it.
        """
        if self._attachment is None or not self._attachment.is_open:
            self._attachment = attach(self._place, host_key(), timeout_seconds=self._timeout)
        with held_interrupts() as interrupt:
            interrupt.hold()  # the leader gets Ctrl-C, too, and ends after the present step
            try:
                while not isinstance(end := self._attachment.serve_call(), _Conclusion):
                    pass
            except WorkerError as lost:
                error = as_raised(lost)
                if error is lost:
                    raise
                raise error from error.__cause__
        set_values(model, end.values)
        return end.result


def call_conclude(team: Team, result: Any, model: nn.Module, timeout_seconds: float) -> None:
    """On the leader: end the followers' calls with this result and these weights."""
    serialized = pack((result, values_of(model)))
    team.call(
        conclude,
        serialized.payload,
        serialized.descriptors,
        position=lambda rank: "at the end of a call",
        timeout_seconds=timeout_seconds,
    )
    team.finish(timeout_seconds)
    serialized.close()


def conclude(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> _Conclusion:
    """On a follower: the end of the leader's call."""
    return _Conclusion(*unpacked(body, descriptors))
