"""The help of every command fits a terminal."""

import argparse
from collections.abc import Iterator

import pytest

from lockstep.cli.main import COMMANDS, _make_parser


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers_of(command)


@pytest.mark.parametrize("width", [80, 100])
def test_help_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    texts = [
        parser.format_help()
        for command in COMMANDS
        for parser in parsers_of(_make_parser([command]))
    ]
    assert len(texts) > len(COMMANDS)
    assert [line for text in texts for line in text.splitlines() if len(line) > width] == []
