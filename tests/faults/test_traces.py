"""``fit`` leaves the script's process as it found it, and opens nothing to anybody."""

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import warnings
from ast import literal_eval
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from lockstep.errors import WorkerError
from tests.faults.jobs import fit, helpers_of, make_data, make_trainer, template_of
from tests.faults.mishaps import AsAsked, fail
from tests.faults.processes import children_of
from tests.kept_teams import keep_teams
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

NUM_FITS = 10


def settings() -> dict[str, Any]:
    return {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "python threads": {thread.name for thread in threading.enumerate()} - {"lockstep-spawner"},
        "affinity": os.sched_getaffinity(0),
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),
        "random": random.getstate(),
        "directory": os.getcwd(),
        "path": list(sys.path),
        "environment": {name: os.environ[name] for name in os.environ if "PYTEST" not in name},
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filters": list(warnings.filters),
        "group": (os.getpgrp(), os.getsid(0)),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
    }


@pytest.fixture(scope="module", autouse=True)
def nothing_frozen() -> Iterator[None]:
    """What ``conftest`` froze may die meanwhile, and would be counted."""
    gc.unfreeze()
    gc.collect()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("devices", core_of([1, 2, 3], [2], []))
@pytest.mark.parametrize("fails", [False, True])
def test_settings_are_as_before(devices: int, fails: bool) -> None:
    torch.set_num_threads(2)
    fit(make_trainer(1))  # what torch imports at first use has traces of its own
    try:
        before = settings()
        trainer = make_trainer(devices, lambda: fail(AsAsked()) if fails else None, on="all")
        try:
            fit(trainer)
        except AsAsked:
            assert fails
        assert settings() == before
        if not fails:
            trainer.evaluate(make_data())
            trainer.predict(make_data()[0])
            assert settings() == before
    finally:
        torch.set_num_threads(1)


def test_settings_are_as_before_when_a_helper_fails() -> None:
    before = settings()
    with pytest.raises(WorkerError):
        fit(make_trainer(2, lambda: os._exit(1)))
    assert settings() == before


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:lockstep")


@pytest.fixture
def no_collector() -> Any:
    """Nothing may depend on when the garbage collector runs: shared memory is large."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def check_no_leak(act: Callable[[], None], num_times: int) -> None:
    with keep_teams():  # other tests' teams would come and go here
        act()
        gc.collect()
        before = num_descriptors(), num_maps(), sorted(children_of(os.getpid()))
        for _ in range(num_times):
            act()
        assert (num_descriptors(), num_maps(), sorted(children_of(os.getpid()))) == before


@pytest.mark.thorough
@pytest.mark.usefixtures("no_collector")
def test_fits_leak_nothing() -> None:
    trainer = make_trainer(3)

    def act() -> None:
        fit(trainer, validation_data=make_data())
        trainer.evaluate(make_data())
        trainer.predict(make_data()[0])

    check_no_leak(act, NUM_FITS)
    for pid in helpers_of(trainer):
        # The standard streams, the link, the diagnostics; nothing of the template or others.
        assert len(os.listdir(f"/proc/{pid}/fd")) == 5
        assert Path(f"/proc/{pid}/maps").read_text().count("memfd:lockstep") == 0


@pytest.mark.thorough
@pytest.mark.usefixtures("no_collector")
def test_trainers_that_come_and_go_leak_nothing() -> None:
    def act() -> None:
        trainer = make_trainer(2)
        fit(trainer)
        trainer.close()

    check_no_leak(act, 4)


@pytest.mark.thorough
def test_failing_fits_leak_nothing() -> None:
    """An error's traceback holds what its frames held, so the collector has a part here."""

    def act() -> None:
        trainer = make_trainer(3, lambda: os._exit(1))
        with pytest.raises(WorkerError):
            fit(trainer)
        del trainer
        gc.collect()

    check_no_leak(act, 2)


class _Look(lockstep.Callback):
    """Looks at something during a fit."""

    def __init__(self, look: Callable[[Any], object]) -> None:
        self._look = look
        self.seen: list[object] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(self._look(self.trainer))


def test_children_of_the_script_inherit_nothing() -> None:
    """Not even where the user forgets to close: everything is closed on exec."""
    show = "import os; print(sorted(os.readlink(f'/proc/self/fd/{f}') for f in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{f}')))"  # noqa: E501

    def look(trainer: lockstep.Trainer) -> str:
        command = [sys.executable, "-S", "-c", show]
        return subprocess.run(
            command, close_fds=False, stdout=subprocess.PIPE, check=True, timeout=60
        ).stdout.decode()

    left = {f"socket:[{inode}]" for inode in tcp_sockets()}  # gloo's, of tests before this one
    callback = _Look(look)
    fit(make_trainer(3, callbacks=(callback,)))
    (seen,) = callback.seen
    opened = set(literal_eval(str(seen))) - left
    assert not any("memfd" in one or "socket" in one for one in opened)


def tcp_sockets(*, state: str = "") -> set[str]:
    """Inodes of the machine's TCP sockets, or of those in a state."""
    rows = [
        line.split()
        for family in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]
    ]
    return {fields[9] for fields in rows if state in ("", fields[3])}


def listeners() -> set[str]:
    """Inodes of all sockets that listen, of any family."""
    found = tcp_sockets(state="0A")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & 0x10000:
            found.add(fields[6])
    return found


def sockets_of(pid: int) -> set[str]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            link = os.readlink(f"/proc/{pid}/fd/{name}")
            if link.startswith("socket:["):
                found.add(link[len("socket:[") : -1])
    return found


def test_nothing_listens() -> None:
    def look(trainer: lockstep.Trainer) -> bool:
        helpers = helpers_of(trainer)
        processes = [os.getpid(), *helpers, template_of(helpers[0])]
        sockets = set().union(*(sockets_of(pid) for pid in processes))
        assert len(sockets) > len(helpers)
        return not sockets & listeners() - left

    left = tcp_sockets()  # gloo's, of tests before this one
    callback = _Look(look)
    fit(make_trainer(3, callbacks=(callback,)))
    assert callback.seen == [True]
    with socket.create_server(("127.0.0.1", 0)):  # it would be seen
        assert sockets_of(os.getpid()) & listeners()
