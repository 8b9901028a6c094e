"""Columns: items that are dicts become items to train on, of the same kind of data."""

from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lockstep
from lockstep.data import columns
from lockstep.data.map_style.sources import as_source
from lockstep.errors import DataError, OptionError

ROWS: list[dict[str, Any]] = [
    {"x": [float(index), 1.0], "mask": np.array([1, index]), "label": index % 3, "w": 0.5 * index}
    for index in range(6)
]


class Rows(Dataset[Any]):
    def __init__(self, rows: Any = ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class AtOnce(Rows):
    """As Hugging Face's: many rows are quicker at once."""

    def __init__(self) -> None:
        super().__init__()
        self.column_names = list(ROWS[0])

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.rows[index] for index in indices]


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


@pytest.mark.parametrize("dataset", [Rows(), AtOnce(), Rows([UserDict(row) for row in ROWS])])
def test_map_style_datasets_are_read_by_index(dataset: Any) -> None:
    source = as_source(columns(dataset, inputs="x", targets="label", weight="w"))
    batch = source.read(torch.tensor([4, 1]), torch.float64)
    assert len(source) == 6
    assert batch.inputs.tolist() == [[4, 1], [1, 1]]
    assert batch.targets.tolist() == [1, 1]
    assert batch.sample_weight is not None
    assert batch.sample_weight.tolist() == [2, 0.5]


def test_several_names_are_keyword_arguments() -> None:
    source = as_source(columns(Rows(), inputs=("x", "mask"), targets=["label", "w"]))
    batch = source.read(torch.tensor([3]), torch.float32)
    assert {name: part.tolist() for name, part in batch.inputs.items()} == {
        "x": [[3, 1]],
        "mask": [[1, 3]],
    }
    assert batch.targets.keys() == {"label", "w"}


def test_one_name_in_a_list_is_a_dict_of_one() -> None:
    batch = as_source(columns(Rows(), inputs=["x"], targets="label")).read(
        torch.tensor([0]), torch.float32
    )
    assert batch.inputs.keys() == {"x"}


def make_trainer() -> lockstep.Trainer:
    torch.manual_seed(0)
    return lockstep.Trainer(
        nn.Linear(2, 3),
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        strategy=lockstep.MirroredStrategy(2),
    )


def test_all_kinds_of_data_train_alike() -> None:
    models = []
    by_index = columns(Rows(), inputs="x", targets="label")
    batches = DataLoader(Streamed(), batch_size=4)
    kinds: tuple[tuple[Any, dict[str, Any]], ...] = (
        (by_index, {"batch_size": 4, "shuffle": False}),
        (columns(Streamed(), inputs="x", targets="label"), {"batch_size": 4}),
        (by_index_batches(), {}),
        (batches_of_lists(batches), {}),
    )
    for data, options in kinds:
        trainer = make_trainer()
        trainer.fit(data, epochs=2, verbose=0, **options)
        models.append(list(trainer.model.parameters()))
    for model in models[1:]:
        assert all(map(torch.equal, models[0], model))


def by_index_batches() -> Any:
    loader = DataLoader(AtOnce(), batch_size=4, collate_fn=together)
    return columns(loader, inputs="x", targets="label")


def batches_of_lists(loader: Any) -> Any:
    loader.collate_fn = together
    return columns(loader, inputs="x", targets="label")


def together(rows: list[dict[str, Any]]) -> Any:
    """A batch as tokenizers give it: a mapping that is no dict, of lists."""
    return UserDict({name: [row[name] for row in rows] for name in ("x", "label")})


def test_inputs_alone_are_for_prediction() -> None:
    trainer = make_trainer()
    expected = trainer.predict(torch.tensor([row["x"] for row in ROWS]))
    for dataset in (Rows(), Streamed()):
        assert torch.equal(trainer.predict(columns(dataset, inputs="x")), expected)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no name": (lambda: columns(Rows(), inputs=()), OptionError, r"`inputs` must be.*Received: \("),
    "an empty name": (lambda: columns(Rows(), inputs=""), OptionError, "`inputs` must be"),
    "a number": (lambda: columns(Rows(), inputs="x", targets=3), OptionError, "`targets` must be"),  # type: ignore[arg-type]
    "two weights": (
        lambda: columns(Rows(), inputs="x", targets="label", weight=["w", "w"]),  # type: ignore[arg-type]
        OptionError,
        "`weight` must be the name of a column\\.",
    ),
    "weights without targets": (
        lambda: columns(Rows(), inputs="x", weight="w"),
        OptionError,
        "`weight` needs `targets`",
    ),
    "an unknown column": (
        lambda: columns(AtOnce(), inputs=("x", "y"), targets="lable"),
        OptionError,
        r"(?s)2 problems.*x, mask, label, w\. Received: 'y'.*Received: 'lable'",
    ),
    "splits": (
        lambda: columns({"train": Rows()}, inputs="x"),
        DataError,
        r"Received: dict\. Choose one of its splits",
    ),
    "no dataset": (lambda: columns(3, inputs="x"), DataError, "Received: int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_chosen_is_refused(name: str) -> None:
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make()


BAD_ROWS: dict[str, tuple[Any, str]] = {
    "no dict": ((1.0, 2), "items that are dicts.*a tuple"),
    "without the column": ({"y": 1, "label": 2}, "a column 'x'.*an item with 'y', 'label'"),
    "a text": ({"x": "text", "label": 2}, "Column 'x' must hold numbers.*a str.*tokenizer"),
    "rows of different lengths": ({"x": [[1], [1, 2]], "label": 2}, "'x' must hold numbers"),
    "nothing": ({"x": None, "label": 2}, "'x' must hold numbers.*NoneType"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_are_no_numbers_are_told(name: str) -> None:
    row, message = BAD_ROWS[name]
    source = as_source(columns(Rows([row]), inputs="x", targets="label"))
    with pytest.raises(DataError, match=message):
        source.read(torch.tensor([0]), torch.float32)
