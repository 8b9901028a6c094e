"""Errors: one tree, one shape, all problems at once."""

import builtins
import inspect
import re
import sys
import traceback
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep import errors
from lockstep.errors import (
    LockstepError,
    OptionError,
    Problems,
    problem,
    short_traceback,
    shorten_in_notebook,
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


# --- in notebooks --------------------------------------------------------------------------------


class Refusing(nn.Module):
    """A model that fails, on rank 0 or on the others."""

    def __init__(self, *, on_helpers: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.on_helpers, self.is_sent = on_helpers, False

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "is_sent": True}

    def forward(self, x: Tensor) -> Tensor:
        if self.is_sent == self.on_helpers:
            raise ValueError("the user's own error")
        result: Tensor = self.linear(x)
        return result


def fail(model: nn.Module, devices: int = 1, *, epochs: int = 1) -> BaseException:
    trainer = lockstep.Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        strategy=lockstep.MirroredStrategy(devices),
    )
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the tests look at what it is
        trainer.fit((torch.ones(4, 3), torch.ones(4, 1)), epochs=epochs, verbose=0)
    return caught.value


def in_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("IPython")
    module.get_ipython = lambda: object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", module)


def own_frames(lines: list[str]) -> list[str]:
    return [line for line in lines if "/lockstep/train/" in line or "/lockstep/parallel/" in line]


def test_a_notebook_shows_the_users_line_and_the_message() -> None:
    error = fail(nn.Linear(3, 1), epochs=0)
    lines = error._render_traceback_()  # type: ignore[attr-defined]  # IPython's name
    assert len(lines) < 10
    assert not own_frames(lines)
    assert "    trainer.fit(" in "\n".join(lines)
    assert "frames of Lockstep]" in lines[-3]
    assert lines[-2] == (
        "lockstep.errors.OptionError: `epochs` must be an integer of at least 1. "
        "Received: epochs=0. Pass a positive integer."
    )
    assert "traceback.print_last()" in lines[-1]


def test_a_notebook_shows_the_users_own_error_with_the_users_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_notebook(monkeypatch)
    error = fail(Refusing())
    lines = error._render_traceback_()  # type: ignore[attr-defined]
    assert not own_frames(lines)
    assert any("in forward" in line for line in lines)
    assert "ValueError: the user's own error" in lines
    assert own_frames(traceback_of(error))  # what a debugger sees is all there


def test_a_notebook_shows_what_a_helper_tells_without_its_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_notebook(monkeypatch)
    error = fail(Refusing(on_helpers=True), devices=2)
    assert isinstance(error, ValueError)
    assert own_frames(traceback_of(error))
    lines = error._render_traceback_()  # type: ignore[attr-defined]
    assert not own_frames(lines)
    assert "--- traceback of rank 1 ---" in lines
    assert sum("in forward" in line for line in lines) == 1
    assert lines.count("ValueError: the user's own error") == 2  # and as the cause


def test_what_lockstep_itself_does_wrong_is_shown_in_full() -> None:
    problems = Problems()
    add(problems, "a")
    with pytest.raises(TypeError) as caught:
        problems.raise_if_any(None)  # type: ignore[arg-type]
    lines = short_traceback(caught.value)
    assert any("in raise_if_any" in line for line in lines)
    assert not any("frames of Lockstep]" in line for line in lines)


def test_only_ipython_changes_how_errors_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    error = ValueError()
    shorten_in_notebook(error)
    assert not hasattr(error, "_render_traceback_")
    in_notebook(monkeypatch)
    shorten_in_notebook(error)
    assert error._render_traceback_() == ["ValueError"]  # type: ignore[attr-defined]


def traceback_of(error: BaseException) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()
