"""The template: a warm interpreter from which helpers are forked.

``import torch`` takes a second or more. One process imports it once; a helper is then a fork of
that process, there in milliseconds, and shares its memory. The template has run nothing, so what
makes forks dangerous (threads, OpenMP, CUDA) has not begun in it; it is never a fork of the script.

The script's death kills the template, and the template's death kills the helpers, all by the
kernel. As their parent it tells rank 0 how each of them ended.

macOS forbids its numerical libraries in forks: there a template becomes the one helper itself.
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
from lockstep.cluster.memory_limits import Kills, memory_kills
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
from lockstep.launch.workers.interpreter import environment, start_interpreter
from lockstep.launch.workers.link import Link, Message
from lockstep.launch.workers.worker_backend import WorkerBackend

FORK, SIGNAL, LOAD = b"F", b"S", b"L"

FORKS = sys.platform == "linux"
_END_TIMEOUT_SECONDS = 5.0
_DEATH_TIMEOUT_SECONDS = 5.0

# Variables that the interpreter and its libraries read once, when they are loaded. All others a
# helper has from the script as they are when it starts.
_READ_ON_LOADING = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
    *("TORCH_", "PYTORCH_", "ATEN_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_"),
)

_REPORT = struct.Struct("<qi")  # a helper's number, its exit status


class Template(WorkerBackend):
    """The script's end of a template process.

    Takes no lock: a Trainer's finalizer may be called by the garbage collector during any
    of these methods. Requests are small and go out in one system call, reports come in whole.

    Args:
        threads: OpenMP threads it and its helpers start with; None leaves the environment's
            setting.
        preload: modules to import before any helper is forked.

    Raises:
        WorkerError: it cannot be started.
    """

    stays_ready = True

    def __init__(self, threads: int | None, preload: tuple[str, ...]) -> None:
        self.forks = FORKS
        self.is_warm = False  # until a helper has come from it: it may still import
        self.threads = threads
        self._loaded = set(preload)
        self._loaded_with = _variables_of_libraries()
        self.diagnostics = DiagnosticsFile()
        self._numbers = itertools.count(1)
        self._statuses: dict[int, int] = {}
        self._kills: dict[int, Kills | None] = {}  # when a helper started
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
        """Whether it can start helpers."""
        return self._finalizer.alive and self._process.poll() is None

    @property
    def is_current(self) -> bool:
        """Whether its libraries were loaded in an environment like the script's now."""
        return self._loaded_with == _variables_of_libraries()

    def load(self, modules: Sequence[str]) -> None:
        """Have it import modules, unless it has, before it starts another helper.

        One that cannot be imported is left to helpers: they say who needs it.
        """
        new = [module for module in modules if module not in self._loaded]
        if new:
            self._loaded.update(new)
            self.is_warm = False  # it obeys when it has done so
            self._send(Message(LOAD, pickle.dumps(new)))

    def start_helper(self, rank: int, diagnostics: DiagnosticsFile) -> tuple[int, Link]:
        number = next(self._numbers)
        self._kills[number] = memory_kills()
        ours, theirs = Link.pair()
        # Where the script was started without one, that number may be a file of its own by now.
        streams = ((1, sys.__stdout__), (2, sys.__stderr__))
        stdio = [number for number, stream in streams if stream is not None and _is_open(number)]
        payload = pickle.dumps((number, rank, stdio, environment(self.threads)))
        self._send(Message(FORK, payload, (theirs.fileno(), diagnostics.descriptor, *stdio)))
        theirs.close()
        return number, ours

    def note_ready(self) -> None:
        self.is_warm = True

    def has_ended(self, number: int) -> bool:
        return self.status(number) is not None

    def describe_end(self, number: int) -> str:
        deadline = time.monotonic() + _DEATH_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            status = self.status(number)
            if status is not None:
                return describe_exit(status, self._kills.get(number), memory_kills())
            time.sleep(0.005)
        return "its link is closed"

    def describe_absence(self, number: int, rank: int, reason: str, said: str) -> str:
        return (
            f"Rank {rank}'s process could not start: {reason}. It was to run {sys.executable}. "
            f"Its standard error:\n{self.read_new() + said or '(empty)'}"
        )

    def read_new(self) -> str:
        return self.diagnostics.read_new()  # warnings of imports, most likely

    def ask_for_stacks(self, number: int) -> None:
        self.signal([number], STACKS_SIGNAL)

    def status(self, number: int) -> int | None:
        """How a helper ended, negative for a signal, or None while it lives."""
        self._take_reports()
        if number not in self._statuses:
            return self._process.poll()  # helpers live no longer than their template
        return self._statuses[number]

    def signal(self, numbers: Sequence[int], number_of_signal: int) -> None:
        """Send a signal to those of the helpers that live."""
        if self.forks:
            # Not from here: only a parent knows that a process id still means its child.
            self._send(Message(SIGNAL, pickle.dumps((list(numbers), number_of_signal))))
        else:
            self._process.send_signal(number_of_signal)

    def end(self, numbers: Sequence[int]) -> None:
        """Kill helpers, and return when they are gone."""
        self.signal(numbers, signal.SIGKILL)
        if self.forks and not self.is_warm:
            return  # it still imports, and obeys when it has done so
        deadline = time.monotonic() + _END_TIMEOUT_SECONDS
        while any(self.status(number) is None for number in numbers):
            if time.monotonic() > deadline:  # the template is stopped: all go with it
                self.close()
                return
            time.sleep(0.001)

    def close(self) -> None:
        """End the template, and all its helpers with it."""
        self._finalizer()

    def abandon(self) -> None:
        """In a fork of the script: the template is not ours, our ends of its files are."""
        if self._finalizer.detach():
            self._process.returncode = 0  # keeps it from being waited for, and from warning
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


# --- in the template's process -------------------------------------------------------------------


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
            _ForkServer(link, reports).run()
        while (message := link.receive()).kind == LOAD:
            _load(message)
        _become_helper(message, parent)
    os._exit(0)  # there is nothing to tidy up, and much to tear down


def _load(message: Message) -> None:
    for module in pickle.loads(message.payload):
        with suppress(Exception):
            _import([module])


def _import(modules: Sequence[str]) -> None:
    gc.disable()  # it would look for garbage many times
    try:
        for module in modules:
            import_module(module)
    finally:
        gc.collect()
        gc.freeze()  # what is here now is here to stay: no helper's collector need look at it
        gc.enable()


class _ForkServer:
    """Forks children, passes signals on, reports deaths."""

    def __init__(self, link: Link, reports: int) -> None:
        self._link = link
        self._reports = reports
        self._children: dict[int, int] = {}  # number -> process id
        self._pid = os.getpid()
        self._wakeup, self._woken = socket.socketpair()
        for end in (self._wakeup, self._woken):
            end.setblocking(False)

    def run(self) -> None:
        """Raises EOFError in the end."""
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        while True:
            is_readable([self._link, self._woken], None)
            with suppress(BlockingIOError):
                self._woken.recv(4096)
            self._reap()  # before any signal is passed on: a process id may mean another by now
            # One by one: a child must not inherit the descriptors of the next.
            while (message := self._link.take_one()) is not None:
                self._obey(message)

    def _obey(self, message: Message) -> None:
        if message.kind == FORK:
            self._fork(message)
            return
        if message.kind == LOAD:
            _load(message)
            return
        numbers, number_of_signal = pickle.loads(message.payload)
        for number in numbers:
            if number in self._children:
                os.kill(self._children[number], number_of_signal)

    def _fork(self, message: Message) -> None:
        number = pickle.loads(message.payload)[0]
        try:
            with warnings.catch_warnings():
                # OpenBLAS has threads from its import on, and stops them around a fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError:
            traceback.print_exc()
            self._report(number, 1)
        else:
            if pid == 0:
                self._run_child(message)
            self._children[number] = pid
        for descriptor in message.descriptors:
            os.close(descriptor)

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
            os._exit(status)  # a fork must never go on with the template's own work

    def _reap(self) -> None:
        for number, pid in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[number]
                self._report(number, os.waitstatus_to_exitcode(status))

    def _report(self, number: int, status: int) -> None:
        os.write(self._reports, _REPORT.pack(number, status))


def _ignore(number: int, frame: FrameType | None) -> None:
    """With a handler, unlike SIG_IGN, children wait to be reaped, and their end wakes the loop."""


def _become_helper(message: Message, parent: int) -> None:
    _, rank, stdio, variables = pickle.loads(message.payload)
    os.environ.clear()
    os.environ.update(variables)
    socket_descriptor, diagnostics_descriptor, *outputs = message.descriptors
    for output, target in zip(outputs, stdio, strict=True):
        os.dup2(output, target)
        os.close(output)
    serve_calls(rank, Link(socket.socket(fileno=socket_descriptor)), diagnostics_descriptor, parent)
