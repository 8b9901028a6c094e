"""The hosts that other tests run on: they talk, are cut off, are slow, and are gone afterwards."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.faults.processes import is_alive, wait_until
from tests.netns import Hosts, connected_hosts, why_no_hosts

MakeHosts = Callable[[int], Hosts]

# Answers every line on its first connection, and says how many bytes came on its second.
SERVER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print("PORT", listener.getsockname()[1])
lines, _ = listener.accept()
with lines, lines.makefile("rw") as file:
    for line in file:
        file.write(line)
        file.flush()
bulk, _ = listener.accept()
print("BYTES", sum(iter(lambda: len(bulk.recv(1 << 20)), 0)))
"""

# Pings until one takes LONG, which is said meanwhile and afterwards; then sends so many bytes.
NUM_BYTES = 25_000_000
PING = f"""
import socket, sys, threading, time
LONG = 4.0  # no machine is so busy
address = sys.argv[1], int(sys.argv[2])
lines = socket.create_connection(address, timeout=60)
file = lines.makefile("rw")
number, began = 0, time.monotonic()
def ping():
    global number, began
    began = time.monotonic()
    number += 1
    file.write(f"{{number}}\\n")
    file.flush()
    assert int(file.readline()) == number
    return time.monotonic() - began
def watch():
    while time.monotonic() - began < LONG:
        time.sleep(0.05)
    print("STANDS")
ping()
print("THERE")
threading.Thread(target=watch).start()
while (took := ping()) < LONG:
    pass
print("STOOD", took)
file.close()
lines.close()
bulk = socket.create_connection(address, timeout=60)
began = time.monotonic()
bulk.sendall(bytes({NUM_BYTES}))
bulk.shutdown(socket.SHUT_WR)
bulk.recv(1)  # the other end has read all of it
print("RATE", 8 * {NUM_BYTES} / (time.monotonic() - began))
"""


def python(source: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", source, *map(str, arguments)]


@pytest.mark.exhaustive
def test_hosts_talk_lose_their_link_and_are_as_fast_as_they_are_said_to_be(
    make_hosts: MakeHosts,
) -> None:
    hosts = make_hosts(2)
    hosts.shape(1, "100mbit")
    server = hosts.run(0, python(SERVER, hosts.address(0)))
    client = hosts.run(1, python(PING, hosts.address(0), server.wait_for_line("PORT")))
    client.wait_for_line("THERE")
    assert "STANDS" not in client.out
    hosts.set_link(1, up=False)
    client.wait_for_line("STANDS", 60)
    time.sleep(0.2)
    assert "STOOD" not in client.out, "nothing got through while the link was down"
    hosts.set_link(1, up=True)
    client.wait_for_line("STOOD", 60)
    # The upper end shows the limit; a machine that is busy sends less.
    assert 20e6 < float(client.wait_for_line("RATE")) < 120e6
    assert int(server.wait_for_line("BYTES")) == NUM_BYTES
    client.check()
    server.check()


@pytest.mark.exhaustive
def test_what_a_host_receives_is_limited_too(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    hosts.shape(0, "100mbit")
    server = hosts.run(0, python(SERVER, hosts.address(0)))
    no_stop = PING.replace("LONG = 4.0", "LONG = 0.0")
    client = hosts.run(1, python(no_stop, hosts.address(0), server.wait_for_line("PORT")))
    assert 20e6 < float(client.wait_for_line("RATE")) < 120e6


def test_the_network_of_a_host_is_its_own(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    server = hosts.run(0, python(SERVER, "127.0.0.1"))
    port = f":{int(server.wait_for_line('PORT')):04X}"
    assert port in hosts.read(0, "/proc/net/tcp")
    assert port not in hosts.read(1, "/proc/net/tcp")
    # Not by the port: other programs of this machine may have the same one.
    assert os.readlink(f"/proc/{server.pid}/ns/net") != os.readlink("/proc/self/ns/net")
    assert server.pid in hosts.pids(0)
    assert server.pid not in hosts.pids(1)


def test_nothing_is_left_after_a_failure() -> None:
    reason = why_no_hosts()
    if reason:
        pytest.skip(f"no hosts: {reason}")
    pids: list[int] = []
    with pytest.raises(ZeroDivisionError):
        _fail_on_a_host(pids)
    wait_until(lambda: not any(map(is_alive, pids)), 15)
    assert f"lockstep-test-{os.getpid()}-" not in _namespaces()


def test_what_a_killed_process_has_left_is_removed(make_hosts: MakeHosts) -> None:
    make_hosts(1)
    source = """
import os, signal
from tests.netns import connected_hosts
with connected_hosts(1) as hosts:
    print(os.getpid(), hosts.run(0, ["sleep", "1000"]).pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(python(source), capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done
    maker, sleeper = done.stdout.split()
    assert f"lockstep-test-{maker}-" in _namespaces()
    assert is_alive(int(sleeper))
    make_hosts(1)
    assert f"lockstep-test-{maker}-" not in _namespaces()
    wait_until(lambda: not is_alive(int(sleeper)), 15)


def test_a_process_that_takes_too_long_shows_its_stacks(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(1)
    process = hosts.run(
        0, python("def linger():\n    print('HERE')\n    while True: pass\nlinger()")
    )
    process.wait_for_line("HERE")
    with pytest.raises(AssertionError, match=r"(?s)not within 1.0 s.*in linger"):
        process.finish(timeout_seconds=1.0)
    assert process.popen.returncode is not None


def test_a_process_that_complains_is_no_good(make_hosts: MakeHosts) -> None:
    process = make_hosts(1).run(0, python("import sys; sys.exit('so it is')"))
    with pytest.raises(AssertionError, match="so it is"):
        process.check()


def _fail_on_a_host(pids: list[int]) -> None:
    with connected_hosts(2) as hosts:
        # One of the two leaves its process group, and would outlive it.
        leaver = "import os, time; os.fork() or os.setsid(); print('HERE'); time.sleep(1000)"
        hosts.run(1, python(leaver)).wait_for_line("HERE")
        pids += hosts.pids(1)
        assert len(pids) == 2
        raise ZeroDivisionError


def _namespaces() -> str:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return done.stdout
