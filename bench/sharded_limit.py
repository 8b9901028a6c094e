"""A training that is too large for one host: two hosts, each under a limit of memory.

Parameters and slots of Adam take 1.5 times the limit of a host, which is a memory cgroup (version
1) and counts the page cache, too. The hosts are network namespaces, and share a folder. They build
the model from a function, train, write checkpoints, and save; other processes resume; and a host
exports the checkpoint. What a host had at most is printed: all that the cgroup has counted, and
what the kernel cannot take back (anonymous and shared memory). Run as root:
``python bench/sharded_limit.py``.
"""

import argparse
import os
import secrets
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread

CGROUPS = Path("/sys/fs/cgroup/memory")
PORT, NUM_HOSTS, BATCH, STEPS = 29500, 2, 8, 3
TIMEOUT_SECONDS = 900.0
FACTOR = 1.5


def num_bytes(layers: int, width: int) -> int:
    """Of the parameters."""
    return layers * (width * width + width) * 4


# --- a host --------------------------------------------------------------------------------------


def on_host(what: str, folder: str, layers: int, width: int) -> None:
    while not os.path.exists(f"{folder}/{what} begins"):  # until it is under its limit
        time.sleep(0.01)
    import torch
    from torch import nn

    import lockstep

    if what == "export":
        from lockstep.checkpoint.exporting import export_safetensors

        export_safetensors(f"{folder}/run", f"{folder}/exported")
        return

    def make_model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    slots = f"{folder}/slots"  # files there have no names
    os.makedirs(slots, exist_ok=True)
    trainer = lockstep.Trainer(
        make_model,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-4),
        strategy=lockstep.FullyShardedStrategy(1, offload=slots, timeout_seconds=TIMEOUT_SECONDS),
    )
    data = torch.randn(BATCH * STEPS, width, generator=torch.Generator().manual_seed(0))
    begun = time.perf_counter()
    history = trainer.fit(
        (data, data),
        batch_size=BATCH,
        epochs=1 if what == "train" else 2,
        checkpoint=lockstep.Checkpoint(f"{folder}/run", keep=1),
        verbose=0,
    )
    print(f"{what}: losses {history.history['loss']}, {time.perf_counter() - begun:.0f} s")
    trainer.save(f"{folder}/saved {os.environ['HOST']}")


# --- cgroups -------------------------------------------------------------------------------------


class Limit:
    """A cgroup with a limit of memory, and what it has had at most."""

    def __init__(self, name: str, limit: int) -> None:
        self._path = CGROUPS / name
        self._path.mkdir()
        (self._path / "memory.limit_in_bytes").write_text(str(limit))
        self.most_kept = 0
        self._ends = Event()
        self._thread = Thread(target=self._look)
        self._thread.start()

    def take(self, process: int) -> None:
        """Have a process, and all that it starts, within it."""
        (self._path / "cgroup.procs").write_text(str(process))

    def _look(self) -> None:
        while not self._ends.wait(0.02):
            lines = (self._path / "memory.stat").read_text().splitlines()
            found = {name: int(value) for name, value in map(str.split, lines)}
            kept = found["total_rss"] + found.get("total_shmem", 0)
            self.most_kept = max(self.most_kept, kept)

    def close(self) -> str:
        """Remove it; returns what it has counted."""
        self._ends.set()
        self._thread.join()
        most = int((self._path / "memory.max_usage_in_bytes").read_text())
        oom = (self._path / "memory.oom_control").read_text().split()
        killed = oom[oom.index("oom_kill") + 1] if "oom_kill" in oom else "?"
        for _ in range(100):
            with suppress(OSError):
                self._path.rmdir()
                break
            time.sleep(0.1)
        return f"{most / 1e6:,.0f} MB counted, {self.most_kept / 1e6:,.0f} MB kept, {killed} killed"


def run(what: str, folder: str, layers: int, width: int, num_hosts: int = NUM_HOSTS) -> None:
    """Do something on hosts, each under a limit, and print what they have had."""
    sys.path.append(str(Path(__file__).parents[1]))  # the hosts of the tests are ours, too
    from tests.launchers import tf_config
    from tests.netns import connected_hosts

    limit = int(3 * num_bytes(layers, width) / FACTOR)
    limits = [Limit(f"lockstep-{os.getpid()}-{what}-{host}", limit) for host in range(num_hosts)]
    try:
        with connected_hosts(num_hosts) as hosts:
            secret = secrets.token_hex(32)
            addresses = [f"{hosts.address(host)}:{PORT}" for host in range(num_hosts)]
            arguments = [__file__, "--on-host", what, folder, str(layers), str(width)]
            own = [
                {
                    **os.environ,
                    **({} if num_hosts == 1 else tf_config(addresses, host)),
                    "LOCKSTEP_SECRET": secret,
                    "HOST": str(host),
                    "OMP_NUM_THREADS": "1",
                }
                for host in range(num_hosts)
            ]
            started = [
                hosts.run(host, [sys.executable, *arguments], own[host])
                for host in range(num_hosts)
            ]
            for limited, one in zip(limits, started, strict=True):
                limited.take(one.pid)
            Path(folder, f"{what} begins").touch()
            for one in started:
                print(one.check(TIMEOUT_SECONDS).strip() or what, flush=True)
    finally:
        for host, limited in enumerate(limits):
            print(f"  host {host}: {limited.close()}, of {limit / 1e6:,.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on-host", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    if options.on_host:
        what, folder, layers, width = options.on_host
        on_host(what, folder, int(layers), int(width))
        return
    layers, width = options.layers, options.width
    parameters = num_bytes(layers, width)
    print(f"{parameters / 1e6:,.0f} MB of parameters, {3 * parameters / 1e6:,.0f} MB with slots")
    folder = tempfile.mkdtemp(dir=options.folder)
    try:
        run("train", folder, layers, width)
        run("resume", folder, layers, width)
        run("export", folder, layers, width, num_hosts=1)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
