"""One pool of helper processes for all tests, one thread per process."""

import faulthandler
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from hypothesis import settings

from lockstep.launch.pool import keep_teams
from tests.netns import Hosts, NoHostsError, connected_hosts

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


@pytest.fixture
def make_hosts() -> Iterator[Callable[[int], Hosts]]:
    """Makes so many hosts with addresses of their own; the test is skipped where that cannot be."""
    with ExitStack() as stack:

        def make(num_hosts: int) -> Hosts:
            try:
                return stack.enter_context(connected_hosts(num_hosts))
            except NoHostsError as error:
                pytest.skip(f"no hosts: {error}")

        yield make
