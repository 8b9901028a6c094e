"""Keras's own tests, those that make or train models, as they are: plain, and under strategies.

They come with Keras's package, so they are those of the version that is installed. Each is run
without a strategy, on two replicas, and in two stages (``keras_scope_plugin``): what passes plain
is to pass under both, and to come to the same. A test that hangs or kills its process has failed,
and another process goes on behind it. What is found is kept at once, so a run that was interrupted
goes on where it was. Run: ``python bench/keras_tests.py --results DIR --report PAGE``.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution, version
from itertools import chain
from pathlib import Path
from typing import Any

# Variables of the environment: how tests are run, and the file that results are added to.
WAY, RESULTS = "KERAS_TESTS_WAY", "KERAS_TESTS_RESULTS"

_NAMES = {"mirrored": "`MirroredStrategy(devices=2)`", "pipeline": "`PipelineStrategy(2)`"}

_SOURCE = Path(str(distribution("keras").locate_file("keras/src")))
_TIMEOUT_SECONDS = 120

# Folders whose tests are run: of all files, or of those that call one of the methods.
_ALL_OF = ("callbacks", "distillation", "models", "optimizers", "trainers")
_SOME_OF = (
    "backend/common",
    "layers",
    "legacy",
    "losses",
    "metrics",
    "saving",
    "utils",
    "wrappers",
)
_METHODS = (".fit(", ".evaluate(", ".predict(", "train_on_batch(", "run_layer_test(")

# What tests come to is alike if it differs by less, relatively: they compute in float32.
_TOLERANCE = 1e-3

# Of what a failure says, the part by which it is known, and why that is so.
_REASONS = {
    "calls change": "A call writes to trained weights, which each share of a batch would do.",
    "has its own parameters only": "The loss holds outputs of the model, and so all its layers, of "
    "which the last stage has some.",
    "has only its own weights": "`compute_loss` calls layers, of which the last stage has some.",
    "each stage steps its own": "Each stage would need all that this optimizer looks at.",
    "needs a gradient": "Layers in float8 keep the largest number of a batch, and round by it: "
    "parts of a batch have others.",
    "loss_scale_optimizer": "Mixed precision is bfloat16 here, which needs no scaled losses.",
    "must train by Keras's own steps": "A `train_step` or `test_step` of the model's own calls "
    "all of it, and a stage has a part.",
    "code makes by sizes": "Each batch has images of another size, and a layer decides by that.",
    "6 != 1": "It counts warnings of a call: to be cut, a model is called a few times more.",
    "same number of samples": "It has 80 targets for 16,000 samples.",
}

Line = dict[str, Any]
Found = dict[str, Line]

# Of a test that no process has come to.
_LOST: Line = {"outcome": "began"}


def lines_of(path: Path) -> list[Line]:
    """What was written down."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- running them ---------------------------------------------------------------------------------


def test_files() -> list[str]:
    """Of Keras's package."""
    every = [one for folder in _ALL_OF for one in (_SOURCE / folder).rglob("*_test.py")]
    some = [one for folder in _SOME_OF for one in (_SOURCE / folder).rglob("*_test.py")]
    every += [one for one in some if any(map(one.read_text().__contains__, _METHODS))]
    return sorted(map(str, every))


def run_tests(way: str, results: Path) -> None:
    """Run what is not in the results yet, in as many processes as it takes."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "keras_scope_plugin", "--tb=no"]
    command += ["-p", "no:cacheprovider", "-W", "ignore", "-c", os.devnull]
    command += ["--rootdir", str(_SOURCE), "--continue-on-collection-errors"]
    command += ["--timeout", str(_TIMEOUT_SECONDS), "--timeout-method", "thread", *test_files()]
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    given = {WAY: way, RESULTS: str(results), "PYTHONPATH": path}
    given |= {"KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    before = -1
    while before < len(lines_of(results)):  # a process that has found nothing new was the last
        before = len(lines_of(results))
        subprocess.run(command, env={**os.environ, **given}, check=False)


# --- the page -------------------------------------------------------------------------------------


def has_passed(line: Line) -> bool:
    return bool(line["outcome"] == "passed")


def is_alike(one: Line, other: Line) -> bool:
    """Whether all calls of a test have come to the same."""
    some, others = ([call["values"] for call in line["calls"]] for line in (one, other))
    return list(map(len, some)) == list(map(len, others)) and all(
        map(are_close, chain.from_iterable(some), chain.from_iterable(others))
    )


def are_close(one: float, other: float) -> bool:
    are_none = math.isnan(one) and math.isnan(other)
    return are_none or math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def is_divided(line: Line) -> bool:
    """Whether calls of a test ran on several devices."""
    return any(call["ranks"] > 1 for call in line["calls"])


def reason_of(line: Line) -> str:
    """Why a test has failed."""
    if line["outcome"] == "began":
        return "It did not end."
    if line["outcome"] == "skipped":
        return "It was skipped."
    text: str = line["failure"]
    known = (reason for part, reason in _REASONS.items() if part in text)
    return next(known, f"`{' '.join(text.split())[:200]}`".replace("|", "/"))


def folder_of(test: str) -> str:
    return test.partition("/")[0]


def page(directory: Path) -> str:
    """What came of all tests that pass plain and call models."""
    ended = {one["test"]: one for one in lines_of(directory / "plain.jsonl")}
    plain = {test: one for test, one in ended.items() if has_passed(one)}
    found = {way: dict.fromkeys(plain, _LOST) for way in _NAMES}
    for way, lines in found.items():
        lines |= {one["test"]: one for one in lines_of(directory / f"{way}.jsonl")}
    tests = [test for test, one in plain.items() if one["calls"]]
    return _PAGE.format(
        keras=version("keras"),
        num_plain=len(plain),
        num_tests=len(tests),
        summary="\n".join(summary(tests, plain, way, lines) for way, lines in found.items()),
        table="\n".join(rows(tests, found)),
        failures="\n\n".join(failures(tests, way, lines) for way, lines in found.items()),
    )


def summary(tests: Sequence[str], plain: Found, way: str, lines: Found) -> str:
    """How many tests pass in a way, and how."""
    passed = [test for test in tests if has_passed(lines[test])]
    others = [test for test in plain if test not in set(tests)]
    num_others = sum(has_passed(lines[test]) for test in others)
    divided = [test for test in passed if is_divided(lines[test])]
    alike = sum(is_alike(plain[test], lines[test]) for test in passed)
    return (
        f"- {_NAMES[way]}: **{len(passed)}** of {len(tests)} pass "
        f"({100 * len(passed) / len(tests):.1f} %), {len(divided)} of them on both devices; "
        f"{alike} come to the numbers that they come to plain. Of the others, which call no "
        f"method of a model, {num_others} of {len(others)}."
    )


def rows(tests: Sequence[str], found: dict[str, Found]) -> Iterator[str]:
    """The table: by folder, how many pass."""
    counts = Counter(map(folder_of, tests))
    for folder, count in sorted(counts.items()):
        own = [test for test in tests if folder_of(test) == folder]
        cells = (sum(has_passed(lines[test]) for test in own) for lines in found.values())
        yield f"| `{folder}` | {count} | {' | '.join(map(str, cells))} |"


def failures(tests: Sequence[str], way: str, lines: Found) -> str:
    """Tests that fail in a way, by reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        if not has_passed(lines[test]):
            by_reason[reason_of(lines[test])].append(test.rpartition("::")[2])
    listed = sorted(by_reason.items(), key=lambda one: -len(one[1]))
    items = (f"- {reason} {', '.join(f'`{name}`' for name in names)}" for reason, names in listed)
    return f"### {_NAMES[way]}\n\n" + "\n".join(items)


_PAGE = """# Keras's own tests

The tests of Keras {keras} on its PyTorch backend, as they come with its package: those of models,
training, callbacks and optimizers, and all others that train or ask models. Each is run plain, and
once more within the scope of a strategy, so that every model it makes belongs to that. {num_plain}
of them pass plain; {num_tests} of these call `fit` or another method that Lockstep distributes.

{summary}

Those that come to other numbers draw random ones, of which each part of a batch has its own.

| folder | pass plain | two replicas | two stages |
|---|---|---|---|
{table}

## What fails, and why

{failures}

Regenerate with `make bench-keras-tests`.
"""


def main() -> None:
    """Run the tests, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="a directory for what is found")
    parser.add_argument("--report", type=Path, help="the page to write")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    for way in ("plain", *_NAMES):
        run_tests(way, options.results / f"{way}.jsonl")
    if options.report:
        options.report.write_text(page(options.results))


if __name__ == "__main__":
    main()
