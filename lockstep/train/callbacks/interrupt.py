"""Ctrl-C and SIGTERM during ``fit``: training ends after the current step.

During a step some ranks have updated their slices of the weights and others have not, and the
optimizer's slots are spread over all of them. So during steps the first Ctrl-C is only noted; all
ranks leave the loop at the same step, the optimizer gets its slots back, and then ``fit`` raises
KeyboardInterrupt. The second Ctrl-C raises it at once. A ``fit`` that writes checkpoints writes one
first.

Slurm, Kubernetes and clouds send SIGTERM before they end a machine. A ``fit`` that writes
checkpoints writes one after the current step, and exits with the status that the signal would have
had. Without checkpoints the signal ends the process, as it does by default.

Python runs signal handlers in the main thread only, so this works only for a ``fit`` there. A
handler of the user stays in force.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lockstep.errors import HostError, WorkerError
from lockstep.tracebacks import note_last

# Longest wait for a step's end after SIGTERM. Its sender often kills 10 s or more later.
PATIENCE_SECONDS = 7.0
# Launchers forward signals: a second SIGTERM so soon after the first is the same one.
_SAME_SECONDS = 1.0
STATUS_OF_SIGTERM = 128 + signal.SIGTERM


class Interrupt:
    """A handler of SIGINT that can delay it.

    Attributes:
        is_requested: True if Ctrl-C was pressed and is delayed.
        requested_seconds: its time by the monotonic clock.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.requested_seconds = 0.0
        self._holds = False

    def hold(self) -> None:
        """From now on only note the first Ctrl-C."""
        self._holds = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._holds or self.is_requested:
            signal.default_int_handler(number, frame)
        self.is_requested, self.requested_seconds = True, time.monotonic()


@contextmanager
def held_interrupts() -> Iterator[Interrupt]:
    """Within the block an Interrupt handles Ctrl-C, if Python's own handler did.

    Raises:
        KeyboardInterrupt: at the end of the block, if Ctrl-C was delayed.
    """
    previous = _handler_of(signal.SIGINT)
    if isinstance(previous, Interrupt):
        yield previous  # a fit within a callback of another fit, which does the rest
    elif previous is not signal.default_int_handler:
        yield Interrupt()
    else:
        yield from _hold_interrupts()


@contextmanager
def telling_of_interrupts(count: Callable[[], int], writer: Any = None) -> Iterator[None]:
    """Within the block, a training, a note on KeyboardInterrupt says what it leaves.

    Args:
        count: the steps made so far.
        writer: writes checkpoints; None if none are written.
    """
    before = count()
    try:
        yield
    except KeyboardInterrupt as error:
        notes = getattr(error, "__notes__", ())
        if writer is not None and writer.has_last:
            folder = writer.checkpoint.directory
            left = f"a checkpoint is in {folder}: the same script goes on from there"
        elif notes:
            left = f"{notes[-1][:1].lower()}{notes[-1][1:].rstrip('.')}"
        elif count() > before:
            left = "model and optimizer are as after the last step"
        else:
            left = "no step was made"
        note_last(error, f"stopped by Ctrl-C; {left}.")
        raise


def _hold_interrupts() -> Iterator[Interrupt]:
    interrupt = Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    error: Exception | None = None
    try:
        yield interrupt
    except Exception as raised:
        error = raised
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupt.is_requested:
            raise KeyboardInterrupt from error


class Termination:
    """A handler of SIGTERM that waits for the end of a step, with a limit.

    Attributes:
        is_requested: True after a SIGTERM.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._first_seconds = 0.0
        self._timer = threading.Timer(PATIENCE_SECONDS, os.kill, (os.getpid(), signal.SIGTERM))
        self._timer.daemon = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.is_requested:
            if now - self._first_seconds > _SAME_SECONDS:  # the second, or past the limit
                raise SystemExit(STATUS_OF_SIGTERM)
            return
        self.is_requested, self._first_seconds = True, now
        self._timer.start()

    def close(self) -> None:
        """Cancel the limit."""
        self._timer.cancel()


@contextmanager
def held_termination() -> Iterator[Termination]:
    """Within the block a Termination handles SIGTERM, if nothing else does.

    The process that writes checkpoints ends the call after the current step. Other processes, which
    may also have been sent the signal, wait for that.

    Raises:
        SystemExit: at the end of the block, after a SIGTERM.
    """
    termination = Termination()
    previous = _handler_of(signal.SIGTERM)
    if previous is not signal.SIG_DFL:
        yield previous if isinstance(previous, Termination) else termination
        return
    signal.signal(signal.SIGTERM, termination)
    lost: Exception | None = None
    try:
        yield termination
    except (WorkerError, HostError) as error:
        if not (termination.is_requested and getattr(error, "is_loss", True)):
            raise
        lost = error  # other processes were also sent the signal
    finally:
        termination.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if termination.is_requested:
        raise SystemExit(STATUS_OF_SIGTERM) from lost


def _handler_of(number: signal.Signals) -> object:
    """The handler of a signal; None if this thread cannot change it."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.getsignal(number)
