"""The layout of an exchange: how the ranks' shared memory is divided, and which ranks use what."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate

from lockstep.comm.collectives.gradient_spec import GradientSpec
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.comm.shared_memory.status_board import LINE_BYTES
from lockstep.plan.layout import align
from lockstep.plan.program.compression import Compression


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Trainable parameters that the same ranks hold, and the rows of their gradients.

    Attributes:
        ranks: in ascending order.
        gradients: how they lie in memory.
        row_ranks: the rank that fills each row; none where a rank alone keeps its gradients.
        shares_per_row: consecutive shares that are added up in a row; 0 where a row has all that
            its rank computes.
        compressions: of each parameter, what hosts send one another is compressed so; None where it
            is sent as it is. Empty where hosts send each other pieces, and what became of them.
        divisions: where ranks keep their part of the gradients only, the groups of consecutive
            ranks of which each divides the parameters.
        keeps_on_host: sums of gradients are kept in host memory, whatever device computes them.
        keeps_memory: the memory of gradients is not freed.
    """

    ranks: tuple[int, ...]
    gradients: GradientSpec
    row_ranks: tuple[int, ...] = ()
    shares_per_row: int = 0
    compressions: tuple[Compression | None, ...] = ()
    divisions: tuple[tuple[int, ...], ...] = ()
    keeps_on_host: bool = False
    keeps_memory: bool = False

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return self.gradients.num_bytes if self.row_ranks else 0

    def rows_of(self, ranks: Collection[int]) -> range:
        """The consecutive rows of consecutive ranks."""
        rows = [row for row, rank in enumerate(self.row_ranks) if rank in ranks]
        return range(rows[0], rows[-1] + 1) if rows else range(0)

    def is_held_by(self, ranks: Collection[int]) -> bool:
        """Whether any of these ranks has a part in it."""
        return any(rank in ranks for rank in self.ranks)

    def num_filled_rows(self, num_filled: int) -> int:
        """The rows that count where so many shares are filled."""
        per_row = self.shares_per_row
        return -(-num_filled // per_row) if per_row else len(self.row_ranks)

    def holes(self, here: Collection[int]) -> list[tuple[int, int]]:
        """Bytes ``[start, stop)`` that need no memory on a host with these ranks.

        Without any of them the rows need none, but what is said about them does. Where only
        servers are, sums lie in the first row.
        """
        if not self.row_ranks:
            return []
        if here and not self.is_held_by(here):
            return [(0, self.num_bytes)]
        if self.gradients.buckets:  # ranks take memory for a unit while they need it
            return self.gradients.holes(range(0))
        return self.gradients.holes(self.rows_of(here) or range(min(len(here), 1)))


@dataclass(frozen=True, kw_only=True)
class ExchangeSpec:
    """The layout of an ``Exchange``: the same on every rank.

    Every host has a region; they are alike but for what has memory.

    Attributes:
        num_ranks: ranks of all hosts.
        share_ranks: by share, the rank that knows its loss, the first that computes it.
        groups: the parameters, by the ranks that hold them.
        row_capacity: longest row that a share may offer, in float64.
        mail_bytes: sizes of the mailboxes.
        on_accelerators: gradients lie in devices' memory, and need none of the host.
        ranks_per_share: consecutive ranks that compute a share; all but the first offer nothing.
        gathering_rank: its host has memory for the gradients of all ranks; None for no host.
    """

    num_ranks: int
    share_ranks: tuple[int, ...]
    groups: tuple[GroupSpec, ...]
    row_capacity: int = 0
    mail_bytes: tuple[int, ...] = ()
    on_accelerators: bool = False
    gathering_rank: int | None = None
    ranks_per_share: int = 1

    @property
    def num_shares(self) -> int:
        """The number of shares of a batch."""
        return len(self.share_ranks)

    def offsets(self) -> list[int]:
        """Byte offsets of: losses, marks, offered rows, each group, each part of mail; the end."""
        sizes = [
            self.num_ranks * LINE_BYTES,
            self.num_shares * 4 * 8,
            self.num_ranks * 8,
            2 * self.num_shares * self.row_capacity * 8,
            *(group.num_bytes for group in self.groups),
            *self.mail_bytes,
        ]
        return list(accumulate(align(size) for size in sizes))

    @property
    def mail_offsets(self) -> list[int]:
        """Where each part of the mail begins."""
        return self.offsets()[3 + len(self.groups) : -1]

    @property
    def num_bytes(self) -> int:
        """Size of the region."""
        return self.offsets()[-1]

    def shares_of(self, ranks: Collection[int]) -> list[int]:
        """The shares whose losses some ranks know."""
        return [share for share, rank in enumerate(self.share_ranks) if rank in ranks]

    def leads(self, rank: int) -> bool:
        """Whether a rank is the first that computes its shares."""
        return rank % self.ranks_per_share == 0

    def create(self, ranks: range | None = None) -> SharedRegion:
        """Make the region of the host with these ranks, by default all.

        Raises:
            DeviceError: the host has not that much memory to share.
        """
        here = range(self.num_ranks) if ranks is None or self.gathering_rank in ranks else ranks
        holes = [
            (offset + start, offset + stop)
            for group, offset in zip(self.groups, self.offsets()[3:], strict=False)
            for start, stop in group.holes(range(0) if self.on_accelerators else here)
        ]
        return SharedRegion.create(self.num_bytes, holes)
