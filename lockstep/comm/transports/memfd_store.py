"""A store for the rendezvous of process groups: a file without a name, on one host.

torch.distributed needs a store of keys and values in which each rank leaves its address. Its own
stores listen on all interfaces (TCPStore), or need a file with a name that must be removed
(FileStore). This one is a file that exists only as a descriptor of the script's process:
others open it through ``/proc``, which the kernel allows only to processes of the same user.

Every host has such a file. The hosts' leaders exchange the entries over the control group, which is
authenticated.
"""

import fcntl
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
from torch import distributed

from lockstep.cluster.anonymous_files import anonymous_file

_Store: Any = vars(distributed)["Store"]  # torch's types do not name it

_POLL_SECONDS = 0.001
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The address of the store of a process group, sent to all of its ranks.

    Attributes:
        path: under which processes of this host open the file, as long as it is there.
        address: of this host, where others reach it.
        num_ranks: how many of them are on this host.
        timeout_seconds: longest wait for another rank.
    """

    path: str
    address: str
    num_ranks: int
    timeout_seconds: float


class MeetingPoint:
    """The file, in the process that makes it; gone with this object.

    Args:
        options: see ``Meeting``.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._descriptor = anonymous_file("lockstep-process-group")
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def meeting(self) -> Meeting:
        """The address, to send to the ranks."""
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return Meeting(path=path, **self._options)


class SharedStore(_Store):  # type: ignore[misc]
    """One process's view: keys and values that all processes with the open file see.

    Args:
        path: of the meeting point.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self.update({key: value.encode() if isinstance(value, str) else bytes(value)})

    def entries(self) -> dict[str, bytes]:
        """All keys with their values."""
        with self._locked() as entries:
            return entries

    def update(self, more: Mapping[str, bytes]) -> None:
        """Give some keys values."""
        with self._locked() as entries:
            self._write({**entries, **more})

    def get(self, key: str) -> bytes:
        """A key's value; waits until it has one."""
        self.wait([key])
        with self._locked() as entries:
            return entries[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a key's number; returns the sum."""
        with self._locked() as entries:
            count = int(entries.get(key, b"0")) + amount
            self._write({**entries, key: b"%d" % count})
        return count

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them have values."""
        with self._locked() as entries:
            return all(key in entries for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values.

        Raises:
            TimeoutError: time is up.
        """
        until = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"no rank has set {', '.join(keys)}")
            time.sleep(_POLL_SECONDS)

    @contextmanager
    def _locked(self) -> Iterator[dict[str, bytes]]:
        """The entries, while no other process changes them."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield self._read()
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _read(self) -> dict[str, bytes]:
        text = os.pread(self._descriptor, _MOST_BYTES, 0)
        return msgspec.msgpack.decode(text, type=dict[str, bytes]) if text else {}

    def _write(self, entries: dict[str, bytes]) -> None:
        os.pwrite(self._descriptor, msgspec.msgpack.encode(entries), 0)
