"""Sums over memory domains: how gradients of ranks that share no memory become one, piece by piece.

A domain is the ranks that share one copy of the parameters: those of a host, or one rank alone.
Every domain sums the gradients of its own shares, as far as they are subtrees of the tree over all
shares (``plan.program.sum_tree``). Each piece of a parameter is updated by one rank of one domain:
all others send it their sums of that piece, and it adds them up in the same tree. After the update
it sends the piece to all others. Where a domain's shares are one subtree, as powers of two are, it
sends and receives per step 2 (n - 1) / n of the parameters' bytes, for n domains; that is the least
for gradients that are summed, and every connection carries its part at once.

In every other domain a rank has a partner, which sends it that domain's sums of
its pieces and gets its pieces after the update. With as many ranks everywhere, partners have the
same place in their domains; else some ranks are partners of several others.

If a weight's factors are exchanged (``comm.collectives.shm_gradient_buffer``), no domain sends its
gradient at all. Every domain gets the factors of all shares, forms the whole gradient and updates
the whole weight. All multiply blocks of the same sizes, and compute the same bits.

For sparse parameters each domain sends the rows that its shares have touched, share by share, and
the rank that updates them sends the rows that any share has touched.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from lockstep.comm.collectives.gradients import Gradients, GroupGradients, add_up, cut_piece
from lockstep.comm.collectives.shm_gradient_buffer import SharedGradientBuffer
from lockstep.comm.collectives.shm_touched_rows import sum_of_rows
from lockstep.comm.sparse.sparse_rows import SparseRows, exchange_rows
from lockstep.comm.transport import Buffers, Transport
from lockstep.plan.layout import Piece

_Tensors = dict[int, list[torch.Tensor]]


def partner(rank: int, domains: Sequence[Sequence[int]], domain: int) -> int:
    """The rank of another domain that a rank exchanges its pieces with.

    Args:
        rank: whose partner.
        domains: the ranks of each domain that take part.
        domain: the other domain, which has some.
    """
    own = next(ranks for ranks in domains if rank in ranks)
    return domains[domain][own.index(rank) % len(domains[domain])]


def pairs(domains: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """Ranks of different domains that are partners, the lower one first."""
    found = set()
    for ranks in domains:
        for rank in ranks:
            for domain, others in enumerate(domains):
                if others and rank not in others:
                    other = partner(rank, domains, domain)
                    found.add((min(rank, other), max(rank, other)))
    return found


def members_by_domain(ranks: Sequence[int], domains: Sequence[range]) -> list[list[int]]:
    """Some ranks domain by domain, for those that have any."""
    found = ([rank for rank in ranks if rank in own] for own in domains)
    return [own for own in found if own]


class ReduceScatter(GroupGradients):
    """One rank's end.

    Args:
        rows: the gradients of this domain's shares.
        rank: this rank.
        domains: the ranks of each domain that take part, in ascending order over all domains.
        rows_of: the rows of gradients of consecutive ranks of one domain.
        transport: to the ranks of other domains.
        is_everywhere: by parameter, whether every domain updates all of it.
        meet_here: waits for the ranks of this domain.
    """

    def __init__(
        self,
        rows: SharedGradientBuffer,
        *,
        rank: int,
        domains: Sequence[Sequence[int]],
        rows_of: Callable[[Sequence[int]], range],
        transport: Transport,
        is_everywhere: Sequence[bool],
        meet_here: Callable[[], None],
    ) -> None:
        self._rows = rows
        self._meet_here = meet_here
        self._rank = rank
        self._domains = domains
        self._domain = next(domain for domain, ranks in enumerate(domains) if rank in ranks)
        self._rows_of = rows_of
        self._transport = transport
        self._is_everywhere = is_everywhere
        self._others = [
            domain for domain, ranks in enumerate(domains) if ranks and domain != self._domain
        ]
        self._partners = {domain: partner(rank, domains, domain) for domain in self._others}
        self._clients = [
            other
            for domain in self._others
            for other in domains[domain]
            if partner(other, domains, self._domain) == rank
        ]
        self._pieces: Mapping[int, Sequence[Piece]] = {}
        self._touched: dict[Piece, torch.Tensor] = {}  # rows of sparse pieces

    def begin_pass(self) -> None:
        self._rows.begin_pass()

    def write(self, row: int, gradients: Gradients) -> None:
        self._rows.write(row, gradients)

    def write_product(
        self, row: int, parameter: int, inputs: torch.Tensor, output_gradients: torch.Tensor
    ) -> None:
        self._rows.write_product(row, parameter, inputs, output_gradients)

    def bound(self) -> float:
        return self._rows.bound()

    def places(self, row: int) -> Sequence[torch.Tensor] | None:
        return self._rows.places(row)

    def weigh(self, factors: Sequence[float] | None) -> None:
        self._rows.weigh(factors)

    def collect(self, num_rows: int) -> None:
        self._rows.collect(num_rows)

    def divide(self, pieces: Mapping[int, Sequence[Piece]]) -> None:
        self._pieces = pieces

    @torch.no_grad()
    def reduce_scatter(self, pieces: Sequence[Piece]) -> list[torch.Tensor | None]:
        sends, receives, partials = self._partial_sums(pieces)
        if any(self._is_everywhere):
            self._add_factors(sends, receives)
        self._transport.transfer(sends, receives)
        if any(self._is_everywhere):
            self._meet_here()  # for the factors that other ranks have received
        results = self._totals(pieces, [partials[index] for index in range(len(pieces))])
        self._rows.add_products(pieces, results)
        if self._rows.has_touched:
            self._sum_touched(pieces, results)
        return results

    def summed(self, parameter: int) -> torch.Tensor | None:
        return self._rows.base(parameter) if self._rows.is_used(parameter) else None

    def _partial_sums(
        self, pieces: Sequence[Piece]
    ) -> tuple[_Tensors, _Tensors, dict[int, dict[int, torch.Tensor]]]:
        """The gradients to send and receive; and by piece, the sums of all domains' subtrees.

        Sums are formed in place, but for those of a weight that all domains update: others may form
        the same at this moment.
        """
        sends: _Tensors = defaultdict(list)
        receives: _Tensors = defaultdict(list)
        partials: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        self._sum_in_place(pieces)
        for client in self._clients:
            self._sum_in_place(self._exchanged(client))
            for piece in self._exchanged(client):
                sends[client] += self._own_sums(piece).values()
        for index, piece in enumerate(pieces):
            partials[index].update(self._own_sums(piece))
            for domain in self._others:
                rows_there = self._rows_of(self._domains[domain])
                for first, *_ in self._rows.subtree_rows(piece.parameter, rows_there):
                    partials[index][first] = torch.empty_like(self._rows.target(piece))
                    receives[self._partners[domain]].append(partials[index][first])
        return sends, receives, partials

    def _exchanged(self, rank: int) -> Sequence[Piece]:
        """The pieces of a rank whose gradients are exchanged in ``reduce_scatter``."""
        return self._pieces[rank]

    def _sum_in_place(self, pieces: Sequence[Piece]) -> None:
        self._rows.sum_rows([one for one in pieces if not self._is_everywhere[one.parameter]])

    def _own_sums(self, piece: Piece) -> dict[int, torch.Tensor]:
        if self._is_everywhere[piece.parameter]:
            return self._rows.subtree_sums_apart(piece)
        return self._rows.subtree_sums(piece)

    def _totals(
        self, pieces: Sequence[Piece], partials: Sequence[Mapping[int, torch.Tensor]]
    ) -> list[torch.Tensor | None]:
        """The sums over all domains' subtrees of pieces."""
        sums = iter(add_up([each for each in partials if each]))
        totals = [
            next(sums) if each else self._rows.target(piece)  # products lie there
            for piece, each in zip(pieces, partials, strict=True)
        ]
        return [
            total if self._rows.is_used(piece.parameter) else None
            for piece, total in zip(pieces, totals, strict=True)
        ]

    def _add_factors(self, sends: _Tensors, receives: _Tensors) -> None:
        """Send the factors that shares have published to all domains, rank by rank."""
        own = [each for pair in self._factors_of(self._rank) for each in pair]
        for peer in self._partners.values():
            sends[peer] += own
        for client in self._clients:
            self._rows.make_room(self._rows_of([client]))
            receives[client] += [each for pair in self._factors_of(client) for each in pair]

    def _factors_of(self, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self._rows.published_factors(self._rows_of([rank]))

    # --- rows of embeddings ----------------------------------------------------------------------

    def _sum_touched(self, pieces: Sequence[Piece], results: list[torch.Tensor | None]) -> None:
        """Put the sums of sparse pieces into ``results``: those of all domains' shares."""
        own = {piece: index for index, piece in enumerate(pieces) if self._is_touched(piece)}
        come = exchange_rows(
            self._transport,
            {
                client: [rows for piece in self._pieces[client] for rows in self._published(piece)]
                for client in self._clients
            },
            {
                self._partners[domain]: [
                    self._rows.base(piece.parameter)
                    for piece in own
                    for _ in self._rows.touching(piece.parameter, self._rows_there(domain))
                ]
                for domain in self._others
            },
        )
        for piece, index in own.items():
            found = dict(self._own_touched(piece))
            for domain in self._others:
                for row in self._rows.touching(piece.parameter, self._rows_there(domain)):
                    rows = next(come[self._partners[domain]])
                    found[row] = rows.as_gradient(self._rows.height(piece))
            total = sum_of_rows([found[row] for row in sorted(found)])
            results[index], self._touched[piece] = total, total.indices()[0]

    def _rows_there(self, domain: int) -> range:
        return self._rows_of(self._domains[domain])

    def _is_touched(self, piece: Piece) -> bool:
        return self._rows.is_sparse(piece.parameter) and self._rows.is_used(piece.parameter)

    def _own_touched(self, piece: Piece) -> Iterable[tuple[int, torch.Tensor]]:
        """The rows of a sparse piece that this domain's shares have touched, by gradient row."""
        here = self._rows_there(self._domain)
        for row in self._rows.touching(piece.parameter, here) if self._is_touched(piece) else ():
            gradient = self._rows.published(row, piece)
            assert gradient is not None
            yield row, gradient

    def _published(self, piece: Piece) -> Iterable[SparseRows]:
        return (SparseRows.of_gradient(each) for _, each in self._own_touched(piece))

    def _all_gather_touched(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Bring the touched rows of sparse pieces to all domains."""

        def by_rows(piece: Piece) -> torch.Tensor:
            tensor = tensors[piece.parameter]
            return cut_piece(tensor, piece).view(-1, tensor.shape[1])

        own = [
            SparseRows(self._touched[piece], by_rows(piece)[self._touched[piece]])
            for piece in filter(self._is_touched, self._pieces[self._rank])
        ]
        theirs = {
            client: list(map(by_rows, filter(self._is_touched, self._pieces[client])))
            for client in self._clients
        }
        peers = self._partners.values()
        come = exchange_rows(self._transport, dict.fromkeys(peers, own), theirs)
        for client, places in theirs.items():
            for place, rows in zip(places, come[client], strict=True):
                place[rows.numbers] = rows.values

    # --- what is updated -------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self, pieces: Sequence[Piece], sums: Sequence[torch.Tensor | None]) -> None:
        # Into the base rows, which hold whole sums once all ranks have done this.
        used = [number for number in range(len(self._is_everywhere)) if self._rows.is_used(number)]
        wholes = {number: self._rows.base(number) for number in used}
        for number in filter(self._rows.is_sparse, used):
            self._rows.reserve_base(number)
        self._rows.gather(pieces, sums)
        for piece, total in zip(pieces, sums, strict=True):
            if total is not None and not total.is_sparse:
                cut_piece(wholes[piece.parameter], piece).copy_(total)
        self.all_gather(wholes, all_pieces=True)

    def all_gather(self, tensors: Mapping[int, torch.Tensor], *, all_pieces: bool) -> None:
        if self._rows.has_touched and not all_pieces:
            self._all_gather_touched(tensors)
        self._move(*self.pieces_to_move(tensors, all_pieces=all_pieces))

    def pieces_to_move(
        self, tensors: Mapping[int, torch.Tensor], *, all_pieces: bool
    ) -> tuple[Buffers, Buffers]:
        """What this rank sends in ``all_gather``, and where it receives."""

        def pieces_of(rank: int) -> Iterable[torch.Tensor]:
            for piece in self._pieces[rank]:
                number = piece.parameter
                is_dense = not self._rows.is_sparse(number)
                is_changed = all_pieces or (self._rows.is_used(number) and is_dense)
                if number in tensors and is_changed and not self._is_everywhere[number]:
                    yield cut_piece(tensors[number], piece)

        own = list(pieces_of(self._rank))
        return (
            dict.fromkeys(self._partners.values(), own),
            {client: list(pieces_of(client)) for client in self._clients},
        )

    def _move(self, sends: Buffers, receives: Buffers) -> None:
        """Transfer pieces of tensors that have a store of their own in every domain."""
        self._transport.transfer(sends, receives)
