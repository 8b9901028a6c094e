"""The interface of a folder for checkpoints.

Two kinds of folders implement it: those on this machine (``local_storage``), and those that fsspec
opens by a URL (``remote_storage``).
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, TypeVar

GENERATION = re.compile(r"generation-(\d{6,})")
# A file that several processes write, before its generation is complete.
PARTED_PATH = re.compile(r"\.generation-[0-9a-f]{16}/parts-\d{5}\.safetensors")

Create = Callable[[str, int], AbstractContextManager[BinaryIO]]
"""Makes a file, given its name and number of bytes, which is written within the block."""


class Url(str):
    """A folder that fsspec opens, as in ``s3://bucket/run``; joined with names like a path."""

    __slots__ = ()

    def __truediv__(self, name: str) -> "Url":
        return Url(f"{self.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.rstrip("/").rpartition("/")[2]


Folder = Path | Url
AnyFolder = TypeVar("AnyFolder", bound=Folder)


def folder_of(path: str | os.PathLike[str]) -> Folder:
    """The folder that a user has named, by its path or its URL."""
    text = os.fspath(path)
    if isinstance(text, str) and "://" in text and not text.startswith("file://"):
        return Url(text)
    return Path(text.removeprefix("file://")) if isinstance(path, str) else Path(path)


class Storage(ABC):
    """A folder of generations, or one of these.

    Attributes:
        takes_several: files may be written by several threads at a time.
    """

    takes_several = True

    @abstractmethod
    def names(self) -> list[str]:
        """The names of its folders that are complete, as far as names tell; none if missing."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """True if it has such a file."""

    @abstractmethod
    def read(self, name: str, most: int) -> bytes:
        """All bytes of a file in it.

        Args:
            name: the file's.
            most: bytes that it may have.

        Raises:
            CheckpointError: it is not a file, or larger.
            OSError: it cannot be read; after a ConnectionError the file's state is unknown.
        """

    @abstractmethod
    def alone(self) -> AbstractContextManager[None]:
        """Lock it for writing within the block; it is made if missing.

        Raises:
            CheckpointError: another process writes there, or the path is not a folder.
            OSError: it cannot be made or written to.
        """

    @abstractmethod
    def new(self, name: str) -> AbstractContextManager[Create]:
        """Make the files of a folder within the block; after it the folder is complete.

        The manifest is the last of them. If the block raises, there is no such folder.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a folder. If this is interrupted, the rest does not count as a complete one."""
