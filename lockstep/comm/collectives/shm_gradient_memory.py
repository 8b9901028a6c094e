"""The layout of a step's gradients in shared memory, and the parts of it that have memory."""

import torch

from lockstep.comm.collectives.gradient_spec import GradientSpec
from lockstep.comm.collectives.gradients import views_in
from lockstep.comm.collectives.piece_memory import release
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.plan.layout import flat_offsets


class GradientMemory:
    """Views of a part of a region: the table, and each share's gradients, factors and sparse rows.

    Args:
        spec: the layout.
        region: where they lie.
        offset_bytes: where they begin in it.

    Attributes:
        table: per share and parameter, the kind of what is published and its number of rows.
    """

    def __init__(self, spec: GradientSpec, region: SharedRegion, offset_bytes: int) -> None:
        self._spec = spec
        self._region = region
        self._offset = offset_bytes
        self._row_offsets, self._factor_offsets, _ = spec.offsets()
        _, count, _ = spec.table_shape
        self.table = self._tensor(0, torch.int64, spec.table_shape, (count * 2, 2, 1)).numpy()
        self._reserved: dict[int, int] = {}

    def row(self, share: int) -> list[torch.Tensor]:
        """A share's gradient of each parameter."""
        return [
            self._tensor(start, tensor.dtype, tensor.shape, tensor.stride)
            for start, tensor in zip(self._row_offsets[share], self._spec.tensors, strict=True)
        ]

    def reserve_row(self, share: int, parameter: int) -> None:
        """Take memory for a share's whole gradient of a parameter."""
        num_bytes = self._spec.tensors[parameter].extent.num_bytes
        self._reserve(self._row_offsets[share][parameter], num_bytes)

    # --- factors ---------------------------------------------------------------------------------

    def factors(
        self, share: int, parameter: int, num_rows: int, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A share's inputs (num_rows, ins) and output gradients (num_rows, outs).

        ``dtype`` is theirs; None for the parameter's.
        """
        tensor = self._spec.tensors[parameter]
        outs, ins = tensor.shape
        start, middle = self._factor_starts(share, parameter)
        return (
            self._tensor(start, dtype or tensor.dtype, (num_rows, ins), (ins, 1)),
            self._tensor(middle, dtype or tensor.dtype, (num_rows, outs), (outs, 1)),
        )

    def factors_to_fill(
        self, share: int, parameter: int, num_rows: int, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``factors``, with memory taken for them."""
        self.reserve_factors(share, parameter, num_rows)
        return self.factors(share, parameter, num_rows, dtype)

    def reserve_factors(self, share: int, parameter: int, num_rows: int) -> None:
        """Take memory for so many rows of factors."""
        tensor = self._spec.tensors[parameter]
        outs, ins = tensor.shape
        start, middle = self._factor_starts(share, parameter)
        self._reserve(start, num_rows * ins * tensor.dtype.itemsize)
        self._reserve(middle, num_rows * outs * tensor.dtype.itemsize)

    def _factor_starts(self, share: int, parameter: int) -> tuple[int, int]:
        """Where a share's inputs and its output gradients begin."""
        tensor = self._spec.tensors[parameter]
        start = self._factor_offsets[share][parameter]
        size = self._spec.capacity(parameter) * tensor.shape[1] * tensor.dtype.itemsize
        return start, start + size

    # --- rows of embeddings ----------------------------------------------------------------------

    def touched(
        self, share: int, parameter: int, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers of the rows that a share has published, ascending, and the rows."""
        tensor = self._spec.tensors[parameter]
        width = tensor.shape[1]
        numbers = self._factor_offsets[share][parameter]
        values = self._row_offsets[share][parameter]
        return (
            self._tensor(numbers, torch.int64, (num_rows,), (1,)),
            self._tensor(values, tensor.dtype, (num_rows, width), (width, 1)),
        )

    def reserve_touched(self, share: int, parameter: int, num_rows: int) -> None:
        """Take memory for so many rows of an embedding, and for their numbers."""
        tensor = self._spec.tensors[parameter]
        row_bytes = tensor.shape[1] * tensor.dtype.itemsize
        self._reserve(self._row_offsets[share][parameter], num_rows * row_bytes)
        self._reserve(self._factor_offsets[share][parameter], num_rows * torch.int64.itemsize)

    # --- the region ------------------------------------------------------------------------------

    def _tensor(
        self, start: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        return self._region.tensor(self._offset + start, dtype, shape, stride)

    def _reserve(self, start: int, num_bytes: int) -> None:
        """Take memory for a part of a hole, once."""
        if self._reserved.get(start, 0) < num_bytes:
            self._region.reserve(self._offset + start, num_bytes)
            self._reserved[start] = num_bytes


def row_apart(spec: GradientSpec, device: torch.device) -> list[torch.Tensor]:
    """A share's gradients in memory of this rank alone: of the host, or of a device.

    In host memory they lie as in a region that ranks share. On a device they lie in one storage, or
    in one for each bucket; one of a unit has no memory yet (``comm.collectives.piece_memory``).
    """
    if device.type == "cpu":
        offsets, num_bytes = flat_offsets([tensor.extent for tensor in spec.tensors])
        region = SharedRegion.create(num_bytes, [(0, num_bytes)])
        region.close()
        return [
            region.tensor(offset, one.dtype, one.shape, one.stride)
            for offset, one in zip(offsets, spec.tensors, strict=True)
        ]
    row: dict[int, torch.Tensor] = {}
    for numbers in spec.numbers_by_bucket():
        tensors = [spec.tensors[number] for number in numbers]
        _, num_bytes = flat_offsets([tensor.extent for tensor in tensors])
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        row |= zip(numbers, views_in(buffer, tensors), strict=True)
        if spec.buckets:  # until it is filled
            release([buffer])
    return [row[number] for number in range(len(row))]
