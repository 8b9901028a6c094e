"""The README's examples do what it says, in a fresh directory."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_ten_lines_train_and_print_the_plan_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{BLOCKS[0]}\nprint(trainer.plan)\n")
    printed = run(["-W", "error", "train.py"], tmp_path)
    assert "Epoch 3/3" in printed
    shown = re.search(r"```\n(Plan: mirrored.*?)```", README, flags=re.DOTALL)
    assert shown is not None
    assert shown.group(1).strip() in printed


def test_the_job_is_verified(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(BLOCKS[3])
    command = re.search(r"\$ lockstep (verify .*)", README)
    assert command is not None
    arguments = command.group(1).split()
    printed = run(["-m", "lockstep.cli.main", *arguments], tmp_path)
    assert "lockstep.verify" not in printed
    assert "same" in printed or "passed" in printed.lower()


def test_the_model_in_stages_trains(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"{BLOCKS[0].partition('trainer =')[0]}\n{BLOCKS[1]}\n"
        "trainer.fit((x, y), batch_size=500)\nprint(trainer.plan)\n"
    )
    printed = run(["-W", "error", "train.py"], tmp_path)
    assert "Plan: pipeline, pipe 2, fp32" in printed


def test_the_schedule_is_simulated(tmp_path: Path) -> None:
    (tmp_path / "simulate.py").write_text(BLOCKS[2])
    assert "(4, 4, 4, 4)" in run(["-W", "error", "simulate.py"], tmp_path)
