"""Writing files: an error says which file it was, how much was to be written, and what is free.

Python names a file where it cannot be opened; where a disk is full, or a limit is reached while the
file is written, it says ``[Errno 28] No space left on device`` and no more.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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


def _figures(number: int, path: str | os.PathLike[str], num_bytes: int | None) -> str:
    figures = [] if num_bytes is None else [f"{format_bytes(num_bytes)} to write"]
    if number in SHORTAGES:
        with suppress(OSError):  # its folder is gone
            free = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free
            figures.append(f"{format_bytes(free)} free on its disk")
    return f" ({', '.join(figures)})" if figures else ""
