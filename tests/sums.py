"""The sum that shares' gradients are to have, to the last bit, by halving and not by levels."""

from collections.abc import Sequence

import torch


def tree_sum(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum in a binary tree over all places, aligned at powers of two; None adds nothing."""
    if len(gradients) == 1:
        return gradients[0]
    half = 1 << ((len(gradients) - 1).bit_length() - 1)
    left, right = tree_sum(gradients[:half]), tree_sum(gradients[half:])
    if left is None or right is None:
        return right if left is None else left
    return left + right
