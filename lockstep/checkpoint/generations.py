"""Generations: the checkpoints of a training in a folder, written whole or not at all.

A generation is a folder ``generation-000042`` with tensors in safetensors files and a manifest. It
is written under another name, synced, and renamed; only then are the oldest removed. So whatever
ends the writer, at whatever moment, the generations there are whole, and the newest is the last or
the one before it. One process writes, as one has everything: weights and slots of all ranks of a
host lie in memory that rank 0 maps, whatever the layout.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.checkpoint.manifest import (
    NAME,
    FileEntry,
    Manifest,
    TensorEntry,
    encode_manifest,
)
from lockstep.checkpoint.saved import Saved
from lockstep.checkpoint.trees import Tensors
from lockstep.checkpoint.weights import write_tensors
from lockstep.disk import writing
from lockstep.errors import CheckpointError

_GENERATION = re.compile(r"generation-(\d{6,})")
_TEMPORARY = ".generation-"
_LOCK = ".lock"

# Files are read as a whole, so that what is used is what was hashed.
_SHARD_BYTES = 256 << 20


def generations(folder: Path) -> list[Path]:
    """The generations in a folder, the oldest first; none where there is no folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    numbers = {name: int(found[1]) for name in names if (found := _GENERATION.fullmatch(name))}
    return [folder / name for name in sorted(numbers, key=numbers.__getitem__)]


@contextmanager
def writing_alone(folder: Path) -> Iterator[None]:
    """Within the block this process alone writes to a folder, which is made if there is none.

    Raises:
        CheckpointError: another process does.
        OSError: the folder cannot be made or written to.
    """
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sync_folder(folder.parent)
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(lock, folder)
        _remove_temporaries(folder)
        yield
    finally:
        os.close(lock)


def _lock(lock: int, folder: Path) -> None:
    # Of the process, not of the open file: what a reader of data forked does not keep it.
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        raise CheckpointError(
            "One process at a time writes checkpoints into a folder.",
            received=f"{folder}, into which another one writes",
            fix="Wait for it to end, or give this training a folder of its own.",
        ) from error


def write_generation(folder: Path, saved: Saved, keep: int) -> Path:
    """Write the next generation, then remove all but the newest ``keep``.

    The caller is within ``writing_alone``.

    Raises:
        OSError: it cannot be written; those that were there stay.
        CheckpointError: a tensor is of a type that safetensors has not.
    """
    newest = max((_number(each) for each in generations(folder)), default=-1)
    name = f"generation-{newest + 1:06}"
    temporary = _temporary(folder)
    os.mkdir(temporary, 0o700)
    try:
        _write_all(temporary, saved)
        os.rename(temporary, folder / name)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(folder)
    for old in generations(folder)[:-keep]:
        gone = _temporary(folder)
        os.rename(old, gone)  # so that nobody takes a half for a torn one
        shutil.rmtree(gone)
    return folder / name


def _write_all(folder: Path, saved: Saved) -> None:
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    for number, shard in enumerate(_shards(saved.tensors)):
        name = f"tensors-{number:05}.safetensors"
        files[name] = _write_shard(folder / name, shard)
        tensors.update({key: _entry(one, name) for key, one in shard.items()})
    manifest = Manifest(
        summary=saved.summary,
        files=files,
        tensors=tensors,
        weights=saved.weights,
        values=saved.values,
        plan=saved.plan,
    )
    data = encode_manifest(manifest)
    with _new_file(folder / NAME, len(data)) as file:
        file.write(data)
    _sync_folder(folder)


def _shards(tensors: Tensors) -> Iterator[Tensors]:
    """The tensors in groups, each for a file."""
    shard: Tensors = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        if shard and num_bytes + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor
        num_bytes += tensor.nbytes
    if shard:
        yield shard


def _write_shard(path: Path, shard: Tensors) -> FileEntry:
    with _new_file(path, sum(tensor.nbytes for tensor in shard.values())) as file:
        write_tensors(shard, {"format": "pt"}, file)  # type: ignore[arg-type]  # it has ``write``
    return FileEntry(file.size, file.hash.hexdigest())


def _entry(tensor: Any, file: str) -> TensorEntry:
    return TensorEntry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), file)


class _Hashed:
    """A file that knows the hash of what was written."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = 0
        self.hash = hashlib.sha256()

    def write(self, data: Any) -> None:
        self._file.write(data)
        self.hash.update(data)
        self.size += len(data)


@contextmanager
def _new_file(path: Path, num_bytes: int) -> Iterator[_Hashed]:
    """A file that is on the disk after the block."""
    with writing(path, num_bytes):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            yield _Hashed(file)
            file.flush()
            os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    with writing(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _number(generation: Path) -> int:
    return int(generation.name.rpartition("-")[2])


def _temporary(folder: Path) -> Path:
    return folder / f"{_TEMPORARY}{secrets.token_hex(8)}"


def _remove_temporaries(folder: Path) -> None:
    """What a process has left that was killed."""
    for name in os.listdir(folder):
        if name.startswith(_TEMPORARY):
            shutil.rmtree(folder / name)
