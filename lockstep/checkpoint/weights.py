"""Weights as safetensors: whole tensors by name, whatever strategy trained them."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from lockstep.errors import CheckpointError, Problems, problem

_ALIAS = "alias:"


def save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write ``model.state_dict()``; the file appears whole or not at all.

    A tied tensor is written once, under its first name; its other names are in the metadata.

    Raises:
        CheckpointError: the state holds something that is no tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    metadata = {"format": "pt"}
    first_names: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                problem(
                    "A safetensors file holds tensors only.",
                    received=f"{name!r}, a {type(value).__name__} (from get_extra_state?)",
                    fix="Save it apart, or keep it in a buffer.",
                )
            )
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and place in first_names:
            metadata[_ALIAS + name] = first_names[place]
            continue
        first_names[place] = name
        tensors[name] = value.detach().cpu().contiguous().clone()
    _write_whole(tensors, metadata, Path(path))


def _write_whole(tensors: dict[str, torch.Tensor], metadata: dict[str, str], path: Path) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    try:
        save_file(tensors, temporary, metadata)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@torch.no_grad()
def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Read what ``save_weights`` wrote into a model, in place.

    Raises:
        CheckpointError: names or shapes do not fit; nothing is changed then.
    """
    loaded = _read(path)
    own = model.state_dict()
    problems = Problems()
    missing, unexpected = own.keys() - loaded.keys(), loaded.keys() - own.keys()
    if missing or unexpected:
        lists = f"missing {sorted(missing) or 'none'}, unexpected {sorted(unexpected) or 'none'}"
        problems.add(
            f"{os.fspath(path)} must have the model's names.",
            received=lists,
            fix="Load it into the model it was saved from.",
        )
    for name in own.keys() & loaded.keys():
        if own[name].shape != loaded[name].shape:
            problems.add(
                f"{name!r} must have shape {tuple(own[name].shape)}.",
                received=tuple(loaded[name].shape),
                fix="Load it into the model it was saved from.",
            )
    problems.raise_if_any(CheckpointError)
    for name, value in own.items():
        value.copy_(loaded[name])


def _read(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (SafetensorError, FileNotFoundError) as error:
        raise CheckpointError(
            problem(
                f"{os.fspath(path)} must be a safetensors file.",
                received=error,
                fix="Give the path of a file that save() wrote.",
            )
        ) from error
    for key, first in metadata.items():
        if key.startswith(_ALIAS):
            tensors[key.removeprefix(_ALIAS)] = tensors[first]
    return tensors
