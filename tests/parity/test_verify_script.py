"""``lockstep verify script.py``: a script of DDP on two processes against one."""

import json
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.cli.records import script_proof
from tests.launchers import ROOT
from tests.pages import read_page

SCRIPT = read_page((ROOT / "docs" / "prove-your-run.md").read_text()).files["ddp.py"]


@pytest.mark.thorough
def test_a_script_is_run_on_two_processes_and_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Behind the recorded steps it is ended: what follows is not reached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "ddp.py").write_text(f"{SCRIPT}\nprint('the end')\n")
    assert main(["verify", "ddp.py", "--steps", "3", "--keep", "both", "--json"]) == 0
    told = capfd.readouterr().out
    outcome = json.loads(told[told.index("{") :])
    assert (outcome["passed"], outcome["num_steps"], outcome["same_bits"]) == (True, 3, False)
    assert "2 ranks" in outcome["title"]
    assert "the end" not in told
    assert sorted(path.name for path in (tmp_path / "both").glob("*/*")) == [
        *("rank0.record", "rank0.record", "rank1.record")
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing.py", "--processes", "2"], "A script must be a file"),
        (["ddp.py", "--processes", "1"], "--processes must be at least 2"),
        (["ddp.py", "--devices", "2"], "A script has no such option"),
        (["job.py:make", "--processes", "2"], "A job has no such option"),
        (["job.py:make", "--arguments", "a"], "A job has no such option"),
    ],
)
def test_mistakes(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ddp.py").write_text(SCRIPT)
    assert main(["verify", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_script_that_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.py").write_text("print('nothing')\n")
    monkeypatch.setattr(script_proof, "run_like_torchrun", lambda *_: 0)
    assert main(["verify", str(tmp_path / "empty.py"), "--processes", "2"]) == 2
    assert "The script must record its training" in capsys.readouterr().err
