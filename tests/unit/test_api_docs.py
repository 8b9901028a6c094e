"""docs/api.md says what the docstrings say, of every public name, and its links lead somewhere."""

import importlib
import re
import sys
from pathlib import Path

import griffe
import pytest

import lockstep
from tools import api_reference
from tools.api_reference import PAGE, Reference, anchor, prose, signature

pytestmark = pytest.mark.thorough

TOOL = Path(api_reference.__file__)
TEXT = PAGE.read_text()


def headings() -> list[str]:
    return re.findall(r"^#+ (.*)$", TEXT, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def lockstep_sources() -> griffe.Module:
    """Parsed once: it takes seconds."""
    return api_reference.load_package()


def test_the_page_is_up_to_date(
    lockstep_sources: griffe.Module,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If not: ``make api-docs``. What griffe finds odd in docstrings is logged."""
    monkeypatch.setattr(api_reference, "load_package", lambda: lockstep_sources)
    monkeypatch.setattr(sys, "argv", ["api_reference.py", "--check"])
    assert (api_reference.main(), capsys.readouterr().out.strip()) == (0, "")
    assert [*caplog.get_records("setup"), *caplog.records] == []


@pytest.mark.exhaustive
def test_a_page_that_is_not_up_to_date_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "api.md"
    stale.write_text(TEXT.replace("Trains a PyTorch model", "Trains any model"))
    monkeypatch.setattr(api_reference, "PAGE", stale)
    monkeypatch.setattr(sys, "argv", ["api_reference.py", "--check"])
    assert api_reference.main() == 1
    assert "-Trains any model" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["api_reference.py"])
    assert api_reference.main() == 0
    assert stale.read_text() == TEXT


def test_every_public_name_is_there() -> None:
    names = [name for name in lockstep.__all__ if name not in api_reference.PACKAGES]
    wanted = {f"lockstep.{name}" for name in names}
    for package in api_reference.PACKAGES:
        if (TOOL.parent.parent / "lockstep" / package).exists():
            module = importlib.import_module(f"lockstep.{package}")
            wanted |= {f"lockstep.{package}.{name}" for name in module.__all__}
    assert wanted <= set(headings())
    assert {"Trainer.fit", "Trainer.plan", "Plan.num_ranks", "Strategy.scope"} <= set(headings())


def test_links_lead_to_headings_that_are_there_once() -> None:
    anchors = [anchor(heading) for heading in headings()]
    assert len(set(anchors)) == len(anchors)
    links = re.findall(r"\]\(#([^)]*)\)", TEXT)
    assert len(links) > 20
    assert set(links) <= set(anchors)


def test_every_argument_of_the_trainer_is_explained(lockstep_sources: griffe.Module) -> None:
    kind = lockstep_sources["train.trainer.Trainer"]
    for function in (kind, kind["fit"], kind["evaluate"], kind["predict"]):
        explained = {
            argument.name
            for section in function.docstring.parsed
            if section.kind.value == "parameters"
            for argument in section.value
        }
        assert explained == {one.name for one in function.parameters} - {"self"}, function.path


# --- on a package of its own --------------------------------------------------------------------

SOURCE = '''
"""A package."""
from dataclasses import dataclass
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DEFAULT = 7
_HOMES = {"Thing": ("lockstep", "Thing"), "scope": ("lockstep", "scope")}

class Base:
    """A base."""
    def given(self) -> int:
        """From the base."""

class Thing(Base):
    """What ``it`` is.

    Args:
        size: how
            large.
        kind: a "word".
    """
    def __init__(self, size: int = DEFAULT, /, *rest: int, kind: str = 'plain', **more: int):
        self.size = size
    def given(self) -> int:
        return 1
    def made(self, a: "Callable[[], int]") -> Iterator[int]:
        """Makes.

        Yields:
            Numbers.

        Raises:
            ValueError: never.
        """
    def _hidden(self):
        """Not shown."""

@contextmanager
def scope(name: str) -> Iterator[None]:
    """Within the block."""
'''


@pytest.fixture
def package(tmp_path: Path) -> griffe.Module:
    folder = tmp_path / "lockstep"
    folder.mkdir()
    (folder / "__init__.py").write_text(SOURCE)
    (folder / "errors.py").write_text('"""Errors.\n\n::\n\n    A\n    B\n\nAll."""\n')
    return api_reference.load_package(tmp_path)


def test_a_page_of_a_package(package: griffe.Module) -> None:
    page = Reference(package).page()
    assert 'lockstep.Thing(size: int = 7, *rest: int, kind: str = "plain", **more: int)\n' in page
    assert "What `it` is." in page
    assert "- `size`: how\n  large.\n" in page
    assert "thing.made(a: Callable[[], int]) -> Iterator[int]\n" in page
    assert "**Yields:** Numbers." in page
    assert "- `ValueError`: never." in page
    assert "with lockstep.scope(name: str): ...\n" in page
    assert "```text\nA\nB\n```\n\nAll." in page
    assert "hidden" not in page
    assert "thing.given() -> int\n```\n\nFrom the base." in page  # which has no place of its own


def test_a_long_signature_is_broken_into_lines(package: griffe.Module) -> None:
    parameters = package["Thing"].parameters
    broken = signature("a" * 60, parameters, "int", package).splitlines()
    assert broken[0] == f"{'a' * 60}("
    assert broken[-2:] == ["    **more: int,", ") -> int"]


def test_a_section_that_nobody_knows_is_an_error(package: griffe.Module) -> None:
    package["Thing"].docstring.value = "A thing.\n\nWarns:\n    UserWarning: always.\n"
    with pytest.raises(ValueError, match=r"lockstep.Thing: a section of kind 'warns'"):
        Reference(package).page()


def test_prose_keeps_code_over_the_end_of_a_line() -> None:
    assert prose("See ``a\nb`` and ``c``.") == "See `a\nb` and `c`."
