"""Diagnostics: a process's errors and stacks, in a file that rank 0 can read.

A helper that Lockstep started writes its stacks when a signal arrives. A process of the user's gets
no signals: its script may use them (Slurm's SIGUSR1 announces the end of the job's time), and a
signal after the call, without Lockstep's handler, would kill it. So a thread there waits for
requests during a call. The thread needs the interpreter's lock: code that holds the lock prevents
an answer.

Linux only.
"""

import faulthandler
import os
import re
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lockstep.cluster.anonymous_files import anonymous_file

# faulthandler's list of modules after the stacks: long, and without information.
_MODULE_LIST = re.compile(r"^\n?Extension modules: .*\n?", re.MULTILINE)


class DiagnosticsFile:
    """A file without a name: a process's errors while it starts, its stacks, and its crash."""

    def __init__(self) -> None:
        self.descriptor = anonymous_file("lockstep-diagnostics file")
        self._read = 0

    def read_new(self) -> str:
        """What has been written since the last call."""
        # Read with an offset: all processes share the file position, where the next write goes.
        new = os.pread(self.descriptor, 1 << 20, self._read)
        self._read += len(new)
        return _MODULE_LIST.sub("", new.decode(errors="replace"))

    @property
    def num_bytes(self) -> int:
        """The file's size."""
        return os.fstat(self.descriptor).st_size

    @property
    def has_new(self) -> bool:
        """True if there is unread text."""
        return self.num_bytes > self._read

    def close(self) -> None:
        """Close this process's descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def show(text: str) -> None:
    """Write to standard error if possible: a failure there must not end training."""
    if text and sys.stderr is not None:
        with suppress(OSError, ValueError):  # a full disk, a closed pipe or stream
            sys.stderr.write(text)


def make_event() -> int:
    """An event descriptor with which one process requests another's stacks."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def notify(event: int) -> None:
    """Signal an event. Does not wait."""
    os.eventfd_write(event, 1)


@contextmanager
def stacks_on_request(event: int, diagnostics: int) -> Iterator[None]:
    """Within the block, write all threads' stacks to ``diagnostics`` whenever ``event`` fires."""
    end = make_event()
    thread = threading.Thread(
        target=_write_stacks, args=(event, diagnostics, end), name="lockstep-stacks", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:  # no more threads
        os.close(end)
        raise
    try:
        yield
    finally:
        notify(end)
        thread.join()


def _write_stacks(event: int, diagnostics: int, end: int) -> None:
    poller = select.poll()
    poller.register(event, select.POLLIN)
    poller.register(end, select.POLLIN)
    while end not in (notified := [descriptor for descriptor, _ in poller.poll()]):
        assert notified == [event]
        os.eventfd_read(event)
        faulthandler.dump_traceback(file=diagnostics, all_threads=True)
    os.close(end)  # here, because Ctrl-C may interrupt the other thread before its join
