"""The accuracy of yes and no, where the loss has said whether outputs are logits.

torchmetrics' own guesses that from the values of a batch, and logits may all lie from 0 to 1.
"""

import torch
from torchmetrics.classification import BinaryAccuracy

from lockstep.errors import DataError


class AccuracyOfTwo(BinaryAccuracy):
    """Samples, or labels of samples, that are on the right side.

    Args:
        of_logits: outputs are logits, and not probabilities.
    """

    def __init__(self, *, of_logits: bool) -> None:
        super().__init__()
        self._of_logits = of_logits

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        """Count a batch.

        Raises:
            DataError: targets between 0 and 1, which are on no side.
        """
        if not bool(((target == 0) | (target == 1)).all()):
            raise DataError(
                "An accuracy needs targets that are 0 or 1.",
                received=f"targets from {target.min().item()} to {target.max().item()}",
                fix="Leave it out, or pass another metric: metrics=['mae'].",
            )
        super().update(preds.sigmoid() if self._of_logits else preds, target.long())
