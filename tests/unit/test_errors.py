"""Errors: one tree, one shape, all problems at once."""

import builtins
import inspect
import re

import pytest

from lockstep import errors
from lockstep.errors import (
    LockstepError,
    OptionError,
    Problems,
    problem,
)

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, LockstepError)
}


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = re.findall(r"^( *│   )?.*[├└]── (\w+)(?:\s+\((\w+)\))?", errors.__doc__ or "", re.M)
    names = [name for _, name, _ in drawn]
    assert names == [name for name in CLASSES if name != "LockstepError"]
    parent = ""
    for is_below, name, base in drawn:
        if is_below:
            assert CLASSES[name].__bases__ == (CLASSES[parent],)
        else:
            parent = name
            assert CLASSES[name].__bases__ == (LockstepError, getattr(builtins, base))


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_says_when_it_is_raised(name: str) -> None:
    assert CLASSES[name].__doc__


def test_a_problem_says_what_is_wrong_what_was_received_and_how_to_fix_it() -> None:
    text = problem("`epochs` must be positive.", received="epochs=0", fix="Use epochs=1.")
    assert text == "`epochs` must be positive. Received: epochs=0. Use epochs=1."


def add(problems: Problems, *names: str) -> None:
    for name in names:
        problems.add(f"{name} is wrong.", received=name, fix="Mend it.")


def test_a_sentence_that_was_received_ends_once() -> None:
    text = errors.problem("It must run.", received="It has ended.", fix="Start it.")
    assert text == "It must run. Received: It has ended. Start it."
    text = errors.problem("It must be short.", received="a, b, ...", fix="Cut it.")
    assert text == "It must be short. Received: a, b, .... Cut it."


def test_no_problem_raises_nothing() -> None:
    Problems().raise_if_any(OptionError)


def test_one_problem_is_the_message() -> None:
    problems = Problems()
    add(problems, "a")
    with pytest.raises(OptionError, match=r"^a is wrong\. Received: a\. Mend it\.$"):
        problems.raise_if_any(OptionError)


def test_several_problems_are_numbered() -> None:
    problems = Problems()
    add(problems, "a", "b")
    with pytest.raises(OptionError) as caught:
        problems.raise_if_any(OptionError)
    first, second, third = str(caught.value).splitlines()
    assert first == "2 problems:"
    assert second == "  1. a is wrong. Received: a. Mend it."
    assert third.startswith("  2. b is wrong.")
