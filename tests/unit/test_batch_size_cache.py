"""Batch sizes are remembered in a file that may be gone, broken, foreign or not writable."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.data.map_style.sources import as_source
from lockstep.train.batch_size_search import batch_size_cache
from lockstep.train.batch_size_search.batch_size_cache import (
    SIZES,
    BatchSizeCache,
    key_of,
    recall,
    remember,
)

FOUND = BatchSizeCache(batch_size=64, seconds_per_step=0.1, peak_bytes=1000, num_samples=None)
X, Y = torch.zeros(10, 4), torch.zeros(10, dtype=torch.long)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_was_written_is_recalled_beside_what_was_there(folder: Path) -> None:
    assert recall("a") is None
    assert remember("a", FOUND)
    assert remember("b", FOUND)
    assert (recall("a"), recall("b"), recall("c")) == (FOUND, FOUND, None)
    assert [path.name for path in (folder / "lockstep").iterdir()] == ["batch_sizes.json"]


def test_without_the_variable_it_is_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert SIZES.path == Path.home() / ".cache" / "lockstep" / "batch_sizes.json"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{not json",
        b"\xff\xfe",
        b"[1, 2]",
        b'{"version": 2, "sizes": {}}',
        b'{"version": 1, "sizes": {"a": {"batch_size": "large"}}}',
        b'{"version": 1, "sizes": {}, "more": 1}',
    ],
)
def test_a_file_that_cannot_be_read_is_told_and_written_anew(content: bytes) -> None:
    path = SIZES.path
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"batch_sizes.json is ignored, and written anew"):
        assert recall("a") is None
    assert path.read_bytes() == content
    assert remember("a", FOUND)
    assert recall("a") == FOUND


@pytest.mark.exhaustive
def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as any user."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert recall("a") is None
    with pytest.warns(UserWarning, match="cannot be remembered: .*The user has no home folder"):
        assert not remember("a", FOUND)


def test_a_folder_that_cannot_be_written_to_is_told(folder: Path) -> None:
    (folder / "lockstep").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="cannot be remembered"):
        assert not remember("a", FOUND)


def test_a_failed_write_leaves_the_file_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember("a", FOUND)
    before = SIZES.path.read_bytes()

    def fail(*arguments: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", fail)
        with pytest.warns(UserWarning, match="the disk is full"):
            assert not remember("b", FOUND)
    assert SIZES.path.read_bytes() == before
    assert [path.name for path in (folder / "lockstep").iterdir()] == ["batch_sizes.json"]


# --- keys ---------------------------------------------------------------------------------------


def key(**changes: Any) -> str:
    model = changes.pop("model", None) or nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    given: dict[str, Any] = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), lr=1e-3),
        "source": as_source((X, Y)),
        "precision": "fp32",
        "maker": lockstep.MirroredStrategy(2).maker(),
        "options": (lockstep.BatchSizeSearch(),),
    }
    return key_of(**{**given, **changes})


class Renamed(nn.Linear):
    pass


CHANGES: dict[str, Any] = {
    "a wider layer": lambda: {"model": nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3))},
    "another class": lambda: {"model": nn.Sequential(Renamed(4, 8), nn.Linear(8, 3))},
    "another name": lambda: {"model": nn.Sequential(*key_layers("first", "second"))},
    "a frozen layer": lambda: {"model": frozen()},
    "another loss": lambda: {"loss": nn.MSELoss()},
    "another optimizer": lambda: {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1e-3)},
    "other samples": lambda: {"source": as_source((torch.zeros(10, 5), Y))},
    "another dtype": lambda: {"source": as_source((X.long(), Y))},
    "weights of samples": lambda: {"source": as_source((X, Y, torch.ones(10)))},
    "another precision": lambda: {"precision": "bf16-mixed"},
    "more devices": lambda: {"maker": lockstep.MirroredStrategy(3).maker()},
    "more shares": lambda: {"maker": lockstep.MirroredStrategy(2, num_shares=4).maker()},
    "another strategy": lambda: {"maker": lockstep.PipelineStrategy(2).maker()},
    "another search": lambda: {"options": (lockstep.BatchSizeSearch(objective="memory"),)},
}


def key_layers(*names: str) -> list[Any]:
    from collections import OrderedDict

    return [OrderedDict(zip(names, (nn.Linear(4, 8), nn.Linear(8, 3)), strict=True))]


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("name", CHANGES)
def test_a_key_differs_where_the_training_does(name: str) -> None:
    assert key(**CHANGES[name]()) != key()


def test_a_key_is_that_of_any_training_like_it() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    rate = torch.optim.Adam([torch.zeros(1)], lr=0.5)
    more = as_source((torch.ones(20, 4), torch.ones(20, dtype=torch.long)))
    assert key(optimizer=rate, source=more) == key()
    assert not torch.equal(torch.get_rng_state(), state)  # of making models; and of nothing else:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    state = torch.get_rng_state()
    key(model=model)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_key_depends_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    for name, value in [("memory_ceiling", lambda: 1 << 30), ("processor_name", lambda: "another")]:
        with monkeypatch.context() as patched:
            patched.setattr(batch_size_cache, name, value)
            assert key() != before
    assert key() == before


def test_functions_go_by_their_names() -> None:
    mse, l1 = nn.functional.mse_loss, nn.functional.l1_loss
    assert key(loss=mse) != key(loss=l1)
    assert key(loss=partial(mse, reduction="none")) != key(loss=partial(l1, reduction="none"))
