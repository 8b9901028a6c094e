"""Checkpoints as files: contents, and who writes them."""

import os
from collections.abc import Sequence

import msgspec
import torch
from torch import nn

from lockstep.checkpoint.generations import PartitionedGeneration, write_generation
from lockstep.checkpoint.manifest import Manifest, Summary
from lockstep.checkpoint.partitioned_files import WrittenSpan
from lockstep.checkpoint.saved import Saved
from lockstep.checkpoint.storage import Folder
from lockstep.checkpoint.trees import Tensors, flattened, pointer
from lockstep.checkpoint.weights import mapped_tensors
from lockstep.events import LOGGER
from lockstep.train.resume.fit_record import FitState
from lockstep.version import __version__


class PartitionedCheckpoint:
    """A checkpoint that ranks write together; see ``partitioned_state.Target``.

    Args:
        generation: the files.
        keep: how many are kept.
    """

    def __init__(self, generation: PartitionedGeneration, keep: int) -> None:
        self._generation, self._keep = generation, keep
        self.files, self.folder = generation.files, str(generation.folder)

    def finish(self, spans: Sequence[WrittenSpan]) -> Tensors:
        """The tensors in the files."""
        written = self._generation.finish(spans, self._keep)
        LOGGER.info("checkpoint written: %s", written)
        files = [written / os.path.basename(one.path) for one in self.files]
        return {name: one for file in files for name, one in mapped_tensors(str(file)).items()}

    def give_up(self, error: BaseException) -> None:
        self._generation.give_up(error)


def write_one(folder: Folder, saved: Saved, keep: int) -> Folder:
    """Write a checkpoint by this process; see ``write_generation``."""
    written = write_generation(folder, saved, keep)
    LOGGER.info("checkpoint written: %s, step %d", written, saved.manifest.summary.step)
    return written


def saved_of(copy: FitState, model: nn.Module) -> Saved:
    """The contents of a checkpoint."""
    tensors, values = flattened(copy.tree())
    position, plan = copy.state.position, copy.plan
    place = position["fit"]
    summary = Summary(
        epoch=position["epochs"] + (0 if place is None else place["epoch"]),
        step=position["steps"],
        is_finished=copy.record.is_finished,
        strategy="" if plan is None else plan.strategy,
        num_devices=0 if plan is None else plan.num_ranks,
        lockstep=__version__,
    )
    weights, plan_values = _weights(model), msgspec.to_builtins(plan)
    manifest = Manifest(
        summary=summary, weights=weights, values=values, plan=plan_values, files={}, tensors={}
    )
    return Saved(manifest=manifest, tensors=tensors)


def _weights(model: nn.Module) -> dict[str, str]:
    """For each name in the model's ``state_dict()``, the tensor's name in the training's state."""
    parts = {"parameters": model.named_parameters(), "buffers": model.named_buffers()}
    names = {id(one): pointer((part, name)) for part, every in parts.items() for name, one in every}
    found = model.state_dict(keep_vars=True).items()
    return {
        name: names[id(one)]
        for name, one in found
        if isinstance(one, torch.Tensor) and id(one) in names
    }
