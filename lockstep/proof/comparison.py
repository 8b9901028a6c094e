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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.parallel.update import PieceSlots
from lockstep.proof.reference import Record
from lockstep.train.callbacks.driver import Snapshot

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
        tolerance: the measure.
    """

    kind: str
    name: str
    rank: int | None
    step: int
    relative: float
    remark: str = ""
    tolerance: float = TOLERANCE

    @property
    def agrees(self) -> bool:
        """Whether it is within the measure."""
        return self.relative <= self.tolerance

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
    """Compare everything that a step left behind on ranks that are alike."""
    return compare_replicas(snapshot, [record] * len(snapshot.states))


def compare_replicas(snapshot: Snapshot, records: Sequence[Record]) -> list[Comparison]:
    """Compare everything that a step left behind, with a record for each rank."""
    first = records[0]
    return [
        _compare_loss(snapshot, first),
        *_compare_gradients(snapshot, first),
        *_compare_slots(snapshot, first),
        *compare_states(snapshot, records),
    ]


def compare_records(other: Record, record: Record) -> list[Comparison]:
    """Compare two runs of the reference."""
    slots = [
        PieceSlots(name=name, start=0, stop=record.state[name].numel(), slots=slots)
        for name, slots in other.slots.items()
    ]
    snapshot = Snapshot(
        step=other.step,
        loss=math.nan if other.loss is None else other.loss,
        weight=float(other.loss is not None),
        gradients=other.gradients,
        states=[other.state],
        slots=slots,
    )
    return compare_step(snapshot, record)


def distance(theirs: torch.Tensor, ours: torch.Tensor, scale: float = 0.0) -> float:
    """How far apart two tensors are, by the measure; infinite where no number can say it."""
    return _measure(theirs, ours, scale)[0]


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
            _magnitude(tensor).where(tensor.isfinite(), 0.0).pow(2).sum().item()
            for tensor in tensors
            if tensor is not None
        )
    )


def _magnitude(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.abs() if tensor.is_complex() else tensor).double()


# --- kind by kind -------------------------------------------------------------------------------


def _compare_loss(snapshot: Snapshot, record: Record) -> Comparison:
    relative, remark = 0.0, ""
    if snapshot.step != record.step:
        relative, remark = math.inf, f"Lockstep has it as step {snapshot.step}"
    elif (record.loss is None) != (snapshot.weight == 0):
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


def compare_states(snapshot: Snapshot, records: Sequence[Record]) -> Iterator[Comparison]:
    """Compare parameters and buffers of each rank with those of its record."""
    for rank, (state, record) in enumerate(zip(snapshot.states, records, strict=True)):
        scales = _scales_of_state(record)
        for name in state if snapshot.is_divided else _all_names(state, record.state):
            kind = BUFFER if name in record.buffers else PARAMETER
            ours, theirs = record.state.get(name), state.get(name)
            yield _compare(kind, name, rank, record.step, theirs, ours, scales[kind])
    if snapshot.is_divided:
        yield from _compare_left_out(snapshot, records[0])


def _scales_of_state(record: Record) -> dict[str, float]:
    return {
        PARAMETER: norm_of(_floating(record.state, record.parameters)),
        BUFFER: norm_of(_floating(record.state, record.moved_buffers)),
    }


def _compare_left_out(snapshot: Snapshot, record: Record) -> Iterator[Comparison]:
    """What no rank has."""
    scales = _scales_of_state(record)
    found = {name for state in snapshot.states for name in state}
    for name in sorted(record.state.keys() - found):
        kind = BUFFER if name in record.buffers else PARAMETER
        yield _compare(kind, name, None, record.step, None, record.state[name], scales[kind])


def _compare_slots(snapshot: Snapshot, record: Record) -> Iterator[Comparison]:
    pieces = _pieces_by_slot(snapshot)
    scales = _slot_scales(record.slots)
    for name, slots in record.slots.items():
        for slot, ours in slots.items():
            found = pieces.pop((name, slot), [])
            if not (found or record.state[name].numel()):
                continue  # no rank steps on a parameter without elements
            for theirs, same in _aligned(found, ours, record.state[name]):
                yield _compare(
                    SLOT, f"{name} {slot}", None, record.step, theirs, same, scales[slot]
                )
    for (name, slot), found in pieces.items():  # what the reference does not have
        yield _compare(SLOT, f"{name} {slot}", None, record.step, found[0].value, None, 0.0)


# --- slots: the ranks hold pieces of them -------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    start: int
    stop: int
    value: Any


def _pieces_by_slot(snapshot: Snapshot) -> dict[tuple[str, str], list[_Piece]]:
    pieces: dict[tuple[str, str], list[_Piece]] = {}
    for part in snapshot.slots:
        for slot, value in part.slots.items():
            pieces.setdefault((part.name, slot), []).append(_Piece(part.start, part.stop, value))
    return pieces


def _aligned(pieces: list[_Piece], ours: Any, parameter: torch.Tensor) -> Iterator[tuple[Any, Any]]:
    """Pairs to compare: the whole slot, or what each piece has of its own (a step count)."""
    if not pieces:
        yield None, ours
    elif all(_shape_of(piece.value) == _shape_of(ours) for piece in pieces):
        for piece in pieces:
            yield piece.value, ours
    elif isinstance(ours, torch.Tensor) and ours.shape == parameter.shape:
        yield _assembled(pieces, ours), _in_memory_order(ours, parameter)
    else:
        yield pieces[0].value, ours


def _assembled(pieces: list[_Piece], ours: torch.Tensor) -> torch.Tensor:
    """One flat tensor from pieces; what no rank has is NaN, which equals nothing."""
    dtype = torch.complex128 if ours.is_complex() else torch.float64
    whole = torch.full((ours.numel(),), math.nan, dtype=dtype)
    for piece in pieces:
        if _shape_of(piece.value) == (piece.stop - piece.start,):
            whole[piece.start : piece.stop] = piece.value
    return whole


def _in_memory_order(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Elements in the order in which the parameter's lie in memory: pieces are cut along it."""
    strides = parameter.stride()
    dims = sorted(range(parameter.dim()), key=lambda dim: strides[dim], reverse=True)
    return value.permute(dims).flatten()


def _slot_scales(slots: dict[str, dict[str, Any]]) -> dict[str, float]:
    by_slot: dict[str, list[torch.Tensor]] = {}
    for values in slots.values():
        for slot, value in values.items():
            numbers = [_tensor(value)] if _is_numeric(value) else []
            by_slot.setdefault(slot, []).extend(numbers)
    return {slot: norm_of(values) for slot, values in by_slot.items()}


# --- one tensor ---------------------------------------------------------------------------------


def _compare(
    kind: str, name: str, rank: int | None, step: int, theirs: Any, ours: Any, scale: float
) -> Comparison:
    relative, remark = _measure(theirs, ours, scale)
    return Comparison(kind=kind, name=name, rank=rank, step=step, relative=relative, remark=remark)


def _measure(theirs: Any, ours: Any, scale: float) -> tuple[float, str]:
    """How far apart, and what is wrong where no number says it."""
    if ours is None or theirs is None:
        return (0.0, "") if ours is theirs else (math.inf, _presence("one", theirs is not None))
    if not (_is_numeric(ours) and _is_numeric(theirs)):
        return (0.0, "") if ours == theirs else (math.inf, f"{theirs!r} instead of {ours!r}")
    theirs, ours = _tensor(theirs), _tensor(ours)
    if theirs.shape != ours.shape:
        return math.inf, f"shape {tuple(theirs.shape)} instead of {tuple(ours.shape)}"
    if not (ours.is_floating_point() or ours.is_complex()):
        differing = int((theirs != ours).sum())
        return (math.inf, f"{differing} of {ours.numel()} differ") if differing else (0.0, "")
    if theirs.dtype == ours.dtype and theirs.equal(ours):
        return 0.0, ""
    distance = (theirs - ours).abs().double().where(theirs != ours, 0.0)
    difference = torch.linalg.vector_norm(distance).item()
    if not math.isfinite(difference):
        return math.inf, f"{int((~distance.isfinite()).sum())} of {ours.numel()} not finite"
    if difference == 0:
        return 0.0, ""
    largest = max(norm_of([ours.abs()]), scale)
    return (difference / largest, "") if largest else (math.inf, "not zero")


def _presence(what: str, theirs: bool) -> str:
    return f"{what} where the reference has none" if theirs else f"none, the reference has {what}"


def _shape_of(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _is_numeric(value: Any) -> bool:
    return isinstance(value, torch.Tensor | float | int)


def _tensor(value: torch.Tensor | float) -> torch.Tensor:
    """A tensor on the host; a number keeps its digits."""
    dtype = torch.float64 if isinstance(value, float) else None
    return torch.as_tensor(value, dtype=dtype).detach().cpu()


def _floating(state: dict[str, torch.Tensor], names: Iterable[str]) -> list[torch.Tensor]:
    tensors = [state[name] for name in names if name in state]
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


def _all_names(theirs: Iterable[str], ours: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*ours, *theirs]))
