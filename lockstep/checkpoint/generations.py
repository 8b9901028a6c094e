"""Generations: the checkpoints of a training in a folder, each written completely or not at all.

A generation is a folder ``generation-000042`` with tensors in safetensors files and a manifest. The
storage makes it appear as a whole (``storage``); only then are the oldest removed. So if the writer
is killed, at any moment, all generations there are complete, and the newest is the last or the one
before it.

One process writes everything: rank 0 maps the memory with the weights and slots of all ranks of its
host, whatever the layout. Several of its threads write files in parallel: hashing takes longer than
the disk, and both release the interpreter's lock. Where ranks divide a training, each writes its
parts (``PartitionedGeneration``).
"""

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from lockstep.channel.background import Background
from lockstep.checkpoint.local_storage import LocalStorage
from lockstep.checkpoint.manifest import NAME, FileEntry, Span, TensorEntry, encode_manifest
from lockstep.checkpoint.partitioned_files import (
    SPAN_BYTES,
    PartitionedFile,
    WrittenSpan,
    entry_of,
    lay_out,
)
from lockstep.checkpoint.remote_storage import RemoteStorage
from lockstep.checkpoint.saved import Saved
from lockstep.checkpoint.storage import GENERATION, AnyFolder, Create, Folder, Storage
from lockstep.checkpoint.trees import Tensors
from lockstep.checkpoint.weights import write_tensors
from lockstep.cluster.devices import usable_cores

# Files are read as a whole, so that the bytes used are those hashed. Several are written at once.
_SHARD_BYTES = 128 << 20
_MOST_THREADS = 4
_NONE: Any = MappingProxyType({})


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
    storage, name = storage_of(folder), _next_name(folder)
    with storage.new(name) as create:
        _write_all(create, saved, _MOST_THREADS if storage.takes_several else 1)
    _remove_old(folder, keep)
    return _joined(folder, name)


def _next_name(folder: Folder) -> str:
    newest = max((_number(each.name) for each in generations(folder)), default=-1)
    return f"generation-{newest + 1:06}"


def _remove_old(folder: Folder, keep: int) -> None:
    for old in generations(folder)[:-keep]:
        storage_of(folder).remove(old.name)


class PartitionedGeneration:
    """The next generation in a folder of this machine, which several processes write.

    This one lays the files out; all write their parts of these; then it writes the rest. The
    caller is within ``writing_alone``.

    Args:
        folder: the folder.
        saved: the contents. Of tensors that all write only forms are used.
        names: of these tensors.

    Attributes:
        files: that all write.
        folder: given.

    Raises:
        OSError: it cannot be written; earlier ones stay.
    """

    def __init__(self, folder: Path, saved: Saved, names: Collection[str]) -> None:
        self.folder, self._name, self._saved = folder, _next_name(folder), saved
        self._partitioned = {name: saved.tensors[name] for name in saved.tensors if name in names}
        self._new = storage_of(folder).new(self._name)
        self._create = self._new.__enter__()
        with self._given_up_on_error():
            self.files = [*map(self._laid_out, _shard_names("parts", self._partitioned).items())]

    def _laid_out(self, shard: tuple[str, Tensors]) -> PartitionedFile:
        name, tensors = shard
        with self._create(name, sum(tensor.nbytes for tensor in tensors.values())) as file:
            path = os.path.relpath(file.name, self.folder)
            laid_out = lay_out(path, tensors, {"format": "pt"})
            file.write(laid_out.header)
            file.truncate(laid_out.size)
        return laid_out

    def finish(self, spans: Sequence[WrittenSpan], keep: int) -> Path:
        """Write the rest when all have written their parts, and remove all but the newest ``keep``.

        Raises:
            OSError, CheckpointError: it cannot be written, or a part is missing; earlier ones stay.
        """
        with self._given_up_on_error():
            partitioned = {os.path.basename(one.path): entry_of(one, spans) for one in self.files}
            _write_all(self._create, self._saved, _MOST_THREADS, self._partitioned, partitioned)
        self._new.__exit__(None, None, None)
        _remove_old(self.folder, keep)
        return self.folder / self._name

    def give_up(self, error: BaseException) -> None:
        """Remove what has been written of it."""
        with suppress(type(error)):
            self._new.__exit__(type(error), error, error.__traceback__)

    @contextmanager
    def _given_up_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            raise


def _shard_names(prefix: str, tensors: Tensors) -> dict[str, Tensors]:
    """The tensors in groups, by the name of each group's file."""
    every = enumerate(_shards(tensors))
    return {f"{prefix}-{number:05}.safetensors": shard for number, shard in every}


def _write_all(
    create: Create,
    saved: Saved,
    most_threads: int,
    partitioned: Tensors = _NONE,
    partitioned_files: Mapping[str, FileEntry] = _NONE,
) -> None:
    """Write what is not partitioned, and the manifest."""
    whole = {name: one for name, one in saved.tensors.items() if name not in partitioned}
    shards = _shard_names("tensors", whole)
    files = {**partitioned_files, **_write_shards(create, shards, most_threads)}
    shards |= _shard_names("parts", partitioned)
    tensors = {
        key: TensorEntry.of(one, name)
        for name, shard in shards.items()
        for key, one in shard.items()
    }
    manifest = msgspec.structs.replace(saved.manifest, files=files, tensors=tensors)
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
    num_threads = max(min(len(shards), usable_cores(), most_threads), 1)
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
    return FileEntry.of_spans(hashed.size, hashed.spans)


class _Hashed:
    """A file that hashes what is written to it, in spans: a header, and tensor by tensor."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = 0
        self.spans: list[Span] = []

    def write(self, data: Any) -> None:
        self._file.write(data)
        size = SPAN_BYTES if self.spans else len(data)
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            self.size += len(piece)
            self.spans.append(Span(self.size, hashlib.sha256(piece).hexdigest()))


def _joined(folder: AnyFolder, name: str) -> AnyFolder:
    return folder / name  # type: ignore[return-value]  # a path of a path, a URL of a URL


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
