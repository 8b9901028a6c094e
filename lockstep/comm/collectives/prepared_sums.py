"""The additions that sum a rank's pieces, prepared once for many steps."""

from typing import NamedTuple

import torch

from lockstep.comm.collectives.gradients import Levels
from lockstep.plan.layout import Piece


class PreparedSums(NamedTuple):
    """What a rank does to sum its pieces, as long as rows publish the same kinds of gradients.

    Attributes:
        targets: where the sums are placed; None for parameters that no row has used.
        levels: the additions of rows.
        products: pieces to which products of factors are added, and whether rows are there, too.
        sparse: numbers of the pieces whose sums are rows.
    """

    targets: list[torch.Tensor | None]
    levels: Levels
    products: list[tuple[Piece, torch.Tensor, bool]]
    sparse: list[int]
