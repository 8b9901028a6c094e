"""One pool of helper processes for all tests, one thread per process."""

import atexit
import faulthandler
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from lockstep.train.runtime import session
from tests import preloading, warm
from tests.kept_teams import keep_teams
from tests.netns import Hosts, NoHostsError, connected_hosts
from tests.thorough import CORE, covering

faulthandler.enable()
# What is measured while other tests have the cores must not stay in the user's cache.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lockstep-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# Whoever runs the tests in the background (nohup, a job of a shell) may have them ignore these, and
# that is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
torch.set_num_threads(1)  # from now on: test files compute where they are collected, too
settings.register_profile("exhaustive", deadline=None)  # other tests may have the cores
settings.register_profile("all", settings.get_profile("exhaustive"), max_examples=50)
settings.register_profile("core", settings.get_profile("exhaustive"), max_examples=20)


# Folders whose tests mostly wait, and those whose tests compute, in the order of their runs:
# the longest files first, so that both workers end together.
_WAITING = ("faults", "parallel")
_COMPUTING = ("parity", "fuzz", "devices", "tpu", "unit", "property", "golden")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--exhaustive``: whole products of strategies, models and options."""
    parser.addoption("--exhaustive", action="store_true", help="run whole products of arguments")


def pytest_configure(config: pytest.Config) -> None:
    """Of a law, the core tries fewer examples."""
    outer = "exhaustive" if config.option.exhaustive else "all"
    settings.load_profile("core" if config.option.markexpr == CORE else outer)


@pytest.hookimpl(optionalhook=True)  # it is not known with `-p no:xdist`
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """How ``--numprocesses`` shares out tests: by file, in the order in which they stand."""
    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose cases, and order files so that some compute while others wait."""
    if not (config.option.exhaustive or any("::" in argument for argument in config.args)):
        chosen = covering(items)
        config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
        items[:] = chosen
    files = list(dict.fromkeys(item.path for item in items))
    turns: dict[Path, float] = {}
    for folders in (_WAITING, _COMPUTING):
        own = [path for folder in folders for path in files if path.parent.name == folder]
        turns |= {path: index / len(own) for index, path in enumerate(own)}
    items.sort(key=lambda item: turns[item.path])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What collecting imports is here to stay: the collector need not look at it ever again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before fixtures, which may start scripts for many tests
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Scripts are forks of warm interpreters, but for those of tests marked ``fresh``."""
    warm.is_on = item.get_closest_marker("fresh") is None


@pytest.fixture(scope="session", autouse=True)
def helper_pool() -> Iterator[None]:
    """Helpers are started once per number of devices, and anew after a failure.

    One that gets a class of a test file imports the file, and with it what takes longest to import:
    in the template, once for all.
    """
    session.PRELOAD += (preloading.__name__, "pytest", "lockstep.train.trainer", "numpy.random")
    with keep_teams():
        yield


@pytest.fixture(scope="module", autouse=True)
def no_trainers_of_other_files() -> Iterator[None]:
    """A trainer in a cycle has helpers until somebody looks for garbage, which may take long.

    What a file has imported stays, and is looked at this once.
    """
    yield
    gc.collect()
    gc.freeze()


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
