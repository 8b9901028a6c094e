"""Checkpoints where fsspec opens a URL: whole or not there, whatever call is the last."""

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import fsspec.core
import pytest

import lockstep
from lockstep.channel.background import Background
from lockstep.checkpoint import generations as writer
from lockstep.checkpoint.generations import generations, write_generation, writing_alone
from lockstep.checkpoint.manifest import NAME
from lockstep.checkpoint.reading import (
    DamagedCheckpointWarning,
    load_state_dict,
    read_checkpoint,
    read_newest,
)
from lockstep.checkpoint.storage import Url, folder_of
from lockstep.errors import CheckpointError, ExtraError, OptionError
from tests.unit.test_generations import assert_is, saved


class Dying:
    """A file system, or a file of it, of which from a call on none comes through.

    Args:
        files: the file system, or the file.
        last: number of the call that is the last; of what it writes, half comes through.
        count: of the calls, shared with files that it opens.
    """

    def __init__(self, files: Any, last: int, count: list[int] | None = None) -> None:
        self._files = files
        self._last = last
        self.count = count or [0]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, name)
        return partial(self._call, name, found) if callable(found) else found

    def _call(self, name: str, act: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.count[0] += 1
        if self.count[0] >= self._last:
            if name == "write" and self.count[0] == self._last:
                act(memoryview(arguments[0])[: len(arguments[0]) // 2])
            raise TimeoutError("no answer")
        found = act(*arguments, **options)
        return Dying(found, self._last, self.count) if name == "open" else found

    def __enter__(self) -> "Dying":
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_SHARD_BYTES", 64)


@pytest.fixture(params=["memory", "local"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Url]]:
    """Of a store without folders, and of one with them; made by their names."""

    def folder(name: str) -> Url:
        found = folder_of(f"{request.param}://{tmp_path}/{name}")
        assert isinstance(found, Url)
        return found

    yield folder
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def folder(folders: Callable[[str], Url]) -> Url:
    """With two generations."""
    begin(folders("run"))
    return folders("run")


def begin(folder: Url) -> None:
    for step in (1, 2):
        commit(folder, step)


def commit(folder: Url, step: int, keep: int = 3) -> None:
    with writing_alone(folder):
        write_generation(folder, saved(step), keep)


def step_of(folder: Url) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedCheckpointWarning)
        found = read_newest(folder)
    assert found is not None
    assert_is(found, found.manifest.summary.step)
    return found.manifest.summary.step


def files_of(folder: Url) -> list[str]:
    """Of all generations, the oldest first."""
    files, path = fsspec.core.url_to_fs(str(folder))
    return sorted(each[len(path) :].strip("/") for each in files.find(path))


def names_of(folder: Url) -> list[str]:
    return [each.name for each in generations(folder)]


def stored(folder: Url) -> tuple[Any, str]:
    files, path = fsspec.core.url_to_fs(str(folder))
    return files, path


def test_a_generation_is_read_as_it_was_written(folder: Url) -> None:
    oldest, newest = generations(folder)
    assert_is(read_checkpoint(folder), 2)
    assert_is(read_checkpoint(oldest), 1)
    assert list(load_state_dict(str(newest))) == ["weight", "tied", "_extra_state"]
    assert len(files_of(newest)) == 3  # two files of tensors
    assert read_newest(folder / "nothing") is None
    with pytest.raises(CheckpointError, match=r"There are no checkpoints in the folder"):
        read_checkpoint(folder / "nothing")


def test_the_newest_are_kept(folder: Url) -> None:
    for step in (3, 4, 5):
        commit(folder, step, keep=2)
    assert names_of(folder) == ["generation-000003", "generation-000004"]
    assert {each.partition("/")[0] for each in files_of(folder)} == {*names_of(folder)}
    assert step_of(folder) == 5


@pytest.mark.parametrize(("is_async", "most"), [(False, 1), (True, 2)])
def test_stores_that_are_no_stores_of_objects_are_written_by_one_thread(
    folder: Url, monkeypatch: pytest.MonkeyPatch, *, is_async: bool, most: int
) -> None:
    asked = []

    class Noted(Background):
        def __init__(self, name: str, num_threads: int = 1) -> None:
            asked.append(num_threads)
            super().__init__(name, num_threads)

    monkeypatch.setattr(writer, "Background", Noted)
    monkeypatch.setattr(writer, "usable_cores", lambda: 8)
    monkeypatch.setattr(type(stored(folder)[0]), "async_impl", is_async)
    commit(folder, 3)
    assert asked == [most], "there are two files of tensors"
    assert step_of(folder) == 3


def test_whatever_call_is_the_last_the_old_is_there_or_the_new(
    folders: Callable[[str], Url], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(folders("counted"))
    files, path = stored(folders("counted"))
    whole = Dying(files, sys.maxsize)
    with monkeypatch.context() as patched:
        patched.setattr(fsspec.core, "url_to_fs", lambda url: (whole, path))
        commit(folders("counted"), 3, keep=2)
    assert whole.count[0] > 12
    found = set()
    for last in range(1, whole.count[0] + 1):
        folder = folders(f"run-{last}")
        begin(folder)
        dying = Dying(files, last), stored(folder)[1]
        with monkeypatch.context() as patched:
            patched.setattr(fsspec.core, "url_to_fs", lambda url, dying=dying: dying)
            with pytest.raises(ConnectionError, match="TimeoutError: no answer"):
                commit(folder, 3, keep=2)
        found.add(step_of(folder))
        commit(folder, 4, keep=2)
        assert step_of(folder) == 4
        assert {each.partition("/")[0] for each in files_of(folder)} == {*names_of(folder)}
    assert found == {2, 3}


def test_what_is_missing_or_of_another_generation_is_seen(folder: Url) -> None:
    (oldest, newest), files = generations(folder), stored(folder)[0]
    shard = "tensors-00000.safetensors"
    files.cp_file(stored(oldest)[1] + f"/{shard}", stored(newest)[1] + f"/{shard}")
    with pytest.warns(DamagedCheckpointWarning, match="does not match its hash"):
        assert_is(read_checkpoint(folder), 1)
    files.rm_file(stored(newest)[1] + f"/{shard}")
    with pytest.warns(DamagedCheckpointWarning, match="000001 is not a complete checkpoint"):
        assert_is(read_checkpoint(folder), 1)
    files.rm_file(stored(newest)[1] + f"/{NAME}")  # as if it were still written
    assert_is(read_checkpoint(folder), 1)
    commit(folder, 3)
    assert step_of(folder) == 3


def test_no_older_one_is_taken_where_the_store_does_not_answer(
    folder: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, path = stored(folder)

    def silent(name: str) -> bytes:
        raise TimeoutError("no answer")

    monkeypatch.setattr(type(files), "cat_file", lambda self, name: silent(name))
    with pytest.raises(ConnectionError, match=f"{path}.*TimeoutError: no answer"):
        read_checkpoint(folder)


def test_what_is_needed_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ExtraError, match=r'pip install "\.\[remote\]"'):
        generations(Url("s3://bucket/run"))
    with pytest.raises(OptionError, match=r"nowhere://run: Protocol not known"):
        generations(Url("nowhere://run"))
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ExtraError, match=r'pip install "\.\[remote\]"'):
        generations(Url("memory://run"))


def test_folders_by_path_and_url() -> None:
    assert folder_of("file:///a/run") == folder_of(Path("/a/run")) == Path("/a/run")
    assert isinstance(folder_of("s3://bucket/run"), Url)
    assert str(folder_of("s3://bucket/run/") / "one") == "s3://bucket/run/one"
    assert repr(lockstep.Checkpoint("gs://bucket/run")).startswith("Checkpoint('gs://bucket/run'")
