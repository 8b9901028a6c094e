"""The state of a training: all that a run needs to resume, by name.

It is pure data: tensors, and JSON values. Copies in memory, comparisons, checkpoints and transfers
between hosts use it (``train.checkpointing.run_state``). Tensors have qualified names, made of the
keys that lead to them: ``parameters/0.weight``, ``optimizer/0.weight/exp_avg``
(``checkpoint.trees``). Nothing in it depends on the strategy or on the number of devices.

What the script makes anew is not a part of it: the model's modules and their attributes, the loss,
options of the Trainer, data, Plan.
"""

import hashlib
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from lockstep.checkpoint.trees import Tensors, Tree, flattened
from lockstep.data.trees import bits_of
from lockstep.errors import CheckpointError

_NOTHING: Mapping[int, torch.Tensor] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """See the module.

    Attributes:
        parameters: by name; tied ones once.
        buffers: by name, those that are not persistent as well.
        modules: their extra states (``get_extra_state``), by the module's name.
        trained: names of the parameters that require gradients.
        optimizer: slots by the parameter's name and their own.
        options: of each parameter group, with the names of its parameters as ``"params"``.
        own: ``state_dict()`` of the optimizers whose class overrides it, by the name of the
            optimizer, or ``""``; the two parts above leave these optimizers out.
        masters: float32 copies of parameters, by name.
        velocities: of an outer optimizer, by the parameter's name.
        residuals: of compressed tensors, which are not sent yet, by the number of the host.
        averages: of the weights, with the number of updates averaged; None without.
        schedule: of the learning rate; None without.
        loss_scale: of float16; None without.
        random: the seed; all random streams are functions of it and the position.
        position: the training's progress.
        callbacks: their states, with the names of their classes, in their order.
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
        if isinstance(parts, Mapping) and "residuals" not in parts:  # written by older versions
            parts = {**parts, "residuals": {}}
        if not isinstance(parts, Mapping) or sorted(map(str, parts)) != sorted(known):
            found = sorted(map(str, parts)) if isinstance(parts, Mapping) else type(parts).__name__
            raise CheckpointError(
                f"The state of a training must have the parts {known}.",
                received=found,
                fix="Pass the result of a Trainer's state_dict().",
            )
        return cls(**parts)

    def parts(self) -> dict[str, Tree]:
        """All parts by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def copied(self, before: "TrainingState | None" = None) -> "TrainingState":
        """A copy of this state, in the memory of an earlier copy where that fits."""
        return TrainingState(**copied(self.parts(), None if before is None else before.parts()))

    # --- as tensors and JSON values ---------------------------------------------------------------

    def flat(self) -> tuple[Tensors, dict[str, Any]]:
        """The tensors by qualified name, and the rest as JSON values.

        Raises:
            CheckpointError: a part is neither.
        """
        return flattened(self.parts())

    def digest(self) -> str:
        """SHA-256 over names, dtypes, shapes and bytes of the tensors, and over all values."""
        found = hashlib.sha256()
        for part in self.digests().values():
            found.update(part)
        return found.hexdigest()

    def digests(self) -> dict[str, bytes]:
        """SHA-256 of each part, by the part's name."""
        return {name: _digest(name, one) for name, one in self.parts().items()}


def copied(tree: Tree, before: Tree = None, known: Mapping[int, torch.Tensor] = _NOTHING) -> Tree:
    """A tree with containers and tensors of its own.

    Args:
        tree: the tree.
        before: a copy that is no longer needed; its tensors are written to where they fit.
        known: copies of tensors, by the ``id`` of these.
    """
    if id(tree) in known:
        return known[id(tree)]
    if isinstance(tree, torch.Tensor):
        return copy_onto(before, tree)
    if type(tree) is dict:
        there = before if type(before) is dict else {}
        return {key: copied(one, there.get(key), known) for key, one in tree.items()}
    if type(tree) in (list, tuple):
        first = before if type(before) is type(tree) else ()
        pairs = zip_longest(tree, first[: len(tree)])
        return type(tree)(copied(one, present, known) for one, present in pairs)
    return copy(tree)


def copy_onto(present: object, value: torch.Tensor, like: torch.Tensor | None = None) -> Any:
    """A copy of a state's tensor, in the memory of the present one if that fits.

    Args:
        present: the present value; a tensor or anything else.
        value: of the state, which is not changed.
        like: has the memory layout of the result, if their shapes are equal.
    """
    if value.is_meta:  # ranks set it
        return present if isinstance(present, torch.Tensor) else value
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


def _form(tensor: torch.Tensor) -> object:
    return tensor.shape, tensor.dtype
