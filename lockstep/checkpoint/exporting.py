"""Exporting checkpoints into the forms of others: one safetensors file, or torch's DCP."""

import os
import warnings
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from lockstep.checkpoint.reading import read_checkpoint
from lockstep.checkpoint.weights import save_state_dict
from lockstep.errors import CheckpointError


def export_safetensors(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Write the weights and buffers of a checkpoint, whole and by name, as one file.

    ``trainer.load`` reads it, and whatever reads safetensors.

    Args:
        path: of a folder with checkpoints, of which the newest whole one is taken; or of one.
        out: the file.

    Raises:
        CheckpointError: there is none, or none is whole; or modules keep what is no tensor.
    """
    save_state_dict(read_checkpoint(path).state_dict(), out)


def export_dcp(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Write weights and optimizer in the form of ``torch.distributed.checkpoint``.

    What it has under ``"model"`` and ``"optim"`` is what ``set_model_state_dict`` and
    ``set_optimizer_state_dict`` of ``torch.distributed.checkpoint.state_dict`` take. The metadata
    of that form is pickled by torch: read it where it is trusted only.

    Args:
        path: of a folder with checkpoints, of which the newest whole one is taken; or of one.
        out: the folder, which is new or empty.

    Raises:
        CheckpointError: there is none, or none is whole; the folder holds something; the optimizer
            keeps its state in a form of its own.
    """
    if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise CheckpointError(
            "A checkpoint is exported into a new folder.", received=out, fix="Name another."
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
            "Of an optimizer, slots and options are exported.",
            received="one whose state_dict() is its own",
            fix="Export the weights alone: --format safetensors.",
        )
    return {"state": tree["optimizer"], "param_groups": tree["options"]}
