"""A process on this machine that holds the script of a host, here or at the far end of ssh."""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from lockstep.launch.orders import Orders

HOLD_SCRIPT = ("-m", "lockstep.launch.held_script")

# What a script has written to its output and errors since it was last asked; and its exit status,
# once it has ended and all that it wrote was read.
Progress = tuple[tuple[bytes, bytes], int | None]

_MOST_BYTES = 1 << 20


class HeldProcess:
    """``held_script.py`` or what leads to it: takes orders on its input, and is read from.

    Args:
        command: to start it.
        orders: for the script.
    """

    def __init__(self, command: Sequence[str], orders: Orders) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,  # Ctrl-C in the terminal is for us, who pass it on
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._streams = (self._process.stdout, self._process.stderr)
        for stream in self._streams:
            os.set_blocking(stream.fileno(), False)
        self.tell(orders.line())

    def read(self) -> Progress:
        """How far it is. Does not wait."""
        status = self._process.poll()  # before reading: what it wrote last is read, too
        output, errors = (stream.read(_MOST_BYTES) or b"" for stream in self._streams)
        if status is None or output or errors:
            return (output, errors), None
        return (b"", b""), status if status >= 0 else 128 - status

    def tell(self, told: bytes) -> None:
        """Write to its input."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # nobody reads: the exit status says why
            self._process.stdin.write(told)

    def end(self) -> None:
        """Have the script ended."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        """Kill the process."""
        self.end()
        self._process.kill()
        self._process.wait()
        for stream in self._streams:
            stream.close()
