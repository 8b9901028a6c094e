"""Comparison of the states of two trainings, and their way back from files."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lockstep.checkpoint.trees import Path, Tensors, assembled, pointer
from lockstep.data.trees import bits_of
from lockstep.train.checkpointing.training_state import TrainingState


def from_flat(tensors: Mapping[str, torch.Tensor], values: Any) -> TrainingState:
    """The inverse of ``TrainingState.flat``."""
    return TrainingState.of(assembled(tensors, values))


def first_difference(one: TrainingState, other: TrainingState) -> str | None:
    """The name of the first value that differs, and how; None if none."""
    own, theirs = _named(one), _named(other)
    for name in dict.fromkeys((*own, *theirs)):
        shown = [_shown(leaves, name) for leaves in (own, theirs)]
        if shown[0] != shown[1]:
            return f"{name}: {shown[0]}, {shown[1]}"
        if not _is_same(own[name], theirs[name]):
            return f"{name}: other values"
    return None


def _named(state: TrainingState) -> dict[str, Any]:
    tensors, values = state.flat()
    return dict(_leaves(values, (), tensors))


def _leaves(value: Any, path: Path, tensors: Tensors) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree by qualified name; an empty dict or list is a leaf, too."""
    if isinstance(value, dict) and "$tensor" in value:
        yield pointer(path), tensors[value["$tensor"]]
    elif isinstance(value, dict | list) and value:
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from _leaves(part, (*path, str(key)), tensors)
    else:
        yield pointer(path), value


def _shown(leaves: Mapping[str, Any], name: str) -> str:
    """A description of a value; of a tensor, only dtype and shape."""
    value = leaves.get(name, "missing")
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return repr(value)


def _is_same(one: Any, other: Any) -> bool:
    """True if two values with the same description have the same bits."""
    return not isinstance(one, torch.Tensor) or torch.equal(*map(bits_of, (one, other)))
