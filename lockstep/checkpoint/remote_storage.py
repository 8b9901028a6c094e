"""Folders that fsspec opens by a URL: object stores, and all else that it supports.

A store has no rename. Here a generation exists once its manifest does, which is written last and
removed first, and has the hashes of all other files. So a generation with files that are missing,
or of another writer, does not count or is found to be damaged. Nothing keeps two processes from
writing into one folder; files that they mix up do not match the hashes.

A missing or damaged file differs from a store that does not answer: then the generation's state is
unknown, and no older one is used as the newest.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, BinaryIO

from lockstep.checkpoint.manifest import NAME
from lockstep.checkpoint.storage import GENERATION, Create, Storage, Url
from lockstep.errors import CheckpointError, ExtraError, OptionError
from lockstep.extras import import_extra


class RemoteStorage(Storage):
    """A folder that fsspec opens.

    Args:
        url: of the folder.

    Raises:
        ExtraError: a package that opens such URLs is not installed.
        OptionError: fsspec does not know them.
    """

    def __init__(self, url: Url) -> None:
        self._url = url
        user = f"A folder at {url}"
        core = import_extra("fsspec.core", extra="remote", user=user)
        try:
            self._files, self._path = core.url_to_fs(str(url))
        except ImportError as error:
            raise ExtraError(
                f"{user} needs a package that is not installed.",
                received=error,
                fix='Run `pip install ".[remote]"` in a clone of Lockstep, for s3:// and gs://; '
                "for others install the package that fsspec names.",
            ) from error
        except ValueError as error:
            raise OptionError(
                "Checkpoints need a folder, or a URL that fsspec can open.",
                received=f"{url}: {error}",
                fix="Name a folder, or a URL as s3://bucket/run, gs://bucket/run.",
            ) from error
        # Other file systems may have one connection, which threads cannot share.
        self.takes_several = bool(self._files.async_impl)

    def names(self) -> list[str]:
        return [folder for folder, files in self._found().items() if NAME in files]

    def has(self, name: str) -> bool:
        with self._reached():
            return bool(self._files.exists(self._at(name)))

    def read(self, name: str, most: int) -> bytes:
        with self._reached():
            info = self._files.info(self._at(name))
            if info["type"] != "file":
                raise CheckpointError(f"{name} is not a file")
            if info["size"] > most:
                raise CheckpointError(f"{name} has {info['size']} bytes, more than {most}")
            return bytes(self._files.cat_file(self._at(name)))

    @contextmanager
    def alone(self) -> Iterator[None]:
        for name, files in self._found().items():
            if GENERATION.fullmatch(name) and NAME not in files:  # of a process that was killed
                self._remove_files(name)
        yield

    @contextmanager
    def new(self, name: str) -> Iterator[Create]:
        yield partial(self._new_file, name)

    def remove(self, name: str) -> None:
        with self._reached():
            self._files.rm_file(self._at(name, NAME))
        self._remove_files(name)

    def _remove_files(self, name: str) -> None:
        with self._reached(), suppress(FileNotFoundError):  # where folders are parts of names
            self._files.rm(self._at(name), recursive=True)

    @contextmanager
    def _new_file(self, folder: str, name: str, num_bytes: int) -> Iterator[BinaryIO]:
        with self._reached(), self._opened(self._at(folder), name) as file:
            yield file

    def _opened(self, folder: str, name: str) -> Any:
        try:
            return self._files.open(f"{folder}/{name}", "wb")
        except FileNotFoundError:  # where folders are more than parts of names
            self._files.makedirs(folder, exist_ok=True)
            return self._files.open(f"{folder}/{name}", "wb")

    def _found(self) -> dict[str, list[str]]:
        """Names of files by that of their folder."""
        found: dict[str, list[str]] = {}
        with self._reached(), suppress(FileNotFoundError):
            self._files.invalidate_cache()  # others may have written since
            for path in self._files.find(self._path):
                folder, _, name = path[len(self._path) :].strip("/").rpartition("/")
                found.setdefault(folder, []).append(name)
        return found

    def _at(self, *names: str) -> str:
        return "/".join((self._path.rstrip("/"), *names))

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Convert errors of the store's client, of any type, to a ConnectionError."""
        try:
            yield
        except (CheckpointError, FileNotFoundError):
            raise
        except Exception as error:
            message = f"{self._url} cannot be read or written: {type(error).__name__}: {error}"
            raise ConnectionError(message) from error
