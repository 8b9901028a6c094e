"""Files without a name: memory that processes share by passing a descriptor on."""

import os
import tempfile

_STANDARD = range(3)  # input, output, error


def anonymous_file(name: str) -> int:
    """The descriptor of a new, empty file that is gone with the last descriptor of it.

    Args:
        name: for those who look into ``/proc``.
    """
    _occupy_standard()
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # no memfd on macOS: an unlinked file does the same
        return os.dup(file.fileno())


def _occupy_standard() -> None:
    """Open the standard descriptors that a script was started without, on nothing.

    A file of ours that took such a number, or a copy of its descriptor, would get what is printed.
    """
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
