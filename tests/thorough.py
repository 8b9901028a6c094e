"""Which cases of a matrix ``make test`` runs; ``make test-all`` runs them all.

A test of its own that is as dear is left to ``make test-all`` with ``@pytest.mark.thorough``.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

# What `make test` gives pytest as ``-m``.
CORE = "not thorough"

Core = Collection[Any] | Callable[..., bool]


def core_of(cases: Iterable[Any], core: Core) -> list[Any]:
    """Cases for ``pytest.mark.parametrize``; those that are not of the core are ``thorough``.

    Args:
        cases: values of an argument, or tuples of values of several.
        core: those that always run; or whether a case does, given its values.
    """
    every = list(cases)
    if callable(core):
        always = [case for case in every if core(*_values(case))]
    else:
        always = [case for case in every if case in core]
        assert len(always) == len(core), f"{core} are not all among {every}"
    assert always, "of every test something runs"
    return [
        case if case in always else pytest.param(*_values(case), marks=pytest.mark.thorough)
        for case in every
    ]


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
