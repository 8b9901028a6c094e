"""Training on one host opens no port: scanned from another host while it trains."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import CALM
from tests.netns import HostProcess, Hosts

MakeHosts = Callable[[int], Hosts]

# Trains until a file is there; counts epochs.
TRAINING = """
import pathlib
import torch
from torch import nn
import lockstep

class Counting(lockstep.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("EPOCH", epoch)
        self.trainer.stop_training = pathlib.Path("enough").exists()

trainer = lockstep.Trainer(
    nn.Linear(8, 3), loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    strategy=lockstep.MirroredStrategy(devices=2), callbacks=[Counting()])
trainer.fit((torch.ones(64, 8), torch.zeros(64, dtype=torch.long)), epochs=1_000_000, batch_size=8,
            verbose=0)
"""

# A trainer that is less careful: what the scan must find.
OPEN_PORTS = """
import socket
ports = [socket.create_server(("", 0)), socket.socket(type=socket.SOCK_DGRAM)]
ports[1].bind(("", 0))
print("TCP", ports[0].getsockname()[1])
print("UDP", ports[1].getsockname()[1])
"""

# Tries to connect to every port of a host, some hundreds at a time.
SCANNER = """
import errno, select, socket, sys

def knock(port):
    door = socket.socket()
    door.setblocking(False)
    assert door.connect_ex((sys.argv[1], port)) in (0, errno.EINPROGRESS, errno.ECONNREFUSED)
    return door

found, tried = [], 0
for first in range(1, 65536, 512):
    doors = {port: knock(port) for port in range(first, min(first + 512, 65536))}
    tried += len(doors)
    poller = select.poll()
    ports = {}
    for port, door in doors.items():
        poller.register(door, select.POLLOUT)
        ports[door.fileno()] = port
    while ports:
        ready = poller.poll(10_000)
        assert ready, f"no answer at all from {sorted(ports.values())}"
        for descriptor, _ in ready:
            poller.unregister(descriptor)
            port = ports.pop(descriptor)
            status = doors[port].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            assert status in (0, errno.ECONNREFUSED), (port, errno.errorcode[status])
            if status == 0:
                found.append(port)
    for door in doors.values():
        door.close()
print("TRIED", tried)
print("FOUND", *found)
"""

LISTENING = "0A"


@pytest.mark.exhaustive
def test_training_on_one_host_opens_no_port(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts = make_hosts(2)
    training = start_training(hosts, tmp_path)
    epochs = num_epochs(training)
    assert listed(hosts) == {"tcp": [], "udp": []}
    assert scanned(hosts) == []
    assert listed(hosts) == {"tcp": [], "udp": []}
    assert num_epochs(training) > epochs, "it trained while it was scanned"
    (tmp_path / "enough").touch()
    training.check()


@pytest.mark.exhaustive
def test_a_port_that_is_open_is_found(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts = make_hosts(2)
    training = start_training(hosts, tmp_path, OPEN_PORTS)
    tcp, udp = (int(training.wait_for_line(kind)) for kind in ("TCP", "UDP"))
    assert listed(hosts) == {"tcp": [tcp], "udp": [udp]}
    assert scanned(hosts) == [tcp]


def start_training(hosts: Hosts, directory: Path, prelude: str = "") -> HostProcess:
    """On host 0, with two devices; returns once both are at it."""
    script = directory / "script.py"
    script.write_text(prelude + TRAINING)
    training = hosts.run(0, [sys.executable, *CALM, script], directory=directory)
    training.wait_for_line("EPOCH 1")
    assert len(hosts.pids(0)) >= 3, "the script, a helper and the template that it came from"
    return training


def num_epochs(training: HostProcess) -> int:
    return training.out.count("EPOCH")


def scanned(hosts: Hosts) -> list[int]:
    """TCP ports of host 0 that host 1 can connect to."""
    scan = hosts.run(1, [sys.executable, "-c", SCANNER, hosts.address(0)])
    assert scan.wait_for_line("TRIED") == "65535"
    scan.check()
    return [int(port) for port in scan.wait_for_line("FOUND").split()]


def listed(hosts: Hosts) -> dict[str, list[int]]:
    """What host 0's kernel has: TCP ports that are listened on, and all UDP ports.

    A scan cannot find the latter: UDP need not answer.
    """
    return {kind: ports_of(hosts, kind) + ports_of(hosts, f"{kind}6") for kind in ("tcp", "udp")}


def ports_of(hosts: Hosts, table: str) -> list[int]:
    rows = [line.split() for line in hosts.read(0, f"/proc/net/{table}").splitlines()[1:]]
    open_rows = [row for row in rows if table.startswith("udp") or row[3] == LISTENING]
    return [int(row[1].rpartition(":")[2], 16) for row in open_rows]
