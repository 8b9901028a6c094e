"""The state of a training: everything of which a run consists, by name.

Pure data: tensors, and what JSON can say. Who rewinds, compares, shares or saves a run asks for one
of these (``train.checkpointing.run_state``). Tensors have qualified names, made of the keys that
lead to them: ``parameters/0.weight``, ``optimizer/0.weight/exp_avg`` (``checkpoint.trees``).
Nothing in it depends on the strategy or on the number of devices.

Not a part of it: what the script makes anew. That is the model's modules and their attributes, the
loss, options of the Trainer, data, Plan.
"""

import hashlib
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

import msgspec
import torch

from lockstep.checkpoint.trees import Path, Tensors, Tree, assembled, flattened, pointer
from lockstep.data.trees import bits_of
from lockstep.errors import CheckpointError


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
        residuals: by the number of each host, what it could not send yet of what is compressed.
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
    residuals: dict[str, Tensors] = field(default_factory=dict)
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
        if isinstance(parts, Mapping) and "residuals" not in parts:  # of versions that had none
            parts = {**parts, "residuals": {}}
        if not isinstance(parts, Mapping) or sorted(map(str, parts)) != sorted(known):
            found = sorted(map(str, parts)) if isinstance(parts, Mapping) else type(parts).__name__
            raise CheckpointError(
                f"The state of a training has the parts {known}.",
                received=found,
                fix="Give what state_dict() of a Trainer has returned.",
            )
        return cls(**parts)

    def parts(self) -> dict[str, Tree]:
        """All parts by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def copied(self, before: Mapping[str, Tree] | None = None) -> "TrainingState":
        """The same with memory of its own: that of the parts of an earlier copy, where they fit."""
        return TrainingState(**copied(self.parts(), before))

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


def copied(tree: Tree, before: Tree = None) -> Tree:
    """A tree with containers and tensors of its own.

    Args:
        tree: the tree.
        before: a copy that is no longer needed; its tensors are written to where they fit.
    """
    if isinstance(tree, torch.Tensor):
        return copy_onto(before, tree)
    if type(tree) is dict:
        there = before if type(before) is dict else {}
        return {key: copied(one, there.get(key)) for key, one in tree.items()}
    if type(tree) in (list, tuple):
        first = before if type(before) is type(tree) else ()
        pairs = zip_longest(tree, first[: len(tree)])
        return type(tree)(copied(one, present) for one, present in pairs)
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


def _leaves(value: Any, path: Path, tensors: Tensors) -> Iterator[tuple[str, Any]]:
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
