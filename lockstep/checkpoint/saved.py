"""A checkpoint's contents in memory."""

from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.trees import Tensors, Tree, assembled
from lockstep.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint's contents.

    Attributes:
        manifest: of a new one without files and their tensors.
        tensors: by qualified name.
        place: where it was read from; "" for a new one.
    """

    manifest: Manifest
    tensors: Tensors
    place: str = ""

    def tree(self) -> dict[str, Tree]:
        """Tensors and values together, by the name of the part.

        Raises:
            CheckpointError: they do not fit together.
        """
        tree: dict[str, Tree] = assembled(self.tensors, self.manifest.values)
        return tree

    def state_dict(self) -> dict[str, Any]:
        """The model's ``state_dict()``, tied tensors under each of their names.

        Raises:
            CheckpointError: the modules' extra states are not by name.
        """
        names = self.manifest.weights.items()
        tensors = {name: self.tensors[qualified] for name, qualified in names}
        modules = self.tree().get("modules", {})
        if not isinstance(modules, dict):
            raise CheckpointError(
                "A checkpoint must have the modules' extra states by name.",
                received=f"a {type(modules).__name__}",
                fix="Use another checkpoint.",
            )
        extra = {f"{name}." if name else "": state for name, state in modules.items()}
        return {**tensors, **{f"{prefix}_extra_state": state for prefix, state in extra.items()}}
