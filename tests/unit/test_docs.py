"""Every example of every page runs, as a reader would run it; see ``tests/pages.py``."""

import importlib.util
import itertools
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.cli.main import _make_parser
from tests.launchers import run_script
from tests.launching import STRICT_BUT_KERAS
from tests.pages import Page, PageError, imports_lockstep_first, read_page, undefined_names
from tests.thorough import core_of
from tools.api_reference import anchor

ROOT = Path(__file__).parents[2]
PATHS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PACKAGE = ROOT / "lockstep"
CHINESE = ROOT / "README.zh.md"
PAGES = {str(path.relative_to(ROOT)): read_page(path.read_text()) for path in PATHS}
# Their blocks are programs of their own, which test_docs_migrating.py runs, and
# test_prove_your_run_page.py.
PROGRAMS = ("docs/migrating.md", "docs/own-loops.md", "docs/prove-your-run.md")
SCRIPTS = [
    name
    for name, page in PAGES.items()
    if name not in PROGRAMS and any(block.is_python for block in page.blocks)
]
CORE = ("README.md",)
# That they run takes long.
LONG = ("docs/batch-size.md", "docs/callbacks.md", "docs/hosts.md", "docs/training.md")
# The page's script is one for several hosts, and so it is run.
LOCAL_HOSTS = ["-m", "lockstep", "run", "--hosts", "2", "--local"]


CASES = core_of(
    [(name, need) for name in SCRIPTS for need in ("", *PAGES[name].needs)],
    lambda name, need: name in CORE and not need,
    lambda name, need: name not in LONG and not need,
)
COMMANDS = [
    (name, command)
    for name, page in PAGES.items()
    if name not in PROGRAMS
    for command in page.commands
]
TARGETS = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def run(arguments: list[str], folder: Path, *, like: str = "torch") -> str:
    """Run Python in a folder of its own, as a reader with one core would; returns what it says."""
    own = {"COLUMNS": "200", "XDG_CACHE_HOME": str(folder / "cache")}
    return run_script([*STRICT_BUT_KERAS, *arguments], folder, own, like=like)


def write_files(page: Page, folder: Path) -> None:
    for name, text in page.files.items():
        (folder / name).write_text(f"{text}\n")


def run_page(name: str, folder: Path, *, without: frozenset[str]) -> None:
    page = PAGES[name]
    write_files(page, folder)
    script = folder / f"{Path(name).stem.lower()}_page.py"
    text = page.script({need: need not in without for need in page.needs})
    script.write_text(text)
    on_hosts = LOCAL_HOSTS if name == "docs/hosts.md" else []
    like = "keras" if "import keras" in text else "torch"
    printed = run([*on_hosts, script.name], folder, like=like)
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


@pytest.mark.parametrize("name", [*SCRIPTS, *PROGRAMS])
def test_lockstep_is_imported_before_keras(name: str) -> None:
    """It chooses Keras's backend, which a fork of a warm interpreter has chosen already."""
    page = PAGES[name]
    programs = [text for name, text in page.files.items() if not name.startswith("before_")]
    whole = [] if name in PROGRAMS else [page.script(dict.fromkeys(page.needs, True))]
    for text in (*programs, *whole):
        assert imports_lockstep_first(text), text


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_needs_nothing_that_is_hidden(name: str) -> None:
    shown = replace(PAGES[name], blocks=PAGES[name].visible)
    assert undefined_names(shown.script(dict.fromkeys(shown.needs, True))) == [""]


@pytest.mark.parametrize("name", [*SCRIPTS, *PROGRAMS])
def test_a_block_can_be_pasted_or_the_page_says_what_it_continues(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    blocks = [block for block in PAGES[name].visible if block.is_python]
    undefined = undefined_names(*(f"{block.text}\n" for block in blocks))
    for block in itertools.compress(blocks, undefined):
        before = "\n".join(lines[: block.line]).lower()
        assert "continu" in before, f"{name}, line {block.line}"


def test_links_between_pages_lead_to_files_and_headings() -> None:
    for path in (*PATHS, CHINESE):
        for link, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", path.read_text()):
            target = path.parent / link if link else path
            assert target.exists(), (path, link)
            assert not heading or heading in anchors(target), (path, link, heading)


def anchors(path: Path) -> set[str]:
    return {anchor(line) for line in re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)}


def file_named(name: str) -> Path:
    """A file of the repository or of the package, by its path there."""
    return next((path for path in (ROOT / name, PACKAGE / name) if path.exists()), ROOT / name)


@pytest.mark.parametrize("name", PAGES)
def test_files_that_a_page_names_are_there(name: str) -> None:
    """And what they are said to hold: `plan/spec.py` (`Plan`)."""
    text = (ROOT / name).read_text()
    for file in re.findall(r"`((?:\w+/)+\w+\.py)\b", text):
        assert file_named(file).exists(), file
    for file, part in re.findall(r"`((?:\w+/)*\w+\.py)` \(`(\w+)`", text):
        assert re.search(rf"\b{part}\b", file_named(file).read_text()), (file, part)


# --- the README in Chinese ----------------------------------------------------------------------


def test_both_readmes_have_the_same_code_and_links() -> None:
    texts = [(ROOT / "README.md").read_text(), CHINESE.read_text()]
    one, other = ([(block.kind, block.text) for block in read_page(text).visible] for text in texts)
    assert one == other
    # Code in the text, such as the strategies' arguments, is the same, whatever its order.
    prose = [re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.M | re.S) for text in texts]
    for pattern in (r"`[^`]+`", r"\]\(([^)]+)\)"):
        one_set, other_set = (set(re.findall(pattern, text)) for text in prose)
        languages = {"README.md", "README.zh.md"}
        assert one_set - languages == other_set - languages


# --- how pages are read -------------------------------------------------------------------------

TEXT = """\
# A page

```python
# job.py
x = 1
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
    assert list(kept.values()) == ["# job.py", "x = 1", "y = x + 1", "print(y)"]
    assert "import nothing_like_it" in page.script({"nothing_like_it": True, "os": True})


def test_a_page_has_files_outputs_and_commands() -> None:
    page = read_page(TEXT)
    assert page.files == {"job.py": "# job.py\nx = 1\ny = x + 1"}
    assert len(page.visible) == len(page.blocks) - 1
    assert page.outputs == ("2",)
    assert page.commands == ("make test", "lockstep demo")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nx = 1\n", "line 1: no ``` ends"),
        ("\n<!-- check\nx = 1\n", "line 2: no --> ends"),
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
