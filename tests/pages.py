"""Pages of documentation as scripts: what the reader sees is what is run.

A page's ``python`` blocks are one script, in their order, at the lines that they have in the page:
so a traceback names the line of the page. Comments of HTML, which no reader sees, add to it:

``<!-- check``, Python code, ``-->``
    is run with the blocks: whether they did what the text says. They must not need it.
``<!-- output -->`` before a block
    the block is part of what the script prints.
``<!-- needs tensorflow, wandb -->`` before a ``python`` block
    it is run only where these modules are installed.

A ``python`` block whose first line is a comment such as ``# job.py`` is also written to a file of
that name, before the script runs. Lines ``$ command`` of other blocks are what the reader is told
to type.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Of ruff: nothing but names that are not defined, a line for each.
OPTIONS = (
    *("--isolated", "--no-cache", "--quiet", "--output-format", "concise"),
    *("--select", "F821"),
)

_FENCE = re.compile(r"^```(\w*)$")
_HIDDEN = re.compile(r"^<!-- check$")
_NOTE = re.compile(r"^<!-- (.*) -->$")
_CHOICE = r"^\s*(import|from) lockstep\b|KERAS_BACKEND"
_KERAS = r"^\s*(import|from) keras\b"
_FILE = re.compile(r"^# (\w+\.py)$")


class PageError(Exception):
    """A page that is not written as this module reads it."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Lines of a page.

    Attributes:
        kind: the word behind the fence, empty where there is none; or ``"hidden"``.
        line: number of its first line, from 1.
        lines: without fence or comment signs.
        note: the comment right before it, if there is one.
    """

    kind: str
    line: int
    lines: tuple[str, ...]
    note: str

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines)

    @property
    def is_python(self) -> bool:
        """Whether it is run."""
        return self.kind in ("python", "hidden")

    @property
    def file(self) -> str:
        """Name of the Python file that it is to be saved as; empty where there is none."""
        match = _FILE.match(self.lines[0]) if self.is_python and self.lines else None
        return match[1] if match else ""

    @property
    def needs(self) -> tuple[str, ...]:
        """Modules without which it cannot be run."""
        words = self.note.removeprefix("needs ") if self.note.startswith("needs ") else ""
        return tuple(word.strip() for word in words.split(",") if word.strip())


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a page asks its reader to run."""

    blocks: tuple[Block, ...]

    def script(self, installed: Mapping[str, bool]) -> str:
        """The Python of the page, for those modules that are installed."""
        lines: list[str] = []
        for block in self.blocks:
            if block.is_python and all(installed[name] for name in block.needs):
                lines += [""] * (block.line - 1 - len(lines))
                lines += block.lines
        return "\n".join(lines) + "\n"

    @property
    def visible(self) -> tuple[Block, ...]:
        """What the reader sees."""
        return tuple(block for block in self.blocks if block.kind != "hidden")

    @property
    def needs(self) -> tuple[str, ...]:
        """All modules that some block needs."""
        return tuple(sorted({name for block in self.blocks for name in block.needs}))

    @property
    def files(self) -> dict[str, str]:
        """Text of the files that blocks are to be saved as, by name."""
        return {block.file: block.text for block in self.blocks if block.file}

    @property
    def outputs(self) -> tuple[str, ...]:
        """Texts that the script prints."""
        return tuple(block.text for block in self.blocks if block.note == "output")

    @property
    def commands(self) -> tuple[str, ...]:
        """What the reader is told to type, without remarks."""
        lines = (line for block in self.blocks if not block.is_python for line in block.lines)
        return tuple(
            line.removeprefix("$ ").partition("  #")[0].strip()
            for line in lines
            if line.startswith("$ ")
        )


def imports_lockstep_first(script: str) -> bool:
    """Whether Keras finds its backend chosen: by ``lockstep``, or in the environment."""
    found = [re.search(pattern, script, re.MULTILINE) for pattern in (_CHOICE, _KERAS)]
    choice, keras = found
    return keras is None or (choice is not None and choice.start() < keras.start())


def undefined_names(*scripts: str) -> list[str]:
    """What each script uses and does not define or import; empty where nothing."""
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{number}.py" for number in range(len(scripts))]
        for name, script in zip(names, scripts, strict=True):
            Path(folder, name).write_text(script)
        done = subprocess.run(
            [sys.executable, "-m", "ruff", "check", *OPTIONS, *names],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.stderr == "", done.stderr
    found = done.stdout.splitlines()
    return ["\n".join(line for line in found if line.startswith(f"{name}:")) for name in names]


def read_page(text: str) -> Page:
    """Read a page.

    Raises:
        PageError: a block or comment without end, or a ``python`` block with a note that has no
            meaning.
    """
    blocks = tuple(_blocks(text.splitlines()))
    for block in blocks:
        known = not block.note or block.note == "output" or bool(block.needs)
        if block.kind == "python" and not known:
            raise PageError(f"line {block.line}: <!-- {block.note} --> means nothing")
    return Page(blocks=blocks)


def _blocks(lines: list[str]) -> Iterator[Block]:
    index, note = 0, ""
    while index < len(lines):
        line = lines[index]
        fence, hidden = _FENCE.match(line), _HIDDEN.match(line)
        if fence or hidden:
            stop = _end_of(lines, index, "```" if fence else "-->")
            yield Block(
                kind=fence[1] if fence else "hidden",
                line=index + 2,
                lines=tuple(lines[index + 1 : stop]),
                note=note,
            )
            index, note = stop, ""
        elif line.strip():
            comment = _NOTE.match(line)
            note = comment[1] if comment else ""
        index += 1


def _end_of(lines: list[str], start: int, sign: str) -> int:
    for index in range(start + 1, len(lines)):
        if lines[index] == sign:
            return index
    raise PageError(f"line {start + 1}: no {sign} ends what begins here")
