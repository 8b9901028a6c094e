"""Saved weights: whole tensors by name, readable by others, written whole or not at all."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lockstep.checkpoint import weights
from lockstep.checkpoint.weights import load_weights, save_weights
from lockstep.errors import CheckpointError
from tests.zoo import Case, case, cases


class TiedPair(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


class Buffers(nn.Module):
    """One of each kind that a state may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))
        self.register_buffer("coarse", torch.tensor([1.5, 2.5], dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("nothing_else", torch.empty(0, 3))
        self.register_buffer("fleeting", torch.ones(2), persistent=False)


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def channels_last(model: nn.Conv2d) -> nn.Conv2d:
    model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
    return model


def wiped(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    return model


def assert_same_state(model: nn.Module, expected: dict[str, Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    different = [
        name
        for name, value in expected.items()
        if state[name].dtype != value.dtype or not torch.equal(state[name], value)
    ]
    assert different == []


@pytest.mark.parametrize("job", cases(), ids=lambda job: job.name)
def test_what_was_saved_is_loaded_bit_by_bit(job: Case, tmp_path: Path) -> None:
    model = job.make_model()
    expected = copy_of(model)
    save_weights(model, tmp_path / "weights")
    load_weights(wiped(model), tmp_path / "weights")
    assert_same_state(model, expected)


def test_buffers_of_every_kind_are_kept_and_fleeting_ones_are_not(tmp_path: Path) -> None:
    model = Buffers()
    expected = copy_of(model)
    save_weights(model, tmp_path / "weights")
    load_weights(wiped(model), tmp_path / "weights")
    assert_same_state(model, expected)
    assert load_file(tmp_path / "weights").keys() == expected.keys()
    assert "fleeting" not in expected


@pytest.mark.parametrize("path", ["weights.safetensors", "no-suffix"])
def test_plain_safetensors_reads_the_file(path: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save_weights(model, str(tmp_path / path))
    loaded = load_file(tmp_path / path)
    assert loaded.keys() == {"weight", "bias"}
    assert torch.equal(loaded["weight"], model.weight)
    with safe_open(tmp_path / path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_file_of_plain_safetensors_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    expected = copy_of(model)
    save_file(expected, tmp_path / "weights")
    load_weights(wiped(model), tmp_path / "weights")
    assert_same_state(model, expected)


def test_loading_keeps_parameters_and_their_memory(tmp_path: Path) -> None:
    model = channels_last(nn.Conv2d(2, 3, 3))
    save_weights(model, tmp_path / "weights")
    parameter, address, stride = model.weight, model.weight.data_ptr(), model.weight.stride()
    load_weights(model, tmp_path / "weights")
    assert model.weight is parameter
    assert (parameter.data_ptr(), parameter.stride()) == (address, stride)
    assert parameter.requires_grad


def test_the_layout_in_memory_does_not_matter(tmp_path: Path) -> None:
    model = nn.Conv2d(2, 3, 3)
    expected = copy_of(model)
    save_weights(channels_last(model), tmp_path / "weights")
    plain = wiped(nn.Conv2d(2, 3, 3))
    load_weights(plain, tmp_path / "weights")
    assert_same_state(plain, expected)


def test_a_view_of_larger_memory_is_written_alone(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.weight.data = torch.randn(1000, 1000)[:2, :2]
    save_weights(model, tmp_path / "weights")
    assert (tmp_path / "weights").stat().st_size < 1000


# --- tied tensors -------------------------------------------------------------------------------


def test_a_tied_tensor_is_written_once_and_loaded_under_all_names(tmp_path: Path) -> None:
    model = TiedPair()
    expected = copy_of(model)
    save_weights(model, tmp_path / "weights")
    assert [*load_file(tmp_path / "weights")] == ["embedding.weight"]
    load_weights(wiped(model), tmp_path / "weights")
    assert_same_state(model, expected)
    assert model.head.weight is model.embedding.weight
    apart = TiedPair(tied=False)
    load_weights(apart, tmp_path / "weights")
    assert_same_state(apart, expected)


def test_weights_that_were_apart_can_be_loaded_together_only_if_they_are_equal(
    tmp_path: Path,
) -> None:
    apart, tied = TiedPair(tied=False), TiedPair()
    before = copy_of(tied)
    save_weights(apart, tmp_path / "different")
    with pytest.raises(CheckpointError, match=r"'embedding.weight' and 'head.weight' are one"):
        load_weights(tied, tmp_path / "different")
    assert_same_state(tied, before)
    apart.head.weight.data.copy_(apart.embedding.weight)
    save_weights(apart, tmp_path / "equal")
    load_weights(tied, tmp_path / "equal")
    assert torch.equal(tied.head.weight, apart.head.weight)


def test_weights_that_are_no_numbers_are_kept(tmp_path: Path) -> None:
    model = TiedPair()
    model.embedding.weight.data.fill_(float("nan"))
    save_weights(model, tmp_path / "weights")
    load_weights(wiped(model), tmp_path / "weights")
    assert bool(model.head.weight.isnan().all())


# --- what does not fit --------------------------------------------------------------------------

MISFITS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "other names": (
        lambda: nn.Sequential(nn.Linear(3, 2)),
        r"missing \['0.bias', '0.weight'\], unexpected \['bias', 'weight'\]",
    ),
    "a name missing": (lambda: nn.Linear(3, 2, bias=False), r"missing none, unexpected \['bias'\]"),
    "another shape": (
        lambda: nn.Linear(5, 2),
        r"'weight' must have shape \(2, 5\).*Received: \(2, 3\)",
    ),
    "other shapes": (lambda: nn.Linear(5, 4), r"2 problems.*'weight' must.*'bias' must"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_weights_that_do_not_fit_change_nothing(name: str, tmp_path: Path) -> None:
    make, message = MISFITS[name]
    save_weights(nn.Linear(3, 2), tmp_path / "weights")
    model = make()
    before = copy_of(model)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        load_weights(model, tmp_path / "weights")
    assert_same_state(model, before)


def test_floating_numbers_do_not_become_whole_ones(tmp_path: Path) -> None:
    state = {**Buffers().state_dict(), "count": torch.tensor(7.5)}
    save_file(state, tmp_path / "weights")
    with pytest.raises(CheckpointError, match=r"'count' must hold torch\.int64.*torch\.float32"):
        load_weights(Buffers(), tmp_path / "weights")


def test_weights_are_loaded_in_another_precision(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save_weights(model, tmp_path / "weights")
    wide = nn.Linear(3, 2, dtype=torch.float64)
    load_weights(wide, tmp_path / "weights")
    assert torch.equal(wide.weight, model.weight.double())


def alias(path: Path, *names: str) -> None:
    """Save a Linear with other names for tensors, which follow in turn."""
    metadata = {f"alias:{name}": first for name, first in zip(names[::2], names[1::2], strict=True)}
    save_file(nn.Linear(3, 2).state_dict(), path, metadata)


NO_CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "not there": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("weights " * 100),
    "a pickle of torch.save": lambda path: torch.save(nn.Linear(3, 2).state_dict(), path),
    "a directory": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path),
    "an alias of nothing": lambda path: alias(path, "head", "tail"),
    "an alias of an alias": lambda path: alias(path, "head", "weight", "tail", "head"),
    "an alias of a tensor": lambda path: alias(path, "bias", "weight"),
    "a huge header": lambda path: path.write_bytes(b"\xff" * 64),
    "a header that is no table": lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"),
}


@pytest.mark.parametrize("name", NO_CHECKPOINTS)
def test_what_is_no_checkpoint_is_refused_by_name(name: str, tmp_path: Path) -> None:
    NO_CHECKPOINTS[name](tmp_path / "weights")
    model = nn.Linear(3, 2)
    before = copy_of(model)
    with pytest.raises(CheckpointError, match=r"weights must be a safetensors file\. Received: .+"):
        load_weights(model, tmp_path / "weights")
    assert_same_state(model, before)


@pytest.mark.parametrize("path", [None, 3, b"weights", "", "a\0b", ["weights"]])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(CheckpointError, match=r"must be a safetensors file\. Received: .+"):
        load_weights(nn.Linear(3, 2), path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    save_weights(nn.Linear(3, 2), path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="must be a safetensors file"):
        load_weights(nn.Linear(3, 2), path)


class ExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        raise NotImplementedError


def test_state_that_is_no_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'_extra_state', a dict"):
        save_weights(ExtraState(3, 2), tmp_path / "weights")
    assert os.listdir(tmp_path) == []


# --- whole or not at all ------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    save_weights(nn.Linear(3, 2), path)
    before = path.read_bytes()

    def fail(tensors: Any, metadata: Any, file: Any) -> None:
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "write_tensors", fail)
    with pytest.raises(KeyboardInterrupt):
        save_weights(nn.Linear(30, 20), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["weights"]


def test_a_save_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    save_weights(nn.Linear(3, 2), path)
    save_weights(nn.Linear(30, 20), path)
    load_weights(nn.Linear(30, 20), path)
    assert os.listdir(tmp_path) == ["weights"]


def test_a_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    save_weights(nn.Linear(3, 2), tmp_path / "weights")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("other", "weights")}
    assert len(modes) == 1


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o444])
def test_a_save_keeps_the_mode_of_the_file_it_replaces(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    save_weights(nn.Linear(3, 2), path)
    path.chmod(mode)
    save_weights(nn.Linear(30, 20), path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    load_weights(nn.Linear(30, 20), path)


def test_a_new_file_follows_the_umask_and_is_never_open_to_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    write = weights.write_tensors

    def look(tensors: Any, metadata: Any, file: Any) -> None:
        seen.append(stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        write(tensors, metadata, file)

    monkeypatch.setattr(weights, "write_tensors", look)
    before = os.umask(0o027)
    try:
        save_weights(nn.Linear(3, 2), tmp_path / "weights")
        (tmp_path / "weights").chmod(0o606)
        save_weights(nn.Linear(3, 2), tmp_path / "weights")
        assert os.umask(0o027) == 0o027  # as the user has set it
    finally:
        os.umask(before)
    assert seen == [0o640, 0o600]
    assert stat.S_IMODE((tmp_path / "weights").stat().st_mode) == 0o606


def test_a_link_stays_and_leads_to_the_new_file(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    link = tmp_path / "latest"
    link.symlink_to("runs/third")
    for size in (3, 5):  # where the file is new, and where it is replaced
        save_weights(nn.Linear(size, 2), link)
        assert link.is_symlink()
        load_weights(nn.Linear(size, 2), tmp_path / "runs" / "third")
    assert os.listdir(tmp_path / "runs") == ["third"]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    ("make", "kind"),
    [(Path.mkdir, "a folder"), (os.mkfifo, "a pipe"), (make_socket, "a device or socket")],
)
def test_nothing_but_a_file_is_replaced(
    make: Callable[[Path], None], kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "weights"
    make(path)
    before = path.stat().st_mode
    with pytest.raises(CheckpointError, match=f"into a file. Received: {path}, {kind}"):
        save_weights(nn.Linear(3, 2), path)
    assert path.stat().st_mode == before
    assert os.listdir(tmp_path) == ["weights"]


def test_a_folder_that_is_not_there_is_the_systems_error(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "weights"
    (tmp_path / "link").symlink_to(path)
    for given in (path, tmp_path / "link"):
        with pytest.raises(FileNotFoundError) as caught:
            save_weights(case("mlp").make_model(), given)
        assert caught.value.filename == str(given)  # the user's, not a temporary one
