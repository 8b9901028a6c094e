"""Streams: what counts as one, what its batches must be, and what cannot be asked of it."""

import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lockstep
from lockstep.data.iterable.streams import Stream, as_stream
from lockstep.errors import DataError, OptionError

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10) % 3


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(X.split(4), Y.split(4), strict=True)


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=4, **options)


class Samples(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(X, Y, strict=True)


class Again:
    """An iterable that can be gone through again, and says how long it is."""

    def __iter__(self) -> Iterator[Any]:
        return batches()

    def __len__(self) -> int:
        return 3


def stream_of(data: Any, **options: Any) -> Stream:
    stream = as_stream(data, name="data", **{"batch_size": 4, **options})
    assert stream is not None
    return stream


# --- what is a stream -------------------------------------------------------------------------

STREAMS: dict[str, Callable[[], Any]] = {
    "a DataLoader": loader,
    "a generator function": lambda: batches,
    "a lambda": lambda: lambda: batches(),
    "a partial": lambda: partial(zip, X.split(4), Y.split(4)),
    "a bound method": lambda: Again().__iter__,
    "an iterator": batches,
    "an iterable": Again,
    "an iterable dataset": Samples,
    "a map": lambda: map(tuple, batches()),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_gives_global_batches(name: str) -> None:
    stream = stream_of(STREAMS[name]())
    found = [stream.batch(element) for element in stream.begin()]
    assert [len(batch) for batch in found] == [4, 4, 2]
    assert torch.equal(torch.cat([batch.inputs for batch in found]), X)
    assert torch.equal(torch.cat([batch.targets for batch in found]), Y)


ARRAYS: dict[str, Any] = {
    "arrays": (X, Y),
    "a list of arrays": [X, Y],
    "an array": X.numpy(),
    "a tensor": X,
    "a dict": {"x": X},
    "a map-style dataset": TensorDataset(X, Y),
    "a list of batches": list(batches()),
    "text": "data.csv",
    "None": None,
    "a number": 3,
    "a model": nn.Linear(2, 1),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_what_is_read_by_index_or_not_at_all_is_no_stream(name: str) -> None:
    assert as_stream(ARRAYS[name], name="data", batch_size=4) is None


def test_what_a_stream_says_of_itself() -> None:
    assert stream_of(loader()).num_batches == stream_of(Again()).num_batches == 3
    assert stream_of(batches).num_batches is None
    assert stream_of(Samples()).num_batches is None
    assert not stream_of(Samples()).has_batches
    assert stream_of(loader()).has_batches
    assert [stream_of(one).restarts for one in (loader(), batches, Again(), batches())] == [
        True,
        True,
        True,
        False,
    ]


# --- batches ----------------------------------------------------------------------------------

BATCHES: dict[str, tuple[Any, Any]] = {
    "arrays": ((X.numpy(), Y.numpy()), X),
    "a list": ([X, Y], X),
    "lists of numbers": ((X.tolist(), Y.tolist()), X),
    "positional inputs": (((X, X + 1), Y), (X, X + 1)),
    "positional inputs in a list": ([[X, X + 1], Y], (X, X + 1)),
    "keyword inputs": (({"a": X, "b": X + 1}, Y), {"a": X, "b": X + 1}),
    "weights": ((X, Y, np.ones(10)), X),
    "no weights": ((X, Y, None), X),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_may_be_of_all_forms_of_arrays(name: str) -> None:
    element, inputs = BATCHES[name]
    batch = stream_of(batches).batch(element)
    torch.testing.assert_close(batch.inputs, inputs, check_dtype=False)
    assert torch.equal(batch.targets, Y)
    assert (batch.sample_weight is not None) == (name == "weights")


INPUTS: dict[str, tuple[Any, Any]] = {
    "inputs": (X, X),
    "rows in lists": (X[:2].tolist(), X[:2]),
    "inputs in a tuple": ((X,), X),
    "with targets": ([X, Y], X),
    "with weights": ((X, Y, Y), X),
    "positional": (((X, Y),), (X, Y)),
    "by keyword": ({"a": X}, {"a": X}),
}


@pytest.mark.parametrize("name", INPUTS)
def test_predict_takes_the_inputs_of_a_batch(name: str) -> None:
    element, inputs = INPUTS[name]
    batch = stream_of(batches, with_targets=False).batch(element)
    torch.testing.assert_close(batch.inputs, inputs, check_dtype=False)
    assert batch.targets is None


BAD_BATCHES: dict[str, tuple[Any, str]] = {
    "no tuple": (X, r"must be \(inputs, targets\).*Received: a Tensor"),
    "four parts": ((X, Y, Y, Y), "a tuple of 4"),
    "rows": ([[1.0, 2.0], [3.0, 4.0]], "a list of 2"),
    "no targets": ((X, None), "NoneType"),
    "other lengths": ((X, Y[:3]), "inputs 10, targets 3"),
    "no samples": ((X[:0], Y[:0]), "must hold a sample"),
    "a sample": ((X[0], Y[0]), "targets of `data` must have one row per sample"),
    "texts": ((["a", "b"], [0, 1]), "holds texts.*'a', 'b'"),
    "a negative weight": ((X, Y, -torch.ones(10)), "not negative"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_what_is_no_batch_is_refused_with_a_reason(name: str) -> None:
    element, message = BAD_BATCHES[name]
    with pytest.raises(DataError, match=f"(?s){message}"):
        stream_of(batches).batch(element)


@pytest.mark.parametrize("element", [(X,), {"input": X}, UserDict(input=X)])
def test_inputs_alone_are_for_models_that_compute_their_own_loss(element: Any) -> None:
    batch = stream_of(batches).batch(element)
    assert batch.targets is None
    with pytest.raises(DataError, match=r"needs targets.*lockstep\.data\.columns"):
        make_trainer().fit(lambda: iter([element]), verbose=0)


# --- what cannot be asked of a stream ---------------------------------------------------------


def make_trainer() -> lockstep.Trainer:
    return lockstep.Trainer(nn.Linear(2, 3), loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD)


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "batch_size of a DataLoader": (
        loader,
        {"batch_size": 4},
        "`data` gives global batches of its own.*DataLoader and batch_size=4.*Leave batch_size out",
    ),
    "batch_size of a generator": (lambda: batches, {"batch_size": 4}, "a function and batch_size"),
    "shuffle of a DataLoader": (loader, {"shuffle": True}, "order of its own.*shuffle=True"),
    "no shuffle of a DataLoader": (loader, {"shuffle": False}, "shuffle=False.*Leave shuffle out"),
    "shuffle of samples": (Samples, {"shuffle": True}, "Samples and shuffle=True"),
    "epochs of an iterator": (
        batches,
        {"epochs": 2},
        "`data` can be gone through once.*generator and epochs=2.*steps_per_epoch",
    ),
    "an iterator to validate with": (
        lambda: batches,
        {"epochs": 2, "validation_data": batches()},
        "`validation_data` can be gone through once",
    ),
    "all at once": (
        batches,
        {"epochs": 2, "batch_size": 2, "shuffle": True},
        r"(?s)3 problems.*batches of its own.*order of its own.*gone through once",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_a_stream_cannot_have_are_refused(name: str) -> None:
    make, options, message = REFUSED[name]
    trainer = make_trainer()
    with pytest.raises(OptionError, match=message):
        trainer.fit(make(), verbose=0, **options)


def test_evaluate_and_predict_refuse_a_batch_size_as_well() -> None:
    with pytest.raises(OptionError, match="`data` gives global batches"):
        make_trainer().evaluate(loader(), batch_size=4)
    with pytest.raises(OptionError, match="`inputs` gives global batches"):
        make_trainer().predict(loader(), batch_size=4)


class Endless:
    """As a ``tf.data.Dataset`` that repeats for ever."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield X, Y

    def __len__(self) -> int:
        raise TypeError("The dataset is infinite.")

    def cardinality(self) -> Any:
        return np.int64(-1)


def test_data_without_an_end_needs_a_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    tensorflow = SimpleNamespace(data=SimpleNamespace(Dataset=Endless))
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    trainer = make_trainer()
    with pytest.raises(OptionError, match=r"`data` never ends.*steps_per_epoch in fit, or .take"):
        trainer.fit(Endless(), verbose=0)
    history = trainer.fit(Endless(), epochs=2, steps_per_epoch=3, verbose=0)
    assert len(history.history["loss"]) == 2


def no_batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_sampler=[])


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lambda: iter([]), "a function without any in epoch 0.*new iterator"),
        (lambda: iter([]), "list_iterator without any.*gives every batch once"),
        (no_batches, "DataLoader without any in epoch 0"),
    ],
    ids=["a function", "an iterator", "a DataLoader"],
)
def test_a_stream_without_a_batch_is_refused(make: Any, message: str, call: str) -> None:
    with pytest.raises(DataError, match=message):
        getattr(make_trainer(), call)(make())


def test_a_function_must_make_a_new_iterator_for_every_epoch() -> None:
    once = batches()
    with pytest.raises(DataError, match="a function without any in epoch 1"):
        make_trainer().fit(lambda: once, epochs=2, verbose=0)


def test_a_function_that_gives_no_iterator_is_told() -> None:
    with pytest.raises(DataError, match=r"Reading batch 0 of epoch 0.*TypeError.*not iterable"):
        make_trainer().fit(lambda: 3, verbose=0)


def test_an_iterator_may_be_too_short_for_the_steps_asked_for() -> None:
    message = r"must give 2 batches in every epoch.*ended after 1 batches of epoch 1"
    with pytest.raises(DataError, match=message):
        make_trainer().fit(batches(), epochs=2, steps_per_epoch=2, verbose=0)


def test_a_list_of_batches_is_refused_with_a_way_out() -> None:
    with pytest.raises(DataError, match="generator function, an iterable"):
        make_trainer().fit(list(batches())[:1], verbose=0)


def test_items_that_are_dicts_are_told_of_columns() -> None:
    with pytest.raises(DataError, match=r"lockstep\.data\.columns"):
        make_trainer().fit(iter([{"x": X, "label": Y}]), verbose=0)
