"""Where checkpoints are kept: what a folder must be able to do, of this machine or of a store.

Two kinds of folders do it: those of this machine (``local_storage``), and those that fsspec opens
by a URL (``remote_storage``).
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, TypeVar

GENERATION = re.compile(r"generation-(\d{6,})")

Create = Callable[[str, int], AbstractContextManager[BinaryIO]]
"""Makes a file of a name, into which so many bytes are written within the block."""


class Url(str):
    """A folder that fsspec opens, as in ``s3://bucket/run``; joined with names as a path is."""

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
        """Of the folders in it that are whole, as far as names tell; none if it is not there."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is such a file in it."""

    @abstractmethod
    def read(self, name: str, most: int) -> bytes:
        """All bytes of a file in it.

        Args:
            name: the file's.
            most: bytes that it may have.

        Raises:
            CheckpointError: it is no file, or larger.
            OSError: it cannot be read; a ConnectionError says nothing of the file itself.
        """

    @abstractmethod
    def alone(self) -> AbstractContextManager[None]:
        """Within the block this process alone writes to it; it is made if it is not there.

        Raises:
            CheckpointError: another process does, or what is there is no folder.
            OSError: it cannot be made or written to.
        """

    @abstractmethod
    def new(self, name: str) -> AbstractContextManager[Create]:
        """Within the block the files of a folder in it are made; after it the folder is whole.

        The manifest is the last of them. If the block raises, there is no such folder.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a folder in it. Whenever that ends, nobody takes what is left for a whole one."""
