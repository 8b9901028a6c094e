"""Cached and read ahead, training is what it is without: against a plain loop, and bit by bit."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.data import cache, prefetch
from lockstep.data.iterable.read_ahead import Read
from lockstep.data.map_style.sources import as_source
from lockstep.data.order import kept_streams, seed_streams
from lockstep.parallel.transfer import readers
from lockstep.parallel.transfer.readers import reading_ahead
from tests.map_datasets import Noisy, Rows, readers_in, reads_in
from tests.thorough import core_of
from tests.zoo import case

STRATEGIES: dict[str, Any] = {
    "single": lockstep.SingleDeviceStrategy(),
    "mirrored-2": lockstep.MirroredStrategy(2),
    "mirrored-3": lockstep.MirroredStrategy(3),
    "mirrored-2-shares-4": lockstep.MirroredStrategy(2, num_shares=4),
    "pipeline-2": lockstep.PipelineStrategy(stages=2, microbatches=3),
    "pipeline-2-interleaved": lockstep.PipelineStrategy(2, None, 4, "interleaved"),
    "data-2-pipe-2": lockstep.HybridStrategy(data=2, pipe=2, microbatches=2),
}
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "cache": cache,
    "prefetch": prefetch,
    "prefetch-processes": functools.partial(prefetch, workers=2, depth=1),
    "prefetch-cache": lambda dataset: prefetch(cache(dataset), workers=1),
}


def rows_of(name: str) -> Rows:
    one = case(name)
    assert isinstance(one.inputs, Tensor)
    assert isinstance(one.targets, Tensor)
    return Rows(one.inputs, one.targets)


def verify(dataset: Any, strategy: str, name: str = "cnn_dropout") -> None:
    one = case(name)
    job = lockstep.Job(
        model=one.make_model(),
        loss=one.loss,
        optimizer=one.optimizer,
        data=dataset,
        batch_size=one.batch_size,
    )
    report = lockstep.verify(job, STRATEGIES[strategy], steps=5)
    assert report.passed, str(report)
    assert not report.undetermined


@pytest.mark.parametrize(
    ("wrapper", "strategy"),
    core_of(
        [(wrapper, strategy) for wrapper in WRAPPERS for strategy in STRATEGIES],
        lambda wrapper, strategy: (
            strategy == "mirrored-2" or (wrapper, strategy) == ("prefetch-cache", "data-2-pipe-2")
        ),
    ),
)
def test_training_equals_one_device(wrapper: str, strategy: str) -> None:
    verify(WRAPPERS[wrapper](rows_of("cnn_dropout")), strategy)


@pytest.mark.parametrize("strategy", core_of(STRATEGIES, ["mirrored-2", "data-2-pipe-2"], []))
def test_augmented_at_random_training_equals_one_device(strategy: str) -> None:
    """The reference reads for itself: its draws are those that the reader processes make."""
    rows = rows_of("cnn_dropout")
    verify(prefetch(Noisy(rows.inputs, rows.targets), workers=2), strategy)


@pytest.mark.parametrize("wrapper", core_of(WRAPPERS, ["prefetch-cache"]))
def test_several_shares_of_a_rank_that_take_turns(wrapper: str) -> None:
    """BatchNorm has a rank's shares run in threads, and each reads in its own."""
    verify(WRAPPERS[wrapper](rows_of("cnn_batch_norm")), "mirrored-2-shares-4", "cnn_batch_norm")


def test_what_is_read_twice_takes_no_later_read() -> None:
    """A share whose pass is made again reads again; the next step reads the same samples."""
    rows = rows_of("cnn_dropout")
    source = as_source(prefetch(Noisy(rows.inputs, rows.targets), workers=1))
    indices = torch.arange(4)
    reads = [Read(indices=indices, dtype=torch.float64, seed=seed) for seed in (11, 22, 33)]

    def read_from(source: Any, seed: int) -> Tensor:
        seed_streams(seed)
        inputs: Tensor = source.read(indices, torch.float64).inputs
        return inputs

    with kept_streams(), reading_ahead(source, iter([[read] for read in reads])) as ahead:
        for seed in (11, 11, 22, 33, 33):
            assert torch.equal(read_from(ahead, seed), read_from(source, seed))


# --- bits ---------------------------------------------------------------------------------------


class _Count(lockstep.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert logs is not None
        self.losses.append(logs["loss"])


def train(dataset: Any, strategy: str, *, validation: Any = None) -> tuple[Any, ...]:
    """Everything that a training with evaluation and prediction comes to."""
    one = case("cnn_dropout")
    count = _Count()
    trainer = lockstep.Trainer(
        one.make_model(),
        loss=one.loss,
        optimizer=one.optimizer,
        strategy=STRATEGIES[strategy],
        seed=5,
        callbacks=[count],
    )
    for epochs in (2, 1):
        history = trainer.fit(
            dataset, batch_size=7, epochs=epochs, validation_data=validation, verbose=0
        )
    evaluated = trainer.evaluate(dataset, batch_size=7)
    predicted = trainer.predict(dataset, batch_size=7)
    return trainer.model.state_dict(), count.losses, history.history, evaluated, predicted


def assert_same_bits(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@functools.cache
def plainly(strategy: str, kind: type[Rows]) -> tuple[Any, ...]:
    rows = rows_of("cnn_dropout")
    dataset = kind(rows.inputs, rows.targets)
    return train(dataset, strategy, validation=dataset)


FEW = ["single", "mirrored-2", "mirrored-2-shares-4", "pipeline-2"]


@pytest.mark.parametrize(
    ("wrapper", "strategy"),
    core_of(
        [(wrapper, strategy) for wrapper in WRAPPERS for strategy in FEW],
        [("prefetch-cache", "mirrored-2")],
        [("prefetch-cache", "pipeline-2"), ("prefetch-processes", "mirrored-2")],
    ),
)
def test_the_bits_are_those_of_plain_reading(wrapper: str, strategy: str) -> None:
    dataset = WRAPPERS[wrapper](rows_of("cnn_dropout"))
    assert_same_bits(train(dataset, strategy, validation=dataset), plainly(strategy, Rows))


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", core_of(FEW, ["mirrored-2"], []))
@pytest.mark.parametrize("workers", core_of([1, 2], [2], []))
def test_the_bits_of_random_augmentation_are_those_of_plain_reading(
    workers: int, strategy: str
) -> None:
    rows = rows_of("cnn_dropout")
    dataset = prefetch(Noisy(rows.inputs, rows.targets), workers=workers)
    trained = train(dataset, strategy, validation=dataset)
    # Outside of fit nothing is seeded: there the noise depends on what a process did before.
    assert_same_bits(trained[:3], plainly(strategy, Noisy)[:3])


# --- who reads ----------------------------------------------------------------------------------


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def make_trainer(strategy: Any) -> lockstep.Trainer:
    return lockstep.Trainer(net(), loss=nn.MSELoss(), optimizer=torch.optim.SGD, strategy=strategy)


@pytest.mark.parametrize("strategy", ["mirrored-2", "mirrored-3", "pipeline-2"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_with_a_cache_every_sample_is_read_once_on_the_host(
    on_disk: bool, strategy: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    rows = Rows(torch.ones(40, 3), torch.ones(40, 1), log=log, seconds=0.001)
    cached = cache(rows, tmp_path / "cached" if on_disk else None)
    trainer = make_trainer(STRATEGIES[strategy])
    trainer.fit(cached, batch_size=9, epochs=3, validation_data=cached, verbose=0)
    trainer.evaluate(cached)
    assert reads_in(log) == dict.fromkeys(range(40), 1)
    assert strategy == "pipeline-2" or len(readers_in(log)) > 1  # a last stage always comes second
    assert cached.num_cached == 40


@pytest.mark.thorough
@pytest.mark.parametrize("workers", core_of([0, 2], [2]))
@pytest.mark.parametrize("strategy", core_of(STRATEGIES, ["mirrored-2", "pipeline-2"], []))
def test_every_read_is_foreseen(
    strategy: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 reads nothing itself but, with a thread, its first share; it reads nothing twice."""
    log, reads = tmp_path / "log", []
    take = readers._SourceAhead.read

    def read(source: Any, indices: Tensor, dtype: torch.dtype) -> Any:
        reads.append(source._is_foreseen(indices, dtype))
        return take(source, indices, dtype)

    monkeypatch.setattr(readers._SourceAhead, "read", read)
    rows = Rows(torch.rand(40, 3), torch.rand(40, 1), log=log)
    ahead = prefetch(rows, workers=workers)
    trainer = make_trainer(STRATEGIES[strategy])
    trainer.fit(ahead, batch_size=9, epochs=2, validation_data=ahead, verbose=0)
    trainer.predict(ahead, batch_size=9)
    assert len(reads) > 10
    assert all(reads)
