"""Data that one process alone can read: the weights are those of a plain loop over its batches.

In fp64, to 1e-12 by parameter name, on 1, 2 and 3 replicas and in a pipeline. The plain loop is
written here, and goes over data that was made anew.
"""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import lockstep
from lockstep.data.order import seed_streams, stream_seed
from tests.launchers import run_script
from tests.thorough import core_of
from tests.zoo import case

STRATEGIES = {
    "mirrored-1": lockstep.MirroredStrategy(1),
    "mirrored-2": lockstep.MirroredStrategy(2),
    "mirrored-3": lockstep.MirroredStrategy(3),
    "mirrored-2-shares-5": lockstep.MirroredStrategy(2, num_shares=5),
    "pipeline-2": lockstep.PipelineStrategy(2, microbatches=3),
    "hybrid-2x2": lockstep.HybridStrategy(data=2, pipe=2, microbatches=4),
}
FEW = core_of(STRATEGIES, ["mirrored-2", "pipeline-2"])
SEED = 11
EPOCHS = 2

MLP = case("mlp")
assert isinstance(MLP.inputs, Tensor)
X: Tensor = MLP.inputs
Y = MLP.targets
SIZES = (17, 1, 7, 2, 13, 13)  # of ragged batches: all 53 samples


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output.softmax(1)[:, 0] - target).square()


@dataclass(frozen=True, kw_only=True)
class Data:
    """Data for fit, and how a plain loop goes over it.

    ``make`` returns the same at every call. ``batches`` is None where a plain loop iterates over
    what ``make`` returns.
    """

    make: Callable[[], Any]
    options: dict[str, Any]
    batches: Callable[[], Iterable[Any]]
    loss: Any = nn.functional.cross_entropy


def loader_with_sampler() -> DataLoader[Any]:
    weights = torch.linspace(0.1, 1, len(Y)).tolist()
    sampler = WeightedRandomSampler(weights, 60, generator=Generator().manual_seed(5))
    return DataLoader(TensorDataset(X, Y), batch_size=13, sampler=sampler, num_workers=2)


def shuffling_loader() -> DataLoader[Any]:
    """Its order comes from torch's global random stream."""
    return DataLoader(TensorDataset(X, Y), batch_size=13, shuffle=True)


class Noisy(torch.utils.data.Dataset[Any]):
    """Augments with all three global random streams."""

    def __len__(self) -> int:
        return len(Y)

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(X.shape[1]) + np.random.randn() + random.random()
        return X[index] + 0.1 * noise, Y[index]


def augmenting_loader() -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=13, shuffle=True)


def ragged() -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(X.split(SIZES), Y.split(SIZES), strict=True)


def recycled() -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Every batch in the same memory, as some readers do."""
    inputs, targets = np.empty((13, X.shape[1])), np.empty(13, np.int64)
    for rows, classes in zip(X.split(13), Y.split(13), strict=True):
        inputs[: len(rows)], targets[: len(rows)] = rows, classes
        yield inputs[: len(rows)], targets[: len(rows)]


class Samples(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(X, Y, strict=True)


class Weighted:
    """An iterable of batches with weights, in some of which nothing counts."""

    def __iter__(self) -> Iterator[Any]:
        for number, (inputs, targets) in enumerate(ragged()):
            weight = torch.arange(len(targets)) % 3 if number != 2 else torch.zeros(len(targets))
            yield inputs.numpy(), targets.numpy(), weight.numpy()


def plain_weighted(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return (squared(output, target) * weight).sum() / weight.sum()


DATA = {
    "DataLoader, 2 workers, weighted sampler": Data(
        make=loader_with_sampler, options={}, batches=loader_with_sampler
    ),
    "DataLoader, shuffled": Data(make=shuffling_loader, options={}, batches=shuffling_loader),
    "DataLoader, augmented": Data(make=augmenting_loader, options={}, batches=augmenting_loader),
    "generator": Data(make=lambda: ragged, options={}, batches=lambda: Again(ragged)),
    "recycled memory": Data(make=lambda: recycled, options={}, batches=lambda: Again(recycled)),
    "iterable dataset": Data(
        make=Samples,
        options={"batch_size": 11},
        batches=lambda: DataLoader(Samples(), batch_size=11),
    ),
    "weights": Data(make=Weighted, options={}, batches=Weighted, loss=squared),
}


class Again:
    """An iterable of what a generator function yields."""

    def __init__(self, function: Callable[[], Iterator[Any]]) -> None:
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        return self._function()


def plain_loop(batches: Iterable[Any], loss: Any, epochs: int = EPOCHS) -> nn.Module:
    """What one does without Lockstep; only that reading draws numbers as in the documentation."""
    model = MLP.make_model().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        # Whatever else draws between two batches must put these back: here nothing does.
        seed_streams(stream_seed(SEED, "reading", epoch))
        for inputs, targets, *weight in batches:
            optimizer.zero_grad()
            output = model(torch.as_tensor(inputs))
            targets = torch.as_tensor(targets)
            if weight:
                weights = torch.as_tensor(weight[0])
                if weights.sum() == 0:
                    continue
                value = plain_weighted(output, targets, weights)
            else:
                value = loss(output, targets)
            value.backward()
            optimizer.step()
    return model


def make_trainer(strategy: Any, loss: Any = nn.functional.cross_entropy) -> lockstep.Trainer:
    return lockstep.Trainer(
        MLP.make_model(),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        strategy=strategy,
        precision="fp64",
        seed=SEED,
    )


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    scale = torch.stack([one.detach().norm() for one in expected.values()]).norm()
    for name, parameter in model.named_parameters():
        difference = (parameter - expected[name]).norm()
        assert difference <= 1e-12 * max(scale, expected[name].norm()), name


@pytest.mark.parametrize(
    ("name", "strategy"),
    core_of(
        [(name, strategy) for name in DATA for strategy in STRATEGIES],
        lambda name, strategy: (
            (name == "generator" and strategy in ("mirrored-2-shares-5", "hybrid-2x2"))
            or strategy == "mirrored-2"
        ),
    ),
)
def test_training_equals_a_plain_loop(name: str, strategy: str) -> None:
    data = DATA[name]
    trainer = make_trainer(STRATEGIES[strategy], data.loss)
    trainer.fit(data.make(), epochs=EPOCHS, verbose=0, **data.options)
    with warnings.catch_warnings():
        # Said by Python 3.12 and later, where a DataLoader starts its workers.
        warnings.filterwarnings("ignore", ".* is multi-threaded, use of fork", DeprecationWarning)
        reference = plain_loop(data.batches(), data.loss)
    assert_same(trainer.model, reference)


@pytest.mark.parametrize("name", ["DataLoader, augmented", "generator"])
def test_two_runs_give_the_same_bits(name: str) -> None:
    models = []
    for _ in range(2):
        trainer = make_trainer(lockstep.MirroredStrategy(2))
        trainer.fit(DATA[name].make(), epochs=EPOCHS, verbose=0)
        models.append(trainer.model)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("strategy", ["mirrored-1", "mirrored-3"])
def test_batches_may_grow(strategy: str) -> None:
    def growing() -> Iterator[tuple[Tensor, Tensor]]:
        sizes = (1, 2, 3, 4, 43)
        yield from zip(X.split(sizes), Y.split(sizes), strict=True)

    trainer = make_trainer(STRATEGIES[strategy])
    trainer.fit(growing, epochs=EPOCHS, verbose=0)
    assert_same(trainer.model, plain_loop(Again(growing), nn.functional.cross_entropy))


# --- steps_per_epoch --------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", FEW)
@pytest.mark.parametrize("data", [ragged, ragged()], ids=["function", "iterator"])
def test_an_epoch_goes_on_in_the_data_where_the_last_one_ended(data: Any, strategy: str) -> None:
    data = ragged if callable(data) else ragged()
    trainer = make_trainer(STRATEGIES[strategy])
    history = trainer.fit(data, epochs=2, steps_per_epoch=3, verbose=0)
    assert len(history.epoch) == 2
    assert_same(trainer.model, plain_loop(Again(ragged), nn.functional.cross_entropy, epochs=1))


@pytest.mark.parametrize("strategy", FEW)
def test_an_epoch_may_be_longer_than_the_data(strategy: str) -> None:
    trainer = make_trainer(STRATEGIES[strategy])
    trainer.fit(ragged, epochs=1, steps_per_epoch=2 * len(SIZES), verbose=0)
    assert_same(trainer.model, plain_loop(Again(ragged), nn.functional.cross_entropy, epochs=2))


@pytest.mark.parametrize("strategy", ["mirrored-1", "mirrored-2"])
def test_arrays_are_gone_through_as_ever_in_epochs_of_another_length(strategy: str) -> None:
    by_steps, by_passes = (make_trainer(STRATEGIES[strategy]) for _ in range(2))
    by_steps.fit((X, Y), epochs=5, batch_size=13, steps_per_epoch=2, verbose=0)
    by_passes.fit((X, Y), epochs=2, batch_size=13, verbose=0)  # of five batches each
    assert_same(by_steps.model, by_passes.model)


def test_an_iterator_is_left_where_training_has_ended() -> None:
    iterator = ragged()
    make_trainer(lockstep.MirroredStrategy(2)).fit(iterator, steps_per_epoch=4, verbose=0)
    assert [len(targets) for _, targets in iterator] == list(SIZES[4:])


# --- evaluation, prediction, validation -------------------------------------------------------


@pytest.mark.parametrize("strategy", FEW)
@pytest.mark.parametrize("name", ["DataLoader, shuffled", "generator", "iterable dataset"])
def test_evaluation_and_prediction_equal_those_of_arrays(name: str, strategy: str) -> None:
    trainer = make_trainer(STRATEGIES[strategy])
    data = DATA[name]
    evaluated = trainer.evaluate(data.make(), **data.options)
    assert evaluated["loss"] == pytest.approx(trainer.evaluate((X, Y))["loss"], rel=1e-13)
    if name != "DataLoader, shuffled":
        torch.testing.assert_close(
            trainer.predict(data.make(), **data.options), trainer.predict(X), rtol=1e-13, atol=1e-15
        )


def large_batches() -> Iterator[tuple[Tensor, Tensor]]:
    """More samples than a batch that is trained on."""
    yield from zip(X.split((45, 8)), Y.split((45, 8)), strict=True)


@pytest.mark.parametrize("strategy", FEW)
def test_batches_to_validate_and_predict_with_may_be_larger(strategy: str) -> None:
    by_stream, by_array = (make_trainer(STRATEGIES[strategy]) for _ in range(2))
    history = by_stream.fit(ragged, validation_data=large_batches, verbose=0).history
    expected = by_array.fit(ragged, validation_data=(X, Y), verbose=0).history
    assert history["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-13)

    def growing() -> Iterator[Tensor]:
        yield from (X[:8], X[8:])

    torch.testing.assert_close(
        by_stream.predict(growing), by_array.predict(X), rtol=1e-13, atol=1e-15
    )


@pytest.mark.parametrize("strategy", FEW)
@pytest.mark.parametrize("makes", [ragged, shuffling_loader], ids=["generator", "DataLoader"])
def test_validation_changes_nothing_and_is_that_of_arrays(makes: Any, strategy: str) -> None:
    data = ragged if makes is ragged else shuffling_loader()
    by_stream, by_array = (make_trainer(STRATEGIES[strategy]) for _ in range(2))
    history = by_stream.fit(ragged, epochs=2, validation_data=data, verbose=0).history
    expected = by_array.fit(ragged, epochs=2, validation_data=(X, Y), verbose=0).history
    assert history["loss"] == expected["loss"]
    assert history["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-13)


# --- what only its own library can make -------------------------------------------------------


@pytest.mark.parametrize("strategy", FEW)
def test_hugging_face_datasets_are_read_by_index(strategy: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets

        rows = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})
        data = lockstep.data.columns(rows, inputs="x", targets="label")
        trainer = make_trainer(STRATEGIES[strategy])
        trainer.fit(data, epochs=1, batch_size=13, shuffle=False, verbose=0)
        batches = list(zip(X.split(13), Y.split(13), strict=True))
        assert_same(trainer.model, plain_loop(batches, nn.functional.cross_entropy, epochs=1))
        stream = make_trainer(STRATEGIES[strategy])
        samples = lockstep.data.columns(rows.to_iterable_dataset(), inputs="x", targets="label")
        stream.fit(samples, epochs=1, batch_size=13, verbose=0)
        assert_same(stream.model, trainer.model)


@pytest.mark.parametrize("strategy", FEW)
def test_memory_maps_train_as_arrays(strategy: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    data = (np.load(tmp_path / "x.npy", mmap_mode="r"), np.load(tmp_path / "y.npy", mmap_mode="r"))
    trainer = make_trainer(STRATEGIES[strategy])
    trainer.fit(data, epochs=1, batch_size=13, shuffle=False, verbose=0)
    batches = list(zip(X.split(13), Y.split(13), strict=True))
    assert_same(trainer.model, plain_loop(batches, nn.functional.cross_entropy, epochs=1))


@pytest.mark.exhaustive
def test_tf_data_trains_as_in_a_plain_loop(tmp_path: Path) -> None:
    """In a process of its own: TensorFlow does not leave one as it finds it."""
    script = Path(__file__).with_name("tensorflow_data.py")
    assert run_script([script], tmp_path).splitlines() == [f"{name} same" for name in STRATEGIES]
