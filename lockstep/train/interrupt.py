"""Ctrl-C during ``fit``: training ends with the step that is under way.

In the midst of a step some ranks have updated their slices of the weights and others have not, and
the optimizer's slots are spread over all of them. So while steps are made the first Ctrl-C is only
noted; all ranks leave the loop at the same step, the optimizer gets its slots back, and then
``fit`` raises KeyboardInterrupt. The second Ctrl-C raises it at once.

Python runs signal handlers in the main thread only, so this is for a ``fit`` there. A handler of
the user's own stays in force.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """A handler of SIGINT that can hold it back.

    Attributes:
        is_requested: whether Ctrl-C was pressed and is held back.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._holds = False

    def hold(self) -> None:
        """From now on only note the first Ctrl-C."""
        self._holds = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._holds or self.is_requested:
            signal.default_int_handler(number, frame)
        self.is_requested = True


@contextmanager
def held_interrupts() -> Iterator[Interrupt]:
    """Within the block an Interrupt handles Ctrl-C, if Python's own handler did.

    Raises:
        KeyboardInterrupt: at the end of the block, if one was held back.
    """
    previous = _sigint_handler()
    if isinstance(previous, Interrupt):
        yield previous  # fit within a callback of another fit, which will see to the rest
    elif previous is not signal.default_int_handler:
        yield Interrupt()
    else:
        yield from _hold_interrupts()


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


def _sigint_handler() -> object:
    """The handler of SIGINT; None where it is not this thread's to change."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.getsignal(signal.SIGINT)
