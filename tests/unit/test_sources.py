"""Sources: what counts as data, what is read from it, and what is refused with a way out."""

from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
)

from lockstep.data.iterable.streams import as_stream
from lockstep.data.map_style.sources import Batch, Source, as_input_source, as_source
from lockstep.data.trees import tensors_of
from lockstep.errors import DataError
from lockstep.parallel.data_parallel.forward import call_model

INDICES = torch.tensor([4, 0, 4, 2])
FLOATS = np.arange(15, dtype=np.float64).reshape(5, 3) / 4
LABELS = np.arange(5)


def read(data: Any, dtype: torch.dtype = torch.float32) -> Batch:
    return as_source(data).read(INDICES, dtype)


def items(values: list[Any], *, at_once: bool = False) -> Dataset[Any]:
    """A map-style dataset of these items, one by one or also many at once."""

    class Items(Dataset[Any]):
        def __len__(self) -> int:
            return len(values)

        def __getitem__(self, index: int) -> Any:
            assert not at_once
            return values[index]

    class ManyItems(Items):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            assert all(type(index) is int for index in indices)
            return [values[index] for index in indices]

    return ManyItems() if at_once else Items()


class Sample(NamedTuple):
    image: Tensor
    label: int


class Table:
    """As a pandas DataFrame: an array whose ``[...]`` takes column names."""

    def __init__(self, rows: np.ndarray[Any, Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> Any:
        raise KeyError(column)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self.rows


# --- arrays -----------------------------------------------------------------------------------


def test_rows_are_read_in_the_order_of_the_indices() -> None:
    batch = read((FLOATS, LABELS))
    assert torch.equal(batch.inputs, torch.from_numpy(FLOATS)[INDICES].float())
    assert batch.targets.tolist() == INDICES.tolist()
    assert batch.sample_weight is None
    assert batch.num_samples == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("given", [np.float16, np.float32, np.float64])
def test_floating_numbers_come_in_the_type_of_the_run(given: Any, dtype: torch.dtype) -> None:
    batch = read((FLOATS.astype(given), LABELS, FLOATS[:, 0].astype(given)), dtype)
    assert batch.sample_weight is not None
    assert (batch.inputs.dtype, batch.sample_weight.dtype) == (dtype, dtype)
    assert batch.targets.dtype == torch.int64


@pytest.mark.parametrize(
    "kind", ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_whole_numbers_keep_their_type(kind: str) -> None:
    batch = read((np.ones((5, 2), kind), np.arange(5).astype(kind)))
    wanted = getattr(torch, kind)
    assert (batch.inputs.dtype, batch.targets.dtype) == (wanted, wanted)
    assert batch.targets.long().tolist() == np.arange(5).astype(kind)[INDICES].astype(int).tolist()


@pytest.mark.parametrize("given", [np.int64, np.bool_, np.float16])
def test_weights_are_floating_numbers_whatever_they_were(given: Any) -> None:
    weight = read((FLOATS, LABELS, np.array([1, 0, 1, 1, 0]).astype(given))).sample_weight
    assert weight is not None
    assert weight.dtype == torch.float32
    assert weight.tolist() == [0, 1, 0, 1]


ODD_ARRAYS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "reversed": lambda: FLOATS[::-1],
    "every second row": lambda: np.repeat(FLOATS, 2, axis=0)[::2],
    "columns first": lambda: np.asfortranarray(FLOATS),
    "from another machine": lambda: FLOATS.astype(">f8"),
    "a field of records": lambda: np.zeros(5, [("x", "f8", 3), ("y", "u1")])["x"],
    "broadcast": lambda: np.broadcast_to(FLOATS[:1], (5, 3)),
}


@pytest.mark.parametrize("name", ODD_ARRAYS)
def test_arrays_in_any_layout_are_read(name: str) -> None:
    array = ODD_ARRAYS[name]()
    batch = read((array, LABELS), torch.float64)
    assert batch.inputs.tolist() == array[INDICES.numpy()].tolist()


def test_read_only_arrays_and_memory_maps_are_read(tmp_path: Path) -> None:
    frozen = FLOATS.copy()
    frozen.setflags(write=False)
    np.save(tmp_path / "labels.npy", LABELS)
    batch = read((frozen, np.load(tmp_path / "labels.npy", mmap_mode="r")), torch.float64)
    assert batch.inputs.tolist() == FLOATS[INDICES.numpy()].tolist()
    assert batch.targets.tolist() == INDICES.tolist()


def test_lists_and_tables_are_arrays() -> None:
    batch = read((Table(FLOATS), LABELS.tolist()))
    assert batch.inputs.tolist() == FLOATS[INDICES.numpy()].tolist()
    assert batch.targets.tolist() == INDICES.tolist()


def test_tuples_are_positional_and_dicts_keyword_arguments() -> None:
    batch = read(((FLOATS, LABELS), LABELS))
    assert isinstance(batch.inputs, tuple)
    assert [part.shape for part in batch.inputs] == [(4, 3), (4,)]
    batch = read(({"tokens": LABELS, "mask": FLOATS}, (LABELS, FLOATS)))
    assert {key: tuple(part.shape) for key, part in batch.inputs.items()} == {
        "tokens": (4,),
        "mask": (4, 3),
    }
    assert isinstance(batch.targets, tuple)


def test_data_that_needs_a_gradient_gives_batches_that_need_none() -> None:
    assert not read((torch.ones(5, 2, requires_grad=True), LABELS)).inputs.requires_grad


@pytest.mark.parametrize("make", [tuple, list])
def test_inputs_targets_and_weights_may_come_as_tuple_or_list(make: Any) -> None:
    assert read(make([FLOATS, LABELS])).sample_weight is None
    assert read(make([FLOATS, LABELS, None])).sample_weight is None
    assert read(make([FLOATS, LABELS, np.ones(5)])).sample_weight is not None


MAKE_SOURCES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "arrays": lambda inputs, targets, weight: (inputs, targets, weight),
    "a TensorDataset": TensorDataset,
    "a dataset": lambda *parts: items(list(zip(*parts, strict=True))),
}


@pytest.mark.parametrize("indices", [[2], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("name", MAKE_SOURCES)
def test_what_is_read_is_a_copy(name: str, indices: list[int]) -> None:
    parts = torch.ones(5, 2), torch.ones(5), torch.ones(5)
    source = as_source(MAKE_SOURCES[name](*parts))
    batch = source.read(torch.tensor(indices), torch.float32)
    for tensor in tensors_of((batch.inputs, batch.targets, batch.sample_weight)):
        tensor.zero_()
    assert all(bool(part.all()) for part in parts)


def test_a_source_is_a_source_of_itself() -> None:
    source = as_source((FLOATS, LABELS))
    assert as_source(source) is as_input_source(source) is source


# --- datasets ---------------------------------------------------------------------------------

ROWS: dict[str, Callable[[int], Any]] = {
    "tuples": lambda index: (torch.full((2,), float(index)), index),
    "lists": lambda index: [np.full(2, float(index)), np.int64(index)],
    "named tuples": lambda index: Sample(torch.full((2,), float(index)), index),
}


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_datasets_give_their_items_as_batches(name: str, at_once: bool) -> None:
    source = as_source(items([ROWS[name](index) for index in range(5)], at_once=at_once))
    batch = source.read(INDICES, torch.float64)
    assert len(source) == 5
    assert batch.inputs.dtype == torch.float64
    assert batch.inputs.tolist() == [[index, index] for index in INDICES.tolist()]
    assert batch.targets.tolist() == INDICES.tolist()
    assert batch.num_samples == 4


def test_torchs_own_datasets_compose() -> None:
    tensors = TensorDataset(torch.from_numpy(FLOATS), torch.from_numpy(LABELS))
    joined: ConcatDataset[Any] = ConcatDataset(
        [Subset(tensors, [3, 4]), Subset(tensors, [0, 1, 2])]
    )
    batch = as_source(joined).read(torch.tensor([0, 4]), torch.float32)
    assert batch.targets.tolist() == [3, 2]


def test_anything_with_items_and_a_length_is_a_dataset() -> None:
    class Squares:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> tuple[float, int]:
            return float(index), index**2

    assert read(Squares()).targets.tolist() == [16, 0, 16, 4]


def test_an_item_with_a_tuple_of_inputs_gives_positional_arguments() -> None:
    batch = read(items([((1.0, index), index) for index in range(5)]))
    assert isinstance(batch.inputs, tuple)
    assert [part.tolist() for part in batch.inputs] == [[1.0] * 4, INDICES.tolist()]


def test_an_item_with_a_dict_of_inputs_gives_keyword_arguments() -> None:
    batch = read(items([({"x": 1.0}, index) for index in range(5)]))
    assert batch.inputs["x"].tolist() == [1.0] * 4


ALONE: dict[str, Any] = {
    "a dict": {"x": FLOATS, "y": LABELS},
    "a tuple of a dict": ({"x": FLOATS, "y": LABELS},),
    "another mapping": UserDict({"x": FLOATS, "y": LABELS}),
    "dicts": items([{"x": FLOATS[index], "y": index} for index in range(5)]),
    "other mappings": items([UserDict({"x": FLOATS[index], "y": index}) for index in range(5)]),
    "tuples of a dict": items([({"x": FLOATS[index], "y": index},) for index in range(5)]),
}


@pytest.mark.parametrize("name", ALONE)
def test_inputs_without_targets_are_keyword_arguments(name: str) -> None:
    batch = read(ALONE[name])
    assert type(batch.inputs) is dict
    assert batch.inputs["x"].tolist() == FLOATS[INDICES.numpy()].tolist()
    assert batch.inputs["y"].tolist() == INDICES.tolist()
    assert batch.targets is None
    assert batch.sample_weight is None


def rows_with(kind: Callable[[dict[str, Any]], Any]) -> list[Any]:
    return [(kind({"x": row}), label) for row, label in zip(FLOATS, LABELS, strict=True)]


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_inputs_in_a_mapping_are_keyword_arguments_beside_targets_and_alone(kind: Any) -> None:
    """A ``UserDict`` is what tokenizers and their collators make."""
    stream = as_stream(DataLoader(items(rows_with(kind)), 5), name="data", batch_size=5)
    assert stream is not None
    picked = [
        read((kind({"x": FLOATS}), LABELS)),
        read(items(rows_with(kind))),
        as_input_source(kind({"x": FLOATS})).read(INDICES, torch.float32),
        as_input_source(items([one for one, _ in rows_with(kind)])).read(INDICES, torch.float32),
        stream.batch(next(stream.begin())).read(INDICES, torch.float32),
    ]
    for batch in picked:
        given = call_model(lambda x: x, batch.inputs)
        assert given.tolist() == FLOATS[INDICES.numpy()].tolist()
    assert [batch.targets is None for batch in picked] == [False, False, True, True, False]


@pytest.mark.parametrize("data", [(FLOATS,), items([(row,) for row in FLOATS])])
def test_one_input_without_targets_is_the_one_argument(data: Any) -> None:
    batch = read(data)
    assert batch.inputs.tolist() == FLOATS[INDICES.numpy()].tolist()
    assert batch.targets is None


def test_texts_stay_one_argument() -> None:
    batch = read(items([("some text", index) for index in range(5)]))
    assert list(batch.inputs) == ["some text"] * 4
    batch = as_input_source(items(["a", "b"])).read(torch.tensor([1, 0]), torch.float32)
    assert list(batch.inputs) == ["b", "a"]


def test_a_datasets_third_part_is_the_weight() -> None:
    weight = read(items([(1.0, 2, index) for index in range(5)])).sample_weight
    assert weight is not None
    assert (weight.dtype, weight.tolist()) == (torch.float32, [4, 0, 4, 2])


BAD_ITEMS: dict[str, tuple[Any, str]] = {
    "no tuple": (1.0, r"\(input, target\).*Received: float"),
    "one part in a list": ([1.0], "list of"),
    "four parts": ((1.0, 2, 3, 4), "float, int, int, int"),
    "a weight with dims": (
        (1.0, 2, torch.ones(1)),
        r"one number per sample.*\(4, 1\).*with the inputs",
    ),
    "a weight in a dict": ((1.0, 2, {"weight": 1.0}), "one number per sample.*dict"),
    "a negative weight": ((1.0, 2, -1.0), "not negative"),
    "a weight that is no number": ((1.0, 2, float("nan")), "finite"),
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_items_of_another_form_are_refused(name: str) -> None:
    item, message = BAD_ITEMS[name]
    with pytest.raises(DataError, match=f"(?s){message}"):
        read(items([item] * 5))


# --- what is no training data -----------------------------------------------------------------


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(int, 1)


TENSORS = TensorDataset(torch.ones(5, 2), torch.ones(5))

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a DataLoader": (
        lambda: DataLoader(TENSORS, batch_size=2),
        "DataLoader.*Pass a DataLoader's dataset, and its batch size as batch_size",
    ),
    "an iterable dataset": (Endless, "map-style Dataset.*Endless"),
    "an iterator": (lambda: iter([]), "map-style Dataset.*list_iterator"),
    "a lone array": (lambda: FLOATS, "Received: ndarray"),
    "a dict of a number": (lambda: {"x": FLOATS, "y": 3}, "Received: int"),
    "a dict of other lengths": (
        lambda: {"x": FLOATS, "y": LABELS[:4]},
        r"inputs\['x'\] 5, inputs\['y'\] 4",
    ),
    "None": (lambda: None, "NoneType"),
    "inputs alone in a list": (lambda: [FLOATS], r"list of \(ndarray\)"),
    "nothing in a tuple": (lambda: (None,), "NoneType"),
    "four parts": (lambda: (FLOATS, LABELS, LABELS, LABELS), "tuple of"),
    "no targets": (lambda: (FLOATS, None), "NoneType"),
    "text": (lambda: ("a.csv", "b.csv"), r"tuple of \(str, str\)"),
    "words": (lambda: (np.array(["a", "b"]), [0, 1]), "holds texts.*'a', 'b'"),
    "rows of different lengths": (lambda: ([[1.0], [1.0, 2.0]], [0, 1]), "must form an array"),
    "objects": (lambda: (np.array([None, {}]), [0, 1]), "cannot read.*object"),
    "a scalar": (lambda: (FLOATS, np.array(3)), "targets of `train` must have one row per sample"),
    "a number": (lambda: (FLOATS, 3), "Received: int"),
    "other lengths": (lambda: (FLOATS, LABELS[:4]), "inputs 5, targets 4"),
    "other lengths inside": (
        lambda: ({"a": FLOATS, "b": (FLOATS, LABELS[:2])}, LABELS),
        r"inputs\['a'\] 5, inputs\['b'\]\[0\] 5, inputs\['b'\]\[1\] 2, targets 5",
    ),
    "too few weights": (lambda: (FLOATS, LABELS, np.ones(3)), "sample_weight 3"),
    "negative weights": (
        lambda: (FLOATS, LABELS, np.array([1, 1, -1, 1, 2])),
        "not negative.*values from -1 to 2",
    ),
    "weights that are no numbers": (lambda: (FLOATS, LABELS, FLOATS[:, 0] / 0), "finite"),
    "infinite weights": (lambda: (FLOATS, LABELS, LABELS / np.array(0.0)), "finite"),
    "weights with dims": (lambda: (FLOATS, LABELS, np.ones((5, 1))), r"shape \(5, 1\)"),
    "weights in a dict": (lambda: (FLOATS, LABELS, {"w": np.ones(5)}), "Received: dict"),
}


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_on_is_refused_with_a_reason(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(DataError, match=f"(?s){message}"):
        as_source(make(), name="train")


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(DataError, match=r"(?s)2 problems.*targets 4.*not negative"):
        as_source((FLOATS, LABELS[:4], -np.ones(5)))


# --- inputs of predict ------------------------------------------------------------------------

INPUTS: dict[str, Callable[[], Any]] = {
    "an array": lambda: FLOATS,
    "a list": FLOATS.tolist,
    "a table": lambda: Table(FLOATS),
    "a tensor": lambda: torch.from_numpy(FLOATS),
    "a TensorDataset of inputs": lambda: TensorDataset(torch.from_numpy(FLOATS)),
    "a dataset of inputs": lambda: items(list(torch.from_numpy(FLOATS))),
    "a dataset with targets": lambda: items([(row, 1) for row in torch.from_numpy(FLOATS)]),
    "a dataset with weights": lambda: items([(row, 1, 2.0) for row in torch.from_numpy(FLOATS)]),
}


@pytest.mark.parametrize("name", INPUTS)
def test_predict_takes_inputs_in_every_form(name: str) -> None:
    source = as_input_source(INPUTS[name]())
    batch = source.read(INDICES, torch.float64)
    assert len(source) == 5
    assert torch.equal(batch.inputs, torch.from_numpy(FLOATS)[INDICES])


def test_predict_takes_several_inputs() -> None:
    batch = as_input_source((FLOATS, LABELS)).read(INDICES, torch.float32)
    assert [tuple(part.shape) for part in batch.inputs] == [(4, 3), (4,)]
    batch = as_input_source({"x": FLOATS}).read(INDICES, torch.float32)
    assert batch.inputs["x"].shape == (4, 3)


@pytest.mark.parametrize(
    "data",
    [DataLoader(TENSORS), Endless(), iter([]), None, 3, (FLOATS, LABELS[:2])],
    ids=lambda data: type(data).__name__,
)
def test_predict_refuses_what_is_no_input(data: Any) -> None:
    with pytest.raises(DataError):
        as_input_source(data)


@pytest.mark.parametrize("make", [as_source, as_input_source])
def test_empty_data_has_no_samples(make: Callable[[Any], Source]) -> None:
    empty = np.empty((0, 3))
    assert len(make((empty, empty))) == 0
