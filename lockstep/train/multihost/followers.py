"""Processes that a launcher has started beside the one that leads their host.

Each runs the user's script, too. Where the leader trains, they serve it, within their own call of
``fit``; when the leader's call ends, it tells them what has come of it, and theirs ends as well.
"""

import os
import pickle
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

_CONCLUSION = b"conclusion"


def host_key() -> bytes | None:
    """What the processes of a host know each other by, if the job has a secret.

    Raises:
        HostError: the secret that is given cannot be used.
    """
    if not has_secret(os.environ):  # on one host there need not be one
        return None
    return find_secret(os.environ).key(b"processes of a host")


class Follower:
    """This process, which follows its host's leader.

    Args:
        place: this process's.
        timeout_seconds: longest wait for the leader.
    """

    def __init__(self, place: Place, timeout_seconds: float) -> None:
        self._place = place
        self._timeout = timeout_seconds
        self._attachment: Attachment | None = None

    def serve(self, model: nn.Module) -> Any:
        """Serve the leader until its call ends; returns what that returns.

        Args:
            model: gets the weights that the leader's has then.

        Raises:
            WorkerError: the leader has ended, or given up.
            BaseException: what has ended the leader's call, where it could say so.
        """
        if self._attachment is None or not self._attachment.is_open:
            self._attachment = attach(self._place, host_key(), timeout_seconds=self._timeout)
        with held_interrupts() as interrupt:
            interrupt.hold()  # the leader has been told, too, and ends with the step under way
            try:
                while not (said := self._attachment.serve_call()).startswith(_CONCLUSION):
                    pass
            except WorkerError as trouble:
                error = as_raised(trouble)
                if error is trouble:
                    raise
                raise error from error.__cause__
        result, values = _kept.pop(said)
        set_values(model, values)
        return result

    def close(self) -> None:
        """Hang up."""
        if self._attachment is not None:
            self._attachment.close()


def call_conclude(team: Team, result: Any, model: nn.Module, timeout_seconds: float) -> None:
    """On the leader: let the followers' calls end with this result, and with these weights."""
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


def conclude(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> bytes:
    """On a follower: keep what has come of the leader's call; returns what finds it."""
    said = _CONCLUSION + pickle.dumps(len(_kept))
    _kept[said] = unpacked(body, descriptors)
    return said


# From ``conclude`` to ``Follower.serve``, between which only bytes go.
_kept: dict[bytes, Any] = {}
