"""Where the ranks of a pipeline meet: losses, gradients of what several ranks hold, mail.

One region holds it all: the board; the losses, one line per share; the gradients of each group of
parameters that more than one rank has, one row per rank; the mailboxes. A parameter that one rank
alone has needs no exchange: its gradient stays where autograd left it.

On several hosts each has a region of its own. What leaders tell each other when a step's passes are
done brings losses and marks to all of them; gradients of a group on several hosts meet as replicas'
do (``comm.host_sums``); mail takes a courier.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from lockstep.comm.board import LINE_BYTES, Board
from lockstep.comm.courier import Courier
from lockstep.comm.exchange import ShareTotals, TensorSpec
from lockstep.comm.gradient_rows import GradientRows, GradientSpec
from lockstep.comm.host_sums import HostSums
from lockstep.comm.shared_memory import SharedRegion
from lockstep.comm.wide_board import WideBoard
from lockstep.comm.wires import Wires
from lockstep.parallel.stage_mail import MailSpec, StageMail
from lockstep.plan.layout import Piece, align


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """The trainable parameters of a group, and who has them.

    Attributes:
        ranks: in ascending order.
        tensors: in the model's order.
    """

    ranks: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]

    @property
    def gradients(self) -> GradientSpec:
        """How their gradients lie in memory: a row per rank."""
        return GradientSpec(
            num_shares=len(self.ranks), tensors=self.tensors, row_limits=(0,) * len(self.tensors)
        )

    @property
    def num_bytes(self) -> int:
        """Size in memory: nothing where one rank is alone."""
        return self.gradients.num_bytes if len(self.ranks) > 1 else 0

    @property
    def table_bytes(self) -> int:
        """Of what says who has put up what."""
        return len(self.ranks) * max(len(self.tensors), 1) * 2 * 8

    def rows_of(self, ranks: Sequence[int]) -> range:
        """The rows of those of its ranks that are among some."""
        rows = [row for row, rank in enumerate(self.ranks) if rank in ranks]
        return range(rows[0], rows[-1] + 1)


@dataclass(frozen=True, kw_only=True)
class StageExchangeSpec:
    """The layout of a ``StageExchange``: the same on every rank.

    Attributes:
        num_ranks: of all hosts.
        num_shares: of a batch.
        groups: the parameters, by who has them.
        mail: by whether the model is in training.
    """

    num_ranks: int
    num_shares: int
    groups: tuple[GroupSpec, ...]
    mail: Mapping[bool, MailSpec]

    def offsets(self) -> list[int]:
        """Byte offsets of: losses, marks of use, each group, each mail; and the end."""
        sizes = [
            self.num_ranks * LINE_BYTES,
            self.num_shares * 2 * 8,
            self.num_ranks * 8,
            *(group.num_bytes for group in self.groups),
            *(mail.num_bytes for mail in self.mail.values()),
        ]
        return list(accumulate(align(size) for size in sizes))

    def create(self, ranks: range | None = None) -> SharedRegion:
        """Make the region of the host with these ranks, by default all.

        Raises:
            DeviceError: the host has not that much memory to share.
        """
        here = range(self.num_ranks) if ranks is None else ranks
        elsewhere = [
            (offset, offset + group.num_bytes)
            for group, offset in zip(self.groups, self.offsets()[2:], strict=False)
            if group.num_bytes and not set(group.ranks) & set(here)
        ]
        return SharedRegion.create(self.offsets()[-1], elsewhere)

    @property
    def ranks_of_losses(self) -> list[int]:
        """Which rank knows a share's loss, by share."""
        graph = next(iter(self.mail.values())).graph
        last = len(graph.ranks) - 1
        return [graph.rank_of(last, share) for share in range(self.num_shares)]


@dataclass(frozen=True, kw_only=True)
class StagesAbroad:
    """What a rank has of other hosts.

    Attributes:
        host: this host.
        hosts: the ranks of each host.
        board: the ranks' board.
        wires: for sums of gradients.
        courier: for mail.
        mirrored: tensors in shared memory whose values on host 0 all hosts get in every step.
    """

    host: int
    hosts: Sequence[range]
    board: WideBoard
    wires: Wires
    courier: Courier
    mirrored: Sequence[torch.Tensor] = ()

    def members(self, group: GroupSpec) -> list[list[int]]:
        """A group's ranks, host by host, for those hosts that have any."""
        found = ([rank for rank in group.ranks if rank in ranks] for ranks in self.hosts)
        return [ranks for ranks in found if ranks]

    def sums(self, group: GroupSpec, rows: GradientRows) -> HostSums:
        """Of a group on several hosts, this rank's end of its sums."""
        return HostSums(
            rows,
            rank=self.board.rank,
            hosts=self.members(group),
            rows_of=group.rows_of,
            wires=self.wires,
            is_everywhere=[False] * len(group.tensors),
        )


class StageExchange:
    """One rank's end.

    Args:
        spec: the layout.
        region: what ``spec.create`` has made.
        board: the ranks' board, in the region.
        abroad: what this rank has of other hosts; None where there are none.

    Attributes:
        rows: the gradients of groups of several ranks, of which some are on this host, by number.
        sums: of those on several hosts, this rank's end.
        mail: by whether the model is in training.
    """

    def __init__(
        self,
        spec: StageExchangeSpec,
        region: SharedRegion,
        *,
        board: Board,
        abroad: StagesAbroad | None = None,
    ) -> None:
        self.board = board
        self._spec = spec
        self._region = region
        self._abroad = abroad
        self._ranks_here = range(spec.num_ranks) if abroad is None else abroad.hosts[abroad.host]
        losses, used, *rest = spec.offsets()
        self._losses = region.tensor(losses, torch.float64, (spec.num_shares, 2), (2, 1)).numpy()
        self._used = region.tensor(used, torch.int64, (spec.num_ranks,), (1,)).numpy()
        self.rows: dict[int, GradientRows] = {}
        self.sums: dict[int, HostSums] = {}
        for number, (group, offset) in enumerate(zip(spec.groups, rest, strict=False)):
            self._open_group(number, group, region, offset)
        self.mail = self._open_mail(region, rest[len(spec.groups) :])

    def _open_group(self, number: int, group: GroupSpec, region: SharedRegion, offset: int) -> None:
        if len(group.ranks) == 1 or not set(group.ranks) & set(self._ranks_here):
            return
        rows = GradientRows(group.gradients, region, offset, group.rows_of(self._ranks_here))
        self.rows[number] = rows
        if self._abroad is not None and self._is_abroad(group) and self.board.rank in group.ranks:
            self.sums[number] = self._abroad.sums(group, rows)

    def _is_abroad(self, group: GroupSpec) -> bool:
        """Whether a group has ranks on several hosts."""
        return self._abroad is not None and len(self._abroad.members(group)) > 1

    def _open_mail(self, region: SharedRegion, offsets: Sequence[int]) -> dict[bool, StageMail]:
        opened, first_box = {}, 0
        for (training, mail), offset in zip(self._spec.mail.items(), offsets, strict=False):
            opened[training] = StageMail(
                mail,
                region,
                offset,
                self.board,
                ranks_here=self._ranks_here,
                courier=None if self._abroad is None else self._abroad.courier,
                first_box=first_box,
            )
            first_box += len(mail.boxes)
        return opened

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a mailbox: later messages overwrite it."""
        return self._region.holds(tensor)

    def divide(self, pieces: Sequence[Mapping[int, Sequence[Piece]]]) -> None:
        """From now on each rank updates these pieces, by group and rank."""
        for number, sums in self.sums.items():
            sums.divide(pieces[number])

    def close(self) -> None:
        """A task is done: nothing is on its way any more."""
        if self._abroad is not None:
            self._abroad.courier.close()

    def abandon(self) -> None:
        """A task has failed: nothing that is on its way matters any more."""
        if self._abroad is not None:
            self._abroad.courier.abandon()

    def put_loss(self, share: int, total: float, weight: float) -> None:
        """What a share's loss has come to."""
        self._losses[share] = total, weight

    def put_used(self, is_any_used: bool) -> None:
        """Whether any parameter of this rank has a gradient."""
        self._used[self.board.rank] = is_any_used

    def collect(self, num_filled: int) -> ShareTotals:
        """Wait until all ranks have done their passes; returns the losses of all shares."""
        if self._abroad is None:
            self.board.barrier()
        else:
            self._abroad.board.meet(self._figures, self._take_figures)
        totals, weights = self._losses[:num_filled].T.tolist()
        return ShareTotals(totals, weights)

    def is_any_used(self) -> bool:
        """Whether any parameter has a gradient."""
        return bool(self._used.any())

    # --- what leaders exchange -------------------------------------------------------------------

    def _figures(self) -> bytes:
        """What this host's ranks have put up; what lies there of other ranks is old."""
        tables = [
            rows.table
            for number, rows in self.rows.items()
            if self._is_abroad(self._spec.groups[number])
        ]
        abroad = self._abroad
        assert abroad is not None
        options = [tensor.numpy() for tensor in abroad.mirrored if abroad.host == 0]
        return b"".join(part.tobytes() for part in (*options, self._losses, self._used, *tables))

    def _take_figures(self, payloads: list[bytes]) -> None:
        """Of each other host's ranks, what they have put up."""
        abroad = self._abroad
        assert abroad is not None
        for host, payload in enumerate(payloads):
            if host == abroad.host:
                continue
            ranks, rest = abroad.hosts[host], memoryview(payload)
            for options in abroad.mirrored if host == 0 else ():
                target = options.numpy()
                target[:] = _read(rest, target)
                rest = rest[target.nbytes :]
            owners = self._spec.ranks_of_losses
            shares = [share for share, rank in enumerate(owners) if rank in ranks]
            for target, lines in ((self._losses, shares), (self._used, list(ranks))):
                target[lines] = _read(rest, target)[lines]
                rest = rest[target.nbytes :]
            for number, group in enumerate(self._spec.groups):
                if self._is_abroad(group) and set(group.ranks) & set(ranks):
                    self._take_table(number, ranks, rest)
                    rest = rest[group.table_bytes :]

    def _take_table(self, number: int, ranks: range, payload: memoryview) -> None:
        """What another host's ranks have put up of a group, if this host has a part in it."""
        if number in self.rows:
            table = self.rows[number].table
            lines = list(self._spec.groups[number].rows_of(ranks))
            table[lines] = _read(payload, table)[lines]


def _read(payload: memoryview, like: Any) -> Any:
    """An array as another host has it, from the beginning of a payload."""
    return np.frombuffer(payload[: like.nbytes], like.dtype).reshape(like.shape)
