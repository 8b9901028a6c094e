"""Generations: the checkpoints of a training in a folder, each written completely or not at all.

A generation is a folder ``generation-000042`` with tensors in safetensors files and a manifest. The
storage makes it appear as a whole (``storage``); only then are the oldest removed. So if the writer
is killed, at any moment, all generations there are complete, and the newest is the last or the one
before it.

One process writes everything: rank 0 maps the memory with the weights and slots of all ranks of its
host, whatever the layout. Several of its threads write files in parallel: hashing takes longer than
the disk, and both release the interpreter's lock.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from lockstep.checkpoint.local_storage import LocalStorage
from lockstep.checkpoint.manifest import (
    NAME,
    FileEntry,
    TensorEntry,
    encode_manifest,
)
from lockstep.checkpoint.remote_storage import RemoteStorage
from lockstep.checkpoint.saved import Saved
from lockstep.checkpoint.storage import GENERATION, AnyFolder, Create, Folder, Storage
from lockstep.checkpoint.trees import Tensors
from lockstep.checkpoint.weights import write_tensors
from lockstep.cluster.devices import usable_cores
from lockstep.launch.background import Background

# Files are read as a whole, so that the bytes used are those hashed. Several are written at once.
_SHARD_BYTES = 128 << 20
_MOST_THREADS = 4


def storage_of(folder: Folder) -> Storage:
    """The storage of a folder."""
    return LocalStorage(folder) if isinstance(folder, Path) else RemoteStorage(folder)


def generations(folder: AnyFolder) -> list[AnyFolder]:
    """The generations in a folder, the oldest first; none if there is no folder."""
    names = [name for name in storage_of(folder).names() if GENERATION.fullmatch(name)]
    return [_joined(folder, name) for name in sorted(names, key=_number)]


def writing_alone(folder: Folder) -> AbstractContextManager[None]:
    """Lock a folder for writing within the block; it is made if missing.

    Raises:
        CheckpointError: another process writes there, or the path is not a folder.
        OSError: the folder cannot be made or written to.
    """
    return storage_of(folder).alone()


def write_generation(folder: AnyFolder, saved: Saved, keep: int) -> AnyFolder:
    """Write the next generation, then remove all but the newest ``keep``.

    The caller is within ``writing_alone``.

    Raises:
        OSError: it cannot be written; earlier ones stay.
        CheckpointError: safetensors does not have a tensor's dtype.
    """
    storage = storage_of(folder)
    newest = max((_number(each.name) for each in generations(folder)), default=-1)
    name = f"generation-{newest + 1:06}"
    with storage.new(name) as create:
        _write_all(create, saved, _MOST_THREADS if storage.takes_several else 1)
    for old in generations(folder)[:-keep]:
        storage.remove(old.name)
    return _joined(folder, name)


def _write_all(create: Create, saved: Saved, most_threads: int) -> None:
    every = enumerate(_shards(saved.tensors))
    shards = {f"tensors-{number:05}.safetensors": shard for number, shard in every}
    manifest = msgspec.structs.replace(
        saved.manifest,
        files=_write_shards(create, shards, most_threads),
        tensors={
            key: _entry(one, name) for name, shard in shards.items() for key, one in shard.items()
        },
    )
    data = encode_manifest(manifest)
    with create(NAME, len(data)) as file:
        file.write(data)


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


def _write_shards(
    create: Create, shards: dict[str, Tensors], most_threads: int
) -> dict[str, FileEntry]:
    """Write each shard to the file of its name; all threads end, even on error."""
    num_threads = min(len(shards), usable_cores(), most_threads)
    writing = {}
    with closing(Background("lockstep: files", num_threads)) as threads:
        try:
            for name, shard in shards.items():
                writing[name] = threads.submit(partial(_write_shard, create, name, shard))
        finally:
            wait(writing.values())
        return {name: entry.result() for name, entry in writing.items()}


def _write_shard(create: Create, name: str, shard: Tensors) -> FileEntry:
    with create(name, sum(tensor.nbytes for tensor in shard.values())) as file:
        hashed = _Hashed(file)
        write_tensors(shard, {"format": "pt"}, hashed)  # type: ignore[arg-type]  # it has ``write``
    return FileEntry(hashed.size, hashed.hash.hexdigest())


def _entry(tensor: Any, file: str) -> TensorEntry:
    return TensorEntry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), file)


class _Hashed:
    """A file that hashes what is written to it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = 0
        self.hash = hashlib.sha256()

    def write(self, data: Any) -> None:
        self._file.write(data)
        self.hash.update(data)
        self.size += len(data)


def _joined(folder: AnyFolder, name: str) -> AnyFolder:
    return folder / name  # type: ignore[return-value]  # a path of a path, a URL of a URL


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
