"""Every example of every page runs, as a reader would run it; see ``tests/pages.py``."""

import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from lockstep.cli.main import _make_parser
from tests import warm
from tests.launching import STRICT
from tests.netns import HostProcess
from tests.pages import Page, PageError, read_page

ROOT = Path(__file__).parents[2]
PATHS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGES = {str(path.relative_to(ROOT)): read_page(path.read_text()) for path in PATHS}
SCRIPTS = [name for name, page in PAGES.items() if any(block.is_python for block in page.blocks)]
CASES = [(name, need) for name in SCRIPTS for need in ("", *PAGES[name].needs)]
COMMANDS = [(name, command) for name, page in PAGES.items() for command in page.commands]
TARGETS = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)

# Of its own variables, whenever one becomes an array.
KERAS_SAYS = "__array__ implementation doesn't accept a copy keyword"

# Longest time for one page.
TIMEOUT_SECONDS = 300


def run(arguments: list[str], folder: Path, *, like: str = "torch") -> str:
    """Run Python in a folder of its own, as a reader with one core would; returns what it says."""
    own = {"COLUMNS": "200", "XDG_CACHE_HOME": str(folder / "cache")}
    words = [sys.executable, *STRICT, "-W", f"ignore:{KERAS_SAYS}", *arguments]
    process = HostProcess(words, {**os.environ, **warm.VARIABLES, **own}, folder, like=like)
    try:
        status, out, err = process.finish(TIMEOUT_SECONDS)
    finally:
        process.close()
    assert status == 0, out + err
    return out


def write_files(page: Page, folder: Path) -> None:
    for name, text in page.files.items():
        (folder / name).write_text(f"{text}\n")


def run_page(name: str, folder: Path, *, without: frozenset[str]) -> None:
    page = PAGES[name]
    write_files(page, folder)
    script = folder / f"{Path(name).stem.lower()}_page.py"
    text = page.script({need: need not in without for need in page.needs})
    script.write_text(text)
    printed = run([script.name], folder, like="keras" if "import keras" in text else "torch")
    for output in page.outputs:
        assert output in printed, printed


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@pytest.mark.parametrize(("name", "need"), CASES)
def test_a_page_runs(name: str, need: str, tmp_path: Path) -> None:
    """Without what it needs beside Lockstep's own dependencies, and with each such module."""
    if need and not is_installed(need):
        pytest.skip(f"{need} is not installed")
    without = {each for each in PAGES[name].needs if not (need and is_installed(each))}
    run_page(name, tmp_path, without=frozenset(without))


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_a_command_is_there(name: str, command: str, tmp_path: Path) -> None:
    """``lockstep`` takes these arguments; with a target that the page has, it also runs."""
    words = shlex.split(command)
    if words[0] == "make":
        assert words[1] in TARGETS
    elif words[0] == "lockstep":
        options = _make_parser(words[1:]).parse_args(words[1:])
        files = PAGES[name].files
        if getattr(options, "target", "").partition(":")[0] in files:
            write_files(PAGES[name], tmp_path)
            run(["-m", "lockstep.cli.main", *words[1:]], tmp_path)
    else:
        assert words[0] in ("pip", "python"), command


def test_links_between_pages_lead_to_files() -> None:
    for path in PATHS:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / link).exists(), (path, link)


# --- how pages are read -------------------------------------------------------------------------

TEXT = """\
# A page

<!-- setup
x = 1
-->

```python
# job.py
y = x + 1
```

<!-- needs nothing_like_it, os -->

```python
import nothing_like_it
```

Then

<!-- output -->
```
2
```

<!-- check
print(y)
-->

```console
$ make test     # runs the tests
$ lockstep demo
```
"""


def test_a_page_is_a_script_at_the_lines_of_the_page() -> None:
    page = read_page(TEXT)
    assert page.needs == ("nothing_like_it", "os")
    script = page.script({"nothing_like_it": False, "os": True})
    lines = TEXT.splitlines()
    kept = {number: line for number, line in enumerate(script.splitlines()) if line}
    assert kept == {number: lines[number] for number in kept}
    assert list(kept.values()) == ["x = 1", "# job.py", "y = x + 1", "print(y)"]
    assert "import nothing_like_it" in page.script({"nothing_like_it": True, "os": True})


def test_a_page_has_files_outputs_and_commands() -> None:
    page = read_page(TEXT)
    assert page.files == {"job.py": "# job.py\ny = x + 1"}
    assert page.outputs == ("2",)
    assert page.commands == ("make test", "lockstep demo")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nx = 1\n", "line 1: no ``` ends"),
        ("\n<!-- setup\nx = 1\n", "line 2: no --> ends"),
        ("<!-- nedes os -->\n```python\nx = 1\n```\n", "nedes os --> means nothing"),
    ],
)
def test_a_page_with_a_mistake_is_told(text: str, message: str) -> None:
    with pytest.raises(PageError, match=message):
        read_page(text)


def test_a_failing_example_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, told in [
        ("\n```python\nraise KeyError('here')\n```\n", 'page_page.py", line 3'),
        ("```python\nimport warnings\nwarnings.warn('oh')\n```\n", "UserWarning: oh"),
        ("```python\nprint(1)\n```\n<!-- output -->\n```\n2\n```\n", "1"),
    ]:
        monkeypatch.setitem(PAGES, "page.md", read_page(text))
        with pytest.raises(AssertionError, match=re.escape(told)):
            run_page("page.md", tmp_path, without=frozenset())
