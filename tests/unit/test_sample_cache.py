"""The cache: a sample comes back as it was, is read once, and bad files and samples are refused."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from lockstep.cluster.memory_limits import FreeMemory
from lockstep.data import cache, prefetch
from lockstep.data.records import record_file, sample_cache
from lockstep.data.records.sample_records import num_bytes, pack_item, unpack_item
from lockstep.errors import DataError, OptionError
from tests.faults.processes import wait_until
from tests.map_datasets import AsRead, Listed, Noisy, Rows, reads_in

INPUTS = torch.arange(24.0).reshape(8, 3)
TARGETS = torch.arange(8)

SAMPLES: dict[str, Any] = {
    "tensors": (torch.rand(2, 3), torch.tensor(4)),
    "float64": torch.rand(3, dtype=torch.float64),
    "bfloat16": torch.rand(3).bfloat16(),
    "complex": torch.rand(3, dtype=torch.complex64).conj(),
    "bool": torch.tensor([True, False]),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "empty": (torch.empty(0, 3), torch.tensor(1.5)),
    "transposed": torch.rand(2, 3).T,
    "with a gradient": torch.rand(3, requires_grad=True),
    "arrays": [np.arange(6.0).reshape(2, 3), np.arange(3, dtype=">i2"), np.zeros((0, 2))],
    "columns first": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "dates and texts": (np.array(["2026-01-01"], "M8[D]"), np.array(["ab", "c"])),
    "scalars": (np.float32(1.5), np.int64(-3), np.bool_(True)),
    "numbers": (1, -2.5, True, float("inf")),
    "dict": {"ids": torch.arange(3), "more": {"mask": [np.ones(2), 1]}},
    "nothing": (),
}


class Pair(NamedTuple):
    one: int
    two: int


def rows(**options: Any) -> Rows:
    return Rows(INPUTS, TARGETS, **options)


def every(cached: Any) -> list[Any]:
    """All samples, by the protocol of iteration over what has ``__getitem__``."""
    return list(cached)


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, tuple | list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_equal(list(one.values()), list(other.values()))
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
        assert np.array_equal(one, other)


# --- records ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_comes_back_as_it_was(name: str) -> None:
    layout, record = pack_item(SAMPLES[name])
    assert len(record) == num_bytes(layout)
    assert_equal(unpack_item(layout, bytearray(record)), SAMPLES[name])


@pytest.mark.parametrize("name", SAMPLES)
def test_a_file_keeps_samples_of_every_kind(name: str, tmp_path: Path) -> None:
    for _ in range(2):
        cached = cache(Listed([SAMPLES[name]] * 2), tmp_path / "cached")
        assert_equal([cached[0], cached[1]], [SAMPLES[name]] * 2)


BAD_SAMPLES: dict[str, tuple[Any, str]] = {
    "text": ((torch.ones(2), "cat"), "a str in it"),
    "None": (None, "a NoneType in it"),
    "named tuple": (Pair(1, 2), "a Pair in it"),
    "keys": ({1: torch.ones(2)}, "a dict in it"),
    "objects": (np.array([None]), "a ndarray of type object in it"),
    "records": (np.zeros(2, [("x", "f4")]), "ndarray of type"),
    "parameter": (torch.nn.Parameter(torch.ones(2)), "a Parameter of layout"),
    "sparse": (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
    "meta": (torch.ones(2, device="meta"), "on meta in it"),
    "large": (1 << 70, "of more than 64 bits"),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_sample_that_cannot_be_kept(name: str) -> None:
    sample, received = BAD_SAMPLES[name]
    with pytest.raises(DataError, match=received):
        cache(Listed([sample]))


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
def test_every_sample_is_read_once(on_disk: bool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    cached = cache(rows(log=log), tmp_path / "cached" if on_disk else None)
    assert (len(cached), cached.num_cached) == (8, 1)
    for _ in range(3):
        assert [int(cached[index][1]) for index in (3, -1, 0)] == [3, 7, 0]
    items = cached.__getitems__([6, 3, 6, 1])
    assert [int(target) for _, target in items] == [6, 3, 6, 1]
    assert cached.num_cached == 5
    assert reads_in(log) == {0: 1, 1: 1, 3: 1, 6: 1, 7: 1}


def test_a_dataset_that_reads_many_at_once_is_asked_for_what_is_missing_at_once() -> None:
    asked = []

    class Many(Listed):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(indices)
            return [self.items[index] for index in indices]

    cached = cache(Many([float(index) for index in range(6)]))
    assert cached.__getitems__([2, 0, 4]) == [2.0, 0.0, 4.0]
    assert cached.__getitems__([4, 5]) == [4.0, 5.0]
    assert asked == [[0], [2, 4], [5]]


def test_a_change_in_place_is_nobody_elses() -> None:
    cached = cache(rows())
    for _ in range(2):
        first, again = cached.__getitems__([2, 2])
        assert torch.equal(first[0], INPUTS[2])
        first[0].zero_()
        assert torch.equal(again[0], INPUTS[2])


def test_memory_is_taken_when_it_is_used() -> None:
    cached = cache(Listed([torch.ones(1 << 18)] * 64))
    descriptor = cached._records._descriptor
    assert os.fstat(descriptor).st_size >= 64 << 20
    taken = [os.fstat(descriptor).st_blocks * 512]
    _ = cached[1], cached[2]
    taken.append(os.fstat(descriptor).st_blocks * 512)
    assert taken[0] < 2 << 20
    assert taken[1] - taken[0] == 2 << 20


def test_iteration_and_bad_indices() -> None:
    cached = cache(rows())
    assert [int(target) for _, target in every(cached)] == list(range(8))
    for index in (8, -9):
        with pytest.raises(IndexError, match=f"index {index} of 8 samples"):
            _ = cached[index]


def test_an_empty_dataset() -> None:
    cached = cache(Listed([]))
    assert (len(cached), cached.num_cached, every(cached)) == (0, 0, [])
    assert len(pickle.loads(pickle.dumps(cached))) == 0


def test_the_users_exception_comes_out_with_the_sample() -> None:
    with pytest.raises(DataError, match=r"Sample 3 of the dataset.*as asked") as caught:
        _ = cache(rows(bad=3))[3]
    assert isinstance(caught.value.__cause__, AsRead)


def test_samples_unlike_the_first_are_refused() -> None:
    cached = cache(Listed([torch.ones(2), torch.ones(3)]))
    with pytest.raises(DataError, match=r"float32 \(2,\).*sample 1: tensor float32 \(3,\)"):
        _ = cached[1]
    assert cached.num_cached == 1


def test_a_dataset_that_draws_is_refused() -> None:
    with pytest.raises(DataError, match="sample 0, which draws random numbers"):
        cache(Noisy(INPUTS, TARGETS))


# --- other processes ----------------------------------------------------------------------------


def test_copies_share_the_memory(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cached = cache(rows(log=log))
    for other in (pickle.loads(pickle.dumps(cached)), copy.deepcopy(cached)):
        assert torch.equal(other[4][0], INPUTS[4])
    assert cached.num_cached == 2
    assert reads_in(log) == {0: 1, 4: 1}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_of_a_data_loader_share_the_memory(num_workers: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    cached = cache(rows(log=log))
    for _ in range(2):
        loader = DataLoader(cached, batch_size=3, num_workers=num_workers)
        assert torch.equal(torch.cat([inputs for inputs, _ in loader]), INPUTS)
    assert all(times == 1 for times in reads_in(log).values())


def test_a_cache_in_memory_ends_with_its_maker() -> None:
    cached = cache(rows())
    pickled = pickle.dumps(cached)
    del cached
    with pytest.raises(DataError, match="exists only in the process that made it"):
        pickle.loads(pickled)


class Held(Rows):
    """Rows of which each but the first waits for a byte in a pipe."""

    def __init__(self, hold: int, log: Path) -> None:
        super().__init__(INPUTS, TARGETS, log=log)
        self.hold = hold

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index:
            os.read(self.hold, 1)
        return super().__getitem__(index)


def test_who_comes_second_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_cache, "_PATIENCE_SECONDS", 60)
    log = tmp_path / "log"
    hold, free = os.pipe()
    cached = cache(Held(hold, log))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if torch.equal(cached[5][0], INPUTS[5]) else 1)
    wait_until(lambda: not claimable(cached, 5), 30)
    threading.Timer(0.3, os.write, (free, b"x")).start()
    assert torch.equal(cached[5][0], INPUTS[5])
    assert os.waitpid(pid, 0)[1] == 0
    os.close(hold)
    os.close(free)
    assert reads_in(log) == {0: 1, 5: 1}


def test_a_sample_that_is_stored_just_before_the_claim_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    cached = cache(Rows(INPUTS, TARGETS, log=log))
    records, claims = cached._records, iter([False, True])

    def claim(place: int) -> bool:
        """As if another process had the sample, and stored it before the second claim."""
        is_free = next(claims)
        if is_free:
            records.store(place, pack_item((INPUTS[place], TARGETS[place]))[1])
        return is_free

    monkeypatch.setattr(records, "claim", claim)
    assert torch.equal(cached[5][0], INPUTS[5])
    assert reads_in(log) == {0: 1}


def claimable(cached: sample_cache.Cache, place: int) -> bool:
    is_free = cached._records.claim(place)
    if is_free:
        cached._records.release(place)
    return is_free


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_who_waits_in_vain_reads_itself(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_cache, "_PATIENCE_SECONDS", 0.3)
    dataset = rows(seconds=60)
    dataset.seconds = 0
    cached = cache(dataset)
    dataset.seconds = 60
    pid = os.fork()
    if pid == 0:
        _ = cached[5]
        os._exit(1)
    try:
        wait_until(lambda: not claimable(cached, 5), 30)
        os.kill(pid, number)
        dataset.seconds = 0
        began = time.monotonic()
        assert torch.equal(cached[5][0], INPUTS[5])
        assert time.monotonic() - began < 30  # half of what the other would have taken
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_threads_that_read_the_same() -> None:
    cached = cache(rows(seconds=0.001))
    seen: list[Any] = []
    threads = [
        threading.Thread(target=lambda: seen.append(cached.__getitems__(range(8))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4
    for items in seen:
        assert torch.equal(torch.stack([inputs for inputs, _ in items]), INPUTS)


# --- files --------------------------------------------------------------------------------------


def test_a_later_run_finds_the_file_filled(tmp_path: Path) -> None:
    path = tmp_path / "cached"
    first = cache(rows(), path)
    first.__getitems__(range(8))
    log = tmp_path / "log"
    second = cache(rows(log=log), str(path))
    assert second.num_cached == 8
    assert torch.equal(torch.stack([inputs for inputs, _ in every(second)]), INPUTS)
    assert reads_in(log) == {0: 1}  # to see that the file is of this dataset
    assert set(os.listdir(tmp_path)) == {
        "cached",
        "log",
    }


FILL = """
import sys, torch
from lockstep.data import cache
from tests.map_datasets import Rows
cached = cache(Rows(torch.arange(3000.0).reshape(1000, 3), torch.arange(1000)), sys.argv[1])
print("ready", flush=True)
for index in range(1000):
    cached[index]
print(torch.equal(torch.stack([x for x, _ in cached]).flatten(), torch.arange(3000.0)))
"""


def start_filling(path: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", FILL, str(path)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.exhaustive
def test_processes_make_and_fill_one_file(tmp_path: Path) -> None:
    started = [start_filling(tmp_path / "cached") for _ in range(2)]
    for process in started:
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "ready\nTrue\n")
    assert os.listdir(tmp_path) == ["cached"]


@pytest.mark.thorough
def test_a_process_that_is_killed_leaves_nothing_wrong(tmp_path: Path) -> None:
    path = tmp_path / "cached"
    process = start_filling(path)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.005)
    process.kill()
    process.communicate()
    again = start_filling(path)
    assert again.communicate(timeout=60)[0] == "ready\nTrue\n"


def test_a_record_without_its_flag_is_not_there(tmp_path: Path) -> None:
    path, log = tmp_path / "cached", tmp_path / "log"
    cached = cache(rows(), path)
    records = cached._records
    records._write(b"\xff" * num_bytes(records.header.layout), records._place(5))
    again = cache(rows(log=log), path)
    assert torch.equal(again[5][0], INPUTS[5])
    assert reads_in(log) == {0: 1, 5: 1}


def broken(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def make(path: Path) -> object:
        cache(rows(), path)
        path.write_bytes(change(path.read_bytes()))
        return cache(rows(), path)

    return make


def made_of(dataset: Any) -> Callable[[Path], object]:
    def make(path: Path) -> object:
        cache(dataset, path)
        return cache(rows(), path)

    return make


def cut(path: Path) -> object:
    cached = cache(rows(), path)
    os.truncate(path, 4096 * 2 + 10)
    return cached[0]


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another kind": (broken(lambda data: b"x" + data), "a file of another kind"),
    "short": (broken(lambda data: data[:5]), "a file of 5 bytes"),
    "header": (broken(lambda data: data.replace(b'"layout":{', b'"layout":[')), "cannot be read"),
    "type": (broken(lambda data: data.replace(b"float32", b"compile")), "compile is no dtype"),
    "version": (broken(lambda data: data.replace(b'"version":2', b'"version":9')), "version 9"),
    "cut": (cut, "no record 0"),
    "length": (made_of(Subset(rows(), range(7))), "a cache of 7 samples"),
    "layout": (made_of(Rows(INPUTS.double(), TARGETS)), r"each \(tensor float64 \(3,\)"),
    "content": (made_of(Rows(INPUTS + 1, TARGETS)), "a first sample that is not the dataset's"),
    "folder": (lambda path: cache(rows(), path / "no" / "folder"), "FileNotFoundError"),
    "a folder": (lambda path: cache(rows(), path.parent), "IsADirectoryError"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_used(name: str, tmp_path: Path) -> None:
    act, received = BAD_FILES[name]
    with pytest.raises(DataError, match=received):
        act(tmp_path / "cached")
    assert not list(tmp_path.glob(".cached*"))


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "free_memory", lambda: FreeMemory(1 << 20, "on this host"))
    with pytest.raises(DataError, match=r"takes 8.0 MiB. Received: 1.0 MiB free on this host"):
        cache(Listed([torch.ones(1 << 18)] * 8))


def test_too_small_a_disk(tmp_path: Path) -> None:
    class Huge(Listed):
        def __len__(self) -> int:
            return 1 << 30

    with pytest.raises(DataError, match=r"will grow by 1024.0 TiB. Received: .* free on its disk"):
        cache(Huge([torch.ones(1 << 18)]), tmp_path / "cached")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = cache(rows(), tmp_path / "cached")

    def refuse(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(DataError, match="No space left on device"):
        _ = cached[3]
    assert cached.num_cached == 1


BAD_ARGUMENTS: dict[str, tuple[Callable[[], object], str]] = {
    "arrays": (lambda: cache((INPUTS, TARGETS)), "received: tuple. Arrays are in memory"),
    "loader": (lambda: cache(DataLoader(rows())), "Received: DataLoader. Wrap its dataset"),
    "iterator": (lambda: cache(iter([1])), "Received: list_iterator"),
    "class": (lambda: cache(TensorDataset), "Received: type"),
    "prefetch": (lambda: cache(prefetch(rows())), r"Swap them: prefetch\(cache"),
    "path": (lambda: cache(rows(), 3), "`path` must be the path.*Received: 3"),  # type: ignore[arg-type]
    "both": (lambda: cache([1], 3), "(?s)2 problems.*list.*path"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_arguments_that_cannot_be(name: str) -> None:
    act, message = BAD_ARGUMENTS[name]
    with pytest.raises(OptionError, match=f"(?i){message}" if "(?s)" not in message else message):
        act()
