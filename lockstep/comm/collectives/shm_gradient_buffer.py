"""The gradients of one step in shared memory, and how a rank sums what it owns.

Every share has a row with room for the gradient of each parameter. It fills its row in one of two
ways, and each rank then sums its pieces over all rows, always in the same tree
(``plan.program.sum_tree``): so the sum does not depend on who computed which share, or when.

The gradient of a weight is a product, that of the layer's output gradients and inputs, summed over
the rows (samples, tokens) of the batch. Where these *factors* are far smaller than the product, a
share hands in its factors instead: after the barrier each rank forms its own block of the weight's
gradient over the whole batch, in one product. The arithmetic is the same in amount, and next to
nothing is moved. A share decides for itself, by the number of its rows, and the sum takes both
kinds, so a share with more rows than there is room for hands in its whole gradient.

For a *sparse* parameter, an embedding, a share hands in the rows that it has touched, and their
numbers; their sum is a sparse tensor.

Where there are several hosts, each has memory of its own with rows for all shares, so that a share
has one number everywhere. The table and the factors of other hosts' shares are copied here
(``comm.collectives.host_exchange``); their gradients never are, and have no memory.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from lockstep.comm.collectives.gradient_spec import GradientSpec
from lockstep.comm.collectives.gradients import (
    Gradients,
    GroupGradients,
    add_levels,
    add_up,
    cut_piece,
    levels_of,
    norms_on_host,
)
from lockstep.comm.collectives.matrix_products import multiply
from lockstep.comm.collectives.prepared_sums import PreparedSums
from lockstep.comm.collectives.shm_gradient_memory import GradientMemory, row_apart
from lockstep.comm.collectives.shm_touched_rows import TouchedRows, sum_of_rows
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.plan.layout import Piece, row_blocks
from lockstep.plan.program.sum_tree import subtrees

# Kinds of what a share has published for a parameter.
_NOTHING, _GRADIENT, _FACTORS, _BFLOAT16_FACTORS, _ROWS = range(5)
_PRODUCTS = (_FACTORS, _BFLOAT16_FACTORS)
# Dtypes of factors, by kind; None for the parameter's own.
_DTYPES = {_FACTORS: None, _BFLOAT16_FACTORS: torch.bfloat16}


@dataclass
class _Own:
    """The contributions that a share of this rank has published for a parameter so far."""

    kind: int = _NOTHING
    num_rows: int = 0


class SharedGradientBuffer(GroupGradients):
    """One rank's view of the gradients.

    Args:
        spec: the layout.
        region: where they lie.
        offset_bytes: from where on.
        here: the rows whose gradients are kept here; None for all.
        device: in whose memory these lie, in place of the region; None for the region.

    Attributes:
        base_row: the first of these rows.
    """

    def __init__(
        self,
        spec: GradientSpec,
        region: SharedRegion,
        offset_bytes: int,
        here: range | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._spec = spec
        self._memory = GradientMemory(spec, region, offset_bytes)
        self._here = range(spec.num_shares) if here is None else here
        self.table = self._memory.table
        self._touched = TouchedRows(spec, self._memory)
        self._blocks = [
            row_blocks(extent, spec.num_shares) if extent.row_elements else []
            for extent in spec.extents
        ]
        self._cuts: dict[tuple[int, Piece], torch.Tensor] = {}
        self.base_row = self._here.start  # whole sums lie there
        with_memory = self._here or [self.base_row]
        self._rows = [
            self._memory.row(share)
            if device is None or share not in with_memory
            else row_apart(spec, device)
            for share in range(spec.num_shares)
        ]
        self._own: defaultdict[tuple[int, int], _Own] = defaultdict(_Own)  # by row and parameter
        self._sparse = [spec.is_sparse(number) for number in range(len(spec.tensors))]
        self._capacities = [spec.capacity(number) for number in range(len(spec.tensors))]
        # Views take longer to make than small ones to fill. As many as two sizes of batches have.
        kept = lru_cache(2 * spec.num_shares * len(spec.tensors))
        self._factors = kept(self._memory.factors)
        self._to_fill = kept(self._memory.factors_to_fill)
        self._found: list[list[tuple[int, int, int]]] = []
        self._pattern: object = None  # the contents of the table behind ``_found``
        self._prepared: tuple[Sequence[Piece], PreparedSums] | None = None
        self._published: dict[int, list[tuple[int, int]]] = {}  # this rank's rows of the table
        self._factors_of_rows: Sequence[float] | None = None

    def begin_pass(self) -> None:
        for own in self._own.values():
            own.kind, own.num_rows = _NOTHING, 0

    # --- publishing ------------------------------------------------------------------------------

    def write_product(
        self, row: int, parameter: int, inputs: torch.Tensor, output_gradients: torch.Tensor
    ) -> None:
        own = self._own[row, parameter]
        kind = _BFLOAT16_FACTORS if inputs.dtype == torch.bfloat16 else _FACTORS
        start, stop = own.num_rows, own.num_rows + inputs.shape[0]
        if own.kind in (_NOTHING, kind) and stop <= self._capacities[parameter]:
            own.kind, own.num_rows = kind, stop
            kept_inputs, kept_gradients = self._to_fill(row, parameter, stop, _DTYPES[kind])
            kept_inputs[start:].copy_(inputs)
            kept_gradients[start:].copy_(output_gradients)
        else:
            gradient = self._gradient_row(row, parameter, own)
            multiply(gradient, output_gradients, inputs, adds=own.kind == _GRADIENT)
            own.kind = _GRADIENT

    def write(self, row: int, gradients: Gradients) -> None:
        self.take({(row, number): one for number, one in enumerate(gradients) if one is not None})
        numbers = range(len(gradients))
        entries = [((own := self._own[row, number]).kind, own.num_rows) for number in numbers]
        if self._published.get(row) != entries:
            self._published[row] = entries
            self.table[row, : len(entries)] = np.reshape(entries, (-1, 2))

    def take(self, gradients: Mapping[tuple[int, int], torch.Tensor]) -> None:
        """Add gradients, by row and parameter; the next ``write`` publishes them."""
        targets, sources = [], []
        for (row, parameter), gradient in gradients.items():
            own = self._own[row, parameter]
            if self._sparse[parameter]:
                before = own.num_rows if own.kind == _ROWS else 0
                own.num_rows = self._touched.add(row, parameter, before, gradient)
                own.kind = _ROWS
                continue
            target = self._rows[row][parameter]
            if self._spec.row_limits[parameter]:  # else it has memory, and there are no factors
                self._gradient_row(row, parameter, own)
            if own.kind == _GRADIENT and gradient.data_ptr() != target.data_ptr():
                target.add_(gradient)
            elif gradient.data_ptr() != target.data_ptr():  # else it was formed in its place
                targets.append(target)
                sources.append(gradient)
            own.kind = _GRADIENT
        if targets:
            torch._foreach_copy_(targets, sources)

    def places(self, row: int) -> Sequence[torch.Tensor] | None:
        return self._rows[row]

    def bound(self) -> float:
        formed: list[torch.Tensor] = []
        factors: list[torch.Tensor] = []
        for (row, parameter), own in self._own.items():
            if own.kind == _GRADIENT:
                formed.append(self._rows[row][parameter])
            elif own.kind in _PRODUCTS:
                factors += self._factors(row, parameter, own.num_rows, _DTYPES[own.kind])
            elif own.kind == _ROWS:
                return math.inf
        norms = norms_on_host(formed + factors)
        bound, of_factors = sum(norms[: len(formed)]), norms[len(formed) :]
        for inputs, gradients in zip(of_factors[::2], of_factors[1::2], strict=True):
            bound += inputs * gradients
        return bound

    def _gradient_row(self, share: int, parameter: int, own: _Own) -> torch.Tensor:
        """Where a share's whole gradient goes; factors that it has published become one first."""
        row = self._rows[share][parameter]
        if share != self.base_row and self._spec.row_limits[parameter]:
            self._memory.reserve_row(share, parameter)
        if own.kind in _PRODUCTS:
            inputs, gradients = self._factors(share, parameter, own.num_rows, _DTYPES[own.kind])
            multiply(row, gradients, inputs, adds=False)
            own.kind = _GRADIENT
        return row

    # --- summing ---------------------------------------------------------------------------------

    def collect(self, num_rows: int) -> None:
        columns = self.table[:num_rows, : len(self._spec.tensors)]
        pattern = columns.tobytes()
        if pattern == self._pattern:
            return
        self._pattern, self._prepared = pattern, None
        table = columns.tolist()
        self._found = [
            [(row, kind, count) for row, (kind, count) in enumerate(column) if kind != _NOTHING]
            for column in zip(*table, strict=True)
        ]

    def is_used(self, parameter: int) -> bool:
        """Whether any share has published anything for a parameter."""
        return bool(self._found[parameter])

    def weigh(self, factors: Sequence[float] | None) -> None:
        self._factors_of_rows = factors

    def reduce_scatter(self, pieces: Sequence[Piece]) -> list[torch.Tensor | None]:
        if self._prepared is None or self._prepared[0] is not pieces:
            self._prepared = pieces, self._prepared_sums(pieces)
        prepared = self._prepared[1]
        results = list(prepared.targets)
        for number in prepared.sparse:
            results[number] = self._sum_touched(pieces[number])
        if self._factors_of_rows is not None:
            self._weigh_rows(pieces)
        add_levels(prepared.levels)
        for piece, target, adds in prepared.products:
            self._add_product(target, piece, adds=adds)
        return results

    def _prepared_sums(self, pieces: Sequence[Piece]) -> PreparedSums:
        is_sparse = [self._sparse[piece.parameter] for piece in pieces]
        targets = [
            self.target(piece) if self._found[piece.parameter] and not sparse else None
            for piece, sparse in zip(pieces, is_sparse, strict=True)
        ]
        return PreparedSums(
            targets=targets,
            levels=levels_of(self._rows_to_sum(pieces)),
            products=self._products_to_add(pieces, targets),
            sparse=[
                number
                for number, piece in enumerate(pieces)
                if is_sparse[number] and self._found[piece.parameter]
            ],
        )

    def published(self, row: int, piece: Piece) -> torch.Tensor | None:
        """A piece of the gradient that a row holds; None if it has none."""
        kind, num_rows = self.table[row, piece.parameter].tolist()
        if kind == _ROWS:
            return self._touched.within(row, piece.parameter, num_rows, piece)
        return self.cut(row, piece) if kind == _GRADIENT else None

    def target(self, piece: Piece) -> torch.Tensor:
        """Where the sum of a piece is placed."""
        return self.cut(self._target(piece.parameter), piece)

    def base(self, parameter: int) -> torch.Tensor:
        """The first row's gradient, for which there is always memory here."""
        return self._rows[self.base_row][parameter]

    def sum_rows(self, pieces: Sequence[Piece]) -> None:
        """Sum the gradients of each subtree of the rows here, in place, piece by piece."""
        self._weigh_rows(pieces)
        add_levels(levels_of(self._rows_to_sum(pieces)))

    def _rows_to_sum(self, pieces: Sequence[Piece]) -> list[dict[int, torch.Tensor]]:
        return [
            {row: self.cut(row, piece) for row in rows}
            for piece in pieces
            for rows in self.subtree_rows(piece.parameter, self._here)
        ]

    def _weigh_rows(self, pieces: Sequence[Piece]) -> None:
        """Weigh the gradients of the rows here, if they have different weights."""
        if self._factors_of_rows is None:
            return
        for piece in pieces:
            for row in self.gradient_rows(piece.parameter, self._here):
                self.cut(row, piece).mul_(self._factors_of_rows[row])

    def sum_own_rows(self, pieces: Sequence[Piece], rows: range) -> None:
        """Before publishing: sum this rank's rows into the first of them."""
        if len(rows) == 1:
            return
        for piece in pieces:
            put = [row for row in rows if self._own[row, piece.parameter].kind == _GRADIENT]
            if put:
                (total,) = add_up([{row: self.cut(row, piece) for row in put}])
                if put[0] != rows.start:
                    self.cut(rows.start, piece).copy_(total)

    def weighed(self, partial: torch.Tensor, row: int) -> torch.Tensor:
        """A piece of another domain's row, weighed here."""
        factors = self._factors_of_rows
        return partial if factors is None else partial.mul_(factors[row])

    def mark(self, rows: range, parameters: Collection[int]) -> None:
        """Announce gradients in these rows again: see ``is_marked``."""
        self.table[rows.start : rows.stop, sorted(parameters), 1] = 1
        self._published.clear()

    def is_marked(self, rows: range, parameters: Collection[int]) -> bool:
        """Whether gradients in these rows were marked."""
        return any(
            row in rows and kind == _GRADIENT and mark
            for number in parameters
            for row, kind, mark in self._found[number]
        )

    def subtree_sums(self, piece: Piece) -> dict[int, torch.Tensor]:
        """After ``sum_rows``: the sums of a piece, by the first row of each subtree here."""
        return {
            rows[0]: self.cut(rows[0], piece)
            for rows in self.subtree_rows(piece.parameter, self._here)
        }

    def subtree_sums_apart(self, piece: Piece) -> dict[int, torch.Tensor]:
        """The sums of ``subtree_sums`` without ``sum_rows``, in memory of their own."""
        return {
            rows[0]: add_up([{row: self.cut(row, piece).clone() for row in rows}])[0]
            for rows in self.subtree_rows(piece.parameter, self._here)
        }

    def add_products(self, pieces: Sequence[Piece], targets: Sequence[torch.Tensor | None]) -> None:
        """Add the products of all shares' factors to sums of gradients, or to zero."""
        for piece, target, adds in self._products_to_add(pieces, targets):
            self._add_product(target, piece, adds=adds)

    def _products_to_add(
        self, pieces: Sequence[Piece], targets: Sequence[torch.Tensor | None]
    ) -> list[tuple[Piece, torch.Tensor, bool]]:
        found = []
        for piece, target in zip(pieces, targets, strict=True):
            kinds = [kind for _, kind, _ in self._found[piece.parameter]]
            if target is not None and any(kind in _PRODUCTS for kind in kinds):
                found.append((piece, target, _GRADIENT in kinds))
        return found

    def gradient_rows(self, parameter: int, within: range) -> list[int]:
        """The rows among ``within`` where a gradient has been published."""
        return self._rows_with(_GRADIENT, parameter, within)

    def _rows_with(self, kind: int, parameter: int, within: range) -> list[int]:
        return [row for row, own, _ in self._found[parameter] if own == kind and row in within]

    def subtree_rows(self, parameter: int, within: range) -> list[tuple[int, ...]]:
        """The rows with a gradient, by subtrees; subtrees without any are left out."""
        found = (
            tuple(self.gradient_rows(parameter, each))
            for each in subtrees(within, self._spec.num_shares)
        )
        return [rows for rows in found if rows]

    def published_factors(self, rows: range) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The factors of these rows, parameter by parameter: inputs and output gradients."""
        return [
            self._factors(row, parameter, num_rows, _DTYPES[kind])
            for row, parameter, num_rows, kind in self._factors_in(rows)
        ]

    def make_room(self, rows: range) -> None:
        """Take memory for the factors that these rows are going to hold."""
        for row, parameter, num_rows, _ in self._factors_in(rows):
            self._memory.reserve_factors(row, parameter, num_rows)

    def _factors_in(self, rows: range) -> Iterator[tuple[int, int, int, int]]:
        """The factors of these rows: row, parameter, number of rows and kind."""
        for parameter, found in enumerate(self._found):
            for row, kind, num_rows in found:
                if row in rows and kind in _PRODUCTS:
                    yield row, parameter, num_rows, kind

    def summed(self, parameter: int) -> torch.Tensor | None:
        return self._rows[self._target(parameter)][parameter] if self._found[parameter] else None

    def cut(self, share: int, piece: Piece) -> torch.Tensor:
        """A piece of a share's gradient: made once, for it takes longer than to sum a small one."""
        key = share, piece
        if key not in self._cuts:
            self._cuts[key] = cut_piece(self._rows[share][piece.parameter], piece)
        return self._cuts[key]

    def _target(self, parameter: int) -> int:
        """The row that holds the sum: one with memory for it."""
        return next(iter(self.gradient_rows(parameter, self._here)), self._here.start)

    def _add_product(self, target: torch.Tensor, piece: Piece, adds: bool) -> None:
        """Form a weight's gradient over all factors, block by block.

        One product for each block of rows, whichever rank owns it: so the sizes of the products,
        and with them the order of their sums, do not depend on the number of ranks.
        """
        factors = [
            self._factors(share, piece.parameter, num_rows, _DTYPES[kind])
            for share, kind, num_rows in self._found[piece.parameter]
            if kind in _PRODUCTS
        ]
        inputs = torch.cat([inputs for inputs, _ in factors])
        ins = inputs.shape[1]
        flat = target.view(-1)
        for start, stop in self._blocks[piece.parameter]:
            if piece.start <= start < stop <= piece.stop:
                gradients = torch.cat([each[:, start // ins : stop // ins] for _, each in factors])
                block = flat[start - piece.start : stop - piece.start].view(-1, ins)
                multiply(block, gradients, inputs, adds=adds)

    # --- rows of embeddings ----------------------------------------------------------------------

    def is_sparse(self, parameter: int) -> bool:
        """Whether shares hand in rows of a parameter."""
        return self._sparse[parameter]

    @property
    def has_touched(self) -> bool:
        """Whether any share has published rows."""
        return any(kind == _ROWS for found in self._found for _, kind, _ in found)

    def touching(self, parameter: int, within: range) -> list[int]:
        """The shares among ``within`` that have published rows of a parameter."""
        return self._rows_with(_ROWS, parameter, within)

    def height(self, piece: Piece) -> int:
        """Rows of a sparse piece."""
        return (piece.stop - piece.start) // self._spec.tensors[piece.parameter].shape[1]

    def _sum_touched(self, piece: Piece) -> torch.Tensor:
        return sum_of_rows(
            [
                self._touched.within(share, piece.parameter, num_rows, piece)
                for share, _, num_rows in self._found[piece.parameter]
            ]
        )

    def gather(self, pieces: Sequence[Piece], sums: Sequence[torch.Tensor | None]) -> None:
        """Give sparse sums to ``summed``, whose callers need all rows."""
        for piece, total in zip(pieces, sums, strict=True):
            if total is not None and total.is_sparse:
                self.reserve_base(piece.parameter)
                cut = cut_piece(self.base(piece.parameter), piece)
                cut.copy_(total.to_dense().view_as(cut))

    def reserve_base(self, parameter: int) -> None:
        """Take memory for the whole gradient of a sparse parameter."""
        self._memory.reserve_row(self._here.start, parameter)
