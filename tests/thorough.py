"""Which cases of a matrix are run by ``make test``, ``test-all`` and ``test-exhaustive``.

A test of its own that is as dear is left to ``make test-all`` with ``@pytest.mark.thorough``; so is
a file whose like is in the core. The dearest, of which others show the parts, are left to ``make
test-exhaustive`` with ``@pytest.mark.exhaustive``.
"""

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any
from zlib import crc32

import pytest

# What `make test` gives pytest as ``-m``.
CORE = "not thorough"

# Of a row that its table names for CI, beside those that ``covering`` chooses.
_IN_CI = pytest.mark.thorough(is_chosen=True)

Core = Collection[Any] | Callable[..., bool]


def core_of(cases: Iterable[Any], core: Core, more: Core | None = None) -> list[Any]:
    """Cases for ``pytest.mark.parametrize``; those that are not of the core are ``thorough``.

    Args:
        cases: values of an argument, or tuples of values of several.
        core: those that always run; or whether a case does, given its values.
        more: those that CI runs beside the core, all of them; the rest is ``exhaustive``. None has
            ``covering`` choose.
    """
    every = list(cases)
    always = _chosen(every, core)
    assert always, "of every test something runs"
    others = [case for case in every if case not in always]
    in_ci = [] if more is None else _chosen(others, more)
    rest = pytest.mark.thorough if more is None else pytest.mark.exhaustive
    return [
        case
        if case in always
        else pytest.param(*_values(case), marks=_IN_CI if case in in_ci else rest)
        for case in every
    ]


def _chosen(cases: list[Any], which: Core) -> list[Any]:
    if callable(which):
        return [case for case in cases if which(*_values(case))]
    chosen = [case for case in cases if case in which]
    assert len(chosen) == len(which), f"{which} are not all among {cases}"
    return chosen


def wanted(request: pytest.FixtureRequest, argument: str) -> list[Any]:
    """Values of an argument for which tests are run that use this fixture as it now is.

    One start may serve many tests; it need do no more than they ask for.
    """
    mine, own = request.fixturename, getattr(request, "param", None)
    calls = [
        item.callspec
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and mine in item.fixturenames
        and item.callspec.params.get(mine) == own
    ]
    return list(dict.fromkeys(call.params[argument] for call in calls if argument in call.params))


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def covering(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Tests of the core and rows that are named for CI; of functions without any, two cases.

    These two have as many different values of arguments as can be. The whole product of strategies
    x models x options says little more, and takes a multiple of the time: the fuzzer crosses them
    at random, and ``--exhaustive`` runs them all. The choice is the same every day: it depends on
    the tests' names only.
    """
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("exhaustive") is None:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {item for own in functions.values() for item in _cover(own)}
    return [item for item in items if item in chosen]


def _cover(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of one test that are not open, else two of them."""
    values = {item: set(_arguments(item).items()) for item in items}
    chosen = [item for item in items if not (_is_open(item) and values[item])]
    if chosen:
        return chosen
    first, *others = sorted(items, key=lambda item: crc32(item.nodeid.encode()))
    return [first, *sorted(others, key=lambda item: len(values[item] & values[first]))[:1]]


def _arguments(item: pytest.Item) -> dict[str, Hashable]:
    """By name; what cannot be compared by its value is compared by its identity."""
    values = item.callspec.params if hasattr(item, "callspec") else {}
    plain = (str, int, float, bool, type(None))
    return {name: one if isinstance(one, plain) else id(one) for name, one in values.items()}


def _is_open(item: pytest.Item) -> bool:
    """Whether it is thorough, and no table names it for CI."""
    marks = list(item.iter_markers("thorough"))
    return bool(marks) and not any(mark.kwargs.get("is_chosen", False) for mark in marks)
