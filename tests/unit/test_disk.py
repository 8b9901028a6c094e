"""A full disk or memory: the error says what was written where, how much, and what is free."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import data
from lockstep.callbacks import (
    BestWeights,
    CSVLogger,
    ModelCheckpoint,
    Profiler,
    TensorBoard,
    WandB,
)
from lockstep.callbacks.event_file import EventFile
from lockstep.capture.layers import capture_layers
from lockstep.checkpoint import weights
from lockstep.disk import writing
from lockstep.errors import DataError, DeviceError, OptionError
from lockstep.parallel.transfer import readers
from lockstep.train.batch_size_search import batch_size_cache
from tests.map_datasets import Rows

FULL = "/dev/full"  # whatever is written to it finds no room
X, Y = torch.randn(16, 4), torch.randn(16, 3)


def make(**options: Any) -> lockstep.Trainer:
    return lockstep.Trainer(
        nn.Linear(4, 3), loss=nn.MSELoss(), optimizer=torch.optim.SGD, **options
    )


def fit(trainer: lockstep.Trainer, source: Any = (X, Y)) -> None:
    trainer.fit(source, batch_size=4, verbose=0)


def best_in(path: Any) -> lockstep.Callback:
    return BestWeights("loss", filepath=path)


def wandb_in(folder: Any) -> lockstep.Callback:
    return WandB(folder=folder, mode="disabled")


@pytest.mark.parametrize(
    ("make_callback", "names"),
    [
        (ModelCheckpoint, ["file/x", "file/{epoch}/x", "folder"]),
        (best_in, ["file/x", "folder"]),
        (CSVLogger, ["file/x", "folder"]),
        (Profiler, ["file/x", "folder"]),
        (TensorBoard, ["file", "file/x"]),
        (wandb_in, ["file", "file/x"]),
    ],
    ids=["ModelCheckpoint", "BestWeights", "CSVLogger", "Profiler", "TensorBoard", "WandB"],
)
def test_a_callback_that_cannot_write_says_so_before_the_first_step(
    make_callback: Callable[..., lockstep.Callback], names: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name in names:
        callback = make_callback(tmp_path / name)
        trainer = make(callbacks=[callback])
        before = [parameter.clone() for parameter in trainer.model.parameters()]
        with pytest.raises(OptionError, match=r"a folder|Not a directory"):
            fit(trainer)
        assert all(map(torch.equal, trainer.model.parameters(), before))
    with pytest.raises(OptionError, match="on this machine"):
        make_callback("s3://bucket/x")


def no_space(*args: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_file_the_bytes_and_what_is_free_are_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space") as caught, writing(tmp_path / "x", 3 << 20):
        no_space()
    assert re.fullmatch(
        r"\[Errno 28\] No space left on device \(3\.0 MiB to write, .* free on its disk\): "
        rf"'{tmp_path}/x'",
        str(caught.value),
    )
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "x"))


def test_errors_that_name_a_file_and_others_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, writing(tmp_path / "x"):
        (tmp_path / "absent" / "y").write_text("")
    assert caught.value.filename == str(tmp_path / "absent" / "y")
    with pytest.raises(PermissionError) as denied, writing(tmp_path / "x", 1):
        raise PermissionError(errno.EPERM, "denied")
    assert str(denied.value) == f"[Errno 1] denied (1 B to write): '{tmp_path}/x'"
    with pytest.raises(OSError, match=r"^by hand$"), writing(tmp_path / "x"):
        raise OSError("by hand")


WRITES: dict[str, Callable[[], object]] = {
    "a Plan": lambda: make().plan.save(FULL),
    "a graph of layers": lambda: capture_layers(nn.Linear(4, 3)).save(FULL),
    "a CSV file": lambda: fit(make(callbacks=[CSVLogger(FULL)])),
    "a trace": lambda: fit(
        make(callbacks=[lockstep.callbacks.Profiler(FULL, first_step=1, num_steps=1)])
    ),
}


@pytest.mark.parametrize("what", WRITES)
def test_what_is_written_to_a_full_disk_is_named(what: str) -> None:
    with pytest.raises(
        OSError, match=r"No space left on device \(.*free on its disk\): '/dev/full'"
    ):
        WRITES[what]()


def test_weights_name_the_file_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "write_tensors", no_space)
    path = tmp_path / "w.safetensors"
    with pytest.raises(OSError, match=rf"\(60 B to write, .* free on its disk\): '{path}'"):
        make().save(path)
    assert not list(tmp_path.iterdir())


def test_tensorboards_file_is_named(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file._writer._writer.close()
    file._writer._writer = open(FULL, "wb")  # noqa: SIM115
    file.add_scalar("loss", 1.0, 1)
    with pytest.raises(OSError, match=rf"free on its disk\): '{tmp_path}/events\.out"):
        file.flush()
    with pytest.raises(OSError, match=rf"free on its disk\): '{tmp_path}/events\.out"):
        file.close()


def test_the_file_of_batch_sizes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "fchmod", no_space)
    found = batch_size_cache.BatchSizeCache(
        batch_size=1, seconds_per_step=1.0, peak_bytes=1, num_samples=None
    )
    with pytest.warns(UserWarning, match=r"\(.* B to write, .*batch_sizes.json'"):
        assert not batch_size_cache.remember("key", found)


def test_caches_say_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(X, Y)
    on_disk = data.cache(rows, tmp_path / "cache")
    in_memory = data.cache(rows)
    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(DataError, match=rf"{tmp_path}/cache .*device \(32 B to write, .* free on"):
        on_disk[1]
    with pytest.raises(DataError, match=r"The cache in memory .* left on device \(.* free "):
        in_memory[1]


def test_shared_memory_has_no_file_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    trainer = make(strategy=lockstep.MirroredStrategy(devices=2))
    with pytest.raises(DeviceError) as caught:
        fit(trainer)
    assert re.search(
        r"needs \d.* more of shared memory. Received: No space left on device, in this host's "
        r"memory \(a memfd, no file\); .* free ",
        str(caught.value),
    )
    monkeypatch.undo()
    monkeypatch.setattr(os, "memfd_create", no_space)
    with pytest.raises(DeviceError, match="No space left on device, in this host's memory"):
        fit(trainer)


def test_a_reader_process_says_where_it_puts_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(answer: Any) -> Any:
        if answer[2] is None:
            raise RuntimeError("unable to allocate shared memory: No space left on device (28)")
        return packed(answer)

    packed = readers._packed
    monkeypatch.setattr(readers, "_packed", full)
    with pytest.raises(RuntimeError, match="No space left on device") as caught:
        fit(make(), data.prefetch(Rows(X, Y), workers=1))
    assert "put their batches into /dev/shm: 112 B each, and " in caught.value.__notes__[0]
