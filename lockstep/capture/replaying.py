"""Verifies traces against their models: replays them, watches values, compares the results."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.capture.instruction_log import Record, UntraceableError
from lockstep.capture.instructions import (
    GetAttribute,
    Input,
    Instruction,
    attributes_of,
    parts_of,
    references,
    run_instruction,
)
from lockstep.capture.recording import storage_of
from lockstep.capture.seeding import gradients_of, seeded
from lockstep.data.order import torch_streams
from lockstep.data.trees import Tree, map_tensors, tensors_of

# Tolerance for gradients: the check is for missing ones.
_GRADIENT_TOLERANCE = 1e-3

# Tolerance for outputs, over their norm, if the same is computed in another way. Many models in
# float64 have their masks and softmax in float32.
_ROUNDING = 1e-4
_COARSE_ROUNDING = 0.05  # of 16 bits

# Escape sequences for bold or coloured text in terminals.
_COLOURS = re.compile("\x1b\\[[0-9;]*m")

# Keras's prefix to an error that a layer has raised.
_KERAS_BEGINS = "Exception encountered when calling"


class MismatchError(Exception):
    """A trace and its model behave differently.

    Args:
        path: of the module to blame.
        reason: in one line.
        inside: the culprit in there, see ``InstructionLog``.
        looks_at_values: Python code looks at values, but might not under ``is_compiling()``.
    """

    def __init__(
        self, path: str, reason: str, *, inside: str = "", looks_at_values: bool = False
    ) -> None:
        super().__init__(path, reason)
        self.looks_at_values = looks_at_values
        self.path = path
        self.reason = f"{inside}: {reason}" if inside else reason


class Replay:
    """Runs a trace and watches its values.

    Args:
        model: the model.
        instructions: of the trace.
        records: of each instruction.

    Attributes:
        changes: pairs (instruction that made a tensor, one of another layer that changes it in
            place, or may see it changed).
        rewritten: pairs (value, instruction that changes it in place, also through a view).
    """

    def __init__(
        self, model: nn.Module, instructions: Sequence[Instruction], records: Sequence[Record]
    ) -> None:
        self._model = model
        self._instructions = instructions
        self._records = records
        self._values: list[Any] = []
        self.changes: set[tuple[int, int]] = set()
        self.rewritten: set[tuple[int, int]] = set()

    def __call__(self, inputs: Tree) -> Any:
        """The outputs."""
        values: list[Any] = []
        self._values = values
        makers: dict[int, int] = {}  # by storage
        holders: dict[int, set[int]] = defaultdict(set)  # values that lie in a storage
        changed: set[int] = set()
        for number, instruction in enumerate(self._instructions):
            used = [*tensors_of([values[index] for index in references(instruction)])]
            versions = [tensor._version for tensor in used]
            try:
                value = run_instruction(instruction, self._model, values.__getitem__, inputs)
            except Exception as error:
                record = self._records[number]
                raise MismatchError(record.scope, one_line(error), inside=record.inside) from error
            values.append(value)
            for tensor, version in zip(used, versions, strict=True):
                storage = storage_of(tensor)
                if tensor._version != version:
                    changed.add(storage)
                    self.rewritten |= {(value_in_it, number) for value_in_it in holders[storage]}
                elif storage not in changed or not self._is_everywhere(makers[storage]):
                    continue
                self._note_change(makers[storage], number)
            for tensor in tensors_of(value):
                makers.setdefault(storage_of(tensor), number)
                holders[storage_of(tensor)].add(number)
        return values[-1]

    def _is_everywhere(self, maker: int) -> bool:
        """Inputs and buffers are read anew by every process that uses them."""
        return isinstance(self._instructions[maker], Input | GetAttribute)

    def _note_change(self, maker: int, changer: int) -> None:
        if self._instructions[maker].layer != self._instructions[changer].layer:
            self.changes.add((maker, changer))

    def first_difference(self) -> tuple[str, str]:
        """The scope and inside of the first instruction whose value is not as recorded."""
        for record, value in zip(self._records, self._values, strict=True):
            is_made = not isinstance(record.instruction, Input | GetAttribute)
            if is_made and not is_same(record.value, value):
                return record.scope, record.inside
        return "", ""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outputs and side effects of a forward pass.

    Attributes:
        outputs: of the model.
        buffers: all of them.
        stream: state of torch's random stream.
        gradients: norm and sum of each parameter's, None for those not used; None if there is
            no backward pass.
    """

    outputs: Tree
    buffers: list[torch.Tensor]
    stream: torch.Tensor
    gradients: list[tuple[float, float] | None] | None

    def unlike(self, other: "Result", *, rounded: bool = False) -> str:
        """What differs, or ""; if ``rounded``, differences by rounding are allowed."""
        is_like = is_nearly if rounded else _is_same_tensor
        for name in ("outputs", "buffers", "stream"):
            if not is_same(getattr(self, name), getattr(other, name), is_like):
                return name
        if self.gradients is None or other.gradients is None:
            return ""
        pairs = zip(self.gradients, other.gradients, strict=True)
        return "" if all(_is_close(one, another) for one, another in pairs) else "gradients"


def result_of(model: nn.Module, outputs: Tree, *, with_gradients: bool) -> Result:
    """The result of a forward pass that returned ``outputs``."""
    return Result(
        outputs=map_tensors(_kept, outputs),
        buffers=[_kept(buffer) for buffer in model.buffers()],
        stream=torch_streams(),
        gradients=_gradients(outputs, model) if with_gradients else None,
    )


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _gradients(outputs: Tree, model: nn.Module) -> list[tuple[float, float] | None] | None:
    """Norm and sum of each parameter's gradient, for some gradient of the outputs."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    tensors = [one for one in tensors_of(outputs) if one.requires_grad]
    if not parameters or not tensors:
        return None
    with torch.no_grad():
        directions = [torch.ones_like(one) + torch.sin(one.abs() + 1) for one in tensors]
    try:
        found = gradients_of([seeded(tensors, directions)], parameters, parameters)
    except RuntimeError:  # it has no backward pass
        return None
    return [None if one is None else _likeness(one) for one in found]


def _likeness(gradient: torch.Tensor) -> tuple[float, float]:
    if gradient.is_meta:
        return 0.0, 0.0
    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
    return float(dense.abs().norm()), float(dense.abs().sum())


def _is_close(one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(
        not abs(first - second) > _GRADIENT_TOLERANCE * second  # NaN equals NaN
        for first, second in zip(one, other, strict=True)
    )


def _is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not _is_comparable(one, other) or torch.equal(one, other):
        return _is_alike(one, other)
    if not (one.is_floating_point() or one.is_complex()):
        return False
    is_nan = one.isnan()
    return torch.equal(is_nan, other.isnan()) and torch.equal(one[~is_nan], other[~is_nan])


def is_nearly(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors are equal but for rounding."""
    if not _is_comparable(one, other) or not one.is_floating_point():
        return _is_same_tensor(one, other)
    is_finite = one.isfinite()
    if not _is_same_tensor(one[~is_finite], other[~other.isfinite()]):
        return False
    tolerance = _COARSE_ROUNDING if _is_coarse(one) else _ROUNDING
    apart = (one - other)[is_finite].double().norm()
    return bool(apart <= tolerance * other[is_finite].double().norm())


def _is_coarse(tensor: torch.Tensor) -> bool:
    return tensor.element_size() < 4 or torch.is_autocast_enabled(tensor.device.type)


def is_same(
    one: Any,
    other: Any,
    is_like: Callable[[torch.Tensor, torch.Tensor], bool] = _is_same_tensor,
    within: frozenset[int] = frozenset(),
) -> bool:
    """Whether two trees are equal, bit by bit or as ``is_like`` says.

    Objects are equal if their attributes are; those without any are not compared. ``within`` has
    the ids of the enclosing objects, which are being compared.
    """
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        is_both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return is_both and is_like(one, other)
    if isinstance(one, int | float | str | None):
        return bool(one == other) or (one != one and other != other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if id(one) in within:
        return True
    parts, others = _parts_of(one), _parts_of(other)
    within |= {id(one)}
    pairs = zip(parts, others, strict=False)
    return len(parts) == len(others) and all(is_same(*pair, is_like, within) for pair in pairs)


def _parts_of(value: Any) -> list[Any]:
    return parts_of(attributes_of(value) or value)


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _is_comparable(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether their values can be compared."""
    return _is_alike(one, other) and not one.is_meta and one.layout == torch.strided


def compare_recordings(one: Sequence[Record], other: Sequence[Record]) -> None:
    """Check that recordings with different numbers of samples have the same instructions.

    Raises:
        MismatchError: they differ.
    """
    for first, second in zip_longest(one, other):
        if first is None or second is None or not _is_like(first.instruction, second.instruction):
            different = [record for record in (first, second) if record is not None]
            # If a module runs longer in one of them, the other is back in its caller.
            deepest = max(different, key=lambda record: len(record.scope))
            raise MismatchError(
                deepest.scope,
                "what it does depends on the number of samples",
                inside=deepest.inside,
            )


def _is_like(one: Any, other: Any) -> bool:
    """Whether instructions, or their arguments, are the same."""
    if type(one) is not type(other):
        return False
    parts, others = parts_of(one), parts_of(other)
    if isinstance(one, dict) and one.keys() != other.keys():
        return False
    if parts or others:
        return len(parts) == len(others) and all(map(_is_like, parts, others))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    return bool(one == other) or one != one


def one_line(error: Exception) -> str:
    """The error in one line."""
    lines = [line for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith(_KERAS_BEGINS):
        del lines[0]
    first = lines[0].strip() if lines else ""
    return first if isinstance(error, UntraceableError) else f"{type(error).__name__}: {first}"
