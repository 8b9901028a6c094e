"""Running ``lockstep`` as typed, and a script in which hosts prove that they can meet."""

import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

LOCKSTEP = [sys.executable, "-m", "lockstep"]
TIMEOUT_SECONDS = 180.0

# How a warning begins that depends on how busy the machine is.
WAITED = "Training waited for its data"
# Options of the interpreter: that one is not shown; and all others are errors.
CALM = ("-W", f"ignore:{WAITED}")
STRICT = ("-W", "error", *CALM)
# What Keras says of its own variables, whenever one becomes an array; and the same without that.
KERAS_SAYS = "__array__ implementation doesn't accept a copy keyword"
STRICT_BUT_KERAS = (*STRICT, "-W", f"ignore:{KERAS_SAYS}")

# Hosts meet where they are told, over a socket of their own. NAMES has addresses for names that a
# cluster would know. Each prints its host, number of hosts, devices, what it was told, and its
# arguments.
MEET = """
import json, os, pathlib, socket, sys, time
from lockstep.cluster.environment import find_place

place = find_place(os.environ)
names = json.loads(os.environ.get("NAMES", "{}"))
addresses = [(names.get(each.name, each.name), each.port) for each in place.rendezvous]

def listen():
    for address in addresses:
        try:
            return socket.create_server(address)
        except OSError as error:
            reason = error
    raise reason

def greet(seconds=30):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for address in addresses:
            try:
                with socket.create_connection(address, 5) as peer:
                    peer.sendall(f"host {place.host}".encode())
                    return peer.recv(100).decode()
            except OSError:
                time.sleep(0.02)
    raise TimeoutError(f"nobody at {addresses}")

told = []
if not place.leads:
    told.append("follows")
elif place.host == 0:
    with listen() as server:
        server.settimeout(30)
        for _ in range(place.num_hosts - 1):
            peer, _ = server.accept()
            with peer:
                told.append(peer.recv(100).decode())
                peer.sendall(b"host 0")
else:
    told.append(greet())

if "LOCKSTEP_SECRET_FILE" in os.environ:
    path = pathlib.Path(os.environ["LOCKSTEP_SECRET_FILE"])
    assert path.stat().st_mode & 0o777 == 0o600
    secret = path.read_text().strip()
else:
    secret = os.environ["LOCKSTEP_SECRET"]
assert len(secret) == 64
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        command = path.read_bytes()
    except OSError:  # it has ended by now
        continue
    assert secret.encode() not in command, command
line = [place.host, place.num_hosts, place.devices, *sorted(told), sys.argv[1:]]
sys.stdout.write(" ".join(map(str, line)) + "\\n")  # at once: others write there, too
"""


def be_strict() -> None:
    """What ``STRICT`` does, for a script that is under way."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", WAITED)


def call(
    arguments: list[str], folder: Path, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a folder, as if nobody had launched these tests as one of many."""
    return subprocess.run(
        arguments,
        cwd=folder,
        env=clean_environment() | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def clean_environment() -> dict[str, str]:
    """This process's, without what a launcher may have set."""
    # Unbuffered, a line is written in pieces, and those of several hosts could mix.
    others = ("LOCKSTEP_", "SLURM_", "RAY_", "PYTHONUNBUFFERED")
    return {name: value for name, value in os.environ.items() if not name.startswith(others)}


def write(path: Path, text: str) -> Path:
    """Write a file, and the folders that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def write_program(path: Path, text: str) -> Path:
    """Write a file that can be run."""
    write(path, text).chmod(0o755)
    return path


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
