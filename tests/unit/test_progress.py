"""The progress display: a line per epoch in a file, a bar on a terminal, nothing with verbose=0."""

import io
import time

import pytest
import torch
from rich.console import Console
from torch import nn

import lockstep
from lockstep.train.progress import ProgressDisplay
from lockstep.train.screen import REFRESH_SECONDS


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


def test_the_number_of_steps_may_be_unknown_until_the_first_epoch_has_ended() -> None:
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=True)
    display = ProgressDisplay(epochs=3, steps=None, console=console)
    written: list[str] = []
    for num_steps in (3, 3, 5):  # the last is longer than thought
        display.begin_epoch(len(written))
        for step in range(num_steps):
            time.sleep(REFRESH_SECONDS + 0.01)  # for a refresh of the line
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
