"""Scraps: what a process writes to a descriptor for rank 0 to read, should it come to that."""

import os
import tempfile


class Scrap:
    """A file without a name: a process's errors while it starts, its stacks, its last words."""

    def __init__(self) -> None:
        self.descriptor = _nameless_file()
        self._read = 0

    def read_new(self) -> str:
        """What has been written since the last call."""
        # Read with an offset: all processes share the position where the next word is written.
        new = os.pread(self.descriptor, 1 << 20, self._read)
        self._read += len(new)
        return new.decode(errors="replace")

    @property
    def num_bytes(self) -> int:
        """How much has been written, read or not."""
        return os.fstat(self.descriptor).st_size

    @property
    def has_new(self) -> bool:
        """Whether there is something to read."""
        return self.num_bytes > self._read

    def close(self) -> None:
        """Give up this process's descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lockstep-scrap", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
