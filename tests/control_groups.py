"""Hosts that are threads of one process, for what they say to each other over real sockets."""

import gc
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lockstep.cluster.place import Address, Place
from lockstep.launch.rendezvous.control_group import ControlGroup, HostInfo
from lockstep.launch.rendezvous.host_rendezvous import meet
from lockstep.launch.security.secret import Secret

SECONDS = 30.0  # for what should take none
SECRET = Secret(b"known to all hosts of the tests, and to nobody else")
_ESTABLISHED, _LISTENING = "01", "0A"

_T = TypeVar("_T")


def free_port(name: str = "127.0.0.1") -> int:
    with socket.socket() as sock:
        sock.bind((name, 0))
        port: int = sock.getsockname()[1]
        return port


def address(name: str = "127.0.0.1") -> Address:
    return Address(name=name, port=free_port(name))


def place(
    host: int, num_hosts: int, *where: Address, job: str = "job", min_hosts: int | None = None
) -> Place:
    return Place(
        launcher="test",
        job=job,
        host=host,
        num_hosts=num_hosts,
        rendezvous=where,
        min_hosts=min_hosts,
    )


def info(host: int, **facts: str) -> HostInfo:
    return HostInfo(
        facts={"Lockstep": "1", **facts}, about={"name": f"node{host}", "devices": host}
    )


def enter(
    host: int, num_hosts: int, *where: Address, secret: Secret = SECRET, timeout: float = SECONDS
) -> ControlGroup:
    """Meet as one of the hosts."""
    own = place(host, num_hosts, *where)
    return meet(own, secret, info(host), timeout_seconds=timeout)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What calls return that run at the same time, or the exceptions they raise."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return results


def on_all(groups: Sequence[ControlGroup], call: Callable[[ControlGroup], _T]) -> list[_T]:
    """What all hosts return from the same call. Fails if one of them raises."""
    results = together(*(lambda group=group: call(group) for group in groups))
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def form(num_hosts: int) -> list[ControlGroup]:
    """A control group, seen from each of its hosts."""
    where = address()
    calls = [lambda host=host: enter(host, num_hosts, where) for host in range(num_hosts)]
    results = together(*calls)
    assert all(isinstance(result, ControlGroup) for result in results), results
    return results


def listening_ports() -> set[int]:
    """TCP ports at which this process listens."""
    own = {os.readlink(path) for path in _descriptors() if path.is_symlink()}
    return {port for port, state, inode in _sockets() if state == _LISTENING and inode in own}


def is_connected(port: int) -> bool:
    """Whether anybody is connected to a port of this machine."""
    return any(state == _ESTABLISHED and port == each for each, state, _ in _sockets())


def _sockets() -> list[tuple[int, str, str]]:
    """Port, state, and the name among descriptors, of all TCP sockets of this machine."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return [(int(each[1].rpartition(":")[2], 16), each[3], f"socket:[{each[9]}]") for each in lines]


def _descriptors() -> list[Path]:
    return list(Path("/proc/self/fd").iterdir())


def num_descriptors() -> int:
    gc.collect()  # what earlier tests have left for the collector must not go in the midst of one
    return len(_descriptors())
