"""A checkpoint's contents in memory."""

from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint.manifest import Summary
from lockstep.checkpoint.trees import Tensors, Tree, assembled
from lockstep.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint's contents.

    Attributes:
        summary: for people.
        tensors: by qualified name.
        weights: for each name in the model's ``state_dict()``, the tensor's qualified name.
        values: the rest of the training's state, and the record of its ``fit``, as JSON values.
        plan: the Plan under which it was trained, as JSON values; None if unknown.
        place: where it was read from; "" for a new one.
    """

    summary: Summary
    tensors: Tensors
    weights: dict[str, str]
    values: dict[str, Any]
    plan: Any = None
    place: str = ""

    def tree(self) -> dict[str, Tree]:
        """Tensors and values together, by the name of the part.

        Raises:
            CheckpointError: they do not fit together.
        """
        tree: dict[str, Tree] = assembled(self.tensors, self.values)
        return tree

    def state_dict(self) -> dict[str, Any]:
        """The model's ``state_dict()``, tied tensors under each of their names.

        Raises:
            CheckpointError: the modules' extra states are not by name.
        """
        tensors = {name: self.tensors[qualified] for name, qualified in self.weights.items()}
        modules = self.tree().get("modules", {})
        if not isinstance(modules, dict):
            raise CheckpointError(
                "A checkpoint must have the modules' extra states by name.",
                received=f"a {type(modules).__name__}",
                fix="Use another checkpoint.",
            )
        extra = {f"{name}." if name else "": state for name, state in modules.items()}
        return {**tensors, **{f"{prefix}_extra_state": state for prefix, state in extra.items()}}
