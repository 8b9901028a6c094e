"""``make test`` leaves out what is marked ``thorough`` and nothing else; CI leaves out nothing."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.thorough import core_of

ROOT = Path(__file__).parents[2]


def test_all_tests_are_all() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipes = dict(re.findall(r"^(test|test-all):.*\n\t(.*)", makefile, flags=re.MULTILINE))
    assert recipes["test-all"] == "$(BIN)/python -m pytest --numprocesses 2"
    assert recipes["test"] == f'{recipes["test-all"]} -m "not thorough"'
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["testpaths"] == ["tests"]
    assert set(options["addopts"].split()) == {"-q", "--strict-markers", "--strict-config"}


def test_ci_runs_them() -> None:
    assert (ROOT / ".ci" / "run").read_text().endswith("\nmake lint\nmake test-all\n")


def test_what_is_not_of_the_core_is_marked() -> None:
    assert core_of("abc", ["a", "c"]) == ["a", pytest.param("b", marks=pytest.mark.thorough), "c"]
    cases = [(1, "x"), (2, "x")]
    rest = pytest.param(1, "x", marks=pytest.mark.thorough)
    assert core_of(cases, lambda number, _: number == 2) == [rest, (2, "x")]


@pytest.mark.parametrize("core", [["a", "d"], [], lambda _: False])
def test_a_core_that_is_not_there_is_an_error(core: object) -> None:
    with pytest.raises(AssertionError):
        core_of("abc", core)  # type: ignore[arg-type]
