"""Trees of tensors and plain values, as tensors by name and JSON values.

Tensors have qualified names, made of the keys that lead to them: ``optimizer/0.weight/exp_avg``.
Slashes in keys are escaped as in JSON pointers (RFC 6901).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lockstep.errors import CheckpointError

Tree = Any
"""Dicts, lists and tuples of tensors and of plain values."""

Tensors = dict[str, torch.Tensor]

Path = tuple[str, ...]


def flattened(tree: Tree, *path: str) -> tuple[Tensors, Any]:
    """A tree's tensors by qualified name, and the rest as JSON values.

    Args:
        tree: the tree.
        path: keys that lead to it.

    Raises:
        CheckpointError: a leaf is neither.
    """
    tensors: Tensors = {}
    return tensors, _plain(tree, path, tensors)


def assembled(tensors: Mapping[str, torch.Tensor], values: Any) -> Tree:
    """The inverse of ``flattened``.

    Raises:
        CheckpointError: it is not a tree, or has missing or unknown tensors.
    """
    unused = set(tensors)

    def take(name: object) -> torch.Tensor:
        if not isinstance(name, str) or name not in tensors:
            raise _malformed(f"no tensor {name!r}")
        unused.discard(name)
        return tensors[name]

    tree = _tree(values, take)
    if unused:
        raise _malformed(f"tensors that nothing names: {sorted(unused)}")
    return tree


def pointer(path: Path) -> str:
    """A qualified name: the keys with slashes between (RFC 6901, without the first slash)."""
    return "/".join(key.replace("~", "~0").replace("/", "~1") for key in path)


# --- trees as JSON -------------------------------------------------------------------------------
#
# Values that JSON lacks are a dict with one key, a tag that begins with a dollar sign. A dict with
# a key that is not a text, or that looks like a tag, is written as pairs.


def _plain(value: Tree, path: Path, tensors: Tensors) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[pointer(path)] = value.detach()
        return {"$tensor": pointer(path)}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Mapping):
        return _plain_mapping(value, path, tensors)
    if isinstance(value, list | tuple):
        items = [_plain(one, (*path, str(index)), tensors) for index, one in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    raise CheckpointError(
        "The state of a training must consist of tensors, numbers, texts, lists, tuples and dicts.",
        received=f"{pointer(path)!r}, a {type(value).__name__}",
        fix="Convert it to these in state_dict(), and back in load_state_dict().",
    )


def _plain_mapping(value: Mapping[Any, Tree], path: Path, tensors: Tensors) -> Any:
    if type(value) is not Counter and all(
        isinstance(key, str) and not key.startswith("$") for key in value
    ):
        return {key: _plain(one, (*path, key), tensors) for key, one in value.items()}
    pairs = [
        [_plain(key, path, tensors), _plain(one, (*path, str(index)), tensors)]
        for index, (key, one) in enumerate(value.items())
    ]
    return {"$counter" if type(value) is Counter else "$pairs": pairs}


def _tree(value: Any, take: Callable[[object], torch.Tensor]) -> Tree:
    if isinstance(value, list):
        return [_tree(one, take) for one in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not (isinstance(tag, str) and tag.startswith("$")):
        return {key: _tree(one, take) for key, one in value.items()}
    read = _READERS.get(tag)
    if read is None or len(value) != 1:
        raise _malformed(f"a dict with the keys {list(value)}")
    try:
        return read(value[tag], take)
    except (TypeError, ValueError) as error:
        raise _malformed(f"{tag}: {error}") from error


_READERS: dict[str, Callable[[Any, Any], Tree]] = {
    "$tensor": lambda name, take: take(name),
    "$float": lambda text, take: float(text),
    "$tuple": lambda items, take: tuple(_tree(one, take) for one in items),
    "$pairs": lambda pairs, take: {_tree(key, take): _tree(one, take) for key, one in pairs},
    "$counter": lambda pairs, take: Counter({_tree(key, take): int(one) for key, one in pairs}),
}


def _malformed(received: str) -> CheckpointError:
    return CheckpointError(
        "The values of a training's state are damaged.",
        received=received,
        fix="Use another copy of the file.",
    )
