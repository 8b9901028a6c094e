"""The rule for ``torch.einsum`` with two operands: a letter of the equation is divided.

A weight is divided along a letter of the output, such as the heads; a stack of weights along the
letter that all terms have, such as the experts. Operands that are divided along a letter that is
summed give partial sums.
"""

import re
from typing import Any

import torch

from lockstep.parallel.tensor.divided_tensor import RULES, DividedTensor, Owner, Use, whole_of
from lockstep.parallel.tensor.shard_exchange import Tensors
from lockstep.parallel.tensor.transfers import cut_own, spread, total
from lockstep.plan.splits import Split

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
    if lead is not None and _is_cut_elsewhere(owner, operands, terms, output, lead):
        operands[lead], lead = operands[lead].whole(func), None
    lead = _cut_beside_rows(owner, operands, terms, output) if lead is None else lead
    if lead is None or terms[lead][operands[lead].division.dim] not in output:
        made = _by_matrices(owner, func, equation, operands, terms, output)
        if made is not None:
            return made
    if lead is None:
        return _by_columns(owner, func, equation, operands, terms, output)
    first = operands[lead]
    letter = terms[lead][first.division.dim]
    by = "matrices" if letter in output else "rows"
    others = _parts(owner, operands[1 - lead], terms[1 - lead], letter, first, by)
    if others is None:
        return NotImplemented
    pairs = zip(first.parts, others, strict=True)
    parts = [func(equation, *((one, other) if lead == 0 else (other, one))) for one, other in pairs]
    if letter not in output:
        return total(owner.exchange, parts)
    return first.like(parts, first.division.at(output.index(letter)))


def _is_cut_elsewhere(
    owner: Owner, operands: list[Any], terms: list[str], output: str, lead: int
) -> bool:
    """Whether a divided operand has parts of sums, and the other is a weight divided otherwise."""
    letter, other = terms[lead][operands[lead].division.dim], operands[1 - lead]
    dim = None if _is_divided(other) else owner.dim_of(other)
    return dim is not None and letter not in output and terms[1 - lead][dim] != letter


def _cut_beside_rows(
    owner: Owner, operands: list[Any], terms: list[str], output: str
) -> int | None:
    """Cut a whole operand beside a weight that is divided by its rows; returns its place."""
    for place, weight in enumerate(operands):
        dim = owner.dim_of(weight)
        if dim is None or terms[place][dim] not in {*terms[1 - place]} - {*output}:
            continue
        split = owner.split_of(weight, Use(dim, dim, by="rows"))
        if split is not None:
            own = split.at(terms[1 - place].index(terms[place][dim]))
            parts = cut_own(owner.exchange, operands[1 - place], own)
            operands[1 - place] = DividedTensor.of(parts, own, owner, owner.name_of(weight))
            return 1 - place
    return None


def _is_divided(operand: Any) -> bool:
    return isinstance(operand, DividedTensor)


def _by_matrices(
    owner: Owner, func: Any, equation: str, operands: list[Any], terms: list[str], output: str
) -> DividedTensor | None:
    """The product with a stack of weights, divided along the letter that all terms have."""
    for place in (1, 0):
        weight, own, others = operands[place], terms[place], terms[1 - place]
        letters = [letter for letter in output if letter in own and letter in others]
        is_stack = len({*own} & {*others}) > len(letters) == 1 and not _is_divided(weight)
        dim = own.index(letters[0]) if is_stack else 0
        if not is_stack or weight.shape[dim] < owner.exchange.num_shards:
            continue
        split = owner.split_of(weight, Use(dim, by="matrices"))
        if split is not None:
            other = whole_of(operands[1 - place], func)
            parts = cut_own(owner.exchange, other, split.at(others.index(letters[0])))
            return _of_parts(owner, func, equation, operands, parts, place, split, own, output)
    return None


def _by_columns(
    owner: Owner, func: Any, equation: str, operands: list[Any], terms: list[str], output: str
) -> Any:
    """The product with a weight, divided along a letter that only it and the output have."""
    for place in (1, 0):
        weight, own, others = operands[place], terms[place], terms[1 - place]
        columns = [own.index(letter) for letter in output if letter in own and letter not in others]
        found = (owner.split_of(weight, Use(one)) for one in columns)
        split = next(filter(None, found), None)
        if split is not None:
            rest = spread(owner.exchange, operands[1 - place])
            return _of_parts(owner, func, equation, operands, rest, place, split, own, output)
    return NotImplemented


def _of_parts(
    owner: Owner,
    func: Any,
    equation: str,
    operands: list[Any],
    others: Tensors,
    place: int,
    split: Split,
    term: str,
    output: str,
) -> DividedTensor:
    """The products of a weight's parts and those of the other operand."""
    weight = operands[place]
    pairs = zip(owner.parts_of(weight, split), others, strict=True)
    parts = [func(equation, *((one, rest) if place == 0 else (rest, one))) for one, rest in pairs]
    divided = split.at(output.index(term[split.dim]))
    return DividedTensor.of(parts, divided, owner, owner.name_of(weight))


def _parts(
    owner: Owner, operand: torch.Tensor, term: str, letter: str, first: DividedTensor, by: str
) -> Tensors | None:
    """An operand's parts beside those of a divided one; None if it is divided otherwise."""
    dim = term.find(letter)
    if isinstance(operand, DividedTensor):
        is_alike = operand.division.dim == dim and operand.division.is_like(first.division)
        return operand.parts if is_alike else None
    if dim < 0:
        return spread(owner.exchange, operand)
    split = owner.split_of(operand, Use(dim, dim, first, by))
    if split is not None and split.is_like(first.division):
        return owner.parts_of(operand, split)
    return cut_own(owner.exchange, operand, first.division.at(dim))


RULES[torch.einsum] = _einsum
