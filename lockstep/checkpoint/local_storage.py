"""Folders on this machine: files are synced, and a generation appears by a rename.

It is written under another name. So if the writer is killed, at any moment, all generations are
complete. It is removed under another name, too.
"""

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from lockstep.checkpoint.manifest import Span
from lockstep.checkpoint.storage import Create, Storage
from lockstep.checkpoint.trees import Tensors
from lockstep.checkpoint.weights import mapped_tensors
from lockstep.disk import writing
from lockstep.errors import CheckpointError, reason_of

_TEMPORARY = ".generation-"
_LOCK = ".lock"


class LocalStorage(Storage):
    """A folder on this machine.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        try:
            return os.listdir(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def has(self, name: str) -> bool:
        return os.path.lexists(self._folder / name)

    def read(self, name: str, most: int) -> bytes:
        with self.opened(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise CheckpointError(f"{name} has {size} bytes, more than {most}")
            return file.read()

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """A file, open within the block.

        Raises:
            CheckpointError, OSError: it is not a file, or cannot be opened.
        """
        # Opening a pipe would block, and a link could lead out of the folder.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self._folder / name, flags)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CheckpointError(f"{name} is not a file")
            yield file

    def mapped(self, name: str, spans: Sequence[Span]) -> Tensors:
        """The tensors of a file, which is read when they are; its bytes are not checked.

        Args:
            name: the file's.
            spans: of the whole file.

        Raises:
            CheckpointError: it is not a file, or not one of their size.
            OSError: it cannot be read.
        """
        with self.opened(name) as file:
            if os.fstat(file.fileno()).st_size != spans[-1].stop:
                raise CheckpointError(f"{name} does not have {spans[-1].stop} bytes")
            return mapped_tensors(f"/proc/self/fd/{file.fileno()}")

    def check_spans(self, name: str, spans: Sequence[Span]) -> None:
        """Check the hashes of a file's spans.

        Raises:
            CheckpointError: bytes are damaged.
            OSError: it cannot be read.
        """
        with self.opened(name) as file:
            start = 0
            for span in spans:
                if hashlib.sha256(file.read(span.stop - start)).hexdigest() != span.sha256:
                    raise CheckpointError(f"bytes {start} to {span.stop} of {name} are damaged")
                start = span.stop

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._make()
        lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(lock, self._folder)
            self._remove_temporaries()
            yield
        finally:
            os.close(lock)

    @contextmanager
    def new(self, name: str) -> Iterator[Create]:
        temporary = self._temporary()
        os.mkdir(temporary, 0o700)
        try:
            yield partial(_new_file, temporary)
            _sync_folder(temporary)
            os.rename(temporary, self._folder / name)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync_folder(self._folder)

    def remove(self, name: str) -> None:
        temporary = self._temporary()
        os.rename(self._folder / name, temporary)  # so that no reader finds a part of it
        shutil.rmtree(temporary)

    def _make(self) -> None:
        if self._folder.is_dir():
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            is_file = isinstance(error, FileExistsError)
            raise CheckpointError(
                "Checkpoints must be written into a folder.",
                received=f"{self._folder}, a file" if is_file else reason_of(error),
                fix="Name a folder that you may write to; it need not exist yet.",
            ) from error
        _sync_folder(self._folder.parent)

    def _temporary(self) -> Path:
        return self._folder / f"{_TEMPORARY}{secrets.token_hex(8)}"

    def _remove_temporaries(self) -> None:
        """Remove the leftovers of a killed process."""
        for name in os.listdir(self._folder):
            if name.startswith(_TEMPORARY):
                shutil.rmtree(self._folder / name)


def _lock(lock: int, folder: Path) -> None:
    # A lock of the process, not of the open file: children that are forked do not hold it.
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        raise CheckpointError(
            "Only one process at a time can write checkpoints into a folder.",
            received=f"{folder}, into which another process writes",
            fix="Wait for it to end, or give this training a folder of its own.",
        ) from error


@contextmanager
def _new_file(folder: Path, name: str, num_bytes: int) -> Iterator[BinaryIO]:
    """A file that is on the disk after the block."""
    path = folder / name
    with writing(path, num_bytes), open(path, "wb", opener=_new_descriptor) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _new_descriptor(path: str, _: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _sync_folder(folder: Path) -> None:
    with writing(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
