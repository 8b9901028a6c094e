"""Writing files: an error says which file it was, how much was to be written, and what is free.

Python names a file where it cannot be opened; where a disk is full, or a limit is reached while the
file is written, it says ``[Errno 28] No space left on device`` and no more.
"""

import errno
import os
import secrets
import shutil
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from lockstep.units import format_bytes

# Numbers of errors that say that there is no room.
SHORTAGES = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: str | os.PathLike[str], num_bytes: int | None = None) -> Iterator[None]:
    """Within the block a file is written.

    Args:
        path: of the file.
        num_bytes: to be written, where that is known.

    Raises:
        OSError: as raised in the block; one that names no file names this one.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        reason = f"{error.strerror}{_figures(error.errno, path, num_bytes)}"
        raise OSError(error.errno, reason, os.fspath(path)) from error


@contextmanager
def replacing(
    path: Path, num_bytes: int | None = None, mode: int | None = None
) -> Iterator[BinaryIO]:
    """A file that is written beside the one at a path, and then takes its place, as a whole.

    Args:
        path: of the file.
        num_bytes: to be written, where that is known.
        mode: its permissions; None is what the umask leaves.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    # Made so, a new file has what the umask leaves, and is never open to more than it will be.
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


class JsonFile:
    """Something that a JSON file says as a whole; a base of msgspec's structs."""

    __slots__ = ()

    def to_json(self) -> bytes:
        """All of it, as indented JSON."""
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
