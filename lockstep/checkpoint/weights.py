"""Weights as safetensors: whole tensors by name, whatever strategy trained them."""

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from lockstep.errors import CheckpointError, Problems, problem

State = dict[str, torch.Tensor]

_ALIAS = "alias:"


def save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write ``model.state_dict()``; the file appears whole or not at all.

    A tied tensor is written once, under its first name; its other names are in the metadata.

    Raises:
        CheckpointError: the state holds something that is no tensor.
        FileNotFoundError: there is no such folder.
    """
    _check_folder(Path(path))
    tensors: State = {}
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
        first = first_names.setdefault(_place(name, value), name)
        if first != name:
            metadata[_ALIAS + name] = first
            continue
        tensors[name] = value.detach().cpu().contiguous().clone()
    _write_whole(tensors, metadata, Path(path))


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "There is no such folder to save into", str(path))


def _place(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for names of one tensor; what has no elements lies nowhere and is like nothing else."""
    if not tensor.numel():
        return (name,)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _write_whole(tensors: State, metadata: dict[str, str], path: Path) -> None:
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
        CheckpointError: names, shapes or types do not fit; nothing is changed then.
    """
    loaded = _read(path)
    own = model.state_dict()
    problems = Problems()
    _check_names(own, loaded, path, problems)
    _check_tensors(own, loaded, problems)
    problems.raise_if_any(CheckpointError)
    for name, value in own.items():
        value.copy_(loaded[name])


def _check_names(
    own: State, loaded: State, path: str | os.PathLike[str], problems: Problems
) -> None:
    missing, unexpected = own.keys() - loaded.keys(), loaded.keys() - own.keys()
    if missing or unexpected:
        lists = f"missing {sorted(missing) or 'none'}, unexpected {sorted(unexpected) or 'none'}"
        problems.add(
            f"{os.fspath(path)} must have the model's names.",
            received=lists,
            fix="Load it into the model it was saved from.",
        )


def _check_tensors(own: State, loaded: State, problems: Problems) -> None:
    fix = "Load it into the model it was saved from."
    first_names: dict[tuple[Any, ...], str] = {}
    for name in [name for name in own if name in loaded]:
        mine, other = own[name], loaded[name]
        first = first_names.setdefault(_place(name, mine), name)
        if mine.shape != other.shape:
            shapes = tuple(mine.shape), tuple(other.shape)
            problems.add(f"{name!r} must have shape {shapes[0]}.", received=shapes[1], fix=fix)
        elif not torch.can_cast(other.dtype, mine.dtype):
            problems.add(f"{name!r} must hold {mine.dtype}.", received=other.dtype, fix=fix)
        elif loaded[first] is not other and not torch.equal(
            loaded[first].to(mine.dtype), other.to(mine.dtype)
        ):
            problems.add(
                f"{first!r} and {name!r} are one tensor of the model and must be equal.",
                received="different values",
                fix=fix,
            )


def _read(path: str | os.PathLike[str]) -> State:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
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
