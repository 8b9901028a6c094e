"""The progress display: a bar on a terminal and in notebooks, lines in a file, else nothing."""

import io
import re
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from rich.console import Console
from torch import nn

import lockstep
from lockstep.train.logging import progress
from lockstep.train.logging.progress import ProgressDisplay
from tests.faults.processes import wait_until


def show(console: Console) -> None:
    display = ProgressDisplay(epochs=10, steps=4, console=console)
    for epoch in range(2):
        display.begin_epoch(epoch)
        for step in range(4):
            display.end_step(step, total=50.0, weight=100.0, samples=100)
        display.say("validating")
        display.end_epoch({"loss": 0.5, "accuracy": 0.25, "classes": [1, 2]})
    display.close()


def test_a_file_gets_one_plain_line_per_epoch() -> None:
    file = io.StringIO()
    show(Console(file=file, width=60))
    lines = file.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("Epoch  1/10  ")
    assert lines[0].endswith("loss 0.5000  accuracy 0.2500  classes [1, 2]")
    assert "samples/s" in lines[0]
    assert "\x1b" not in file.getvalue()


def test_a_terminal_gets_a_bar_with_figures() -> None:
    file = io.StringIO()
    show(Console(file=file, width=120, force_terminal=True))
    written = file.getvalue()
    assert "1/4" in written
    assert "loss 0.5000" in written
    assert "left" in written
    assert "validating" in written


def test_the_number_of_steps_may_be_unknown_until_the_first_epoch_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.02)
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=True)
    display = ProgressDisplay(epochs=3, steps=None, console=console)
    written: list[str] = []
    for num_steps in (3, 3, 5):  # the last is longer than thought
        display.begin_epoch(len(written))
        for step in range(num_steps):
            time.sleep(0.03)  # for a refresh of the line
            display.end_step(step, total=50.0, weight=100.0, samples=100)
        display.say("validating")
        display.end_epoch({"loss": 0.5})
        written.append(file.getvalue())
        file.truncate(file.seek(0))
    display.close()
    assert "2/?" in written[0]
    assert "left" not in written[0]
    assert "2/3" in written[1]
    assert "left" in written[1]
    assert "5/5" in written[2]


def test_what_is_done_before_the_first_step_is_on_the_terminal_until_then() -> None:
    file = io.StringIO()
    display = ProgressDisplay(epochs=1, steps=4, console=terminal(file))
    for doing in ("Capturing the model", "Starting 3 helpers"):
        display.announce(doing)
        assert shown(file) == [f"{doing} ..."]
    display.begin_epoch(0)
    assert shown(file)[0].endswith("0/4  First step")
    display.end_step(0, total=50.0, weight=100.0, samples=100)
    assert "First step" not in shown(file)[0]
    display.end_epoch({"loss": 0.5})
    assert shown(file)[0].startswith("Epoch 1/1  ")
    assert len(shown(file)) == 1


def test_what_is_shown_in_place_is_gone_after_an_error() -> None:
    file = io.StringIO()
    display = ProgressDisplay(epochs=1, steps=4, console=terminal(file))
    display.announce("Capturing the model")
    display.close()
    assert shown(file) == []


def terminal(file: io.StringIO, width: int = 120) -> Console:
    return Console(file=file, width=width, force_terminal=True, color_system=None)


@pytest.mark.parametrize(
    ("width", "shown_there", "missing"),
    [
        (15, ["60/200"], ["Epoch", "loss"]),
        (40, ["Epoch  1/10", " 60/200", "loss 0.5000"], ["accuracy", "lr"]),
        (60, ["Epoch  1/10", " 60/200", "loss 0.5000", "left", "accuracy 0.25"], ["samples/s"]),
        (80, ["Epoch  1/10 ━", " 60/200", "loss 0.5000", "left", "accuracy 0.25"], ["samples/s"]),
        (
            120,
            ["━", " 60/200", "loss 0.5", "left", "accuracy 0.2500", "lr 0.01, 0.1", "samples/s"],
            [],
        ),
    ],
)
def test_what_has_no_room_is_left_out_and_never_the_step(
    width: int, shown_there: list[str], missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    file = io.StringIO()
    display = ProgressDisplay(10, 200, terminal(file, width), lambda: [0.01, 0.1])
    display.begin_epoch(0)
    display.note_values({"accuracy": 0.25})
    for step in range(60):
        now[0] += 1.0
        display.end_step(step, total=50.0, weight=100.0, samples=100)
    (line,) = shown(file)
    assert all(text in line for text in shown_there), line
    assert not any(text in line for text in missing), line
    assert len(line) <= width


class Counts(torchmetrics.Metric):
    """Outputs that are right; of fewer than three it cannot be told."""

    seen: torch.Tensor
    right: Any

    def __init__(self, *, keeps_all: bool = False) -> None:
        super().__init__()
        default: Any = [] if keeps_all else torch.tensor(0)
        self.add_state("right", default, dist_reduce_fx="cat" if keeps_all else "sum")
        self.add_state("seen", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.seen += len(target)
        self.right += (
            [output == target] if isinstance(self.right, list) else output.eq(target).sum()
        )

    def compute(self) -> torch.Tensor:
        if self.seen < 3:
            raise ValueError("There must be three.")
        right = torch.cat(self.right).sum() if isinstance(self.right, list) else self.right
        return right / self.seen


class Same(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * self.weight


@pytest.mark.parametrize("devices", [1, 2])
def test_metrics_are_shown_within_an_epoch_and_stay_as_they_are(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(ProgressDisplay, "note_values", lambda _, values: told.append(values))
    monkeypatch.setattr(ProgressDisplay, "seconds_between_values", 1e-9)
    trainer = lockstep.Trainer(
        Same(),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        metrics={"right": Counts(), "kept": Counts(keeps_all=True)},
        strategy=lockstep.MirroredStrategy(devices),
    )
    x, y = torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0]), torch.tensor([1.0, 1, 1, 1, 0, 1, 1, 0])
    history = trainer.fit((x, y), batch_size=2, shuffle=False)
    assert told == [{}, {"right": 0.5}, {"right": pytest.approx(2 / 6)}, {"right": 0.5}]
    assert history.history["right"] == history.history["kept"] == [0.5]


def shown(file: io.StringIO) -> list[str]:
    """The lines that a terminal shows by now, as far as rich's way to write needs it."""
    lines = [""]
    for part in re.findall(r"\x1b\[[?\d]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", file.getvalue()):
        if part == "\x1b[1A":
            lines.pop()
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif part == "\n":
            lines.append("")
        elif not part.startswith(("\x1b", "\r")):
            lines[-1] += part
    return [line.rstrip() for line in lines if line.strip()]


def test_a_file_is_told_of_what_takes_long_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG_SECONDS", 0.0)
    file = io.StringIO()
    display = ProgressDisplay(epochs=1, steps=4, console=Console(file=file, width=120))
    display.announce("Measuring 38 layers")
    wait_until(lambda: file.getvalue() == "Measuring 38 layers ...\n", 30)
    display.begin_epoch(0)
    wait_until(lambda: file.getvalue().endswith("First step ...\n"), 30)
    display.end_step(0, total=50.0, weight=100.0, samples=100)
    display.close()
    assert len(file.getvalue().splitlines()) == 2


def test_a_file_is_not_told_of_what_is_done_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG_SECONDS", 3600.0)
    file = io.StringIO()
    display = ProgressDisplay(epochs=1, steps=1, console=Console(file=file, width=120))
    display.announce("Measuring 38 layers")
    display.begin_epoch(0)
    display.end_step(0, total=50.0, weight=100.0, samples=100)
    display.say("validating")
    display.end_epoch({"loss": 0.5})
    display.close()
    assert len(file.getvalue().splitlines()) == 1


def test_a_file_gets_lines_within_an_epoch_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, now = io.StringIO(), [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    display = ProgressDisplay(epochs=2, steps=200, console=Console(file=file, width=200))
    for epoch in range(2):
        display.begin_epoch(epoch)
        for step in range(200):
            now[0] += 1.0
            display.end_step(step, total=50.0, weight=100.0, samples=100)
        display.end_epoch({"loss": 0.5})
    lines = file.getvalue().splitlines()
    first, second = ["10/200", "30/200", "70/200", "150/200", "3:20"], ["160/200", "3:20"]
    assert [line.split()[2] for line in lines] == first + second
    assert lines[1] == "Epoch 1/2  30/200  loss 0.5000  2:50 left  100 samples/s"


def test_a_notebook_gets_one_output_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[list[dict[str, str]]] = []
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    module = ModuleType("IPython.display")
    module.display = lambda contents, **how: Output(outputs, contents, how)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    file = io.StringIO()
    show(Console(file=file, width=120, force_jupyter=True))
    (contents,) = outputs
    texts = [one["text/plain"] for one in contents]
    assert texts[0] == "Epoch  1/10  0/4  First step"
    assert re.fullmatch(r"Epoch  1/10  1/4  loss 0.5000  0.0 s left  [\d,]+ samples/s", texts[1])
    assert "Epoch  1/10  4/4  validating" in texts
    assert texts[-1] == ""
    assert (
        '<progress value="4" max="4">'
        in contents[texts.index("Epoch  1/10  4/4  validating")]["text/html"]
    )
    assert len(file.getvalue().splitlines()) == 2


class Output:
    """What ``IPython.display.display`` returns."""

    def __init__(
        self, outputs: list[list[dict[str, str]]], contents: dict[str, str], how: dict[str, bool]
    ) -> None:
        assert how == {"raw": True, "display_id": True}
        self.contents = [contents]
        outputs.append(self.contents)

    def update(self, contents: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.contents.append(contents)


def test_what_a_pipeline_does_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(ProgressDisplay, "announce", lambda display, doing: said.append(doing))
    trainer = make_trainer(lockstep.PipelineStrategy(stages=2, microbatches=2))
    data = torch.ones(6, 3), torch.ones(6, 1)
    trainer.fit(data, verbose=0)
    assert said == []
    trainer = make_trainer(lockstep.PipelineStrategy(stages=2, microbatches=2))
    trainer.fit(data)
    assert said == [
        "Capturing the model",
        "Measuring 3 layers",
        "Moving the model to shared memory",
        "Starting 1 helper",
    ]
    trainer.fit(data)
    assert len(said) == 4


def make_trainer(strategy: Any) -> lockstep.Trainer:
    return lockstep.Trainer(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        strategy=strategy,
    )


@pytest.mark.parametrize("verbose", [0, 1])
def test_verbose(verbose: int, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = lockstep.Trainer(
        nn.Linear(3, 1),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        strategy=lockstep.MirroredStrategy(2),
    )
    trainer.fit((torch.ones(6, 3), torch.ones(6, 1)), epochs=2, verbose=verbose)
    printed = capsys.readouterr()
    assert printed.err == ""
    assert len(printed.out.splitlines()) == 2 * verbose
