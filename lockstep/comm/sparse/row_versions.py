"""When a server has changed each row of an embedding, so that other hosts get only what is new.

For each row of a sparse parameter, shared memory has the version of its server's weights with which
it was changed last (``WorkQueue.version``), which is odd; 0 is for never.
"""

from collections.abc import Mapping, Sequence

import torch

from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.plan.layout import Piece


class RowVersions:
    """One rank's view.

    Args:
        region: where the versions lie.
        offset: where they begin there.
        tensors: the sparse parameters, by number.
    """

    def __init__(
        self, region: SharedRegion, offset: int, tensors: Mapping[int, TensorSpec]
    ) -> None:
        self._versions = {}
        self._widths = {number: tensor.shape[1] for number, tensor in tensors.items()}
        for number, tensor in tensors.items():
            height = tensor.shape[0]
            self._versions[number] = region.tensor(offset, torch.int64, (height,), (1,))
            offset += 8 * height

    def note(self, piece: Piece, rows: torch.Tensor, version: int) -> None:
        """A server changes rows of a piece, which are numbered within it."""
        self._of(piece)[rows] = version

    def since(self, piece: Piece, version: int) -> torch.Tensor:
        """The rows of a piece that were changed after a version, in ascending order."""
        return torch.nonzero(self._of(piece) > version).view(-1)

    def _of(self, piece: Piece) -> torch.Tensor:
        width = self._widths[piece.parameter]
        return self._versions[piece.parameter][piece.start // width : piece.stop // width]


def num_bytes(tensors: Sequence[TensorSpec]) -> int:
    """Room for the versions of sparse parameters."""
    return sum(8 * tensor.shape[0] for tensor in tensors)
