"""The numbers among an optimizer's options, in memory that all ranks map.

A schedule that steps at every update changes options that every rank needs for its next update.
Sending them would make all ranks wait for rank 0 once more per step. So rank 0 writes them here
between two steps, and the ranks read them when they update: a step's two barriers (after all losses
are in; after all updates are done) separate writing and reading.

Options that are not numbers (flags, functions) are not covered: no schedule changes them.
"""

from collections.abc import Iterator
from numbers import Real
from typing import Any

import torch

from lockstep.comm.collectives.gradients import TensorSpec

Groups = list[dict[str, Any]]

# A group's number, the option, and how many numbers it holds; None for a single one.
_Place = tuple[int, str, int | None]


class SharedOptions:
    """Options of parameter groups in a tensor.

    Args:
        groups: of an optimizer, with the same options on every rank.
        tensor: with the layout of ``options_spec``, in memory that all ranks share.
    """

    def __init__(self, groups: Groups, tensor: torch.Tensor) -> None:
        self._places = list(_places(groups))
        self._tensor = tensor
        self.write(groups)

    def write(self, groups: Groups) -> None:
        """On rank 0, between two steps: write these options."""
        self._tensor.numpy()[:] = [
            number
            for group, option, count in self._places
            for number in _numbers_in(groups[group][option], count)
        ]

    def read_into(self, groups: Groups) -> None:
        """On any rank, before its update: read the options that have changed."""
        numbers = iter(self._tensor.tolist())
        for group, option, count in self._places:
            found = [next(numbers) for _ in range(1 if count is None else count)]
            before = groups[group][option]
            if found != _numbers_in(before, count):
                if isinstance(before, torch.Tensor):
                    before.fill_(found[0])
                else:
                    groups[group][option] = found[0] if count is None else type(before)(found)


def options_spec(groups: Groups) -> TensorSpec:
    """The layout of the tensor that holds the numbers."""
    size = sum(1 if count is None else count for _, _, count in _places(groups))
    return TensorSpec("options of the optimizer", (size,), (1,), torch.float64)


def _places(groups: Groups) -> Iterator[_Place]:
    for number, group in enumerate(groups):
        for option, value in sorted(group.items()):
            if option == "params":
                continue
            if _is_number(value):
                yield number, option, None
            elif isinstance(value, tuple | list) and value and all(map(_is_number, value)):
                yield number, option, len(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)  # NumPy's numbers are, too


def _numbers_in(value: Any, count: int | None) -> list[float]:
    return [float(value)] if count is None else [float(number) for number in value]
