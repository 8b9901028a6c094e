"""Runs random trainings: ``python -m tests.fuzz --minutes 30``, or one: ``--family fit --seed 17``.

What is not the same as on one device is printed with the command that runs it again, made as small
as it can be (``--shrink``). The trainings run one after the other in a process of their own, so
that one that hangs, or dies, is told, too. Exit status 1: something was wrong, crashed or hung, or
was refused for a reason that is not in ``refusals.py``.
"""

import argparse
import json
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import torch

from tests.fuzz.families import NAMES, family
from tests.fuzz.refusals import reason_of
from tests.fuzz.running import Outcome
from tests.fuzz.shrinking import shrunk
from tests.kept_teams import keep_teams

SECONDS = 400.0  # that a case may take


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    if options.worker:
        return _work(options.family, options.seed)
    if options.seed is not None:
        return _run_one(options)
    return _run_many(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--family", choices=NAMES, default=None, help="the kind of cases")
    parser.add_argument("--seed", type=int, default=None, help="run this one")
    parser.add_argument("--shrink", action="store_true", help="and find what is left to blame")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _say(text: str = "") -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _is_fault(kind: str, text: str) -> bool:
    return kind in ("wrong", "crashed", "hung", "void") or (
        kind == "refused" and reason_of(text) is None
    )


def _show(outcome: Outcome) -> None:
    _say(f"{outcome.kind}: {outcome.text.strip()}")
    _say(repr(outcome.case))


def _run_one(options: argparse.Namespace) -> int:
    own = family(options.family or "fit")
    with keep_teams():
        outcome = own.run(own.draw(options.seed))
        _show(outcome)
        if options.shrink and outcome.kind != "same":
            _say("smaller:")
            _show(shrunk(outcome, own.run))
    return int(_is_fault(outcome.kind, outcome.text))


# --- many ----------------------------------------------------------------------------------------


def _run_many(options: argparse.Namespace) -> int:
    end = time.monotonic() + 60 * options.minutes
    names = [options.family] if options.family else NAMES
    counts = {name: Counter[str]() for name in names}
    faults = 0
    share = 60 * options.minutes / len(names)
    for number, name in enumerate(names):
        until = end - share * (len(names) - number - 1)
        for seed, kind, text in _outcomes(name, options.first, until):
            reason = reason_of(text) if kind == "refused" else None
            counts[name][f"refused: {reason}" if reason else kind] += 1
            if _is_fault(kind, text):
                faults += 1
                _say(f"{kind}: python -m tests.fuzz --family {name} --seed {seed} --shrink")
                _say("    " + "\n    ".join(text.strip().splitlines()[-6:]))
    for name, found in counts.items():
        _say(f"{name}: {sum(found.values())} cases")
        for kind, count in sorted(found.items(), key=lambda one: -one[1]):
            _say(f"    {count:6,}  {kind}")
    return int(faults > 0)


def _outcomes(name: str, seed: int, until: float) -> Iterator[tuple[int, str, str]]:
    """Seed, kind and text of one case after the other."""
    while time.monotonic() < until:
        worker = _Worker(name, seed)
        try:
            while time.monotonic() < until:
                told = worker.next()
                kind, text = told or ("hung", worker.last_words())
                yield seed, kind, text
                seed += 1
                if told is None:
                    break
        finally:
            worker.end()


class _Worker:
    """The process that runs cases."""

    def __init__(self, name: str, seed: int) -> None:
        words = ["-X", "faulthandler", "-m", "tests.fuzz", "--worker"]
        self._process = subprocess.Popen(
            [sys.executable, *words, "--family", name, "--seed", str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def next(self) -> tuple[str, str] | None:
        """Kind and text of the next case; None where it does not come."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline() if self._selector.select(SECONDS) else ""
        return tuple(json.loads(line)) if line else None

    def last_words(self) -> str:
        """What it has to say, where it is or was."""
        with suppress(ProcessLookupError):
            self._process.send_signal(6)  # faulthandler shows the stack
        try:
            return self._process.communicate(timeout=10)[1]
        except subprocess.TimeoutExpired:
            return "no stack: it does not end"

    def end(self) -> None:
        self._selector.close()
        self._process.kill()
        self._process.wait()


def _work(name: str, seed: int) -> int:
    """Run a case for each line that comes."""
    own = family(name)
    out, sys.stdout = sys.stdout, sys.stderr
    with keep_teams():
        for _ in sys.stdin:
            outcome = own.run(own.draw(seed))
            out.write(json.dumps((outcome.kind, f"{outcome.text}\n{outcome.case!r}")) + "\n")
            out.flush()
            seed += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
