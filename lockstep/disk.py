"""Writes files with errors that name the file, the number of bytes to write, and the free space.

Python names a file that cannot be opened. But if the disk is full, or a limit is reached while the
file is written, it only says ``[Errno 28] No space left on device``.
"""

import errno
import os
import secrets
import shutil
import tempfile
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, Self, TypeVar

import msgspec

from lockstep.errors import OptionError
from lockstep.formatting import format_bytes

_T = TypeVar("_T")

# Error numbers for a full disk.
SHORTAGES = (errno.ENOSPC, errno.EDQUOT)


def cache_folder() -> Path:
    """``lockstep`` in the user's cache folder: ``$XDG_CACHE_HOME``, or ``~/.cache``.

    Raises:
        FileNotFoundError: the user has no home, as in a container without an entry for the user.
    """
    folder = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(folder) if folder else Path.home() / ".cache") / "lockstep"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "The user has no home folder", "~") from error


@contextmanager
def writing(path: str | os.PathLike[str], num_bytes: int | None = None) -> Iterator[None]:
    """Within the block a file is written.

    Args:
        path: of the file.
        num_bytes: to be written, if known.

    Raises:
        OSError: as raised in the block, with this file's name if it has none.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        reason = f"{error.strerror}{_figures(error.errno, path, num_bytes)}"
        raise OSError(error.errno, reason, os.fspath(path)) from error


def prepare_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder if it is missing, and check that files can be written into it.

    Raises:
        OptionError: it cannot be made or written to.
    """
    try:
        with suppress(FileExistsError):  # a file; the next line says so
            os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OptionError(
            "Files must be written into a folder.",
            received=f"{os.fspath(path)}: {error.strerror}",
            fix="Name a folder that you may write to; it need not exist yet.",
        ) from error


def prepare_file(path: str | os.PathLike[str]) -> None:
    """Make the folder of a file, and check that the file can be written.

    Raises:
        OptionError: it cannot.
    """
    if os.path.isdir(path):
        raise OptionError(
            "The path must be that of a file.",
            received=f"{os.fspath(path)}, a folder",
            fix="Give the path of a file, which need not exist yet.",
        )
    prepare_folder(os.path.dirname(path) or os.curdir)


@contextmanager
def replacing(
    path: Path, num_bytes: int | None = None, mode: int | None = None
) -> Iterator[BinaryIO]:
    """A new file beside the one at a path, which it replaces atomically after the block.

    Args:
        path: of the file.
        num_bytes: to be written, if known.
        mode: its permissions; None for those of the umask.

    Raises:
        OSError: it cannot be written; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    # The file never has more permissions than it will have at the end.
    new = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
    try:
        with writing(path, num_bytes), open(new, "wb") as file:
            yield file
            if mode is not None:
                os.fchmod(new, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@dataclass(frozen=True)
class CacheFile(Generic[_T]):
    """A JSON file in the user's cache folder. One that cannot be read warns, and is written anew.

    It is replaced as a whole, so a reader finds the old one or the new one; if two processes write
    at once, what one of them has added may be lost.

    Attributes:
        name: in ``cache_folder``.
        kind: the type of its contents.
        what: is in it, for warnings.
    """

    name: str
    kind: type[_T]
    what: str

    @property
    def path(self) -> Path:
        """See ``cache_folder``."""
        return cache_folder() / self.name

    def read(self) -> _T | None:
        """The contents; None if there are none."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=self.kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            warnings.warn(f"{self.path} is ignored, and written anew: {error}.", stacklevel=2)
            return None

    def write(self, contents: _T) -> bool:
        """Replace the contents; returns False if they could not be written."""
        text = msgspec.json.format(msgspec.json.encode(contents), indent=2) + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path, len(text), mode=0o600) as file:
                file.write(text)
        except OSError as error:
            warnings.warn(
                f"{self.what} cannot be remembered: {error}. "
                "Set XDG_CACHE_HOME to a writable folder.",
                stacklevel=2,
            )
            return False
        return True


class JsonFile:
    """An object that is saved as a JSON file; a base of msgspec's structs."""

    __slots__ = ()

    def to_json(self) -> bytes:
        """The object as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @classmethod
    @abstractmethod
    def from_json(cls, text: bytes | str) -> Self:
        """Read what ``to_json`` wrote."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a JSON file."""
        text = self.to_json() + b"\n"
        with writing(path, len(text)):
            Path(path).write_bytes(text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read it from a JSON file; see ``from_json``."""
        return cls.from_json(Path(path).read_bytes())


def _figures(number: int, path: str | os.PathLike[str], num_bytes: int | None) -> str:
    figures = [] if num_bytes is None else [f"{format_bytes(num_bytes)} to write"]
    if number in SHORTAGES:
        with suppress(OSError):  # its folder is gone
            free = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free
            figures.append(f"{format_bytes(free)} free on its disk")
    return f" ({', '.join(figures)})" if figures else ""
