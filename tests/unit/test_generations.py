"""Checkpoints on disk: whole or not at all, and whatever is damaged is seen."""

import ast
import errno
import hashlib
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint import generations as writer
from lockstep.checkpoint import local_storage
from lockstep.checkpoint.generations import generations, write_generation, writing_alone
from lockstep.checkpoint.manifest import NAME, Manifest, Summary
from lockstep.checkpoint.reading import (
    DamagedCheckpointWarning,
    read_checkpoint,
    read_generation,
    read_newest,
)
from lockstep.checkpoint.saved import Saved
from lockstep.checkpoint.trees import flattened
from lockstep.errors import CheckpointError
from tests.thorough import core_of

PACKAGE = Path(writer.__file__).parent


def saved(step: int = 0) -> Saved:
    generator = torch.Generator().manual_seed(step)
    parameters = {"weight": torch.randn(5, 3, generator=generator), "bias": torch.tensor(2.0)}
    tree = {
        "parameters": parameters,
        "optimizer": {"weight": {"step": torch.tensor(3), "seen": torch.zeros(0, 4).bool()}},
        "modules": {"": {"calls": step}},
        "history": {"loss": [float("nan"), 1.5], "pairs": {1: (2, 3)}},
    }
    tensors, values = flattened(tree)
    manifest = Manifest(
        summary=Summary(
            epoch=1, step=step, is_finished=False, strategy="single", num_devices=1, lockstep="1"
        ),
        weights={"weight": "parameters/weight", "tied": "parameters/weight"},
        values=values,
        plan={"version": 1},
        files={},
        tensors={},
    )
    return Saved(manifest=manifest, tensors=tensors)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_SHARD_BYTES", 64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With two generations."""
    for step in (1, 2):
        commit(tmp_path / "run", step)
    return tmp_path / "run"


def commit(folder: Path, step: int, keep: int = 3) -> Path:
    with writing_alone(folder):
        return write_generation(folder, saved(step), keep)


def step_of(folder: Path) -> int:
    found = read_newest(folder)
    assert found is not None
    step = found.manifest.summary.step
    assert_is(found, step)
    return step


def assert_is(found: Saved, step: int) -> None:
    expected = saved(step)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor), name
    assert repr(found.tree()["history"]) == repr(expected.tree()["history"])
    for name in ("plan", "weights"):
        assert getattr(found.manifest, name) == getattr(expected.manifest, name)


def files_of(generation: Path) -> list[Path]:
    return sorted(generation.iterdir())


# --- writing -------------------------------------------------------------------------------------


def test_a_generation_is_read_as_it_was_written(folder: Path) -> None:
    newest = generations(folder)[-1]
    assert len(files_of(newest)) == 3  # two files of tensors
    assert_is(read_checkpoint(folder), 2)
    assert_is(read_checkpoint(generations(folder)[0]), 1)
    state = read_checkpoint(folder).state_dict()
    assert list(state) == ["weight", "tied", "_extra_state"]
    assert state["tied"] is state["weight"]
    assert state["_extra_state"] == {"calls": 2}


def test_nobody_else_may_read_it(folder: Path) -> None:
    every = [folder, *folder.rglob("*")]
    modes = {path.is_dir(): stat.S_IMODE(path.stat().st_mode) for path in every}
    assert modes == {True: 0o700, False: 0o600}


def test_the_newest_are_kept(folder: Path) -> None:
    for step in (3, 4, 5):
        commit(folder, step, keep=2)
    assert [each.name for each in generations(folder)] == ["generation-000003", "generation-000004"]
    assert {path.name for path in folder.iterdir()} == {
        ".lock",
        "generation-000003",
        "generation-000004",
    }
    assert step_of(folder) == 5


def test_one_process_at_a_time_writes(folder: Path) -> None:
    code = f"""
from pathlib import Path
from lockstep.checkpoint.generations import writing_alone
with writing_alone(Path({str(folder)!r})):
    print("in", flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with pytest.raises(CheckpointError, match="one process at a time"):
            commit(folder, 3)
        other.communicate("\n", timeout=30)
    commit(folder, 3)


# --- crashes -------------------------------------------------------------------------------------

OPERATIONS = (
    *("mkdir", "open", "fsync", "rename", "close", "listdir"),
    *("write", "flush", "unlink", "rmdir", "scandir", "fstat", "stat", "lstat"),
)


class Crashing:
    """``os`` that ends at one of its operations, or at one of a file that is written."""

    def __init__(self, last: int, end: Callable[[], None]) -> None:
        self._last, self._end = last, end
        self._counting = threading.Lock()  # several threads write
        self.num_calls = 0

    @contextmanager
    def in_use(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """By what writes and removes generations."""
        with monkeypatch.context() as patched:
            patched.setattr(local_storage, "os", self)
            patched.setattr(local_storage, "open", self._opened, raising=False)
            patched.setattr(shutil, "os", self)
            yield

    def _opened(self, path: Any, mode: str, **options: Any) -> Any:
        return Watched(open(path, mode, **options), self)

    def __getattr__(self, name: str) -> Any:
        return self.watched(name, getattr(os, name))

    def watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function, or what counts its calls and ends at the last."""
        if name not in OPERATIONS:
            return function

        def called(*args: Any, **options: Any) -> Any:
            with self._counting:
                self.num_calls += 1
                is_last = self.num_calls == self._last
            if is_last:
                self._end()
            return function(*args, **options)

        return called


class Watched:
    """A file of which each operation counts."""

    def __init__(self, file: Any, crashing: Crashing) -> None:
        self._file, self._crashing = file, crashing

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return self._crashing.watched(name, getattr(self._file, name))


def die() -> None:
    os._exit(9)


def in_a_fork(act: Callable[[], Any]) -> None:
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            die()
    os.waitpid(child, 0)


def fail() -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("is_killed", core_of([True, False], [False]))
def test_wherever_writing_ends_the_old_is_there_or_the_new(
    is_killed: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Crashing(0, fail)
    with counting.in_use(monkeypatch):
        commit(folder, 3, keep=2)
    found = set()
    assert counting.num_calls > 35
    for last in range(1, counting.num_calls + 1):
        copy = tmp_path / f"copy-{last}"
        for step in (1, 2):
            commit(copy, step)
        with Crashing(last, die if is_killed else fail).in_use(monkeypatch):
            if is_killed:
                in_a_fork(partial(commit, copy, 3, keep=2))
            else:
                with pytest.raises(OSError, match="Input/output"):
                    commit(copy, 3, keep=2)
        found.add(step_of(copy))
        commit(copy, 4, keep=2)
        assert step_of(copy) == 4
        assert len(list(copy.iterdir())) == 3, "something is left behind"
    assert found == {2, 3}


def test_a_full_disk_leaves_the_old(tmp_path: Path) -> None:
    """On a small disk of its own."""
    with disk(tmp_path / "disk", "size=64k") as small:
        commit(small / "run", 1)
        big = saved(2)
        big.tensors["parameters/weight"] = torch.zeros(100_000)
        no_space = r"No space left.*free on its disk.*tensors-00000"
        with pytest.raises(OSError, match=no_space), writing_alone(small / "run"):
            write_generation(small / "run", big, 3)
        assert step_of(small / "run") == 1
        assert {path.name for path in (small / "run").iterdir()} == {".lock", "generation-000000"}
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        with pytest.raises(OSError, match="Read-only"):
            commit(small / "run", 2)
        assert step_of(small / "run") == 1


class disk:  # noqa: N801  # used as a function
    """A file system of its own, for a block."""

    def __init__(self, path: Path, options: str) -> None:
        self._path, self._options = path, options

    def __enter__(self) -> Path:
        self._path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", self._options, "tmpfs", str(self._path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        return self._path

    def __exit__(self, *error: object) -> None:
        subprocess.run(["umount", str(self._path)], check=True)


# --- damage --------------------------------------------------------------------------------------


def assert_damaged(folder: Path, match: str = "complete checkpoint") -> None:
    """The newest is seen to be damaged, and the one before it is taken."""
    with pytest.raises(CheckpointError, match=match):
        read_generation(generations(folder)[-1])
    with pytest.warns(DamagedCheckpointWarning, match=match):
        assert step_of(folder) == 1


def test_a_file_that_is_too_short_or_too_long_is_seen(folder: Path) -> None:
    for path in files_of(generations(folder)[-1]):
        whole = path.read_bytes()
        for number in range(64):
            path.write_bytes(whole[: len(whole) * number // 64])
            assert_damaged(folder)
        path.write_bytes(whole + b"\0")
        assert_damaged(folder)
        path.write_bytes(whole)
    assert step_of(folder) == 2


def test_every_flipped_bit_is_seen(folder: Path) -> None:
    newest, chance = generations(folder)[-1], random.Random(0)
    for _ in range(1000):
        path = chance.choice(files_of(newest))
        whole = bytearray(path.read_bytes())
        place = chance.randrange(8 * len(whole))
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            read_generation(newest)
        path.write_bytes(whole)
    assert step_of(folder) == 2


def test_missing_and_swapped_files_are_seen(folder: Path) -> None:
    newest = generations(folder)[-1]
    for path in files_of(newest):
        whole = path.read_bytes()
        path.unlink()
        assert_damaged(folder, match="No such file")
        path.write_bytes(whole)
    one, other = (newest / f"tensors-0000{number}.safetensors" for number in range(2))
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])
    assert_damaged(folder)
    shutil.copy(generations(folder)[0] / one.name, one)  # the same file of another generation
    other.write_bytes(contents[1])
    assert_damaged(folder)


def test_links_pipes_and_folders_are_no_files(folder: Path, tmp_path: Path) -> None:
    path = files_of(generations(folder)[-1])[-1]
    os.rename(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert_damaged(folder, match="symbolic links")
    path.unlink()
    os.mkfifo(path)
    assert_damaged(folder, match="is not a file")
    path.unlink()
    path.mkdir()
    assert_damaged(folder)


def test_without_a_whole_one_there_is_an_error(folder: Path, tmp_path: Path) -> None:
    for generation in generations(folder):
        (generation / NAME).unlink()
    with (
        pytest.warns(DamagedCheckpointWarning),
        pytest.raises(CheckpointError, match="is complete"),
    ):
        read_newest(folder)
    assert read_newest(tmp_path / "nothing") is None
    with pytest.raises(CheckpointError, match="no checkpoints in the folder"):
        read_checkpoint(tmp_path / "nothing")


# --- ill-meant -----------------------------------------------------------------------------------


def with_body(body: bytes) -> bytes:
    digest = hashlib.sha256(body).hexdigest().encode()
    return b'{"sha256":"' + digest + b'","manifest":' + body + b"}\n"


def mutations(value: Any, chance: random.Random) -> Iterator[None]:
    """Change a tree of JSON in place, in one place, for one turn each."""
    strange: list[Any] = [None, -1, 1 << 70, "", "../x", "a/b", [], {}, {"$tensor": "x"}, {"$f": 1}]
    places = list(_places(value))
    while True:
        holder, key = chance.choice(places)
        kept = holder[key]
        if isinstance(holder, dict) and chance.random() < 0.3:
            del holder[key]
        else:
            holder[key] = chance.choice(strange)
        yield
        holder[key] = kept


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(value, dict | list):
        return
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        yield from _places(value[key])


def test_a_manifest_that_was_made_up_gives_errors_of_ours_only(folder: Path) -> None:
    path = generations(folder)[-1] / NAME
    body = json.loads(path.read_bytes())["manifest"]
    turns = mutations(body, random.Random(0))
    num_refused = 0
    for _ in range(300):
        next(turns)
        path.write_bytes(with_body(json.dumps(body).encode()))
        try:
            read_generation(path.parent).state_dict()
        except CheckpointError:
            num_refused += 1
    assert num_refused > 200  # the others change what is for people, or plain values


@pytest.mark.parametrize(
    "name", ["../run/x.safetensors", "/etc/passwd", "..", "a\0.safetensors", ""]
)
def test_no_name_leads_out_of_the_folder(name: str, folder: Path) -> None:
    path = generations(folder)[-1] / NAME
    body = json.loads(path.read_bytes())["manifest"]
    body["files"] = dict.fromkeys([name], next(iter(body["files"].values())))
    for entry in body["tensors"].values():
        entry["file"] = name
    path.write_bytes(with_body(json.dumps(body).encode()))
    assert_damaged(folder, match="regex|length|is damaged")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"version":2}', b"[" * 100_000, b'"\xff"', b"nul"]
)
def test_what_is_no_manifest_is_refused(body: bytes, folder: Path) -> None:
    (generations(folder)[-1] / NAME).write_bytes(with_body(body))
    assert_damaged(folder)


def test_no_byte_of_a_checkpoint_reaches_what_runs_it() -> None:
    """Nor ``torch.load``, which unpickles."""
    runs = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "eval", "exec", "compile"}
    runs |= {"__import__", "import_module"}
    loads = {"torch.load", "np.load", "numpy.load"}
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = set()
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {part for each in node.names for part in each.name.split(".")}
                names |= set((getattr(node, "module", None) or "").split("."))
            elif isinstance(node, ast.Name):
                names = {node.id}
            elif isinstance(node, ast.Attribute):
                names = {ast.unparse(node)} & loads
            assert not names & (runs | loads), (path.name, ast.unparse(node))
