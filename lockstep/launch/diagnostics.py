"""Diagnostics: what a process writes to a descriptor for rank 0 to read, should it come to that."""

import os
import sys
from contextlib import suppress

from lockstep.cluster.nameless_files import nameless_file


class DiagnosticsFile:
    """A file without a name: a process's errors while it starts, its stacks, and its crash."""

    def __init__(self) -> None:
        self.descriptor = nameless_file("lockstep-diagnostics file")
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


def show(text: str) -> None:
    """Write on standard error, if that can be: to lose words there must not end training."""
    if text and sys.stderr is not None:
        with suppress(OSError, ValueError):  # a full disk, a closed pipe or stream
            sys.stderr.write(text)
