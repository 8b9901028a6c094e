"""What a server adds up of a batch until all of its parts have come."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lockstep.comm.collectives.gradients import Gradients, added


@dataclass
class BatchSum:
    """What a server has of a batch.

    Attributes:
        missing: parts that are still to come.
        losses: of those that have come; see ``Push``.
        weight: of those that have come.
        gradients: of the server's pieces, each part's mean times its weight, added up.
    """

    missing: int
    losses: Sequence[float] = (0.0, 0.0, 0.0, 0.0)
    weight: float = 0.0
    gradients: list[torch.Tensor | None] = field(default_factory=list)

    def add(self, means: Gradients, weight: float) -> None:
        weighted = [None if mean is None else mean * weight for mean in means]
        self.gradients = added(self.gradients, weighted) if self.gradients else weighted
        self.weight += weight

    def means(self) -> list[torch.Tensor | None]:
        """The gradients of the batch's mean; not where nothing has weight."""
        return [None if total is None else total.div_(self.weight) for total in self.gradients]
