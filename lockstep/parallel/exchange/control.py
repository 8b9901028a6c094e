"""Control: small objects between rank 0 and the others, outside of the hot path.

All ranks call the same methods in the same order, as with collectives.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.comm.shared_memory.file_region import FileRegion
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.launch.workers.helper import HelperContext
from lockstep.launch.workers.team import Team
from lockstep.parallel.transfer.serialization import pack, unpack


class Control(ABC):
    """One rank's end.

    Attributes:
        rank: this rank.
        num_ranks: number of ranks.
        timeout_seconds: longest wait for another rank.
    """

    rank: int
    num_ranks: int
    timeout_seconds: float = math.inf

    @abstractmethod
    def broadcast(self, obj: Any) -> Any:
        """Rank 0's object, on every rank; the other ranks' arguments are ignored."""

    @abstractmethod
    def gather(self, obj: Any) -> list[Any]:
        """Every rank's object by rank, on rank 0; an empty list on the others."""

    @abstractmethod
    def share(self, region: SharedRegion | None) -> SharedRegion:
        """Rank 0's region, mapped by every rank; the others pass None.

        Another host has a region of its own, of the same size.
        """

    def fill(self, region: SharedRegion, num_bytes: int) -> None:
        """Bring the beginning of rank 0's region, as it is now, to the other hosts' regions."""
        return

    def bring_groups(self) -> None:
        """Send every host the parameters and slots that none of its ranks has."""
        return


class SoloControl(Control):
    """The only rank."""

    rank = 0
    num_ranks = 1

    def broadcast(self, obj: Any) -> Any:
        return obj

    def gather(self, obj: Any) -> list[Any]:
        return [obj]

    def share(self, region: SharedRegion | None) -> SharedRegion:
        assert region is not None
        return region


class LeaderControl(Control):
    """Rank 0, which leads a team."""

    rank = 0

    def __init__(self, team: Team, timeout_seconds: float) -> None:
        self._team = team
        self.timeout_seconds = timeout_seconds
        self.num_ranks = team.num_helpers + 1

    def broadcast(self, obj: Any) -> Any:
        serialized = pack(obj)
        self._team.broadcast(serialized.payload, serialized.descriptors)
        serialized.close()
        return obj

    def gather(self, obj: Any) -> list[Any]:
        return [obj, *(unpacked(*message) for message in self._team.gather(self.timeout_seconds))]

    def share(self, region: SharedRegion | None) -> SharedRegion:
        assert region is not None
        self._team.broadcast(b"", (region.descriptor,))
        return region


class FollowerControl(Control):
    """A helper of a team.

    Args:
        context: the connection to its leader.
        rank: this rank.
        num_ranks: number of ranks on all hosts.
        has_hosts: there are several hosts.
    """

    def __init__(
        self, context: HelperContext, rank: int, num_ranks: int, *, has_hosts: bool = False
    ) -> None:
        self._context = context
        self._has_hosts = has_hosts
        self.rank = rank
        self.num_ranks = num_ranks

    def broadcast(self, obj: Any) -> Any:
        return unpacked(*self._context.receive())

    def gather(self, obj: Any) -> list[Any]:
        serialized = pack(obj)
        self._context.send(serialized.payload, serialized.descriptors)
        serialized.close()
        return []

    def share(self, region: SharedRegion | None) -> SharedRegion:
        _, (descriptor,) = self._context.receive()
        shared = open_region(descriptor)
        shared.close()  # the mapping stays
        return shared

    def fill(self, region: SharedRegion, num_bytes: int) -> None:
        if self._has_hosts:
            self._context.receive()  # the leader has filled it


def open_region(descriptor: int, *, private: bool = False, is_file: bool = False) -> SharedRegion:
    """Map the region of a descriptor; see ``SharedRegion`` and ``FileRegion``."""
    num_bytes = os.fstat(descriptor).st_size
    if is_file:
        return FileRegion(descriptor, num_bytes)
    return SharedRegion(descriptor, num_bytes, private=private)


def unpacked(
    payload: bytes, descriptors: Sequence[int], tensors: Sequence[torch.Tensor] = ()
) -> Any:
    """The object of ``serialization.pack``; the receiver has its own copy of its buffers."""
    regions = [open_region(number, private=True) for number in descriptors]
    try:
        return unpack(payload, next(iter(regions), None), tensors)
    finally:
        for each in regions:
            each.close()
