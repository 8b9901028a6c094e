"""``lockstep checkpoint``, and what others make of an export."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

import lockstep
from lockstep.checkpoint.generations import generations
from lockstep.cli.main import main

X, Y = torch.randn(32, 6), torch.randint(3, (32,))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.norm(self.first(x)))


@pytest.fixture(scope="module")
def trainer() -> lockstep.Trainer:
    torch.manual_seed(0)
    adam = partial(torch.optim.AdamW, lr=1e-2)
    return lockstep.Trainer(Tied(), loss=nn.CrossEntropyLoss(), optimizer=adam)


@pytest.fixture(scope="module")
def run(trainer: lockstep.Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    checkpoint = lockstep.Checkpoint(folder, every="3 steps")
    trainer.fit((X, Y), epochs=2, batch_size=8, verbose=0, checkpoint=checkpoint)
    return folder


def lines(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, list[str]]:
    status = main(["checkpoint", *map(str, words)])
    return status, capsys.readouterr().out.splitlines()


def test_it_shows_and_verifies_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = lines(capsys, "show", run)
    assert status == 0
    head, *rows = (line.split() for line in shown)
    assert head[:3] == ["checkpoint", "steps", "epochs"]
    assert [row[:3] for row in rows] == [
        ["generation-000000", "3", "0"],
        ["generation-000001", "6", "1"],
        ["generation-000002", "8", "2,"],
    ]
    status, shown = lines(capsys, "verify", run)
    assert (status, [line.split()[-1] for line in shown[1:]]) == (0, ["whole"] * 3)
    status, shown = lines(capsys, "verify", generations(run)[1])
    assert (status, len(shown)) == (0, 2)


def test_it_says_which_is_damaged(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for generation in generations(run):
        copied = tmp_path / generation.name
        copied.mkdir()
        for path in generation.iterdir():
            (copied / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation-000001" / "tensors-00000.safetensors").write_bytes(b"")
    (tmp_path / "generation-000002" / "manifest.json").write_bytes(b"")
    status, shown = lines(capsys, "show", tmp_path)
    assert (status, sum(line.rstrip().endswith(" damaged") for line in shown)) == (0, 1)
    status, shown = lines(capsys, "verify", tmp_path)
    assert (status, sum(line.rstrip().endswith(" damaged") for line in shown)) == (1, 2)
    assert any("has 0 bytes of" in line for line in shown)
    assert lines(capsys, "show", tmp_path / "nothing") == (2, [])


def test_one_file_is_read_by_load(
    trainer: lockstep.Trainer, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.safetensors"
    assert lines(capsys, "export", run, out) == (0, [f"{out} is written."])
    other = lockstep.Trainer(Tied())
    other.load(out)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_goes_on_from_its_own_form(
    trainer: lockstep.Trainer, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "dcp"
    assert lines(capsys, "export", run, out, "--format", "dcp")[0] == 0
    assert lines(capsys, "export", run, out, "--format", "dcp")[0] == 2  # it is there
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    state = {
        "model": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    load_dcp(state, checkpoint_id=out, no_dist=True)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    theirs = copy.deepcopy(trainer.model)
    own = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    own.load_state_dict(trainer.optimizer.state_dict())
    for each, step in ((model, optimizer), (theirs, own)):
        each.train()
        nn.functional.cross_entropy(each(X), Y).backward()
        step.step()
    for name, value in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
