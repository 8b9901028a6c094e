"""Memory maps: what is sent is their place in the file, and what arrives is the same array."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import lockstep
from lockstep.data.map_style.mapped_files import file_part
from lockstep.data.map_style.sources import as_source
from lockstep.parallel.transfer.serialization import SerializedObject, pack, unpack

ROWS = 4000  # more than a page, so that views begin in other pages


@pytest.fixture
def mapped(tmp_path: Path) -> "np.memmap[Any, Any]":
    np.save(tmp_path / "rows.npy", np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3))
    rows: np.memmap[Any, Any] = np.load(tmp_path / "rows.npy", mmap_mode="r")
    return rows


VIEWS: dict[str, Callable[[Any], Any]] = {
    "all": lambda rows: rows,
    "some rows": lambda rows: rows[1500:3700],
    "every third row": lambda rows: rows[5::3],
    "a column": lambda rows: rows[:, 1],
    "transposed": lambda rows: rows.T,
    "backwards": lambda rows: rows[::-2],
    "a view of a view": lambda rows: rows[1000:][2000:, :2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_arrive_as_they_are(name: str, mapped: Any) -> None:
    view = VIEWS[name](mapped)
    serialized = pack({"array": view})
    assert serialized.region is None
    assert len(serialized.payload) < 2000
    arrived = unpack(serialized.payload, None)["array"]
    assert np.array_equal(arrived, view)
    assert arrived.strides == view.strides
    assert not arrived.flags.writeable


def test_what_two_parts_share_arrives_as_one(mapped: Any) -> None:
    serialized = pack([mapped, mapped])
    first, second = unpack(serialized.payload, None)
    assert first is second


def test_raw_maps_of_a_part_of_a_file_and_records_arrive(tmp_path: Path) -> None:
    kind = np.dtype([("x", "<f4", 3), ("label", "<i2")])
    written = np.memmap(tmp_path / "records.bin", kind, "w+", offset=100, shape=(50,))
    written["label"] = np.arange(50)
    arrived = unpack(pack(written).payload, None)
    assert arrived["label"].tolist() == list(range(50))
    written["label"][3] = 77  # the file is one for all
    assert arrived["label"][3] == 77


def test_a_source_of_mapped_arrays_is_sent_by_its_place(mapped: Any) -> None:
    source = as_source((mapped, mapped[:, 0], mapped[:, 1]))
    serialized = pack(source)
    assert serialized.region is None
    arrived = unpack(serialized.payload, None)
    indices = torch.tensor([3999, 0, 1234])
    batch, expected = (one.read(indices, torch.float64) for one in (arrived, source))
    assert torch.equal(batch.inputs, expected.inputs)
    assert torch.equal(batch.targets, expected.targets)
    assert batch.sample_weight is not None
    assert batch.sample_weight.tolist() == expected.inputs[:, 1].tolist()


class Rows(Dataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = np.array(self.rows[index])
        return row, row[:1]


def test_a_dataset_of_the_users_keeps_its_map(mapped: Any) -> None:
    serialized = pack(as_source(Rows(mapped)))
    assert serialized.region is None
    batch = unpack(serialized.payload, None).read(torch.tensor([7]), torch.float32)
    assert batch.targets.item() == 21


def copied_on_write(mapped: Any) -> Any:
    rows = np.load(mapped.filename, mmap_mode="c")
    rows[:] += 1  # in this process alone
    return rows


def without_its_file(mapped: Any) -> Any:
    Path(mapped.filename).unlink()
    return mapped


def of_another_size(mapped: Any) -> Any:
    rows = np.array(mapped)
    Path(mapped.filename).unlink()
    np.save(mapped.filename, rows[:10])
    return mapped


NOT_IN_A_FILE: dict[str, Callable[[Any], Any]] = {
    "copied on write": copied_on_write,
    "without its file": without_its_file,
    "in a file of another size": of_another_size,
    "computed": lambda mapped: mapped + 1,
    "copied": lambda mapped: mapped.copy(),
    "no array": lambda mapped: 3,
}


@pytest.mark.parametrize("name", NOT_IN_A_FILE)
def test_what_is_not_in_the_file_is_sent_as_it_is(name: str, mapped: Any) -> None:
    value = NOT_IN_A_FILE[name](mapped)
    assert file_part(value) is None
    serialized: SerializedObject = pack([value])
    (arrived,) = unpack(serialized.payload, serialized.region)
    assert np.array_equal(arrived, value)


def test_arrays_that_torch_cannot_map_are_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "swapped.npy", np.arange(10, dtype=">i4"))
    source: Any = as_source((np.load(tmp_path / "swapped.npy", mmap_mode="r"), np.arange(10)))
    assert file_part(source.inputs) is None
    assert source.inputs.tolist() == list(range(10))


@pytest.mark.thorough
def test_helpers_map_the_file_and_take_no_shared_memory_for_it(tmp_path: Path) -> None:
    """The file is sparse, and larger than the memory of most machines."""
    rows = np.memmap(tmp_path / "large.bin", np.float32, "w+", shape=(1 << 21, 1 << 16))
    rows[:8, :100] = 1
    trainer = lockstep.Trainer(
        torch.nn.Linear(1 << 16, 1),
        loss=torch.nn.MSELoss(),
        optimizer=torch.optim.SGD,
        strategy=lockstep.MirroredStrategy(2),
    )
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.fit((rows, rows[:, :1]), batch_size=4, steps_per_epoch=2, shuffle=False, verbose=0)
    after = trainer.model.parameters()
    assert not any(map(torch.equal, before, after))
    assert trainer.predict(rows[:8]).shape == (8, 1)
