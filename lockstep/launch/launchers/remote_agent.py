"""The far end of ``lockstep run --ssh``: runs the script on its host, and ends it when told to.

It is started there by ssh, or by a Ray actor, and gets its orders on its standard input: one line,
with the job's secret, which must not stand in a command that others can see. After that each byte
is the number of a signal for the script, and the end of the input means that nobody waits for the
script any more: it is ended. So whatever becomes of the machine that started the job, or of the
connection to it, nothing of the job is left here.

The script is a process of its own: a thread that watches the input beside it could not run while
the script is deep in C.
"""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from contextlib import suppress
from functools import partial

import msgspec

from lockstep.launch.launchers.launch_spec import Orders, Terminal
from lockstep.launch.workers.helper import die_with

# The script's own time to end after SIGTERM.
GRACE_SECONDS = 5.0

# Longest line of orders.
_MAX_BYTES = 1 << 24


def main() -> int:
    """Run what standard input says; returns the exit status."""
    line = _read_line(0)
    if not line.endswith(b"\n"):
        return 1  # who started this has gone
    orders = msgspec.json.decode(line, type=Orders)
    try:
        os.chdir(orders.directory)
        process, screen = _start(orders)
    except OSError as error:
        print(f"lockstep: the script cannot be started: {error}", file=sys.stderr)  # noqa: T201
        return 126
    threading.Thread(target=_obey, args=(process,), daemon=True).start()
    status = process.wait()
    _signal(process, signal.SIGKILL)  # to processes that the script has left behind
    if screen is not None:
        screen.join(GRACE_SECONDS)
    return status if status >= 0 else 128 - status


def _read_line(descriptor: int) -> bytes:
    """Byte by byte at its end: what follows the line is not orders."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _MAX_BYTES:
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return line


def _start(orders: Orders) -> tuple["subprocess.Popen[bytes]", threading.Thread | None]:
    """Start the script; the thread copies what it shows."""
    if orders.terminal is None:
        return _run(orders, {}), None
    streams = orders.terminal.streams
    screen, far_end = pty.openpty()
    try:
        _set_size(far_end, orders.terminal)
        process = _run(orders, dict.fromkeys(streams, far_end))
    finally:
        os.close(far_end)
    copier = threading.Thread(target=_copy, args=(screen, min(streams)), daemon=True)
    copier.start()
    return process, copier


def _run(orders: Orders, streams: dict[int, int]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, *orders.script.words],
        env=orders.environment,
        stdin=subprocess.DEVNULL,
        stdout=streams.get(1),
        stderr=streams.get(2),
        process_group=0,
        preexec_fn=partial(_prepare, os.getpid()),
    )


def _prepare(parent: int) -> None:
    """In the script's process, before it begins."""
    # Ray's processes ignore Ctrl-C, as those in the background of a shell do, and hand that on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    die_with(parent)


def _set_size(terminal: int, size: Terminal) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))
    modes = termios.tcgetattr(terminal)
    modes[1] &= ~termios.OPOST  # the terminal at the other end turns \n into \r\n
    termios.tcsetattr(terminal, termios.TCSANOW, modes)


def _copy(screen: int, stream: int) -> None:
    """Pass on what the script writes to its terminal, until nothing can write to it any more."""
    with suppress(OSError):  # Linux's way to say so; or nobody reads any more
        while shown := os.read(screen, 1 << 16):
            view = memoryview(shown)
            while view:
                view = view[os.write(stream, view) :]


def _obey(process: "subprocess.Popen[bytes]") -> None:
    """Pass on the signals that the input asks for; at its end, end the script."""
    while numbers := os.read(0, 1):
        _signal(process, numbers[0])
    _signal(process, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    _signal(process, signal.SIGKILL)


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Send it to the script and all of its processes that are in its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


if __name__ == "__main__":
    sys.exit(main())
