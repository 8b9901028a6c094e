"""Standard output and error that cannot be written to: training goes on, to the same weights."""

import io
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchmetrics

import lockstep
from tests import warm
from tests.faults.jobs import make_data, make_trainer
from tests.faults.processes import JOB, TIMEOUT_SECONDS
from tests.launching import STRICT
from tests.netns import HostProcess
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

# Where there is no output, C code writes to these numbers all the same.
SCRIPT = (
    JOB
    + """
def in_forward(net):
    if "CLOSED" in os.environ:
        print("x" * 999, flush=True)
        os.write(1, b"x" * 999)
        os.write(2, b"x" * 999)

torch.manual_seed(0)
trainer = make_trainer()
data = torch.ones(16, 8), torch.zeros(16, dtype=torch.long)
trainer.fit(data, batch_size=8, epochs=20)
trainer.fit(lambda: iter([data]), epochs=20)
trainer.save("weights")
"""
)

OUTPUTS = {
    "nobody reads": "{command} 2>&1 | head -n 1",
    "a full disk": "{command} >/dev/full 2>/dev/full",
    "closed": "CLOSED=1 {command} <&- >&- 2>&-",
}


def run(command: str, source: str, directory: Path) -> "subprocess.CompletedProcess[str]":
    (directory / "script.py").write_text(source)
    words = shlex.join((sys.executable, *STRICT, "script.py"))
    return subprocess.run(
        ["bash", "-c", command.format(command=words)],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("expected")
    (directory / "script.py").write_text(SCRIPT)
    words = [sys.executable, *STRICT, "script.py"]
    process = HostProcess(words, os.environ | warm.VARIABLES, directory, like="torch")
    try:
        status, out, err = process.finish(TIMEOUT_SECONDS)
    finally:
        process.close()
    # A slow start is spoken of, too.
    epochs = [line for line in out.splitlines() if line.startswith("Epoch")]
    assert (status, err, len(epochs)) == (0, "", 40)
    return (directory / "weights").read_bytes()


@pytest.mark.parametrize("name", core_of(OUTPUTS, ["closed"], []))
def test_a_broken_output_ends_no_training(name: str, expected: bytes, tmp_path: Path) -> None:
    done = run(OUTPUTS[name], SCRIPT, tmp_path)
    assert (tmp_path / "weights").read_bytes() == expected, done.stderr
    assert "Traceback" not in done.stderr


class Terminal(io.StringIO):
    """One that is gone after some writes."""

    def __init__(self, error: Exception, encoding: str = "utf-8") -> None:
        super().__init__()
        self.error, self._encoding, self.num_writes = error, encoding, 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.num_writes += 1
        if self.num_writes > 3:
            raise self.error
        text.encode(self._encoding)
        return super().write(text)


ERRORS: dict[str, Callable[[], Exception]] = {
    "gone": lambda: OSError(5, "Input/output error"),
    "closed": lambda: ValueError("I/O operation on closed file"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", ERRORS)
def test_a_terminal_that_is_gone(name: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(ERRORS[name]())
    monkeypatch.setattr(sys, "stdout", terminal)
    trainer = make_trainer(devices)
    history = trainer.fit(make_data(), epochs=3, batch_size=8)
    assert sys.stdout is terminal
    assert len(history.epoch) == 3
    assert terminal.num_writes == 4


def test_an_output_that_has_not_all_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the locale is C, say."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", output)
    trainer = lockstep.Trainer(
        torch.nn.Linear(16, 3),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        metrics={"精度": torchmetrics.Accuracy(task="multiclass", num_classes=3)},
    )
    trainer.fit(make_data())
    output.seek(0)
    assert "  ?? 0." in output.read()
