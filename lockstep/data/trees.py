"""Nested inputs and outputs: a tensor, or tuples, lists and dicts of trees.

Structures may also hold what is no tensor (None, a flag): it passes through.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

Tree = Any


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """The same structure with ``function`` applied to every tensor."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        mapped = {key: map_tensors(function, value) for key, value in tree.items()}
        return _like(tree, mapped)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree


def _like(original: dict[Any, Any], mapped: dict[Any, Any]) -> dict[Any, Any]:
    """Keep the kind of dict: ordered, default, or one whose keys are attributes (Hugging Face)."""
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
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors_of(value)


def concatenate(trees: list[Tree]) -> Tree:
    """Join trees of one structure along the first dim of their tensors."""
    first = trees[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(trees)
    if isinstance(first, dict):
        return _like(first, {key: concatenate([tree[key] for tree in trees]) for key in first})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(concatenate(list(parts)) for parts in zip(*trees, strict=True)))
    if isinstance(first, tuple | list):
        return type(first)(concatenate(list(parts)) for parts in zip(*trees, strict=True))
    return first
