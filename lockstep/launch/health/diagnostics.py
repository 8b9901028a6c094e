"""Diagnostics: what a process writes to a descriptor for rank 0 to read, should it come to that.

Stacks on request are what the threads of a process do, told although it is busy.

A helper of ours writes its stacks when a signal comes. To a process of the user's we send none: its
signals are its own (Slurm's SIGUSR1 says that time is nearly up), and one that came a moment too
late, when our handler is gone, would kill it. So a thread waits for requests for as long as a call
lasts. It needs the interpreter's lock: there is no answer from code that keeps it for itself.

Linux only.
"""

import faulthandler
import os
import re
import select
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lockstep.cluster.nameless_files import nameless_file

# What faulthandler writes after the stacks: long, and the same whatever has happened.
_MODULE_LIST = re.compile(r"^\n?Extension modules: .*\n?", re.MULTILINE)


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
        return _MODULE_LIST.sub("", new.decode(errors="replace"))

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


def stack_of(thread: int) -> str:
    """The Python stack of a thread of this process, by its identifier."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame else "(the thread has ended)\n"


def make_event() -> int:
    """A descriptor by which one process asks another for its stacks."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def notify(event: int) -> None:
    """Ask for stacks. Does not wait."""
    os.eventfd_write(event, 1)


@contextmanager
def stacks_on_request(event: int, diagnostics: int) -> Iterator[None]:
    """Within the block, write the stacks of all threads there whenever ``event`` rings."""
    end = make_event()
    thread = threading.Thread(
        target=_tell_stacks, args=(event, diagnostics, end), name="lockstep-stacks", daemon=True
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


def _tell_stacks(event: int, diagnostics: int, end: int) -> None:
    poller = select.poll()
    poller.register(event, select.POLLIN)
    poller.register(end, select.POLLIN)
    while end not in (notified := [descriptor for descriptor, _ in poller.poll()]):
        assert notified == [event]
        os.eventfd_read(event)
        faulthandler.dump_traceback(file=diagnostics, all_threads=True)
    os.close(end)  # here: the other thread may have gone on after Ctrl-C
