"""Every row of docs/prove-your-run.md: a script with a fault on two processes, against one."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import lockstep
from tests.launchers import ROOT
from tests.pages import read_page
from tests.parity.test_recorded_loops import start
from tests.thorough import core_of, wanted

PAGE = ROOT / "docs" / "prove-your-run.md"
TEXT = PAGE.read_text()
SCRIPTS = {name: text for name, text in read_page(TEXT).files.items() if name != "compare_two.py"}
DRIVER = ROOT / "tests" / "parity" / "recorded_page.py"
_ROW = re.compile(r"^\| `(\w+\.py)` \| `(.+?)` \| `(.+?)` \| (.+?) \| (.+?) \|$", re.MULTILINE)
ROWS = {f"{script}: {fault}": row for row in _ROW.findall(TEXT) for script, _, fault, *_ in [row]}
RIGHT = sorted(SCRIPTS)
DEAREST = ("hugging.py", "accelerated.py")  # to import


def variant(key: str) -> str:
    """The script that a test records: a right one, or with the fault of a row."""
    if key in SCRIPTS:
        return SCRIPTS[key]
    script, line, fault, *_ = ROWS[key]
    assert SCRIPTS[script].count(line) == 1, f"{line} is once in {script}"
    return SCRIPTS[script].replace(line, fault)


def name_of(key: str) -> str:
    return re.sub(r"\W+", "_", key)


@pytest.fixture(scope="module")
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    keys = wanted(request, "key")
    scripts = {
        2: {name_of(key): variant(key) for key in keys},
        1: {name_of(own): SCRIPTS[own] for own in {key.partition(":")[0] for key in keys}},
    }
    processes = []
    for size, texts in scripts.items():
        (folder / str(size)).mkdir()
        for name, text in texts.items():
            (folder / str(size) / f"{name}.py").write_text(text)
        processes += start(DRIVER, folder / str(size), size, [])
    try:
        for each in processes:
            status, out, err = each.finish(250)
            assert status == 0, out + err[-3000:]
    finally:
        for each in processes:
            each.close()
    return folder


def compare(key: str, records: Path) -> "lockstep.proof.records.outcome.RecordComparison":
    reference = name_of(key.partition(":")[0])
    return lockstep.compare(records / "2" / name_of(key), records / "1" / reference)


def cases(keys: Iterable[str]) -> list[Any]:
    """Those of DDP are of the core; those of transformers and Accelerate exhaustive."""
    dear = [key for key in keys if key.startswith(DEAREST)]
    others = [key for key in keys if key not in dear]
    marked = [pytest.param(key, marks=pytest.mark.exhaustive) for key in dear]
    return core_of(others, lambda key: key.startswith("ddp.py")) + marked


@pytest.mark.thorough
@pytest.mark.parametrize("key", cases(RIGHT))
def test_a_script_trains_as_one_process(key: str, records: Path) -> None:
    outcome = compare(key, records)
    assert outcome.passed, outcome


@pytest.mark.parametrize("key", cases(ROWS))
def test_a_fault_looks_as_the_page_says(key: str, records: Path) -> None:
    *_, first, cause = ROWS[key]
    outcome = compare(key, records)
    assert outcome.first is not None
    assert outcome.cause is not None
    found = f"{outcome.first.kind} {outcome.first.name}".strip()
    assert (f"{found}, step {outcome.first.step}", outcome.cause.kind) == (first, cause), outcome


def test_the_page_has_ten_faults_in_five_libraries() -> None:
    assert len(ROWS) == 10
    assert {script for script, *_ in ROWS.values()} == set(SCRIPTS)
    assert len(SCRIPTS) == 5
