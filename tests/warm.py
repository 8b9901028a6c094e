"""Scripts that start in an instant: forks of an interpreter that has imported what they need.

A fresh interpreter takes seconds for torch, Keras and what these import at their first use, and a
page or a host is a script of its own. They are forked from one warm process for each kind, which
has run nothing. Of every kind of script some start as users start them: those of tests marked
``fresh``, some under each launcher (torchrun, ``lockstep run``, srun, ...), and those that
something is done to while they start.
"""

import atexit
import ctypes
import fcntl
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import warnings
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from lockstep.launch.script import Script
from lockstep.launch.workers.helper import die_with
from tests import seed

# What the interpreters of each kind have imported. Dynamo comes with the first optimizer, and
# TensorFlow with ``keras.utils.set_random_seed``.
KINDS = {
    "torch": (
        *("lockstep.train.runtime.session", "lockstep.train.trainer"),
        *("torch._dynamo", "tests.preloading", "torch.distributed.launcher.api"),
    ),
    "keras": (
        *("lockstep.frontends.keras.preloading", "torch._dynamo", "tensorflow"),
        "torch.distributed.launcher.api",
    ),
}
# With these it has started, and so have all scripts.
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # so that CUDA works in a fork
}

_ROOT = Path(__file__).parents[1]
_MOST_BYTES = 1 << 18
# For the first worker to connect, which has started the interpreter just now.
_PATIENCE_SECONDS = 60.0
_CLONE_NEWNET = 0x40000000

# Whether scripts are started so; ``conftest`` sets it for every test.
is_on = False


class Process(Protocol):
    """What a ``Popen`` has, and a fork has here."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...
    def send_signal(self, sig: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a fork is to run.

    Attributes:
        words: options ``-W``, then a script's path, or ``-m`` and a module's name; its arguments.
        environment: all variables.
        directory: where it runs.
        namespace: of the network; None stays in this one.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    namespace: str | None = None


def start(kind: str, order: Order, out: int, err: int) -> Process:
    """Start a script that writes to these descriptors, in a session of its own."""
    if kind not in _nests:
        _nests[kind] = _connected(kind)
    ended, ending = os.pipe()
    socket.send_fds(_nests[kind], [pickle.dumps(order)], [ending, out, err])
    os.close(ending)
    pid = int(_nests[kind].recv(_MOST_BYTES) or b"0")
    assert pid, "the warm interpreter has ended"
    return _Fork(pid, ended)


# By kind, the connection to the interpreter that all workers of this run of the tests share.
_nests: dict[str, socket.socket] = {}


def _connected(kind: str) -> socket.socket:
    """A connection to the warm interpreter of a kind, which is started if there is none."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    # A run of other tests within one of them, such as those on a stand-in, has other modules.
    found = zlib.crc32(os.environ.get("PYTHONPATH", "").encode())
    address = f"\0lockstep tests {run} {kind} {found:x}"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(address)
        except ConnectionRefusedError:
            _start(address, KINDS[kind])
            connection.connect(address)
    atexit.register(connection.close)
    return connection


def _start(address: str, modules: Sequence[str]) -> None:
    """Start a warm interpreter, which ends when nobody is connected to it any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        nest = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(listener.fileno()), *modules],
            cwd=_ROOT,
            env={**os.environ, **VARIABLES},
            stdin=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
        )
    nest.returncode = 0  # other workers may need it when this one has ended


class _Fork:
    """A script that the interpreter has forked, like a ``Popen``."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self.returncode = int(os.read(self._ended, 100))
            os.close(self._ended)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


# --- in the warm interpreter ----------------------------------------------------------------------


def main() -> int:
    """Fork scripts on demand until nobody is connected; in a fork, returns its script's status."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        if module != "tensorflow" or find_spec(module):
            import_module(module)
    gc.collect()
    gc.freeze()
    bell, rung = socket.socketpair()
    for end in (bell, rung):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(bell.fileno())
    forks: dict[int, int] = {}  # process id -> where its status goes
    listener.settimeout(_PATIENCE_SECONDS)
    connections = [listener.accept()[0]]
    while connections or select.select([listener], [], [], 0)[0]:
        ready = select.select([listener, rung, *connections], [], [])[0]
        with suppress(BlockingIOError):
            rung.recv(4096)
        _reap(forks)
        if listener in ready:
            connections.append(listener.accept()[0])
        for connection in [one for one in connections if one in ready]:
            message, descriptors, *_ = socket.recv_fds(connection, _MOST_BYTES, 3)
            if not message:
                connections.remove(connection)
                connection.close()
                continue
            parent, pid = os.getpid(), _fork()
            if pid == 0:
                for each in (listener, bell, rung, *connections):
                    signal.set_wakeup_fd(-1)
                    each.close()
                for descriptor in (descriptors[0], *forks.values()):
                    os.close(descriptor)
                return _run(pickle.loads(message), *descriptors[1:], parent=parent)
            connection.send(str(pid).encode())
            forks[pid] = descriptors[0]
            for descriptor in descriptors[1:]:
                os.close(descriptor)
    return 0


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # OpenBLAS has threads, and stops them
        return os.fork()


def _reap(forks: dict[int, int]) -> None:
    for pid in list(forks):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            descriptor = forks.pop(pid)
            with suppress(BrokenPipeError):
                os.write(descriptor, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(descriptor)


def _run(order: Order, out: int, err: int, *, parent: int) -> int:
    """Become the script; returns its exit status."""
    os.setsid()
    die_with(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, target in ((out, 1), (err, 2)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    if order.namespace is not None:
        with open(f"/run/netns/{order.namespace}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), _CLONE_NEWNET) == 0
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.directory)
    sys.path[1:1] = [
        path
        for path in order.environment.get("PYTHONPATH", "").split(os.pathsep)
        if path not in sys.path[1:]  # the first gives way to the script's folder
    ]
    words = list(order.words)
    while words[0] == "-W":
        sys.warnoptions.append(words[1])
        del words[:2]
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]  # as at the start
    is_module = words[0] == "-m"
    if is_module:
        del words[0]
    script = Script(target=words[0], is_module=is_module, arguments=tuple(words[1:]))
    # A launcher's script is a fork of it, each time that it is started.
    if is_module and words[0] == "torch.distributed.run":
        script = seed.plant_in_torchrun() or script
    (seed.plant_in_scripts if script.target == "lockstep" else seed.plant)()
    return script.run()


if __name__ == "__main__":
    sys.exit(main())
