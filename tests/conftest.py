"""One pool of helper processes for all tests, one thread per process."""

import faulthandler
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from lockstep.launch.pool import keep_teams

faulthandler.enable()
# Whoever runs the tests in the background (nohup, a job of a shell) may have them ignore these, and
# that is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
settings.register_profile("lockstep", deadline=None)  # other tests may have the cores
settings.load_profile("lockstep")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def helper_pool() -> Iterator[None]:
    """Helpers are started once per number of devices, and anew after a failure."""
    with keep_teams():
        yield
