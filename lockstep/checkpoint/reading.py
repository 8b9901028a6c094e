"""Reads checkpoints: the newest complete one, with warnings about newer ones that are damaged.

Each file is read once, so the bytes used are those hashed; except those that several processes have
written (``partitioned_files``), which are larger than memory may be, and are read again when their
tensors are used. Nothing in a checkpoint is executed, and
no name in it leads out of its folder: file names are checked (``manifest``), and links are not
followed (``local_storage``).
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors

from lockstep.checkpoint.generations import generations, storage_of
from lockstep.checkpoint.local_storage import LocalStorage
from lockstep.checkpoint.manifest import (
    NAME,
    FileEntry,
    Manifest,
    Span,
    TensorEntry,
    decode_manifest,
)
from lockstep.checkpoint.saved import Saved
from lockstep.checkpoint.storage import Folder, Storage, folder_of
from lockstep.checkpoint.trees import Tensors
from lockstep.checkpoint.weights import as_written
from lockstep.errors import CheckpointError, level_of_user

_LARGEST_MANIFEST = 1 << 30


class DamagedPartError(CheckpointError):
    """Bytes of a file that several processes have written are damaged."""


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint is damaged, and an older one is used."""


def load_state_dict(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The model's weights and buffers, for ``model.load_state_dict`` of plain PyTorch.

    It warns with a ``DamagedCheckpointWarning`` about newer checkpoints that are damaged.

    Args:
        path: of a folder with checkpoints, of which the newest complete one is read; or of one. It
            may be a URL that fsspec opens, as in ``s3://bucket/run``.

    Returns:
        The ``model.state_dict()`` that was saved, with tensors in this process's memory.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    return read_checkpoint(path).state_dict()


def read_checkpoint(path: str | os.PathLike[str]) -> Saved:
    """A checkpoint's contents.

    Args:
        path: of a folder with generations, of which the newest complete one is read; or of one.

    Raises:
        CheckpointError: there is no complete one.
    """
    folder, every = folder_of(path), found_generations(path)
    if every == [folder]:
        return read_generation(folder)
    return _first_whole(folder, every, read_generation)


def found_generations(path: str | os.PathLike[str]) -> list[Folder]:
    """The generations in a folder, the oldest first; or the one that it is.

    Raises:
        CheckpointError: there is none.
    """
    folder = folder_of(path)
    if storage_of(folder).has(NAME):
        return [folder]
    found = generations(folder)
    if not found:
        raise CheckpointError(
            "There are no checkpoints in the folder.",
            received=folder,
            fix="Give the folder that fit(checkpoint=...) has written to.",
        )
    return found


def read_newest(
    folder: Folder,
    *,
    is_finished: bool | None = None,
    without: Collection[str] = (),
    checks_parts: bool = True,
) -> Saved | None:
    """The newest complete generation in a folder; see ``first_whole`` and ``read_generation``.

    Args:
        folder: the folder.
        is_finished: see ``first_whole``.
        without: names of generations that are left out.
        checks_parts: see ``read_generation``.
    """
    every = [one for one in generations(folder) if one.name not in without]
    read = partial(read_generation, checks_parts=checks_parts)
    return first_whole(folder, every, read, is_finished=is_finished)


def first_whole(
    folder: Folder,
    every: Sequence[Folder],
    read: Callable[[Folder], Saved],
    *,
    is_finished: bool | None = None,
) -> Saved | None:
    """The newest complete generation in a folder; None if there are no generations.

    Args:
        folder: the folder.
        every: its generations, the oldest first.
        read: reads one.
        is_finished: True or False for only those written after, or before, the end of training.

    Warns:
        DamagedCheckpointWarning: for each newer one, why it was skipped.

    Raises:
        CheckpointError: there are some, and none is complete.
    """
    if is_finished is not None:
        every = [one for one in every if _may_be(one, is_finished=is_finished)]
    return _first_whole(folder, every, read) if every else None


def _may_be(generation: Folder, *, is_finished: bool) -> bool:
    """True if a generation is finished as given, or cannot be read: then the reader warns."""
    try:
        return read_manifest(generation).summary.is_finished == is_finished
    except (CheckpointError, OSError):
        return True


def _first_whole(folder: Folder, every: Sequence[Folder], read: Callable[[Folder], Saved]) -> Saved:
    reasons = []
    for generation in reversed(every):
        try:
            return read(generation)
        except CheckpointError as error:
            reasons.append(str(error))
            warnings.warn(str(error), DamagedCheckpointWarning, stacklevel=level_of_user())
    raise CheckpointError(
        f"No checkpoint in {folder} is complete.",
        received="; ".join(reasons),
        fix="Use a copy of the folder, or another folder to begin anew.",
    )


def read_generation(generation: Folder, *, checks_parts: bool = True) -> Saved:
    """One generation, with its hashes checked.

    Args:
        generation: the folder.
        checks_parts: check all hashes. Else whoever reads files with spans must check them
            (``part_reader``, or ``check_parts``).

    Raises:
        CheckpointError: it is damaged.
        ConnectionError: its store does not answer, so its state is unknown.
    """
    storage = storage_of(generation)
    try:
        manifest = read_manifest(generation)
        tensors: Tensors = {}
        for name, entry in manifest.files.items():
            is_mapped = name.startswith("parts-") or not checks_parts
            if entry.spans and is_mapped and isinstance(storage, LocalStorage):
                if checks_parts:
                    storage.check_spans(name, entry.spans)
                shard = storage.mapped(name, entry.spans)
            else:
                shard = _parsed(_read_whole(storage, name, entry), name)
            _check_shard(name, shard, manifest)
            tensors.update(shard)
    except ConnectionError:
        raise
    except (CheckpointError, OSError) as error:
        raise damaged(generation, error) from error
    return Saved(manifest=manifest, tensors=tensors, place=str(generation))


def check_parts(generation: Folder) -> None:
    """Check the hashes of files with spans.

    Raises:
        DamagedPartError: one is damaged, or cannot be read.
    """
    storage = storage_of(generation)
    try:
        for name, entry in read_manifest(generation).files.items():
            if entry.spans and isinstance(storage, LocalStorage):
                storage.check_spans(name, entry.spans)
    except (CheckpointError, OSError) as error:
        raise DamagedPartError(str(error)) from error


def read_manifest(generation: Folder) -> Manifest:
    """The manifest of a generation.

    Raises:
        CheckpointError, OSError: it is damaged, or cannot be read.
    """
    return decode_manifest(storage_of(generation).read(NAME, _LARGEST_MANIFEST))


def _read_whole(storage: Storage, name: str, entry: FileEntry) -> bytes:
    data = storage.read(name, entry.size)
    if len(data) != entry.size:
        raise CheckpointError(f"{name} has {len(data)} bytes of {entry.size}")
    start = 0
    for span in entry.spans or (Span(entry.size, entry.sha256),):
        if hashlib.sha256(data[start : span.stop]).hexdigest() != span.sha256:
            raise CheckpointError(f"{name} does not match its hash")
        start = span.stop
    return data


def _parsed(data: bytes, name: str) -> dict[str, torch.Tensor]:
    try:
        tensors = parse_tensors(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return as_written(tensors, header.get("__metadata__", {}))
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{name} is not a safetensors file: {error}") from error


def _check_shard(name: str, shard: Tensors, manifest: Manifest) -> None:
    """Check that a file holds the tensors that the manifest lists for it, and no others."""
    expected = {key: entry for key, entry in manifest.tensors.items() if entry.file == name}
    found = {key: TensorEntry.of(one, name) for key, one in shard.items()}
    if found != expected:
        both = found.keys() | expected
        strange = sorted(key for key in both if found.get(key) != expected.get(key))
        raise CheckpointError(f"{name} does not have the tensors that {NAME} lists: {strange[:5]}")


def damaged(generation: object, error: BaseException) -> CheckpointError:
    """The error for a generation that cannot be used, with the reason."""
    return CheckpointError(
        f"{generation} is not a complete checkpoint.",
        received=str(error).rstrip("."),
        fix="Use an older one, or another copy.",
    )
