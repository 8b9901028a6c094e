"""``lockstep verify`` as typed: exit status, one line for each mistake, a file's own classes."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.cli.main import main

JOB = """
import functools
import torch
import lockstep

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, x):
        return torch.tanh(self.layer(x))

def mean_square(output, target):
    return (output - target).pow(2).mean(1)

def make_job():
    torch.manual_seed(0)
    x = torch.randn(21, 6)
    optimizer = functools.partial(torch.optim.Adam, lr=1e-2)
    return lockstep.Job(Net(), mean_square, optimizer, (x, x[:, :3].sin()), batch_size=5)

def make_wrong_job():
    job = make_job()
    calls = []

    def drifting(output, target):  # with every call, of which shares make more
        calls.append(target)
        return mean_square(output, target) * (1 + len(calls) / 1000)

    return lockstep.Job(job.model, drifting, job.optimizer, job.data, 5)

def make_unfit_job():
    job = make_job()
    return lockstep.Job(torch.nn.Linear(7, 3), job.loss, job.optimizer, job.data, 5)

def make_nothing():
    return 3

def fail():
    return 1 / 0

number = 3
"""
LINE_OF_ERROR = JOB.splitlines().index("    return 1 / 0") + 1


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "verify_command_job.py"
    path.write_text(JOB)
    before = list(sys.path)
    yield path
    sys.path[:] = before
    sys.modules.pop(path.stem, None)


def test_a_job_that_passes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["verify", f"{file}:make_job", "--strategy", "mirrored", "--devices", "2"])
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert shown.startswith("mirrored, data 2, num_shares=2, against a plain PyTorch loop: 5 steps")
    assert re.search(r"parameters +20 ", shown)  # 2 tensors, 2 ranks, 5 steps
    assert "Passed" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert [line for line in shown.splitlines() if line != line.rstrip()] == []


def test_a_job_that_does_not(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "verify",
        f"{file}:make_wrong_job",
        "--devices",
        "1",
        "--shares",
        "2",
        "--steps",
        "3",
    ]
    assert main(command) == 1
    assert "first difference: loss, step 0: relative" in capsys.readouterr().out


def test_options_reach_the_proof(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify", f"{file}:make_job", "--strategy", "single", "--steps", "2", "--seed", "7"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "single device, one device, num_shares=1" in shown
    assert "Passed: the same" in shown  # it has nothing to divide


def test_sharded_training_has_a_name(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", f"{file}:make_job", "--strategy", "sharded", "--devices", "2"])
    assert "Plan: fully sharded, shard 2" in capsys.readouterr().out


UNDIVIDED = {
    "a pipeline of one stage": (
        ["--strategy", "pipeline"],
        "Note: 1 stage: ",
        "Passed, but nothing was divided: the plan has one stage, on one device. What was",
    ),
    "a pipeline of one stage, as asked": (
        ["--strategy", "pipeline", "--devices", "1"],
        "Note: With",
        "Passed, but nothing was divided: the plan has one stage, on one device. What was",
    ),
    "replicas of one stage": (
        ["--strategy", "hybrid", "--data", "2", "--devices", "1"],
        "Note: With",
        "Passed, but the model was not divided: the plan has one stage, on 2 replicas. What was",
    ),
    "one replica": (
        ["--devices", "1"],
        "",
        "Passed, but nothing was divided: the plan has one replica, with all of each batch. What",
    ),
}


@pytest.mark.parametrize("name", UNDIVIDED)
def test_a_plan_that_divides_nothing_has_not_just_passed(
    name: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, note, verdict = UNDIVIDED[name]
    assert main(["verify", f"{file}:make_job", *options]) == 3
    shown = " ".join(capsys.readouterr().out.split())
    assert note in shown
    assert verdict in shown


MISTAKES = {
    "no function named": ("{file}", "must be file.py:function"),
    "no file": ("nowhere.py:make_job", "TARGET's file must exist"),
    "no function": ("{file}:make_jobs", "It defines: Net, mean_square, make_job"),
    "no function either": ("{file}:number", "has no function of this name"),
    "no job": ("{file}:make_nothing", "must return a lockstep.Job. Received: int"),
    "an error": (
        "{file}:fail",
        f"ZeroDivisionError: division by zero (line {LINE_OF_ERROR} of verify_command",
    ),
}


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_advice_names_the_command_that_was_given(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "job.py"]) == 2
    assert f"For example: lockstep {command} job.py:make_job" in capsys.readouterr().err


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_the_target_take_one_line(
    name: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, message = MISTAKES[name]
    assert main(["verify", target.format(file=file)]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategy", "single", "--devices", "2"], "one device and one share"),
        (["--strategy", "sharded", "--stages", "2"], "sharded has no such option"),
        (["--devices", "0"], "devices=0"),
        (["--devices", "2", "--shares", "1"], "num_shares=1 with 2 replicas"),
        (["--steps", "0"], "`steps` must be"),
    ],
)
def test_mistakes_in_the_options_take_one_line(
    options: list[str], message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", f"{file}:make_job", *options]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("veryfy",), "'verify'"),
        (("plan", "x.py:job", "--stategy", "mirrored"), "'--strategy'"),
        (("verify", "x.py:job", "--strategy", "pipline"), "'pipeline'"),
    ],
)
def test_what_a_misspelled_word_may_mean(
    words: tuple[str, ...], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert shown.endswith(f"\nDid you mean {meant}?\n")
    assert "usage" not in shown


def test_the_strategies_are_choices(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["verify", f"{file}:make_job", "--strategy", "magic"])
    assert re.search(r"magic.*choose from .*single.*mirrored", capsys.readouterr().err)


def test_a_file_that_cannot_be_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text, message in [
        ("broken_job.py", "x = 1\ny = (", "SyntaxError: '(' was never closed"),
        (
            "failing_job.py",
            "x = 1\nraise RuntimeError('no')",
            "RuntimeError: no (line 2 of failing",
        ),
        ("needy_job.py", "import no_such_module", "No module named 'no_such_module'"),
        ("queue.py", "", "and not another module's"),
        ("my-job.py", "", "and not another module's"),
    ]:
        path = tmp_path / name
        path.write_text(text)
        assert main(["verify", f"{path}:make_job"]) == 2
        assert message in capsys.readouterr().err


def test_an_error_of_the_model_is_shown_whole_and_is_no_difference(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", f"{file}:make_unfit_job", "--strategy", "single"]) == 2
    assert "mat1 and mat2 shapes cannot be multiplied" in capsys.readouterr().err
