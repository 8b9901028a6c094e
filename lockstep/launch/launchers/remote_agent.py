"""The agent on a host of ``lockstep run --ssh``: runs the script there, and ends it.

ssh or a Ray actor starts it. It reads its launch specification from its standard input: one line,
with the job's secret, which must not be in a command, because other users can read those. After
that each byte is the number of a signal for the script, and the end of the input ends the script.
So if the machine that started the job, or the connection to it, fails, nothing of the job is left.

The script is another process: in one process, a thread that reads the input could not run while the
script is in a long C call.
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

from lockstep.launch.launchers.launch_spec import LaunchSpec, Terminal
from lockstep.launch.workers.helper import die_with

# The script's time to end after SIGTERM.
GRACE_SECONDS = 5.0

# Longest line of a specification.
_MOST_BYTES = 1 << 24


def main() -> int:
    """Run the specification on standard input; returns the script's exit status."""
    line = _read_line(0)
    if not line.endswith(b"\n"):
        return 1  # the process that started this one has ended
    spec = msgspec.json.decode(line, type=LaunchSpec)
    try:
        os.chdir(spec.directory)
        process, copier = _start(spec)
    except OSError as error:
        print(f"lockstep: the script could not be started: {error}", file=sys.stderr)  # noqa: T201
        return 126
    threading.Thread(target=_forward_signals, args=(process,), daemon=True).start()
    status = process.wait()
    _signal(process, signal.SIGKILL)  # for processes that the script has left
    if copier is not None:
        copier.join(GRACE_SECONDS)
    return status if status >= 0 else 128 - status


def _read_line(descriptor: int) -> bytes:
    """Read one line byte by byte: signals follow it."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _MOST_BYTES:
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return line


def _start(spec: LaunchSpec) -> tuple["subprocess.Popen[bytes]", threading.Thread | None]:
    """Start the script; the thread copies its terminal's output."""
    if spec.terminal is None:
        return _run(spec, {}), None
    streams = spec.terminal.streams
    terminal, far_end = pty.openpty()
    try:
        _set_size(far_end, spec.terminal)
        process = _run(spec, dict.fromkeys(streams, far_end))
    finally:
        os.close(far_end)
    copier = threading.Thread(target=_copy, args=(terminal, min(streams)), daemon=True)
    copier.start()
    return process, copier


def _run(spec: LaunchSpec, streams: dict[int, int]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, *spec.script.words],
        env=spec.environment,
        stdin=subprocess.DEVNULL,
        stdout=streams.get(1),
        stderr=streams.get(2),
        process_group=0,
        preexec_fn=partial(_prepare, os.getpid()),
    )


def _prepare(parent: int) -> None:
    """In the script's process, before it begins."""
    # Ray's processes and a shell's background processes ignore Ctrl-C, and children inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    die_with(parent)


def _set_size(terminal: int, size: Terminal) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))
    modes = termios.tcgetattr(terminal)
    modes[1] &= ~termios.OPOST  # the user's terminal turns \n into \r\n
    termios.tcsetattr(terminal, termios.TCSANOW, modes)


def _copy(terminal: int, stream: int) -> None:
    """Pass on what the script writes to its terminal, until the terminal is closed."""
    with suppress(OSError):  # Linux raises it at the end; or no process reads any more
        while output := os.read(terminal, 1 << 16):
            view = memoryview(output)
            while view:
                view = view[os.write(stream, view) :]


def _forward_signals(process: "subprocess.Popen[bytes]") -> None:
    """Send the script the signals on the input; at its end, end the script."""
    while numbers := os.read(0, 1):
        _signal(process, numbers[0])
    _signal(process, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    _signal(process, signal.SIGKILL)


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to the script and all processes of its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


if __name__ == "__main__":
    sys.exit(main())
