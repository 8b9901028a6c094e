"""The exchange: the data that the ranks of a batch share, and their barriers.

On one host it all lies in one region that all ranks map: the board; a line of losses per share; a
mark per rank, whether it has a gradient; rows that shares offer (statistics); the gradients of
every group of parameters; and room for the mail between stages. One rank alone needs no region.

On several hosts each has a region of its own (``comm.collectives.host_exchange``).
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.collectives.gradients import Gradients, GroupGradients, OwnGradients
from lockstep.comm.collectives.late_losses import LateLosses, LateTotal
from lockstep.comm.collectives.overlapped_reduce import OverlappedReduce
from lockstep.comm.collectives.reduce_scatter import ReduceScatter, members_by_domain
from lockstep.comm.collectives.sharded_reduce import ShardedReduce
from lockstep.comm.collectives.shm_gradient_buffer import SharedGradientBuffer
from lockstep.comm.compression.compressed_sums import CompressedSums, Residual
from lockstep.comm.exchange_spec import ExchangeSpec, GroupSpec
from lockstep.comm.shared_memory.shared_region import SharedRegion, dense_stride
from lockstep.comm.shared_memory.status_board import StatusBoard, look_around_of
from lockstep.comm.transport import NoTransport, Transport
from lockstep.comm.transports.process_group import ProcessGroups
from lockstep.errors import ModelError

_TINY = 1e-300


@dataclass(frozen=True)
class ShareTotals:
    """Loss of every filled share: sums over its samples and the weights of these sums.

    Attributes:
        totals: the sums.
        late: the sum of the totals, which replaces them while a device still computes them.
        weights: their weights.
        is_refused: some share could not be computed in the Plan's memory format.
        is_guess: the weight of some share's loss is unknown.
    """

    totals: list[float]
    weights: list[float]
    is_refused: bool = False
    is_guess: bool = False
    late: LateTotal | None = None


class Exchange:
    """One rank's end. Some methods wait for other ranks.

    Args:
        spec: the layout.
        region: what ``spec.create`` has made; None for one rank alone.
        board: the ranks' board, in the region; None for one rank alone.
        rank: this rank.
        ranks_here: those of this host; None for all.
        domains: the ranks that share parameters, of all ranks; None where all do.
        transports: to the ranks of other domains, by the number of the group.
        groups: of torch.distributed, if tensors go over any.
        residuals: of parameters that are compressed, by name.
        device: in whose memory gradients lie; None for memory that ranks share.

    Attributes:
        bounds_gradients: compute ``gradient_bound``.
        gradient_bound: as of ``collect``, at least the norm of the sum of all ranks' gradients;
            infinite if it is unknown, NaN if a gradient has one, 0 if no rank has any.
        rank: this rank.
        gradients: of the groups that this rank holds, by number.
        ranks_here: those of this host.
        residuals: see above.
    """

    bounds_gradients = False
    gradient_bound = math.inf

    def __init__(
        self,
        spec: ExchangeSpec,
        region: SharedRegion | None,
        *,
        board: StatusBoard | None,
        rank: int,
        ranks_here: range | None = None,
        domains: Sequence[range] | None = None,
        transports: Mapping[int, Transport] | None = None,
        groups: ProcessGroups | None = None,
        residuals: Mapping[str, Residual] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.board = board
        self._device = device
        self._groups = groups
        self._spec = spec
        self.rank = rank
        self._region = region
        self.ranks_here = range(spec.num_ranks) if ranks_here is None else ranks_here
        self._domains = [self.ranks_here] if domains is None else domains
        self._domain = next(ranks for ranks in self._domains if rank in ranks)
        self._transports = transports or {}
        self.residuals = residuals or {}
        losses, used, rows, *places = spec.offsets()
        shares = spec.num_shares
        lines = self._tensor(losses, torch.float64, (shares, 4))
        self._losses, self._late_losses = lines.numpy(), LateLosses(lines)
        self._own_shares = spec.shares_of([rank])
        self._bounds = self._tensor(used, torch.float64, (spec.num_ranks,)).numpy()
        self._rows = self._tensor(rows, torch.float64, (2, shares, spec.row_capacity))
        self._gradient_rows = {
            number: self._open_rows(group, offset)
            for number, (group, offset) in enumerate(zip(spec.groups, places, strict=False))
            if group.row_ranks and group.is_held_by(self.ranks_here)
        }
        self.gradients: dict[int, GroupGradients] = {
            number: self._gradients_of(number) if group.row_ranks else OwnGradients()
            for number, group in enumerate(spec.groups)
            if rank in group.ranks
        }
        self._pass = 0
        self._offers = [0] * shares
        self._is_used = False

    def _tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
        if self._region is None:
            return torch.zeros(shape, dtype=dtype)
        stride = dense_stride(torch.empty(shape, device="meta"))
        return self._region.tensor(offset, dtype, shape, stride)

    def _open_rows(self, group: GroupSpec, offset: int) -> SharedGradientBuffer:
        assert self._region is not None
        here, device = group.rows_of(self._domain), self._device
        if not here:  # of a rank that leads no share; it sees the first row of its host
            first = group.rows_of(self.ranks_here).start
            here = range(first, first)
            if group.divisions and device is None:  # its sums must not lie in another's row
                device = torch.device("cpu")
        return SharedGradientBuffer(group.gradients, self._region, offset, here, device)

    def rows_of(self, number: int) -> SharedGradientBuffer:
        """The rows of a group in this host's memory, as this rank sees them."""
        return self._gradient_rows[number]

    def other_view(self, number: int) -> SharedGradientBuffer:
        """Another view of the same, for another thread."""
        return self._open_rows(self._spec.groups[number], self._spec.offsets()[3 + number])

    def _gradients_of(self, number: int) -> GroupGradients:
        rows, group = self._gradient_rows[number], self._spec.groups[number]
        members = members_by_domain(group.ranks, self._domains)
        is_alone = len(members) == 1 and not group.gradients.buckets
        if is_alone or not group.gradients.tensors:  # nothing is sent
            return rows
        assert self.board is not None
        options: dict[str, Any] = {
            "rank": self.rank,
            "domains": members,
            "rows_of": group.rows_of,
            "transport": self._transports.get(number) or NoTransport(),
            "meet_here": self.board.barrier_here,
        }
        if group.compressions:
            residuals = {
                index: self.residuals[tensor.name]
                for index, tensor in enumerate(group.gradients.tensors)
                if group.compressions[index] is not None
            }
            return CompressedSums(
                rows,
                tensors=group.gradients.tensors,
                compressions=group.compressions,
                residuals=residuals,
                **options,
            )
        options["is_everywhere"] = [limit > 0 for limit in group.gradients.row_limits]
        if not (group.gradients.num_buckets or group.gradients.buckets):
            return ReduceScatter(rows, **options)
        options["buckets"] = [extent.bucket for extent in group.gradients.extents]
        options["num_rows"] = len(group.row_ranks)
        if group.gradients.buckets:
            names = [tensor.name for tensor in group.gradients.tensors]
            options["keeps_on_host"] = group.keeps_on_host
            options["keeps_memory"] = group.keeps_memory
            return ShardedReduce(rows, names=names, divisions=group.divisions, **options)
        return OverlappedReduce(rows, **options)

    # --- results of passes -----------------------------------------------------------------------

    def begin_pass(self, num_filled: int = 0) -> None:
        """Begin the next pass over a batch. Every rank calls it, also without shares.

        Args:
            num_filled: of the shares, in a training step.
        """
        self._pass += 1
        self._offers = [0] * len(self._offers)
        self._is_used = False
        self._late_losses.begin(bisect_left(self._own_shares, num_filled))
        if self._groups is not None:
            self.open()
        for gradients in self.gradients.values():
            gradients.begin_pass()

    def open(self) -> None:
        """Make the groups of torch.distributed, if there are any. Every rank calls it."""
        if self._groups is not None:
            self._groups.open()

    def write_loss(
        self,
        share: int,
        total: torch.Tensor | float,
        weight: torch.Tensor | float,
        *,
        is_refused: bool = False,
        is_guess: bool = False,
    ) -> None:
        """Write a share's loss.

        Args:
            share: one of this rank's.
            total: weighted sum of the losses of its samples.
            weight: the sum of their weights. Does not wait for a device that computes it.
            is_refused: see ``ShareTotals``.
            is_guess: likewise.
        """
        self._late_losses.put(share, total, weight)
        self._losses[share, 2:] = is_refused, is_guess

    def write(self, group: int, row: int, gradients: Gradients) -> None:
        """See ``GroupGradients.write``."""
        spec, kept = self._spec.groups[group].gradients, list(gradients)
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                self._is_used = True
                if gradient.is_sparse and not spec.is_sparse(number):
                    kept[number] = gradient.to_dense()
        self.gradients[group].write(row, kept)

    def expect(self, num_filled: int) -> None:
        """A step begins in which so many shares are filled."""
        for number, gradients in self.gradients.items():
            if gradients.is_early:
                gradients.expect(self._spec.groups[number].num_filled_rows(num_filled))

    def arrive(
        self,
        group: int,
        row: int,
        parameter: int,
        gradient: torch.Tensor | None,
        *,
        is_last: bool,
    ) -> None:
        """See ``GroupGradients.arrive``."""
        self._is_used |= gradient is not None
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        self.gradients[group].arrive(row, parameter, gradient, is_last=is_last)

    def write_product(
        self,
        group: int,
        row: int,
        parameter: int,
        inputs: torch.Tensor,
        output_gradients: torch.Tensor,
    ) -> None:
        """See ``GroupGradients.write_product``."""
        self._is_used = True
        self.gradients[group].write_product(row, parameter, inputs, output_gradients)

    def collect(self, num_filled: int, *, needs_totals: bool = True) -> ShareTotals:
        """Wait until all ranks have written their results; returns the filled shares' losses.

        Args:
            num_filled: of the shares.
            needs_totals: before the update; otherwise a rank alone may get them late.
        """
        self._bounds[self.rank] = self._own_bound() if self._is_used else 0.0
        groups = [
            (gradients, self._spec.groups[number].num_filled_rows(num_filled))
            for number, gradients in self.gradients.items()
        ]
        for gradients, num_rows in groups:
            gradients.hand_over(num_rows)
        late = None
        if self._late_losses.coming:
            is_hasty = not needs_totals and self.board is None
            late = self._late_losses.leave(num_filled) if is_hasty else None
            self._late_losses.settle(look_around_of(self.board))
        self._meet()
        for gradients, num_rows in groups:
            gradients.collect(num_rows)
        self.gradient_bound = math.fsum(self._bounds.tolist())
        totals, weights, refused, guessed = self._losses[:num_filled].T.tolist()
        return ShareTotals(totals, weights, any(refused), any(guessed), late)

    def _meet(self) -> None:
        """Wait for all ranks; afterwards their results are visible here."""
        if self.board is not None:
            self.board.barrier()

    def _own_bound(self) -> float:
        """A bound of this rank's gradients, not 0."""
        if not self.bounds_gradients:
            return math.inf
        bound = 0.0
        for gradients in self.gradients.values():
            bound += gradients.bound()
        return bound or _TINY

    # --- waiting ---------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.board is not None:
            self.board.barrier()

    def end_step(self) -> None:
        """Wait until this step's updates are complete on this host.

        Pieces of other domains have arrived already, so their senders are not waited for.
        """
        if self.board is not None:
            self.board.barrier_here()

    def close(self) -> None:
        """End a task. Every rank calls it: none leaves a group while others still receive."""
        for gradients in self.gradients.values():
            gradients.free()
        if self._groups is not None:
            self.barrier()

    def abandon(self) -> None:
        """End a failed task, on the rank that notices the failure."""
        if self._groups is not None:
            self._groups.abandon()

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in shared memory, where it will be overwritten."""
        return self._region is not None and self._region.holds(tensor)

    # --- rows that shares offer ------------------------------------------------------------------

    @property
    def row_capacity(self) -> int:
        """Longest row that a share may offer."""
        return self._spec.row_capacity

    def offer(self, share: int, row: torch.Tensor, *, last: bool) -> None:
        """Publish a share's row (float64); ``last`` says that this rank has no more shares of it.

        Only filled shares offer rows, all of them the same number of times in a pass.
        """
        if len(row) > self._spec.row_capacity:
            raise ModelError(
                "A functional batch_norm has more channels than any BatchNorm layer.",
                received=f"{(len(row) - 2) // 2} channels",
                fix="Use a BatchNorm layer instead.",
            )
        self._offers[share] += 1
        if self._spec.leads(self.rank):
            self._rows[self._offers[share] & 1, share, : len(row)].copy_(row)
        if last and self.board is not None:
            self.board.post(self._tag(share))

    def offer_nothing(self, share: int) -> None:
        """Take part in a turn without a share."""
        self._offers[share] += 1

    def relays(self, num_filled: int) -> bool:
        """Whether this rank fetches the rows of other hosts, even without shares."""
        return False

    def offered(self, share: int, length: int, num_filled: int) -> torch.Tensor:
        """The rows that all filled shares have offered, shape (num_filled, length), by share.

        They are in host memory.

        ``share`` is the caller's; it has offered its own row.
        """
        self._await_offers(share, length, num_filled)
        rows: torch.Tensor = self._rows[self._offers[share] & 1, :num_filled, :length]
        return rows.clone()

    def _await_offers(self, share: int, length: int, num_filled: int) -> None:
        """Wait until all filled shares have offered as many rows as ``share``."""
        self._await_ranks(self._offering_ranks(num_filled), self._tag(share))

    def _offering_ranks(self, num_filled: int) -> list[int]:
        """The ranks that compute the filled shares."""
        first = self._spec.share_ranks[:num_filled]
        ranks = {rank + other for rank in first for other in range(self._spec.ranks_per_share)}
        return sorted(ranks)

    def _await_ranks(self, ranks: Sequence[int], tag: int) -> None:
        if self.board is not None:
            for rank in ranks:
                self.board.wait_for(rank, tag)

    def _tag(self, share: int) -> int:
        """Grows with every pass and, within it, with every row that a share offers."""
        assert self._offers[share] < 1 << 20
        return (self._pass << 20) | self._offers[share]
