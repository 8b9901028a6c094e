"""Hosts made of network namespaces: each with an interface, an address and a link of its own.

The links end in a bridge in a namespace of its own, so the machine's network is untouched. Files,
memory and cores are shared. Needs root and iproute2; ``NoHostsError`` says why where they cannot be
made, which the fixture ``make_hosts`` turns into a skipped test.

Namespaces have names, and the kernel keeps them. They bear the id of the process that made them, so
that what a killed process has left is removed by the next one that makes hosts.
"""

import fcntl
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from tests import warm

COMMAND_TIMEOUT_SECONDS = 20.0
TIMEOUT_SECONDS = 180.0
STACKS_SECONDS = 5.0

# What is queued before it is dropped, as a time at the link's rate; and what passes at once.
QUEUE = "20ms"
BURST = "128kb"

_PREFIX = "lockstep-test"
_numbers = itertools.count()


class NoHostsError(Exception):
    """Namespaces cannot be made here; says why."""


class CommandError(RuntimeError):
    """A command of iproute2 has failed."""


# What torchrun's agent logs where the one with the store has ended a moment before it.
_OF_TORCHRUN = re.compile(r"[EW]\d{4} \S+ \d+ \S*torch/distributed/elastic/")

# What its store logs there as well, with the frames of an error that the agent then catches.
_OF_ENDED_STORE = re.compile(
    r"^\[W\S+ \S+ TCPStore\.cpp:\d+\] \[c10d\] recvValueWithTimeout failed on .*\n"
    r"(Exception raised from .*\n)?(frame #\d+: .*\n)*\n?",
    re.MULTILINE,
)

# What its store logs of hosts without names, whatever TORCH_CPP_LOG_LEVEL is in a warm interpreter.
_OF_ITS_STORE = re.compile(r"\[W\S+ \S+ socket\.cpp:\d+\] \[c10d\] The .* cannot be retrieved")

# What a process shows where others take longer than 2 s to start, as on a busy machine.
_NOTICE = re.compile(r"Waiting ((for host 0 )?at \S+|for \d+ of \d+ processes of this host)")


class HostProcess:
    """A process on a host, like a ``Popen``; what it writes goes to memory, so it never waits.

    Args:
        argv: program and arguments.
        environment: all of its variables.
        directory: where it runs.
        namespace: the host's; None is this one.
        like: the kind of warm interpreter that may run it, if it is a script (see ``warm``).
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        *,
        namespace: str | None = None,
        like: str | None = None,
    ) -> None:
        self._out, self._err = os.memfd_create("out"), os.memfd_create("err")
        for descriptor in (self._out, self._err):
            # Several processes write; without this one's lines may come to lie over another's.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        self.popen: warm.Process
        if warm.is_on and like is not None:
            order = warm.Order(
                words=argv[1:],
                environment=environment,
                directory=str(directory),
                namespace=namespace,
            )
            self.popen = warm.start(like, order, self._out, self._err)
        else:
            self.popen = subprocess.Popen(
                _command(namespace, argv),
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the process itself: ``ip netns exec`` becomes it."""
        return self.popen.pid

    @property
    def out(self) -> str:
        """All that it has written to its standard output so far."""
        return _contents(self._out)

    @property
    def err(self) -> str:
        """All that it has written to its standard error so far."""
        return _contents(self._err)

    def wait_for_line(self, start: str, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
        """The rest of the first whole line on its output that starts so."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            has_ended = self.popen.poll() is not None
            lines = self.out.splitlines(keepends=True)
            for line in lines:
                if line.startswith(start) and line.endswith("\n"):
                    return line[len(start) :].strip()
            if has_ended or time.monotonic() > deadline:
                raise AssertionError(f"no line {start!r}: {self._story()}")
            time.sleep(0.01)

    def finish(self, timeout_seconds: float = TIMEOUT_SECONDS) -> tuple[int, str, str]:
        """Its exit status, output and errors. At the deadline: its stacks, in an error."""
        try:
            status = self.popen.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.popen.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER writes all threads' stacks
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(STACKS_SECONDS)
            self.end()
            raise AssertionError(f"not within {timeout_seconds} s: {self._story()}") from None
        return status, self.out, self.err

    def check(self, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
        """Its output; it must come to a good end, and have nothing to complain of."""
        status, out, err = self.finish(timeout_seconds)
        expected = (_OF_TORCHRUN, _OF_ITS_STORE, _NOTICE)
        lines = _OF_ENDED_STORE.sub("", err).splitlines()
        complaints = [line for line in lines if not any(one.match(line) for one in expected)]
        assert (status, complaints) == (0, []), self._story()
        return out

    def end(self) -> None:
        """Kill it, and its process group, now."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait(COMMAND_TIMEOUT_SECONDS)

    def close(self) -> None:
        """Forget what it has written."""
        os.close(self._out)
        os.close(self._err)

    def _story(self) -> str:
        return f"status {self.popen.returncode}\n--- out\n{self.out}\n--- err\n{self.err}"


class Hosts:
    """Some hosts on one network; ``connected_hosts`` makes them."""

    def __init__(self, name: str, num_hosts: int) -> None:
        self._switch = f"{name}-switch"
        self._names = [f"{name}-host{index}" for index in range(num_hosts)]
        self._processes: list[HostProcess] = []

    def __len__(self) -> int:
        return len(self._names)

    def address(self, index: int) -> str:
        """The host's IPv4 address."""
        return f"10.77.0.{index + 1}"

    @property
    def interface(self) -> str:
        """The name that every host has for its interface."""
        return "eth0"

    def command(self, index: int, argv: Sequence[str | Path]) -> list[str]:
        """What runs ``argv`` on a host."""
        return _command(self._names[index], argv)

    def run(
        self,
        index: int,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        *,
        directory: Path | None = None,
        like: str | None = None,
    ) -> HostProcess:
        """Start a process on a host, with one thread, in a session of its own.

        Args:
            index: of the host.
            argv: program and arguments.
            env: added to the environment of this process.
            directory: where it runs; this process's own by default.
            like: see ``HostProcess``.
        """
        environment = {**os.environ, **warm.VARIABLES, **(env or {})}
        words = list(map(str, argv))
        where = {"namespace": self._names[index], "like": like}
        process = HostProcess(words, environment, directory or Path.cwd(), **where)
        self._processes.append(process)
        return process

    def read(self, index: int, path: str) -> str:
        """A file as it is there: those below ``/proc/net`` differ from host to host."""
        return _output(self.command(index, ["cat", path]))

    def pids(self, index: int) -> list[int]:
        """All processes on a host."""
        return _pids(self._names[index])

    def set_link(self, index: int, *, up: bool) -> None:
        """Pull the host's cable, or put it back in.

        The other end of it is set down: the host keeps its address, its routes and its
        connections, and learns nothing but that there is no carrier.
        """
        _ip("-n", self._switch, "link", "set", f"host{index}", "up" if up else "down")

    def shape(self, index: int, rate: str = "1gbit") -> None:
        """Limit what a host sends and what it receives, each to this rate."""
        for name, device in ((self._names[index], "eth0"), (self._switch, f"host{index}")):
            where = ["tc", "-n", name, "qdisc", "replace", "dev", device, "root"]
            _output([*where, "tbf", "rate", rate, "burst", BURST, "latency", QUEUE])

    def build(self) -> None:
        """Make namespaces, cables and addresses."""
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for index, name in enumerate(self._names):
            cable = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("netns", "add", name)
            _ip("-n", self._switch, "link", "add", f"host{index}", *cable)
            _ip("-n", self._switch, "link", "set", f"host{index}", "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{self.address(index)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        """End all processes there, then the namespaces."""
        for process in self._processes:
            process.end()
            process.close()
        for name in (*self._names, self._switch):
            _remove(name)


@contextmanager
def connected_hosts(num_hosts: int) -> Iterator[Hosts]:
    """Hosts that can reach each other; nothing of them is left after the block.

    Raises:
        NoHostsError: this is not root, or the system lacks what it takes.
    """
    reason = why_no_hosts()
    if reason:
        raise NoHostsError(reason)
    _sweep()
    hosts = Hosts(f"{_PREFIX}-{os.getpid()}-{next(_numbers)}", num_hosts)
    with ExitStack() as stack:
        stack.callback(hosts.remove)
        hosts.build()
        yield hosts


@cache
def why_no_hosts() -> str | None:
    """Why hosts cannot be made here; None where they can. Found by trying."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "network namespaces need iproute2 (the commands ip and tc)"
    hosts = Hosts(f"{_PREFIX}-{os.getpid()}-probe", 1)
    try:
        hosts.build()
        hosts.shape(0)
    except CommandError as error:
        return str(error)
    finally:
        hosts.remove()
    return None


def _command(namespace: str | None, argv: Sequence[str | Path]) -> list[str]:
    where = [] if namespace is None else ["ip", "netns", "exec", namespace]
    return [*where, *map(str, argv)]


def _ip(*arguments: str) -> str:
    return _output(["ip", *arguments])


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_SECONDS)
    if done.returncode != 0:
        raise CommandError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _remove(name: str) -> None:
    """Remove a namespace with all that runs in it; it may be gone, or never have been."""
    with suppress(CommandError):
        for pid in _pids(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _ip("netns", "delete", name)


def _pids(name: str) -> list[int]:
    return [int(pid) for pid in _ip("netns", "pids", name).split() if int(pid) != os.getpid()]


def _sweep() -> None:
    """Remove what processes have left that are no more."""
    for line in _ip("netns", "list").splitlines():
        made = re.match(rf"{_PREFIX}-(\d+)-\S+", line)
        if made and not Path(f"/proc/{made[1]}").exists():
            _remove(made[0])


def _contents(descriptor: int) -> str:
    """All that a file holds; where its writer writes is left as it is."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
