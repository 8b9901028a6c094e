"""Bytes of any length that the shares of a batch publish for each other.

They go in the rows that shares offer (``Exchange.offer``): first how many there are, then the bytes
themselves, in as many rows as the longest of them takes. So no rank has to know beforehand how many
there will be, and several hosts see no difference.
"""

from collections.abc import Mapping

import torch

from lockstep.comm.exchange import Exchange

_ELEMENT_BYTES = 8


def gather_bytes(exchange: Exchange, own: Mapping[int, bytes], num_filled: int) -> list[bytes]:
    """What every filled share has published, by share.

    Every rank that has such shares calls it, and every one that ``Exchange.relays`` what others of
    its host are waiting for.

    Args:
        exchange: of this rank.
        own: what the shares of this rank publish.
        num_filled: how many shares have samples.
    """
    lengths = _turn(exchange, {share: _length(one) for share, one in own.items()}, 1, num_filled)
    num_bytes = [int(length) for length in lengths[:, 0].tolist()]
    longest = -(-max(num_bytes) // _ELEMENT_BYTES)
    if not longest:
        return [b""] * num_filled
    rows = {share: _as_row(payload, longest) for share, payload in own.items()}
    turns = []
    for start in range(0, longest, exchange.row_capacity):
        length = min(exchange.row_capacity, longest - start)
        parts = {share: row[start : start + length] for share, row in rows.items()}
        turns.append(_turn(exchange, parts, length, num_filled))
    found = torch.cat(turns, dim=1) if len(turns) > 1 else turns[0]
    return [
        row.view(torch.uint8)[:length].numpy().tobytes()
        for row, length in zip(found, num_bytes, strict=True)
    ]


def _turn(
    exchange: Exchange, rows: Mapping[int, torch.Tensor], length: int, num_filled: int
) -> torch.Tensor:
    last = max(rows, default=0)
    for share, row in sorted(rows.items()):
        exchange.offer(share, row, last=share == last)
    if not rows:
        exchange.offer_nothing(last)
    return exchange.offered(last, length, num_filled)


def _length(payload: bytes) -> torch.Tensor:
    return torch.tensor([len(payload)], dtype=torch.float64)


def _as_row(payload: bytes, length: int) -> torch.Tensor:
    """The bytes as numbers, whatever these mean: they are copied only."""
    padded = bytearray(payload) + bytes(length * _ELEMENT_BYTES - len(payload))
    return torch.frombuffer(padded, dtype=torch.float64)
