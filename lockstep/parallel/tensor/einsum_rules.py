"""The rule for ``torch.einsum`` with two operands: a letter of the equation is divided.

A weight is divided along a letter of the output, such as the heads. Operands that are divided along
a letter that is summed give partial sums.
"""

import re
from typing import Any

import torch

from lockstep.parallel.tensor.divided_tensor import RULES, DividedTensor, Owner
from lockstep.parallel.tensor.shard_exchange import Tensors
from lockstep.parallel.tensor.transfers import cut_own, spread, total

_EQUATION = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]*)")


def _einsum(owner: Owner, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    found = _EQUATION.fullmatch(equation.replace(" ", "")) if isinstance(equation, str) else None
    if found is None or len(operands) != 2 or any(len({*one}) < len(one) for one in found.groups()):
        return NotImplemented
    *terms, output = found.groups()
    lead = next((place for place, one in enumerate(operands) if _is_divided(one)), None)
    if lead is None:
        return _by_columns(owner, func, equation, operands, terms, output)
    first = operands[lead]
    letter = terms[lead][first.division.dim]
    others = _parts(owner, operands[1 - lead], terms[1 - lead], letter, first)
    if others is None:
        return NotImplemented
    pairs = zip(first.parts, others, strict=True)
    parts = [func(equation, *((one, other) if lead == 0 else (other, one))) for one, other in pairs]
    if letter not in output:
        return total(owner.exchange, parts)
    return first.like(parts, first.division.at(output.index(letter)))


def _is_divided(operand: Any) -> bool:
    return isinstance(operand, DividedTensor)


def _by_columns(
    owner: Owner, func: Any, equation: str, operands: list[Any], terms: list[str], output: str
) -> Any:
    """The product with a weight, divided along a letter that only it and the output have."""
    for place in (1, 0):
        weight, own, others = operands[place], terms[place], terms[1 - place]
        columns = [own.index(letter) for letter in output if letter in own and letter not in others]
        split = owner.split_of(weight, columns[0]) if columns else None
        if split is None:
            continue
        rest = spread(owner.exchange, operands[1 - place])
        pairs = zip(owner.parts_of(weight, split), rest, strict=True)
        parts = [
            func(equation, *((one, other) if place == 0 else (other, one))) for one, other in pairs
        ]
        dim = output.index(own[split.dim])
        return DividedTensor.of(parts, split.at(dim), owner, owner.name_of(weight))
    return NotImplemented


def _parts(
    owner: Owner, operand: torch.Tensor, term: str, letter: str, first: DividedTensor
) -> Tensors | None:
    """An operand's parts beside those of a divided one; None if it is divided otherwise."""
    dim = term.find(letter)
    if isinstance(operand, DividedTensor):
        is_alike = operand.division.dim == dim and operand.division.is_like(first.division)
        return operand.parts if is_alike else None
    if dim < 0:
        return spread(owner.exchange, operand)
    split = owner.split_of(operand, dim, dim, first)
    if split is not None and split.is_like(first.division):
        return owner.parts_of(operand, split)
    return cut_own(owner.exchange, operand, first.division.at(dim))


RULES[torch.einsum] = _einsum
