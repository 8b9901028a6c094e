"""The fork server: a warm interpreter from which helpers are forked.

``import torch`` takes a second or more. One process imports it once; a helper is then a fork of
that process, starts in milliseconds, and shares its memory. The server has run no user code, so
nothing that makes forks dangerous (threads, OpenMP, CUDA) has started in it; it is never a fork of
the script.

The kernel kills the server when the script dies, and the helpers when the server dies. As their
parent, the server reports to rank 0 how each of them ended.

macOS forbids its numerical libraries in forks: there each server becomes one helper itself.
"""

import gc
import itertools
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType

from lockstep.channel.polling import is_readable
from lockstep.cluster.memory_limits import memory_kills
from lockstep.launch.forks import give_up_in_forks
from lockstep.launch.health.diagnostics import DiagnosticsFile
from lockstep.launch.health.failure import describe_exit
from lockstep.launch.workers.helper import (
    STACKS_SIGNAL,
    die_with,
    leave_signals_to_script,
    name_process,
    serve_calls,
)
from lockstep.launch.workers.helper_handle import HelperHandle
from lockstep.launch.workers.interpreter import environment, start_interpreter
from lockstep.launch.workers.link import Link, Message

FORK, SIGNAL, LOAD = b"F", b"S", b"L"

FORKS = sys.platform == "linux"
_END_TIMEOUT_SECONDS = 5.0
_DEATH_TIMEOUT_SECONDS = 5.0

# Variables that the interpreter and its libraries read once, when they are loaded. A helper gets
# the script's values of all others when it starts.
_READ_ON_LOADING = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
    *("TORCH_", "PYTORCH_", "ATEN_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_"),
)

_REPORT = struct.Struct("<qi")  # a helper's number, its exit status


class ForkServer:
    """The script's end of a fork server's process.

    Takes no lock: the garbage collector may call a Trainer's finalizer during any of these
    methods. A request is sent, and a report read, by one system call.

    Args:
        threads: OpenMP threads that the server and its helpers start with; None keeps the
            environment's setting.
        preload: modules to import before any helper is forked.

    Attributes:
        is_ready: a helper has started, so all imports are done.

    Raises:
        WorkerError: it cannot be started.
    """

    def __init__(self, threads: int | None, preload: tuple[str, ...]) -> None:
        self.forks = FORKS
        self.is_ready = False
        self.threads = threads
        self._loaded = set(preload)
        self._loaded_with = _variables_of_libraries()
        self.diagnostics = DiagnosticsFile()
        self._numbers = itertools.count(1)
        self._statuses: dict[int, int] = {}
        self._link, theirs = Link.pair()
        self._reports, reports = _report_pipe()
        code = (
            "from lockstep.launch.workers.fork_server import main\n"
            f"main({theirs.fileno()}, {reports}, {os.getpid()}, {preload!r}, forks={self.forks})"
        )
        try:
            self._process = start_interpreter(
                code, (theirs.fileno(), reports), self.diagnostics, threads
            )
        except BaseException:
            self._link.close()
            os.close(self._reports)
            self.diagnostics.close()
            raise
        finally:
            theirs.close()
            os.close(reports)
        give_up_in_forks(self, "abandon")
        self._finalizer = weakref.finalize(
            self, _end_process, self._process, self._link, self._reports, self.diagnostics
        )

    @property
    def is_alive(self) -> bool:
        """True if it can start helpers."""
        return self._finalizer.alive and self._process.poll() is None

    @property
    def is_current(self) -> bool:
        """True if its libraries were loaded with the script's present variables."""
        return self._loaded_with == _variables_of_libraries()

    def load(self, modules: Sequence[str]) -> None:
        """Have it import new modules before it starts another helper.

        A module that cannot be imported is left to the helpers, whose errors say what needs it.
        """
        new = [module for module in modules if module not in self._loaded]
        if new:
            self._loaded.update(new)
            self.is_ready = False  # it handles nothing else until then
            self._send(Message(LOAD, pickle.dumps(new)))

    def fork(self, rank: int, theirs: Link, diagnostics: DiagnosticsFile) -> int:
        """Start a helper; returns its number here.

        Args:
            rank: the helper's.
            theirs: its end of its link.
            diagnostics: the file that it writes its stacks to.
        """
        number = next(self._numbers)
        # If the script was started without a stream, its number may be another file by now.
        streams = ((1, sys.__stdout__), (2, sys.__stderr__))
        stdio = [number for number, stream in streams if stream is not None and _is_open(number)]
        payload = pickle.dumps((number, rank, stdio, environment(self.threads)))
        self._send(Message(FORK, payload, (theirs.fileno(), diagnostics.descriptor, *stdio)))
        return number

    def status(self, number: int) -> int | None:
        """A helper's exit status, negative for a signal; None while it runs."""
        self._take_reports()
        if number not in self._statuses:
            return self._process.poll()  # helpers end with their server
        return self._statuses[number]

    def signal(self, number: int, number_of_signal: int) -> None:
        """Send a signal to a helper, if it runs."""
        if self.forks:
            # By the server: only a parent knows that a process id is still its child's.
            self._send(Message(SIGNAL, pickle.dumps((number, number_of_signal))))
        else:
            self._process.send_signal(number_of_signal)

    def close(self) -> None:
        """End the server, and all its helpers with it."""
        self._finalizer()

    def abandon(self) -> None:
        """In a fork of the script, whose parent owns the server: close this end's files."""
        if self._finalizer.detach():
            self._process.returncode = 0  # Popen then neither waits for it nor warns
            _close(self._link, self._reports, self.diagnostics)

    def _send(self, message: Message) -> None:
        with suppress(OSError):  # its death shows in ``status``
            self._link.send(message)

    def _take_reports(self) -> None:
        if not self._finalizer.alive:
            return
        with suppress(BlockingIOError):
            for report in _REPORT.iter_unpack(os.read(self._reports, 256 * _REPORT.size)):
                self._statuses[report[0]] = report[1]


class ForkedHelper(HelperHandle):
    """A helper that a fork server starts."""

    def __init__(self, server: ForkServer, rank: int) -> None:
        ours, theirs = Link.pair()
        super().__init__(rank, ours)
        self._server = server
        self._kills = memory_kills()  # the kernel's count when it starts
        self._number = server.fork(rank, theirs, self.diagnostics)
        theirs.close()

    def has_ended(self) -> bool:
        return self._status is not None

    def describe_end(self) -> str:
        deadline = time.monotonic() + _DEATH_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if (status := self._status) is not None:
                return describe_exit(status, self._kills, memory_kills())
            time.sleep(0.005)
        return "its link is closed"

    def describe_absence(self, reason: str) -> str:
        output = self.read_output() + self.diagnostics.read_new()
        return (
            f"Rank {self.rank}'s process could not start: {reason}. Its interpreter is "
            f"{sys.executable}. Its standard error:\n{output or '(empty)'}"
        )

    def read_output(self) -> str:
        return self._server.diagnostics.read_new()  # usually warnings of imports

    def ask_for_stacks(self) -> None:
        self._server.signal(self._number, STACKS_SIGNAL)

    def note_start(self) -> None:
        self._server.is_ready = True

    def give_up(self) -> None:
        self._server.close()  # it must not be used again

    def end(self) -> None:
        self._server.signal(self._number, signal.SIGKILL)

    def await_end(self) -> None:
        if self._server.forks and not self._server.is_ready:
            return  # it still imports, and kills the helper after that
        deadline = time.monotonic() + _END_TIMEOUT_SECONDS
        while self._status is None:
            if time.monotonic() > deadline:  # the server is stopped: end it and all its helpers
                self._server.close()
                return
            time.sleep(0.001)

    @property
    def _status(self) -> int | None:
        return self._server.status(self._number)


def _report_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    return reader, writer


def _end_process(
    process: "subprocess.Popen[bytes]", link: Link, reports: int, diagnostics: DiagnosticsFile
) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_TIMEOUT_SECONDS)
    _close(link, reports, diagnostics)


def _close(link: Link, reports: int, diagnostics: DiagnosticsFile) -> None:
    link.close()
    os.close(reports)
    diagnostics.close()


def _variables_of_libraries() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_ON_LOADING)}


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# --- in the server's process ---------------------------------------------------------------------


def main(
    descriptor: int, reports: int, parent: int, preload: tuple[str, ...], *, forks: bool
) -> None:
    """Fork helpers on demand until the link closes, which also ends them."""
    die_with(parent)
    leave_signals_to_script()
    name_process("lockstep:0")
    for inherited in (descriptor, reports):
        os.set_inheritable(inherited, False)
    link = Link(socket.socket(fileno=descriptor))
    _import(preload)
    with suppress(EOFError):  # the script has closed the link
        if forks:
            _ServerLoop(link, reports).run()
        while (message := link.receive()).kind == LOAD:
            _load(message)
        _become_helper(message, parent)
    os._exit(0)  # without the interpreter's slow shutdown: there is nothing to clean up


def _load(message: Message) -> None:
    for module in pickle.loads(message.payload):
        with suppress(Exception):
            _import([module])


def _import(modules: Sequence[str]) -> None:
    gc.disable()  # it would run many times
    try:
        for module in modules:
            import_module(module)
    finally:
        gc.collect()
        gc.freeze()  # helpers' collectors skip the objects that exist now
        gc.enable()


class _ServerLoop:
    """The server's loop: forks children, passes signals on to them, reports their ends."""

    def __init__(self, link: Link, reports: int) -> None:
        self._link = link
        self._reports = reports
        self._children: dict[int, int] = {}  # number -> process id
        self._pid = os.getpid()
        self._wakeup, self._woken = socket.socketpair()
        for end in (self._wakeup, self._woken):
            end.setblocking(False)

    def run(self) -> None:
        """Handle messages until the link is closed, which raises EOFError."""
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        while True:
            is_readable([self._link, self._woken], None)
            with suppress(BlockingIOError):
                self._woken.recv(4096)
            self._reap()  # before signals are passed on: a process id may be another's by now
            # One by one: a child must not inherit the descriptors of the next.
            while (message := self._link.take_one()) is not None:
                self._handle(message)

    def _handle(self, message: Message) -> None:
        if message.kind == FORK:
            self._fork(message)
            return
        if message.kind == LOAD:
            _load(message)
            return
        number, number_of_signal = pickle.loads(message.payload)
        if number in self._children:
            os.kill(self._children[number], number_of_signal)

    def _fork(self, message: Message) -> None:
        number = pickle.loads(message.payload)[0]
        try:
            with warnings.catch_warnings():
                # OpenBLAS starts threads when it is imported, and stops them around a fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError:
            traceback.print_exc()
            self._report(number, 1)
        else:
            if pid == 0:
                self._run_child(message)
            self._children[number] = pid
        message.close()

    def _run_child(self, message: Message) -> None:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with(self._pid)
            for end in (self._link, self._wakeup, self._woken):
                end.close()
            os.close(self._reports)
            _become_helper(message, self._pid)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)  # a fork must never continue the server's loop

    def _reap(self) -> None:
        for number, pid in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[number]
                self._report(number, os.waitstatus_to_exitcode(status))

    def _report(self, number: int, status: int) -> None:
        os.write(self._reports, _REPORT.pack(number, status))


def _ignore(number: int, frame: FrameType | None) -> None:
    """Unlike SIG_IGN, a handler keeps children until they are reaped; their end wakes the loop."""


def _become_helper(message: Message, parent: int) -> None:
    _, rank, stdio, variables = pickle.loads(message.payload)
    os.environ.clear()
    os.environ.update(variables)
    socket_descriptor, diagnostics_descriptor, *outputs = message.descriptors
    for output, target in zip(outputs, stdio, strict=True):
        os.dup2(output, target)
        os.close(output)
    serve_calls(rank, Link(socket.socket(fileno=socket_descriptor)), diagnostics_descriptor, parent)
