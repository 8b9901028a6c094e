"""Compares a step of Lockstep with the same step of the reference, tensor by tensor.

Two tensors agree if ‖a - b‖ <= 1e-12 * max(‖b‖, S), with b the reference's and S the norm of all
tensors of that kind together: the gradients, the parameters, each slot of the optimizer. Rounding
in float64 is near 1e-16 of the numbers that were summed; these are of the order of S, not of a
single small tensor. Integers, booleans and infinities must be equal; NaN equals nothing.

- For buffers, S counts only those that training changed: a large constant must not hide the others.
- A loss is compared with max(|b|, 1): near zero a logarithmic loss is the difference of numbers of
  order 1. A loss that is wrong on a smaller scale has wrong gradients, where S has no such floor.
- Parameters and buffers are compared on every rank, under each of their names.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.parallel.updater_interface import PieceSlots
from lockstep.proof.reference import Record
from lockstep.train.callbacks.driver import Snapshot

TOLERANCE = 1e-12

# A gradient below this part of S is rounding: 1e-16 times a factor for sums of many terms.
ROUNDING = 1e-13

LOSS, GRADIENT, SLOT, PARAMETER, BUFFER = "loss", "gradient", "slot", "parameter", "buffer"
KINDS = (LOSS, GRADIENT, SLOT, PARAMETER, BUFFER)  # in the order in which a fault spreads


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of one tensor in one step.

    Attributes:
        kind: one of ``KINDS``.
        name: of the parameter or buffer, followed by the slot's name; empty for the loss.
        rank: the tensor's rank; None for values that the ranks have together.
        step: from 0.
        relative: ‖a - b‖ / max(‖b‖, S); infinite if the tensors cannot be subtracted.
        remark: the difference in words, if it is not one of size.
        tolerance: the largest ``relative`` that agrees.
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
        """True if it is within the tolerance."""
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
    """Compare all results of a step with one record for all ranks."""
    return compare_replicas(snapshot, [record] * len(snapshot.states))


def compare_replicas(snapshot: Snapshot, records: Sequence[Record]) -> list[Comparison]:
    """Compare all results of a step with a record for each rank."""
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


def distance(actual: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> float:
    """The relative difference of two tensors; infinite if they cannot be subtracted."""
    return _measure(actual, expected, scale)[0]


def rounding_mask(expected: torch.Tensor, actual: torch.Tensor, scale: float) -> torch.Tensor:
    """Elements of a gradient that are only rounding on both sides, and disagree.

    Such a gradient is zero in exact arithmetic (a bias before a normalisation, the bias of
    attention keys), so none of its digits is right. An optimizer that divides by the gradient's
    size still turns it into full steps.

    Args:
        expected: a gradient of the reference.
        actual: the same of Lockstep.
        scale: norm of all gradients of the reference.
    """
    small = (expected.abs() <= ROUNDING * scale) & (actual.abs() <= ROUNDING * scale)
    return small & ((expected - actual).abs() > TOLERANCE * expected.abs())


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
            expected, actual = record.state.get(name), state.get(name)
            yield _compare(kind, name, rank, record.step, actual, expected, scales[kind])
    if snapshot.is_divided:
        yield from _compare_left_out(snapshot, records[0])


def _scales_of_state(record: Record) -> dict[str, float]:
    return {
        PARAMETER: norm_of(_floating(record.state, record.parameters)),
        BUFFER: norm_of(_floating(record.state, record.moved_buffers)),
    }


def _compare_left_out(snapshot: Snapshot, record: Record) -> Iterator[Comparison]:
    """Compare the tensors of the reference that no rank has."""
    scales = _scales_of_state(record)
    found = {name for state in snapshot.states for name in state}
    for name in sorted(record.state.keys() - found):
        kind = BUFFER if name in record.buffers else PARAMETER
        yield _compare(kind, name, None, record.step, None, record.state[name], scales[kind])


def _compare_slots(snapshot: Snapshot, record: Record) -> Iterator[Comparison]:
    pieces = _pieces_by_slot(snapshot)
    scales = _slot_scales(record.slots)
    for name, slots in record.slots.items():
        for slot, expected in slots.items():
            found = pieces.pop((name, slot), [])
            if not (found or record.state[name].numel()):
                continue  # no rank steps on a parameter without elements
            for actual, same in _aligned(found, expected, record.state[name]):
                yield _compare(
                    SLOT, f"{name} {slot}", None, record.step, actual, same, scales[slot]
                )
    for (name, slot), found in pieces.items():  # slots that the reference does not have
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


def _aligned(
    pieces: list[_Piece], expected: Any, parameter: torch.Tensor
) -> Iterator[tuple[Any, Any]]:
    """Pairs to compare: the whole slot, or each piece's own value (a step count)."""
    if not pieces:
        yield None, expected
    elif all(_shape_of(piece.value) == _shape_of(expected) for piece in pieces):
        for piece in pieces:
            yield piece.value, expected
    elif isinstance(expected, torch.Tensor) and expected.shape == parameter.shape:
        yield _assembled(pieces, expected), _in_memory_order(expected, parameter)
    else:
        yield pieces[0].value, expected


def _assembled(pieces: list[_Piece], expected: torch.Tensor) -> torch.Tensor:
    """One flat tensor of all pieces; NaN, which equals nothing, where no rank has a piece."""
    dtype = torch.complex128 if expected.is_complex() else torch.float64
    whole = torch.full((expected.numel(),), math.nan, dtype=dtype)
    for piece in pieces:
        if _shape_of(piece.value) == (piece.stop - piece.start,):
            whole[piece.start : piece.stop] = piece.value
    return whole


def _in_memory_order(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Elements in the parameter's memory order, along which pieces are cut."""
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
    kind: str, name: str, rank: int | None, step: int, actual: Any, expected: Any, scale: float
) -> Comparison:
    relative, remark = _measure(actual, expected, scale)
    return Comparison(kind=kind, name=name, rank=rank, step=step, relative=relative, remark=remark)


def _measure(actual: Any, expected: Any, scale: float) -> tuple[float, str]:
    """The relative difference, and the difference in words if it is not one of size."""
    if expected is None or actual is None:
        return (0.0, "") if expected is actual else (math.inf, _presence("one", actual is not None))
    if not (_is_numeric(expected) and _is_numeric(actual)):
        return (
            (0.0, "") if expected == actual else (math.inf, f"{actual!r} instead of {expected!r}")
        )
    actual, expected = _tensor(actual), _tensor(expected)
    if actual.shape != expected.shape:
        return math.inf, f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if not (expected.is_floating_point() or expected.is_complex()):
        differing = int((actual != expected).sum())
        return (math.inf, f"{differing} of {expected.numel()} differ") if differing else (0.0, "")
    if actual.dtype == expected.dtype and actual.equal(expected):
        return 0.0, ""
    distance = (actual - expected).abs().double().where(actual != expected, 0.0)
    difference = torch.linalg.vector_norm(distance).item()
    if not math.isfinite(difference):
        return math.inf, f"{int((~distance.isfinite()).sum())} of {expected.numel()} not finite"
    if difference == 0:
        return 0.0, ""
    largest = max(norm_of([expected.abs()]), scale)
    return (difference / largest, "") if largest else (math.inf, "not zero")


def _presence(what: str, actual: bool) -> str:
    return f"{what} where the reference has none" if actual else f"none, the reference has {what}"


def _shape_of(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _is_numeric(value: Any) -> bool:
    return isinstance(value, torch.Tensor | float | int)


def _tensor(value: torch.Tensor | float) -> torch.Tensor:
    """A tensor on the CPU; a Python float becomes float64."""
    dtype = torch.float64 if isinstance(value, float) else None
    return torch.as_tensor(value, dtype=dtype).detach().cpu()


def _floating(state: dict[str, torch.Tensor], names: Iterable[str]) -> list[torch.Tensor]:
    tensors = [state[name] for name in names if name in state]
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


def _all_names(actual: Iterable[str], expected: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*expected, *actual]))
