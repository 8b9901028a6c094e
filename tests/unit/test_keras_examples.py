"""Every program in ``examples/keras`` runs as it stands, on small real data.

Some are those of tf.distribute's guides: docs/migrating.md shows what differs, in blocks of
``diff``. With these blocks a program becomes its guide's, and the lines are counted.
"""

import difflib
import re
from pathlib import Path

import pytest

from tests.launchers import lines_of_all, on_loopback, run_script
from tests.pages import imports_lockstep_first, read_page, undefined_names
from tests.thorough import core_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "keras"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "digits.py")
# The tasks of each role, by their hosts' numbers.
ON_HOSTS: dict[str, dict[str, tuple[int, ...]]] = {
    "multi_worker.py": {"worker": (0, 1)},
    "own_loop.py": {"worker": (0, 0)},
    "parameter_servers.py": {"chief": (0,), "worker": (0,), "ps": (0,)},
}
ON_TPUS = "tpu.py"  # tests/tpu runs it
ALONE = [name for name in PROGRAMS if name not in (*ON_HOSTS, ON_TPUS)]
VARIABLES = {"KERAS_BACKEND": None, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}

PAGE = (ROOT / "docs" / "migrating.md").read_text()
GUIDES = {
    block.note.removeprefix("guide "): block.text
    for block in read_page(PAGE).blocks
    if block.kind == "diff"
}
MOST_LINES = 10
DATA = re.compile(r"\btf\.data\b|\bDataLoader\b")


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", core_of(ALONE, ["mirrored_mlp.py"], []))
def test_example(name: str, tmp_path: Path) -> None:
    text = (FOLDER / name).read_text()
    like = "keras" if "import keras" in text else "torch"
    run_script([FOLDER / name], tmp_path, VARIABLES, like=like)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", core_of(ON_HOSTS, ["parameter_servers.py"], []))
def test_example_on_hosts(name: str, tmp_path: Path) -> None:
    script, roles = [str(FOLDER / name)], ON_HOSTS[name]
    with on_loopback(
        script, roles=roles, variables=VARIABLES, like="keras", directory=tmp_path
    ) as processes:
        said = lines_of_all(processes, 200, read=lambda process, wait: [process.finish(wait)])
    assert [status for ((status, _, _),) in said] == [0] * len(said), said
    assert ["accuracy " in out for ((_, out, _),) in said] == [True] + [False] * (len(said) - 1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_lockstep_is_imported_before_keras(name: str) -> None:
    assert imports_lockstep_first((FOLDER / name).read_text())  # a warm interpreter has Keras


def guide_of(program: list[str], diff: str) -> list[str]:
    """The guide's program: of every hunk, the lines that go in place of those that come."""
    found, position = [], 0
    for hunk in diff.split("\n@@\n"):
        rows = hunk.split("\n")
        after = [row[1:] for row in rows if not row.startswith("-")]
        start = next(
            (
                index
                for index in range(position, len(program))
                if program[index : index + len(after)] == after
            ),
            None,
        )
        assert start is not None, f"the program has no such lines:\n{hunk}"
        found += program[position:start] + [row[1:] for row in rows if not row.startswith("+")]
        position = start + len(after)
    return found + program[position:]


def changes(guide: list[str], program: list[str]) -> tuple[int, int]:
    """The numbers of lines that go, and that come; an indentation alone is no change."""
    before, after = ([line.strip() for line in lines] for lines in (guide, program))
    rows = [row for row in difflib.ndiff(before, after) if not DATA.search(row)]
    return sum(row.startswith("- ") for row in rows), sum(row.startswith("+ ") for row in rows)


@pytest.mark.parametrize("name", GUIDES)
def test_an_example_is_a_few_lines_from_its_guide(name: str) -> None:
    program = (FOLDER / name).read_text()
    guide = guide_of(program.splitlines(), GUIDES[name])
    text = "\n".join(guide) + "\n"
    assert "import lockstep" not in text
    assert "lockstep." not in text
    assert "import tensorflow as tf" in text
    assert undefined_names(text) == [""]
    go, come = changes(guide, program.splitlines())
    assert max(go, come) <= MOST_LINES
    assert f"`{name}` | {go} | {come} |" in PAGE


def test_every_guide_has_its_program() -> None:
    assert list(GUIDES) == ["checkpoints.py", *ON_HOSTS, ON_TPUS]
    assert len(PROGRAMS) >= 10
