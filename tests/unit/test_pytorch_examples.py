"""Every program in ``examples/pytorch``, and the notebook, runs and says what it should."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.launchers import ROOT, run_script

FOLDER = ROOT / "examples" / "pytorch"
pytestmark = pytest.mark.thorough


def run(name: str, folder: Path, epochs: int = 1) -> str:
    words: list[str | Path] = [FOLDER / name, "--epochs", str(epochs)]
    return run_script(words, folder, {"PYTHONPATH": str(ROOT)})


def test_every_program_is_run_here_and_is_in_the_index() -> None:
    index = (FOLDER.parent / "README.md").read_text()
    own = Path(__file__).read_text()
    for path in FOLDER.iterdir():
        if path.is_file():
            assert f"pytorch/{path.name})" in index
            assert f'"{path.name}"' in own


@pytest.mark.exhaustive
def test_a_net_resumes_from_its_checkpoint_to_the_same_end(tmp_path: Path) -> None:
    """The newest checkpoint, of the end, is lost: the second run resumes within the last epoch."""
    first = run("digits_cnn.py", tmp_path, 2)
    generations = sorted((tmp_path / "digits_run").glob("generation-*"))
    assert len(generations) > 1
    shutil.rmtree(generations[-1])
    second = run("digits_cnn.py", tmp_path, 2)
    ends = [text[text.index("loss of each epoch:") :] for text in (first, second)]
    assert ends[0] == ends[1]
    assert "Epoch 1/2" in first
    assert "Epoch 1/2" not in second


@pytest.mark.exhaustive
def test_a_pipeline_learns_to_write(tmp_path: Path) -> None:
    told = run("character_gpt.py", tmp_path)
    assert re.search(r"^blocks\.0\.\S+ .* 0$", told, re.MULTILINE)
    assert re.search(r"^blocks\.2\.\S+ .* 1$", told, re.MULTILINE)
    written = told.partition("What it writes now:\n\n")[2]
    assert written.startswith("def ")
    assert len(written) == 401


@pytest.mark.exhaustive
def test_a_model_of_transformers_is_fine_tuned(tmp_path: Path) -> None:
    told = run("fine_tuning.py", tmp_path, 2)
    assert float(re.findall(r"([\d.]+)% of 400 held-out reviews", told)[0]) > 80
    assert (tmp_path / "reviews_model" / "config.json").exists()


@pytest.mark.exhaustive
def test_an_own_loop_comes_to_the_same_on_two_replicas(tmp_path: Path) -> None:
    assert "1 replicas, accuracy" in run("own_loop.py", tmp_path)
    alone = torch.load(tmp_path / "digits.pt")
    words = ["-m", "lockstep", "run", "--processes", "2", str(FOLDER / "own_loop.py")]
    told = run_script([*words, "--", "--epochs", "1"], tmp_path, {"PYTHONPATH": str(ROOT)})
    assert "2 replicas, accuracy" in told
    for name, tensor in torch.load(tmp_path / "digits.pt").items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_views_of_a_digit_come_together(tmp_path: Path) -> None:
    before, after = re.findall(r"([\d.]+)%", run("contrastive.py", tmp_path))
    assert float(after) > float(before)


def test_the_notebook_runs_cell_by_cell(tmp_path: Path) -> None:
    cells = json.loads((FOLDER / "notebook.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    lines = [f"exec(compile({source!r}, 'cell', 'exec'), globals())" for source in sources]
    script = tmp_path / "cells.py"
    script.write_text("\n".join(lines))
    told = run_script([script], tmp_path, {"PYTHONPATH": str(ROOT)})
    assert "Plan: mirrored, data 2, fp32" in told
    assert "Passed: the same" in told
