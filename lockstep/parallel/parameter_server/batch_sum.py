"""A server's sum of a batch's gradients until all its parts have come."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lockstep.comm.collectives.gradients import Gradients, added


@dataclass
class BatchSum:
    """The gradients of a batch that a server has received.

    Attributes:
        missing: number of parts that have not come.
        losses: of the received parts; see ``Push``.
        weight: of the received parts.
        gradients: of the server's pieces: the sum of each part's mean times its weight.
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
        """The gradients of the batch's mean; its weight must not be 0."""
        return [None if total is None else total.div_(self.weight) for total in self.gradients]
