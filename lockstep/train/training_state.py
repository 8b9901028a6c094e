"""The state of a training: everything of which a run consists, by name.

Pure data: tensors, and what JSON can say. Who rewinds, compares, shares or saves a run asks for one
of these (``train.run_state``). Tensors have qualified names, made of the keys that lead to them:
``parameters/0.weight``, ``optimizer/0.weight/exp_avg``. Slashes in keys are escaped as in JSON
pointers (RFC 6901). Nothing in it depends on the strategy or on the number of devices.

Not a part of it: what the script makes anew. That is the model's modules and their attributes, the
loss, options of the Trainer, data, Plan.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
import numpy as np
import torch

from lockstep.errors import CheckpointError, problem

Tree = Any
"""Dicts, lists and tuples of tensors and of plain values."""

Tensors = dict[str, torch.Tensor]

_Path = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """See the module.

    Attributes:
        parameters: by name; tied ones once.
        buffers: by name, those that are not persistent as well.
        modules: what modules tell of themselves (``get_extra_state``), by the module's name.
        trained: names of the parameters that require gradients.
        optimizer: slots by the parameter's name and their own.
        options: of each parameter group, with the names of its parameters as ``"params"``.
        own: ``state_dict()`` of the optimizers whose class has one of its own, by the name of the
            optimizer, or ``""``; the two parts above have nothing of these.
        masters: float32 copies of parameters, by name.
        velocities: of an outer optimizer, by the parameter's name.
        averages: of the weights, with how many updates they have seen; None without.
        schedule: of the learning rate; None without.
        loss_scale: of float16; None without.
        random: the seed, of which all random streams are functions, and of the position.
        position: how far training has come.
        callbacks: what callbacks keep, with the names of their classes, in their order.
    """

    parameters: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    modules: dict[str, Tree] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    optimizer: dict[str, dict[str, Tree]] = field(default_factory=dict)
    options: list[dict[str, Tree]] = field(default_factory=list)
    own: dict[str, Tree] = field(default_factory=dict)
    masters: Tensors = field(default_factory=dict)
    velocities: Tensors = field(default_factory=dict)
    averages: dict[str, Tree] | None = None
    schedule: dict[str, Tree] | None = None
    loss_scale: dict[str, Tree] | None = None
    random: dict[str, Tree] = field(default_factory=dict)
    position: dict[str, Tree] = field(default_factory=dict)
    callbacks: list[dict[str, Tree]] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Mapping[str, Tree]) -> "TrainingState":
        """The state with these parts, all of them.

        Raises:
            CheckpointError: there are others, or some are missing.
        """
        known = [each.name for each in fields(cls)]
        if not isinstance(parts, Mapping) or sorted(map(str, parts)) != sorted(known):
            found = sorted(map(str, parts)) if isinstance(parts, Mapping) else type(parts).__name__
            raise CheckpointError(
                problem(
                    f"The state of a training has the parts {known}.",
                    received=found,
                    fix="Give what state_dict() of a Trainer has returned.",
                )
            )
        return cls(**parts)

    def parts(self) -> dict[str, Tree]:
        """All parts by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def copied(self) -> "TrainingState":
        """The same with memory of its own."""
        return TrainingState(**copied(self.parts()))

    # --- as tensors, and values that JSON can say -------------------------------------------------

    def flat(self) -> tuple[Tensors, dict[str, Any]]:
        """The tensors by qualified name, and the rest as what JSON can say.

        Raises:
            CheckpointError: something is neither.
        """
        return flattened(self.parts())

    @classmethod
    def from_flat(cls, tensors: Mapping[str, torch.Tensor], values: Any) -> "TrainingState":
        """The state that ``flat`` has given.

        Raises:
            CheckpointError: it is none, or tensors are missing or too many.
        """
        return cls.of(assembled(tensors, values))

    # --- comparison ------------------------------------------------------------------------------

    def digest(self) -> str:
        """SHA-256 over names, dtypes, shapes and bytes of the tensors, and over all values."""
        found = hashlib.sha256()
        for part in self.digests().values():
            found.update(part)
        return found.hexdigest()

    def digests(self) -> dict[str, bytes]:
        """SHA-256 of each part, by the part's name."""
        return {name: _digest(name, one) for name, one in self.parts().items()}

    def first_difference(self, other: "TrainingState") -> str | None:
        """The name of the first thing that differs from another state's, and how; None if none."""
        (tensors, values), (tensors_there, values_there) = self.flat(), other.flat()
        for part in self.parts():
            own, theirs = (
                dict(_leaves(one[part], (part,), among))
                for one, among in ((values, tensors), (values_there, tensors_there))
            )
            for name in (*own, *(name for name in theirs if name not in own)):
                shown = [_shown(leaves, name) for leaves in (own, theirs)]
                if shown[0] != shown[1]:
                    return f"{name}: {shown[0]}, {shown[1]}"
                if name in own and not _is_same(own[name], theirs[name]):
                    return f"{name}: other values"
        return None


def flattened(tree: Tree, *path: str) -> tuple[Tensors, Any]:
    """A tree's tensors by qualified name, and the rest as what JSON can say.

    Args:
        tree: the tree.
        path: keys that lead to it.

    Raises:
        CheckpointError: something is neither.
    """
    tensors: Tensors = {}
    return tensors, _plain(tree, path, tensors)


def assembled(tensors: Mapping[str, torch.Tensor], values: Any) -> Tree:
    """The tree that was flattened.

    Raises:
        CheckpointError: it was none, or tensors are missing or too many.
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


def copied(tree: Tree) -> Tree:
    """A tree with containers and tensors of its own."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if type(tree) is dict:
        return {key: copied(one) for key, one in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(copied, tree))
    return copy(tree)


def copy_onto(present: object, value: torch.Tensor, like: torch.Tensor | None = None) -> Any:
    """A tensor of a state for use: in the memory of the one at hand, if that fits.

    Args:
        present: what is there; a tensor or anything else.
        value: of the state, which stays as it is.
        like: lies in memory as the result should, where their shapes are equal.
    """
    with torch.no_grad():
        if isinstance(present, torch.Tensor) and _form(present) == _form(value):
            return present.copy_(value)
        if like is not None and like.shape == value.shape:
            return torch.empty_like(like, dtype=value.dtype, requires_grad=False).copy_(value)
        return value.detach().clone()


def pointer(path: _Path) -> str:
    """A qualified name: the keys with slashes between (RFC 6901, without the first slash)."""
    return "/".join(key.replace("~", "~0").replace("/", "~1") for key in path)


# --- trees as JSON -------------------------------------------------------------------------------
#
# What JSON has not is a dict with one key, a tag that begins with a dollar sign. A dict of which a
# key is no text, or could be taken for a tag, is written as pairs.


def _plain(value: Tree, path: _Path, tensors: Tensors) -> Any:
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
        problem(
            "The state of a training is made of tensors, numbers, texts, lists, tuples and dicts.",
            received=f"{pointer(path)!r}, a {type(value).__name__}",
            fix="Have its state_dict() say it in these, and load_state_dict() make it of them.",
        )
    )


def _plain_mapping(value: Mapping[Any, Tree], path: _Path, tensors: Tensors) -> Any:
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
        problem(
            "The values of a training's state must be what was written.",
            received=received,
            fix="Take another copy of the file.",
        )
    )


# --- bytes ---------------------------------------------------------------------------------------


def _digest(name: str, part: Tree) -> bytes:
    tensors, values = flattened(part, name)
    found = hashlib.sha256(msgspec.json.encode([name, values], order="sorted"))
    for key, tensor in sorted(tensors.items()):
        head = [key, str(tensor.dtype), list(tensor.shape)]
        found.update(msgspec.json.encode(head))
        if tensor.numel():
            found.update(bits_of(tensor).numpy())  # type: ignore[arg-type]  # it is a buffer
    return found.digest()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, which tell NaN from other NaN, and 0 from -0."""
    return (
        tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    )


def _leaves(value: Any, path: _Path, tensors: Tensors) -> Iterator[tuple[str, Any]]:
    """What a plain tree holds, by qualified name; an empty dict or list is a leaf, too."""
    if isinstance(value, dict) and "$tensor" in value:
        yield pointer(path), tensors[value["$tensor"]]
    elif isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _leaves(one, (*path, key), tensors)
    elif isinstance(value, list) and value:
        for index, one in enumerate(value):
            yield from _leaves(one, (*path, str(index)), tensors)
    else:
        yield pointer(path), value


def _shown(leaves: Mapping[str, Any], name: str) -> str:
    """What there is under a name, but for the values of tensors."""
    if name not in leaves:
        return "missing"
    value = leaves[name]
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return repr(value)


def _is_same(one: Any, other: Any) -> bool:
    """Whether what looks alike has the same bits."""
    if not isinstance(one, torch.Tensor):
        return True
    return torch.equal(*map(bits_of, (one, other)))


def _form(tensor: torch.Tensor) -> object:
    return tensor.shape, tensor.dtype
