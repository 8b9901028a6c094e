"""A plugin of pytest for Keras's own tests: the models that they make belong to a strategy.

A scope is open around each test, from its ``setUp`` on. Two lines of JSON say that it began, and
how it has ended: with what its models were asked to do, and some numbers of what that came to, to
be compared with those of the same test without a strategy. Therefore data is shuffled only where a
test asks for it: Lockstep has an order of its own.
"""

import inspect
import json
import os
import re
import sys
import unittest
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras.src.backend.torch.trainer import TorchTrainer
from keras.src.testing import test_utils
from keras_tests import RESULTS, WAY, Line, lines_of

import lockstep
from lockstep.frontends.keras.bound_methods import METHODS
from lockstep.frontends.keras.methods import Methods
from tests.kept_teams import keep_teams

_WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "mirrored": lambda: lockstep.MirroredStrategy(devices=2).scope(),
    "pipeline": lambda: lockstep.PipelineStrategy(2).scope(),
}

# Where it is among the arguments of ``fit``.
_SHUFFLE = [*inspect.signature(keras.Model.fit).parameters].index("shuffle")


def name_of(item: pytest.Item) -> str:
    """A test's, the same in every process: some are called by where an object lies."""
    return re.sub(r"0x[0-9a-f]+", "", item.nodeid)


class Calls:
    """What models were asked to do by a test, but not by one another's methods."""

    def __init__(self) -> None:
        self.made: list[Line] = []
        self._depth = 0

    def noting(self, name: str, method: Any) -> Any:
        """A method, of a model or of its ``Methods``, that is noted when it has returned."""

        @wraps(method)
        def noted(owner: Any, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            if name == "fit" and len(args) < _SHUFFLE:
                kwargs.setdefault("shuffle", False)
            try:
                result = method(owner, *args, **kwargs)
            finally:
                self._depth -= 1
            if not self._depth:
                self.made.append({"method": name, **described(owner, result)})
            return result

        return noted


def described(owner: Any, result: Any) -> Line:
    """The number of devices of a call, what it has returned, and the weights that it has left."""
    is_bound = isinstance(owner, Methods)
    weights = (owner._model if is_bound else owner).weights
    returned = keras.tree.flatten(getattr(result, "history", result))
    values = [norm for one in [*returned, *weights] for norm in norms_of(one)]
    return {"ranks": owner.plan.num_ranks if is_bound else 0, "values": values}


def norms_of(value: Any) -> list[float]:
    """Of an array; what is no number has none."""
    try:
        array = np.asarray(keras.ops.convert_to_numpy(value), dtype=np.float64)
    except (TypeError, ValueError):
        return []
    return [float(array.sum()), float(np.linalg.norm(array))]


class Plugin:
    """Runs each test in a way, and writes down what comes of it."""

    def __init__(self, way: str, results: Path) -> None:
        self._make_scope = _WAYS[way]
        self._results = results
        self._calls = Calls()
        self._failure = ""
        self._outcome = ""
        for name in METHODS:
            for owner in (TorchTrainer, Methods):
                setattr(owner, name, self._calls.noting(name, getattr(owner, name)))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what is known."""
        known = {line["test"] for line in lines_of(self._results)}
        items[:] = [item for item in items if name_of(item) not in known]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Around all of a test."""
        self._calls.made.clear()
        self._outcome, self._failure = "passed", ""
        self._write(test=name_of(item), outcome="began")
        result = yield
        self._write(
            test=name_of(item),
            outcome=self._outcome,
            failure=self._failure,
            calls=self._calls.made,
        )
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """The test with its setUp: in every way from the same seeds."""
        keras.utils.set_random_seed(0)
        with self._make_scope():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, Any, Any]:
        """What a phase of a test has come to."""
        report = yield
        if report.outcome != "passed":
            self._outcome = report.outcome
            error = call.excinfo
            self._failure = "" if error is None else f"{error.typename}: {error.value}"
        return report

    def _write(self, **line: Any) -> None:
        with self._results.open("a") as file:
            file.write(f"{json.dumps(line)}\n")


def pytest_configure(config: pytest.Config) -> None:
    """Begin; what Keras's tests find in its repository is here."""
    for marker in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", marker)
    conftest = ModuleType("conftest")
    vars(conftest)["skip_if_backend"] = lambda backend, reason: pytest.mark.skipif(
        keras.backend.backend() == backend, reason=reason
    )
    sys.modules["conftest"] = conftest
    test_utils.get_test_data.__defaults__ = (0,)  # the seed of data that else has none
    # Losses and models refer to their test, which has pytest's own files among its attributes.
    unittest.TestCase.__getstate__ = lambda test: {**vars(test), "_outcome": None}  # type: ignore[method-assign,assignment]
    torch.set_num_threads(1)
    config.pluginmanager.register(Plugin(os.environ[WAY], Path(os.environ[RESULTS])))


@pytest.fixture(scope="session", autouse=True)
def helper_pool() -> Generator[None]:
    """Helpers are started once, and anew after a failure."""
    with keep_teams():
        yield
