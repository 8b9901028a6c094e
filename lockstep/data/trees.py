"""Nested inputs and outputs: a tensor, or tuples, lists, dicts and dataclasses of trees.

Structures may also hold other values (None, a flag), which pass through.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch

from lockstep.errors import ModelError

Tree = Any

_T = TypeVar("_T")

# Constants of a model (a mask, a table of positions) may be larger; passes do not resize them.
MOST_RESIZED_BYTES = 1 << 17


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """The same structure with ``function`` applied to every tensor."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    return map_leaves(torch.Tensor, function, tree)


def map_leaves(kind: type[_T], function: Callable[[_T], Any], tree: Tree) -> Tree:
    """The same structure with ``function`` applied to every instance of a class."""
    if isinstance(tree, kind):
        return function(tree)
    return rebuilt(partial(map_leaves, kind, function), tree)


def rebuilt(change: Callable[[Any], Any], tree: Tree) -> Tree:
    """A structure of the same kind with ``change`` applied to each of its parts, one level deep."""
    if isinstance(tree, tuple | list):
        return getattr(tree, "_make", type(tree))([change(part) for part in tree])
    if isinstance(tree, dict | UserDict):
        return like(tree, {key: change(part) for key, part in tree.items()})
    if is_record(tree):
        return with_fields(tree, {name: change(one) for name, one in fields_of(tree).items()})
    return tree


def like(original: Any, mapped: dict[Any, Any]) -> Any:
    """A dict of the original's class: ordered, default, a UserDict, or with attributes."""
    if type(original) is dict:
        return mapped
    result = copy.copy(original)
    for key, value in mapped.items():
        result[key] = value
    return result


def tensors_of(tree: Tree) -> Iterator[torch.Tensor]:
    """Every tensor of the tree, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | UserDict):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors_of(value)
    elif is_record(tree):
        for value in fields_of(tree).values():
            yield from tensors_of(value)


def named_tensors(tree: Tree, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the tree, in order, with its place: ``name['key'][0]``."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict | UserDict):
        for key, value in tree.items():
            yield from named_tensors(value, f"{name}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for index, value in enumerate(tree):
            yield from named_tensors(value, f"{name}[{index}]")
    elif is_record(tree):
        for field, value in fields_of(tree).items():
            yield from named_tensors(value, f"{name}.{field}")


def is_record(tree: Tree) -> bool:
    """Whether it is a dataclass's instance."""
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def fields_of(record: Any) -> dict[str, Any]:
    """The values of a record, by the field's name."""
    names = [field.name for field in dataclasses.fields(record)]
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def with_fields(record: Any, values: dict[str, Any]) -> Any:
    """A copy with other values, without ``__init__``; the record may be frozen."""
    result = copy.copy(record)
    for name, value in values.items():
        object.__setattr__(result, name, value)
    return result


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, in which different NaN, and 0 and -0, differ."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return for_numpy(plain).view(-1).view(torch.uint8)


def for_numpy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of a small one: torch resizes no buffer whose memory numpy has had."""
    return tensor.clone() if tensor.nbytes <= MOST_RESIZED_BYTES else tensor


def concatenate(trees: list[Tree], join: Callable[[list[Any]], Any] | None = None) -> Tree:
    """Join trees of one structure along the first dim of their tensors.

    Args:
        trees: with a sample in each row.
        join: makes one leaf of those in one place; by default tensors are joined, and other leaves
            must be equal.

    Raises:
        ModelError: structures differ, tensors cannot be joined, or other leaves differ.
    """
    first = trees[0]
    if isinstance(first, torch.Tensor):
        return (join or _joined)(trees)
    if len({type(tree) for tree in trees}) > 1:
        raise _unlike(sorted({type(tree).__name__ for tree in trees}))
    if isinstance(first, dict | UserDict):
        return like(first, _concatenate_values(trees, join))
    if isinstance(first, tuple | list):
        columns = zip(*_of_one_length(trees), strict=True)
        parts = [concatenate(list(column), join) for column in columns]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if is_record(first):
        return with_fields(first, _concatenate_values([fields_of(tree) for tree in trees], join))
    return (join or _common)(trees)


def _concatenate_values(
    trees: list[dict[Any, Tree]], join: Callable[[list[Any]], Any] | None
) -> dict[Any, Tree]:
    if any(tree.keys() != trees[0].keys() for tree in trees):
        raise _unlike([list(tree) for tree in trees])
    return {key: concatenate([tree[key] for tree in trees], join) for key in trees[0]}


def _of_one_length(trees: list[Tree]) -> list[Tree]:
    lengths = sorted({len(tree) for tree in trees})
    if len(lengths) > 1:
        raise _unlike(f"a {type(trees[0]).__name__} of {' and of '.join(map(str, lengths))}")
    return trees


def _joined(parts: list[Tree]) -> torch.Tensor:
    if not all(isinstance(part, torch.Tensor) for part in parts):
        raise _unlike(sorted({type(part).__name__ for part in parts}))
    if any(part.dim() == 0 or part.shape[1:] != parts[0].shape[1:] for part in parts):
        shapes = dict.fromkeys(str(tuple(part.shape)) for part in parts)
        raise _unlike(f"tensors of shape {', '.join(shapes)}")
    return torch.cat(parts)


def _common(leaves: list[Any]) -> Any:
    """The common value of leaves that are no tensors."""
    if all(_is_equal(leaf, leaves[0]) for leaf in leaves[1:]):
        return leaves[0]
    raise ModelError(
        "Outputs are joined along their first dim: values that are not tensors must be the same "
        "for all samples.",
        received=f"a {type(leaves[0]).__name__} that differs from share to share",
        fix="Return tensors, in tuples, lists, dicts or dataclasses.",
    )


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # of arrays, which are compared by element
        return False


def _unlike(received: object) -> ModelError:
    return ModelError(
        "Outputs are joined along their first dim: every tensor must have one row per "
        "sample, and all batches the same structure.",
        received=received,
        fix="Return tensors of shape (samples, ...), padded to one shape.",
    )
