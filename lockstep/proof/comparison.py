"""Comparing a step of Lockstep's with the reference's, tensor by tensor. Pure functions.

The measure: two tensors agree when ‖a - b‖ <= 1e-12 * max(‖b‖, S), with b the reference's and S the
norm of all tensors of that kind together: the gradients, the parameters, each slot of the
optimizer. Rounding in float64 is near 1e-16 of the numbers that were summed, and these are of the
order of S, not of a single tensor that happened to come out small. What is no floating number must
be equal; so must be infinities; NaN equals nothing.

- Of buffers, S counts those that training has changed: a large constant must not excuse the others.
- A loss is compared with max(|b|, 1): near zero a logarithmic loss is the difference of numbers of
  order 1. A loss that is wrong on a smaller scale than that has wrong gradients, where S has no
  such floor.
- Parameters and buffers are compared as every rank has them, under every name that they have.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.proof.reference import Gradients, Record
from lockstep.train.tasks import Snapshot

TOLERANCE = 1e-12

# A gradient below this part of S is rounding: 1e-16, times what summing many terms adds to it.
ROUNDING = 1e-13

LOSS, GRADIENT, SLOT, PARAMETER, BUFFER = "loss", "gradient", "slot", "parameter", "buffer"
KINDS = (LOSS, GRADIENT, SLOT, PARAMETER, BUFFER)  # in the order in which a fault spreads


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One tensor of one step, compared.

    Attributes:
        kind: one of ``KINDS``.
        name: of the parameter or buffer, with the slot's name behind it; empty for the loss.
        rank: whose tensor it is; None for what the ranks have together.
        step: from 0.
        relative: ‖a - b‖ / max(‖b‖, S); infinite where no number can say it.
        remark: what is wrong, where it is not a matter of size.
    """

    kind: str
    name: str
    rank: int | None
    step: int
    relative: float
    remark: str = ""

    @property
    def agrees(self) -> bool:
        """Whether it is within the measure."""
        return self.relative <= TOLERANCE

    @property
    def place(self) -> str:
        """``head.weight, rank 1, step 3``."""
        rank = None if self.rank is None else f"rank {self.rank}"
        return ", ".join(part for part in (self.name, rank, f"step {self.step}") if part)

    def __str__(self) -> str:
        figure = self.remark or f"relative {self.relative:.1e}"
        comma = " " if self.name else ", "
        return f"{self.kind}{comma}{self.place}: {figure}"


def compare_step(snapshot: Snapshot, record: Record) -> list[Comparison]:
    """Compare everything that a step left behind."""
    return [
        _compare_loss(snapshot, record),
        *_compare_gradients(snapshot, record),
        *_compare_slots(snapshot, record),
        *_compare_states(snapshot, record),
    ]


def rounding_mask(ours: torch.Tensor, theirs: torch.Tensor, scale: float) -> torch.Tensor:
    """Elements of a gradient that are nothing but rounding on both sides, and disagree.

    Zero in exact arithmetic, such a gradient (a bias before a normalisation, the bias of attention
    keys) has no digit that could be right. An optimizer that divides by the gradient's size turns
    it into full steps all the same.

    Args:
        ours: a gradient of the reference.
        theirs: the same of Lockstep.
        scale: norm of all gradients of the reference.
    """
    small = (ours.abs() <= ROUNDING * scale) & (theirs.abs() <= ROUNDING * scale)
    return small & ((ours - theirs).abs() > TOLERANCE * ours.abs())


def norm_of(tensors: Iterable[torch.Tensor | None]) -> float:
    """Norm of all finite elements of all tensors together."""
    return math.sqrt(
        sum(
            tensor.double().where(tensor.isfinite(), 0.0).pow(2).sum().item()
            for tensor in tensors
            if tensor is not None
        )
    )


# --- kind by kind -------------------------------------------------------------------------------


def _compare_loss(snapshot: Snapshot, record: Record) -> Comparison:
    relative, remark = 0.0, ""
    if (record.loss is None) != (snapshot.weight == 0):
        relative, remark = math.inf, _presence("an update", snapshot.weight != 0)
    elif record.loss is not None:
        relative = abs(snapshot.loss - record.loss) / max(abs(record.loss), 1.0)
        if not math.isfinite(relative):
            relative, remark = math.inf, f"{snapshot.loss} instead of {record.loss}"
    return Comparison(
        kind=LOSS, name="", rank=None, step=record.step, relative=relative, remark=remark
    )


def _compare_gradients(snapshot: Snapshot, record: Record) -> Iterator[Comparison]:
    if record.loss is None or snapshot.weight == 0:
        return
    scale = norm_of(record.gradients.values())
    for name in _all_names(snapshot.gradients, record.gradients):
        yield _compare(
            GRADIENT,
            name,
            None,
            record.step,
            snapshot.gradients.get(name),
            record.gradients.get(name),
            scale,
        )


def _compare_states(snapshot: Snapshot, record: Record) -> Iterator[Comparison]:
    scales = {
        PARAMETER: norm_of(_floating(record.state, record.state.keys() - record.buffers)),
        BUFFER: norm_of(_floating(record.state, record.moved_buffers)),
    }
    for rank, state in enumerate(snapshot.states):
        for name in _all_names(state, record.state):
            kind = BUFFER if name in record.buffers else PARAMETER
            ours, theirs = record.state.get(name), state.get(name)
            yield _compare(kind, name, rank, record.step, theirs, ours, scales[kind])


def _compare_slots(snapshot: Snapshot, record: Record) -> Iterator[Comparison]:
    scales = _slot_scales(record.slots)
    found = _PiecesBySlot(snapshot)
    for name, slots in record.slots.items():
        for slot, ours in slots.items():
            for theirs in found.take(name, slot, ours):
                label = f"{name} {slot}"
                yield _compare(SLOT, label, None, record.step, theirs, ours, scales[slot])
    for name, slot in found.left():
        yield _compare(SLOT, f"{name} {slot}", None, record.step, torch.zeros(()), None, 0.0)


def _slot_scales(slots: dict[str, dict[str, Any]]) -> dict[str, float]:
    names = {slot for values in slots.values() for slot in values}
    return {
        slot: norm_of(
            torch.as_tensor(values[slot])
            for values in slots.values()
            if isinstance(values.get(slot), torch.Tensor | float | int)
        )
        for slot in names
    }


class _PiecesBySlot:
    """The optimizer's slots as the ranks hold them, each a piece of some parameters."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._pieces: dict[tuple[str, str], list[tuple[int, int, Any]]] = {}
        for part in snapshot.slots:
            for slot, value in part.slots.items():
                found = self._pieces.setdefault((part.name, slot), [])
                found.append((part.start, part.stop, value))

    def take(self, name: str, slot: str, like: Any) -> list[Any]:
        """One whole slot put together from its pieces, or what every piece has of its own (a step
        count); [None] where no rank has any.
        """
        pieces = self._pieces.pop((name, slot), [])
        if not pieces or not isinstance(like, torch.Tensor):
            return [value for _, _, value in pieces] or [None]
        if all(isinstance(value, torch.Tensor) and value.shape == like.shape
               for _, _, value in pieces):
            return [value for _, _, value in pieces]
        # What no rank has stays NaN, which is a difference.
        whole = torch.full(like.shape, math.nan, dtype=torch.float64)
        flat = _in_memory_order(whole, like)
        for start, stop, value in pieces:
            flat[start:stop] = value
        return [_from_memory_order(flat, like)]

    def left(self) -> list[tuple[str, str]]:
        """Slots that nobody has asked for."""
        return list(self._pieces)
