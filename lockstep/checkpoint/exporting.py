"""Exports checkpoints to other formats: one safetensors file, or torch's DCP."""

import os
import warnings
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from lockstep.checkpoint.reading import read_checkpoint
from lockstep.checkpoint.weights import save_state_dict
from lockstep.errors import CheckpointError


def export_safetensors(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Write the weights and buffers of a checkpoint, whole and by name, as one file.

    ``trainer.load`` reads it, and so does any reader of safetensors.

    Args:
        path: of a folder with checkpoints, of which the newest complete one is used; or of one.
        out: the file.

    Raises:
        CheckpointError: there is no complete checkpoint; or a module's extra state is no tensor.
    """
    save_state_dict(read_checkpoint(path).state_dict(), out)


def export_dcp(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Write weights and optimizer in the format of ``torch.distributed.checkpoint``.

    Its parts ``"model"`` and ``"optim"`` are the arguments of ``set_model_state_dict`` and
    ``set_optimizer_state_dict`` of ``torch.distributed.checkpoint.state_dict``. torch pickles the
    metadata of this format: read it only if you trust its source.

    Args:
        path: of a folder with checkpoints, of which the newest complete one is used; or of one.
        out: the folder, which is new or empty.

    Raises:
        CheckpointError: there is no complete checkpoint; the folder is not empty; or the optimizer
            overrides ``state_dict()``.
    """
    if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise CheckpointError(
            "A checkpoint must be exported into a new or empty folder.",
            received=out,
            fix="Name another.",
        )
    saved = read_checkpoint(path)
    state = {"model": saved.state_dict(), "optim": _optimizer(saved.tree())}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save_dcp(state, checkpoint_id=out, no_dist=True)


def _optimizer(tree: dict[str, Any]) -> dict[str, Any]:
    """Slots and options by names of parameters."""
    if tree["own"]:
        raise CheckpointError(
            "Only slots and options of an optimizer can be exported.",
            received="an optimizer whose class overrides state_dict()",
            fix="Export the weights alone: --format safetensors.",
        )
    return {"state": tree["optimizer"], "param_groups": tree["options"]}
