"""Where the ranks of a pipeline meet: losses, gradients of what several ranks hold, mail.

One region holds it all: the board; the losses, one line per share; the gradients of each group of
parameters that more than one rank has, one row per rank; the mailboxes. A parameter that one rank
alone has needs no exchange: its gradient stays where autograd left it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch

from lockstep.comm.board import LINE_BYTES, Board
from lockstep.comm.exchange import ShareTotals, TensorSpec
from lockstep.comm.gradient_rows import GradientRows, GradientSpec
from lockstep.comm.shared_memory import SharedRegion
from lockstep.parallel.stage_mail import MailSpec, StageMail
from lockstep.plan.layout import align


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


@dataclass(frozen=True, kw_only=True)
class StageExchangeSpec:
    """The layout of a ``StageExchange``: the same on every rank.

    Attributes:
        num_ranks: ranks that map the region.
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

    def create(self) -> SharedRegion:
        """Make the region.

        Raises:
            DeviceError: the host has not that much memory to share.
        """
        return SharedRegion.create(self.offsets()[-1])


class StageExchange:
    """One rank's end.

    Args:
        spec: the layout.
        region: what ``spec.create`` has made.
        rank: whose end this is.
        look_around: see ``Board``.
    """

    def __init__(
        self,
        spec: StageExchangeSpec,
        region: SharedRegion,
        *,
        rank: int,
        look_around: Callable[[float], None],
    ) -> None:
        self.board = Board(region, rank=rank, num_ranks=spec.num_ranks, look_around=look_around)
        self._rank = rank
        losses, used, *rest = spec.offsets()
        self._losses = region.tensor(losses, torch.float64, (spec.num_shares, 2), (2, 1)).numpy()
        self._used = region.tensor(used, torch.int64, (spec.num_ranks,), (1,)).numpy()
        self.rows: dict[int, GradientRows] = {}
        for number, (group, offset) in enumerate(zip(spec.groups, rest, strict=False)):
            if len(group.ranks) > 1 and rank in group.ranks:
                self.rows[number] = GradientRows(group.gradients, region, offset)
        self.mail = {
            training: StageMail(mail, region, offset, self.board, rank)
            for (training, mail), offset in zip(
                spec.mail.items(), rest[len(spec.groups) :], strict=False
            )
        }

    def put_loss(self, share: int, total: float, weight: float) -> None:
        """What a share's loss has come to."""
        self._losses[share] = total, weight

    def put_used(self, is_any_used: bool) -> None:
        """Whether any parameter of this rank has a gradient."""
        self._used[self._rank] = is_any_used

    def collect(self, num_filled: int) -> ShareTotals:
        """Wait until all ranks have done their passes; returns the losses of all shares."""
        self.board.barrier()
        totals, weights = self._losses[:num_filled].T.tolist()
        return ShareTotals(totals, weights)

    def is_any_used(self) -> bool:
        """Whether any parameter has a gradient."""
        return bool(self._used.any())
