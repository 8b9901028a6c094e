"""Control between hosts: rank 0 sends to every host's leader, which sends to its host's ranks.

Within a host messages are pickled, over links that only its own processes have. Between hosts they
are trees of plain values and tensors (``comm.codec.message_codec``), which cannot execute code.
"""

from collections.abc import Callable
from typing import Any

from lockstep.comm.codec.message_codec import decode, encode
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.launch.rendezvous.control_group import ControlGroup
from lockstep.launch.workers.team import Team
from lockstep.parallel.exchange.control import LeaderControl

# Bytes of the parts in which a region is sent.
_PART_BYTES = 1 << 24


class HostControl(LeaderControl):
    """The first rank of a host, one of several.

    Args:
        team: this host's other ranks.
        control_group: the other hosts.
        rank: this rank.
        num_ranks: number of ranks on all hosts.
        timeout_seconds: longest wait for a helper.
        look_around: see ``Board``.
        bring_groups: see ``Control``.
    """

    def __init__(
        self,
        team: Team,
        control_group: ControlGroup,
        *,
        rank: int,
        num_ranks: int,
        timeout_seconds: float,
        look_around: Callable[[float], None],
        bring_groups: Callable[[], None],
    ) -> None:
        super().__init__(team, timeout_seconds)
        self.rank = rank
        self.num_ranks = num_ranks
        self._control_group = control_group
        self._look_around = look_around
        self._bring_groups = bring_groups

    def broadcast(self, obj: Any) -> Any:
        leads = self._control_group.host == 0
        payload = self._control_group.broadcast(encode(obj) if leads else None, self._look_around)
        return super().broadcast(obj if leads else decode(payload))

    def gather(self, obj: Any) -> list[Any]:
        own = super().gather(obj)
        gathered = self._control_group.gather(encode(own), self._look_around)
        if not gathered:
            return []
        return [*own, *(each for payload in gathered[1:] for each in decode(payload))]

    def share(self, region: SharedRegion | None) -> SharedRegion:
        leads = self._control_group.host == 0
        size = None if region is None else str(region.num_bytes).encode()
        size = self._control_group.broadcast(size, self._look_around)
        return super().share(region if leads else SharedRegion.create(int(size)))

    def fill(self, region: SharedRegion, num_bytes: int) -> None:
        for start in range(0, num_bytes, _PART_BYTES):
            stop = min(start + _PART_BYTES, num_bytes)
            leads = self._control_group.host == 0
            part = bytes(region.memory[start:stop]) if leads else None
            part = self._control_group.broadcast(part, self._look_around)
            if not leads:
                region.memory[start:stop] = part
        self._team.broadcast(b"")

    def bring_groups(self) -> None:
        self._bring_groups()
