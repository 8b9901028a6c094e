"""`lockstep report`: predicted and measured costs of a run, as text and as a page."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep.cli.main import main
from lockstep.report.html_page import html_of
from lockstep.report.run_report import report_of, text_of

pytestmark = pytest.mark.thorough

# Elements without an end.
VOID = {"meta", "rect", "polyline"}


class Page(HTMLParser):
    """Checks that elements end in the order in which they began, and notes their names."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def train(folder: Path, strategy: lockstep.Strategy) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    inputs = torch.randn(32, 8)
    trainer = lockstep.Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=strategy,
    )
    data = (inputs, inputs.sin())
    trainer.fit(data, batch_size=8, epochs=3, validation_data=data, record=folder, verbose=0)


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chosen")
    train(folder, lockstep.AutoStrategy("memory", devices=2))
    return folder


def assert_is_whole(page: str) -> Page:
    """Well formed, and needs nothing from elsewhere."""
    parser = Page()
    parser.feed(page)
    assert not parser.open
    assert not parser.names & {"script", "link", "img", "iframe"}
    assert "http" not in page
    return parser


def test_what_was_predicted_and_measured(chosen: Path) -> None:
    report = report_of(chosen)
    assert report.predicted is not None
    assert report.step_seconds > 0
    assert report.peak_bytes > 50 << 20
    assert report.step_error == report.predicted["seconds"] / report.step_seconds - 1
    assert sum(report.predicted["step"].values()) == pytest.approx(report.predicted["seconds"])
    assert [*map(len, report.history.values())] == [3, 3]
    assert [one["reason"] == "" for one in report.ranking] == [True] + [False] * (
        len(report.ranking) - 1
    )
    text = text_of(report)
    for words in ("Step: ", "predicted", "Plans, by predicted step:", "val_loss", "Plan: "):
        assert words in text


def test_the_page(chosen: Path) -> None:
    page = html_of(report_of(chosen))
    names = assert_is_whole(page).names
    assert {"table", "polyline", "svg"} <= names
    for one in report_of(chosen).ranking:
        assert one["name"] in page


def test_times_of_trials(chosen: Path) -> None:
    report = report_of(chosen)
    first, *others = report.ranking
    tried = replace(report, ranking=[{**first, "tried": 0.25}, *others])
    text = text_of(tried)
    assert "Plans, those that were tried first, the others by predicted step:" in text
    assert "the best; a step of its trial took 250 ms" in text
    assert "the best; a step of its trial took 250 ms" in html_of(tried)
    del first["tried"]  # as in records of before
    assert "the best" in text_of(replace(report, ranking=[first, *others]))


def test_the_stages_of_a_pipeline_and_their_passes(tmp_path: Path) -> None:
    train(tmp_path, lockstep.PipelineStrategy(2, microbatches=4))
    report = report_of(tmp_path)
    assert report.predicted is None
    page = html_of(report)
    assert assert_is_whole(page)
    assert page.count("<rect") == 2 * 2 * 4
    assert "Nothing was predicted" in page
    assert "Nothing was predicted" in text_of(report)


def test_names_in_a_page_are_text(chosen: Path) -> None:
    page = html_of(replace(report_of(chosen), title="<script>alert(1)</script>"))
    assert "<script>" not in page


def test_the_command(chosen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.html"
    assert main(["report", str(chosen), "--output", str(output)]) == 0
    assert "Peak memory of all processes" in capsys.readouterr().out
    assert output.read_text() == html_of(report_of(chosen))


def test_without_a_run_there_is_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "RUN must be a folder" in capsys.readouterr().err
    (tmp_path / "record.jsonl").write_text('{"what": "begin", "time": 1}\n')
    assert main(["report", str(tmp_path)]) == 2
    assert "A report is of a fit that has ended well" in capsys.readouterr().err
