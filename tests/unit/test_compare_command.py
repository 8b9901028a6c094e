"""``lockstep compare`` as typed: exit status, table, JSON and page."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.cli.main import main


def train(path: Path, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(30, 4).to(dtype), torch.arange(30) % 3
    with lockstep.record(model, optimizer, path, steps=3) as recorder:
        for index in range(3):
            part = torch.arange(10) + 10 * index
            loss = F.cross_entropy(model(x[part]), y[part])
            recorder.batch(part)
            recorder.loss(loss, weight=10)
            optimizer.zero_grad()
            (loss * factor).backward()
            optimizer.step()


@pytest.fixture
def records(tmp_path: Path) -> Path:
    train(tmp_path / "one")
    train(tmp_path / "again")
    train(tmp_path / "doubled", factor=2)
    return tmp_path


def test_two_equal_runs(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(records / "again"), str(records / "one")]) == 0
    shown = capsys.readouterr().out
    assert "(Sequential, 1 rank), against" in shown.replace("\n", " ")
    assert "Passed: not a bit differs." in shown
    assert [line.split()[:2] for line in shown.splitlines() if line.startswith("parameter")] == [
        ["parameter", "16"]
    ]
    assert max(map(len, shown.splitlines())) <= 100


def test_a_difference(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = records / "page.html"
    words = ["compare", str(records / "doubled"), str(records / "one"), "--html", str(page)]
    assert main(words) == 1
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "First difference: gradient 0.weight, step 0: relative" in shown
    assert "units of rounding. Likely cause: constant factor." in shown
    assert "4 gradients" not in shown
    assert "all gradients are 2 times the reference's" in shown
    check_page(page.read_text())


class _Tags(HTMLParser):
    """Checks that tags are closed in order, and collects what is of interest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.first = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.first += ("id", "first") in attrs
        if tag not in ("meta", "line", "circle", "rect", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


def check_page(text: str) -> None:
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.first == 1
    assert tags.seen.count("svg") == 1
    assert tags.seen.count("polyline") >= 3
    assert "http" not in text  # nothing is loaded
    assert "constant factor" in text


def test_a_tolerance_of_the_users_own(records: Path) -> None:
    words = ["compare", str(records / "doubled"), str(records / "one"), "--tolerance"]
    assert main([*words, "10"]) == 0
    assert main([*words, "1e-3"]) == 1


def test_as_json(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(records / "doubled"), str(records / "one"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["passed"], told["num_steps"]) == (False, 3)
    first = told["first_difference"]
    assert (first["kind"], first["name"], first["step"]) == ("gradient", "0.weight", 0)
    assert told["cause"]["kind"] == "constant factor"
    assert {each["kind"] for each in told["kinds"]} >= {"samples", "gradient"}


def test_a_record_alone(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(records / "one")]) == 0
    assert "its ranks with each other" in capsys.readouterr().out.replace("\n", " ")


def test_mistakes(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(records / "nothing"), str(records / "one")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("lockstep compare: There must be a record to compare")


def test_other_precisions_are_compared_in_the_shorter(records: Path) -> None:
    train(records / "exact", dtype=torch.float64)
    outcome = lockstep.compare(records / "one", records / "exact")
    kinds = {worst.kind: worst for _, worst, _ in outcome.kinds}
    assert kinds["gradient"].units < 2**10, outcome
