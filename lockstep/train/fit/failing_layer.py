"""Adds the layer and the shapes of the batch to errors that a model or a loss raises."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.capture.instructions import run_instruction
from lockstep.data.map_style.sources import Batch
from lockstep.data.trees import Tree, tensors_of
from lockstep.errors import LockstepError
from lockstep.parallel.batch_run import Run
from lockstep.parallel.data_parallel.passes import Passes
from lockstep.parallel.loss import whole_batch
from lockstep.tracebacks import note_last

_LONGEST_NAME = 80

_T = TypeVar("_T")


@contextmanager
def naming_layer(
    model: nn.Module, loss: Any = None, *, inputs: Tree = None, layers: Sequence[str] = ()
) -> Iterator[None]:
    """Within the block, which runs a model, add the layer to errors.

    Args:
        model: the model.
        loss: called with its outputs; None for no loss.
        inputs: of the model, if the block reads no batch.
        layers: names of the layers of a trace that the block may run.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, LockstepError):
            frames = [*_frames(error)]
            place = _place(frames, model, loss, layers)
            shapes = _shapes(frames, inputs)
            if place and not any("; inputs " in note for note in getattr(error, "__notes__", ())):
                note_last(error, f"in {place}{shapes and f'; {shapes}'}.")
        raise


def _frames(error: BaseException) -> Iterator[FrameType]:
    """From the innermost one outwards."""
    entries = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry.tb_frame)
        entry = entry.tb_next
    return reversed(entries)


def _place(frames: Sequence[FrameType], model: nn.Module, loss: Any, layers: Sequence[str]) -> str:
    """The layer, loss or metric that was running; empty if none was."""
    names = {id(module): name for name, module in model.named_modules()}
    other = ""
    for frame in frames:
        if _runs_loss(frame):
            return f"the loss ({label(loss)})" if loss is not None else "the loss"
        if frame.f_code is run_instruction.__code__ and layers:
            number = frame.f_locals["instruction"].layer
            return f"layer {layers[number]!r}" if number < len(layers) else ""
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            name = names.get(id(module))
            if name is not None:
                own_name = name or getattr(module, "name", "")
                whose = f"layer {own_name!r}" if name else "the model"
                return f"{whose} ({label(module)})"
            other = other or label(module)
    return other


def _runs_loss(frame: FrameType) -> bool:
    """True if the frame computes a loss, of a share or of the whole batch."""
    is_whole = frame.f_globals.get("__name__") == whole_batch.__name__
    return is_whole or frame.f_code is Passes.loss_of.__code__


def label(called: Any) -> str:
    """A module or function as errors name it."""
    if isinstance(called, nn.Module):
        text = repr(called)
        return text if "\n" not in text and len(text) <= _LONGEST_NAME else type(called).__name__
    return str(getattr(called, "__name__", type(called).__name__))


def _shapes(frames: Sequence[FrameType], inputs: Tree) -> str:
    batch, run = _innermost(frames, Batch), _innermost(frames, Run)
    if batch is None:
        return "" if inputs is None else f"inputs {_shape(inputs)}"
    has_targets = next(iter(tensors_of(batch.targets)), None) is not None
    targets = f", targets {_shape(batch.targets)}" if has_targets else ""
    is_part = run is not None and run.num_samples > batch.num_samples
    whole = f" (of a batch of {run.num_samples})" if run is not None and is_part else ""
    return f"inputs {_shape(batch.inputs)}{targets}{whole}"


def _innermost(frames: Sequence[FrameType], kind: type[_T]) -> _T | None:
    """The first local variable of this type."""
    values = (value for frame in frames for value in frame.f_locals.values())
    return next((value for value in values if isinstance(value, kind)), None)


def _shape(tree: Tree) -> str:
    if isinstance(tree, torch.Tensor):
        return f"{tuple(tree.shape)} {str(tree.dtype).removeprefix('torch.')}"
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{name!r}: {_shape(one)}" for name, one in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        shown = [_shape(one) for one in tree if one is not None]
        return shown[0] if len(shown) == 1 else f"({', '.join(shown)})"
    return type(tree).__name__
