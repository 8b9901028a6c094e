"""The console: standard output for as long as it can be written to, and then nothing.

What is shown must not end what it is about. A pipe that nobody reads any more (``| head -1``), a
full disk behind a file, a descriptor that was closed, a terminal that is gone: the rest is silence,
and Python tells of what was lost when the script ends.
"""

import io
import sys
from typing import Any, TextIO, cast

from rich.console import Console


class OutputConsole(Console):
    """A console on standard output, whatever that is at the moment.

    Args:
        quiet: show nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(file=cast(TextIO, _Output()), quiet=quiet)


class _Output(io.TextIOBase):
    """``sys.stdout``, until it fails."""

    def __init__(self) -> None:
        self._has_failed = False

    @property
    def _stream(self) -> TextIO | None:
        stream = None if self._has_failed else sys.stdout
        # Where a live line is shown, rich has put itself in the stream's place.
        return getattr(stream, "rich_proxied_file", stream)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute in the base
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except (AttributeError, ValueError):  # a stream of the user's own, or one that is closed
            return False

    def write(self, text: str) -> int:
        """Write what can be; characters that the stream has not become question marks."""
        known = text.encode(self.encoding, "replace").decode(self.encoding)
        self._try("write", known)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def _try(self, method: str, *args: Any) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            getattr(stream, method)(*args)
        except (OSError, ValueError):  # the second where Python's own end of it is closed
            self._has_failed = True
