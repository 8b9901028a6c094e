"""The rows of embeddings that shares have touched, and their numbers, in shared memory."""

from collections.abc import Sequence

import torch

from lockstep.comm.collectives.gradient_spec import GradientSpec
from lockstep.comm.collectives.shm_gradient_memory import GradientMemory
from lockstep.errors import ModelError
from lockstep.plan.layout import Piece


class TouchedRows:
    """One rank's view.

    Args:
        spec: the layout of all gradients.
        memory: where they lie.
    """

    def __init__(self, spec: GradientSpec, memory: GradientMemory) -> None:
        self._spec = spec
        self._memory = memory

    def add(self, share: int, parameter: int, num_before: int, gradient: torch.Tensor) -> int:
        """Add a gradient to the rows that a share has published; returns how many these are now.

        Args:
            share: its number.
            parameter: likewise.
            num_before: rows that it has published before.
            gradient: sparse, of the parameter's shape.

        Raises:
            ModelError: the gradient is dense.
        """
        if not gradient.is_sparse:
            raise ModelError(
                "An embedding with sparse=True must be used for lookups only: its gradient must "
                "be sparse.",
                received=f"a dense gradient of {self._spec.tensors[parameter].name!r}",
                fix="Leave out sparse=True where its weight is also used in other operations.",
            )
        if num_before:
            gradient = gradient + self.within(share, parameter, num_before)
        gradient = gradient.coalesce()
        count, values, numbers = gradient._nnz(), gradient.values(), gradient.indices()[0]
        self._memory.reserve_touched(share, parameter, count)
        kept_numbers, kept_values = self._memory.touched(share, parameter, count)
        kept_numbers.copy_(numbers)
        kept_values.copy_(values)
        return count

    def within(
        self, share: int, parameter: int, num_rows: int, piece: Piece | None = None
    ) -> torch.Tensor:
        """The rows of a piece that a share has published, as a sparse tensor of its own."""
        height, width = self._spec.tensors[parameter].shape
        numbers, values = self._memory.touched(share, parameter, num_rows)
        first, last = (0, height) if piece is None else (piece.start // width, piece.stop // width)
        low, high = torch.searchsorted(numbers, torch.tensor([first, last])).tolist()
        return torch.sparse_coo_tensor(
            (numbers[low:high] - first)[None],
            values[low:high].clone(),
            (last - first, width),
            is_coalesced=True,
            check_invariants=False,
        )


def sum_of_rows(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the rows that shares have published of a piece, without untouched rows."""
    return sum(gradients[1:], start=gradients[0]).coalesce()
