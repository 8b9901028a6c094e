"""Binary accuracy of outputs that are logits or probabilities, as the loss determines.

torchmetrics guesses this from the values of a batch, but the logits of a batch may lie in [0, 1].
"""

import torch
from torchmetrics import classification

from lockstep.errors import DataError


class BinaryAccuracy(classification.BinaryAccuracy):
    """The fraction of labels that are predicted correctly.

    Args:
        of_logits: outputs are logits, and not probabilities.
    """

    def __init__(self, *, of_logits: bool) -> None:
        super().__init__()
        self._of_logits = of_logits

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        """Count a batch.

        Raises:
            DataError: targets that are neither 0 nor 1.
        """
        if not bool(((target == 0) | (target == 1)).all()):
            raise DataError(
                "An accuracy needs targets that are 0 or 1.",
                received=f"targets from {target.min().item()} to {target.max().item()}",
                fix="Leave it out, or pass another metric: metrics=['mae'].",
            )
        super().update(preds.sigmoid() if self._of_logits else preds, target.long())
