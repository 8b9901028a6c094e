"""``make test`` leaves out what is marked ``thorough``; CI only cases of products of arguments."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.thorough import core_of, covering

ROOT = Path(__file__).parents[2]


def test_all_tests_are_all() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipes = dict(re.findall(r"^(test\S*):.*\n\t(.*)", makefile, flags=re.MULTILINE))
    assert recipes["test-all"] == "$(BIN)/python -m pytest --numprocesses 3"
    assert recipes["test"] == f'{recipes["test-all"]} -m "not thorough"'
    assert recipes["test-exhaustive"] == f"{recipes['test-all']} --exhaustive"
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["testpaths"] == ["tests"]
    assert set(options["addopts"].split()) == {"-q", "--strict-markers", "--strict-config"}


def test_ci_runs_them() -> None:
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "set -euo pipefail" in commands
    assert "make lint > lint.log 2>&1 &" in commands
    assert commands[-2:] == ["make test-all", 'wait "$checks"']


def test_what_is_not_of_the_core_is_marked() -> None:
    assert core_of("abc", ["a", "c"]) == ["a", pytest.param("b", marks=pytest.mark.thorough), "c"]
    cases = [(1, "x"), (2, "x")]
    rest = pytest.param(1, "x", marks=pytest.mark.thorough)
    assert core_of(cases, lambda number, _: number == 2) == [rest, (2, "x")]


def test_what_ci_runs_beside_the_core_may_be_named() -> None:
    named, rest = core_of("abc", ["a"], ["c"])[:0:-1]
    assert named == pytest.param("c", marks=pytest.mark.thorough(is_chosen=True))
    assert rest == pytest.param("b", marks=pytest.mark.exhaustive)
    with pytest.raises(AssertionError):
        core_of("abc", ["a"], ["a"])


@pytest.mark.parametrize("core", [["a", "d"], [], lambda _: False])
def test_a_core_that_is_not_there_is_an_error(core: object) -> None:
    with pytest.raises(AssertionError):
        core_of("abc", core)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """What ``covering`` looks at of a test."""

    nodeid: str
    arguments: tuple[Any, ...]
    core: bool
    exhaustive: bool = False
    is_chosen: bool = False

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(params=dict(zip("xyz", self.arguments, strict=False)))

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        """The function's marks, then the row's."""
        if not self.core and name == "thorough":
            yield pytest.mark.thorough.mark
            yield pytest.mark.thorough(is_chosen=self.is_chosen).mark
        if self.exhaustive and name == "exhaustive":
            yield pytest.mark.exhaustive.mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(self.iter_markers(name), None)


def chosen(
    *arguments: tuple[Any, ...], core: tuple[Any, ...] = (), **marks: bool
) -> list[tuple[Any, ...]]:
    cases = [Case(f"test.py::test[{one}]", one, one in core, **marks) for one in arguments]
    return [case.arguments for case in cast(list[Case], covering(cast(Any, cases)))]


def test_two_that_differ_in_all_are_kept_where_none_is_of_the_core() -> None:
    every = [*product(range(6), "abcde", [True, False])]
    first, second = kept = chosen(*every)
    assert kept == [one for one in every if one in kept], "in their order"
    assert all(one != other for one, other in zip(first, second, strict=True))
    assert len(chosen(*((one,) for one in range(9)))) == 2
    assert chosen(("alone",)) == [("alone",)]


def test_beside_the_core_none_is_kept() -> None:
    every = [*product(range(6), "abcde")]
    assert chosen(*every, core=tuple(every[:12])) == every[:12]


def test_what_is_named_for_ci_is_kept() -> None:
    every = [(one,) for one in range(9)]
    assert chosen(*every, is_chosen=True) == every


def test_what_is_marked_exhaustive_is_not_kept() -> None:
    assert chosen(("one",), ("another",), core=(("one",),), exhaustive=True) == []
