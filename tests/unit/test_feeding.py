"""Feeding: the next batch is read meanwhile, in one thread, which ends whatever ends training."""

import random
import sqlite3
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep
from lockstep.data.iterable.stream_reader import Reading
from lockstep.data.iterable.streams import as_stream
from lockstep.errors import DataError, ModelError
from lockstep.parallel.data_parallel.staging import Staged
from lockstep.train.input import stream_broadcast
from lockstep.train.input.stream_broadcast import SharedStream

SAMPLES = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(1))
BATCHES = list(zip(SAMPLES.split(6), CLASSES.split(6), strict=True))
DEVICES = pytest.mark.parametrize("devices", [1, 2])


def make_trainer(devices: int, *callbacks: lockstep.Callback, dropout: float = 0) -> Any:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
    return lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        strategy=lockstep.MirroredStrategy(devices),
        precision="fp64",
        callbacks=callbacks,
    )


def assert_equal(one: lockstep.Trainer, other: lockstep.Trainer) -> None:
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "reading" in thread.name]


@pytest.fixture(autouse=True)
def no_reader_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not readers())


# --- reading ahead ----------------------------------------------------------------------------


class Watched:
    """A generator function that notes which batches were read, and perhaps draws."""

    def __init__(self, *, draws: bool) -> None:
        self.read = [threading.Event() for _ in range(len(BATCHES) + 1)]
        self.draws = draws
        self.threads: set[int] = set()

    def __call__(self) -> Iterator[Any]:
        for event, (inputs, targets) in zip(self.read, BATCHES, strict=False):
            self.threads.add(threading.get_ident())
            noise = random.random() if self.draws else 0
            event.set()
            yield inputs + noise, targets


class Steps(lockstep.Callback):
    """Sees at each step whether the next batch is read meanwhile; patient where it should be."""

    def __init__(self, data: Watched, expected: list[bool]) -> None:
        self.data, self.expected = data, expected
        self.ahead: list[bool] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        patience_seconds = 30 if self.expected[batch] else 0.05
        self.ahead.append(self.data.read[batch + 1].wait(patience_seconds))


@DEVICES
def test_the_next_batch_is_read_while_this_one_trains(devices: int) -> None:
    data = Watched(draws=False)
    steps = Steps(data, [False, False, *[True] * 7, False])  # the first are watched, the last alone
    make_trainer(devices, steps).fit(data, verbose=0)
    assert steps.ahead == steps.expected
    assert len(data.threads) == 1


def test_a_device_alone_gets_the_next_batch_while_this_one_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []

    class FakeStaging:
        def __init__(self, device: torch.device) -> None:
            assert device == cuda

        def stage(self, batch: Any) -> Staged:
            threads.append(threading.current_thread().name)
            return Staged(batch=batch, device=cuda, copied=None)

    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(stream_broadcast, "Staging", FakeStaging)
    monkeypatch.setattr(Staged, "take", lambda staged: staged.batch)
    monkeypatch.setattr(
        stream_broadcast,
        "_CopiedBatches",
        lambda device, plain=stream_broadcast._CopiedBatches: plain(cuda),
    )
    data = Watched(draws=False)
    steps = Steps(data, [False, False, *[True] * 7, False])
    make_trainer(1, steps).fit(data, verbose=0)
    assert threads == ["lockstep: reading"] * len(BATCHES)
    assert steps.ahead == steps.expected


@DEVICES
def test_what_draws_is_read_between_steps(devices: int) -> None:
    data = Watched(draws=True)
    steps = Steps(data, [False] * len(BATCHES))
    make_trainer(devices, steps).fit(data, verbose=0)
    assert steps.ahead == steps.expected


@DEVICES
def test_all_is_read_in_one_thread(devices: int, tmp_path: Path) -> None:
    """So a generator may use what only the thread that made it can use."""

    def rows() -> Iterator[Any]:
        database = sqlite3.connect(tmp_path / "rows.db")
        database.execute("create table if not exists rows (x real)")
        for inputs, targets in BATCHES:
            database.execute("select count(*) from rows")
            yield inputs, targets
        database.close()

    make_trainer(devices).fit(rows, epochs=2, verbose=0)


def test_in_a_pipeline_no_batch_may_be_larger_than_the_first() -> None:
    """Stages have made room for as much as the first one needs."""
    trainer = make_trainer(1)
    trainer.strategy = lockstep.PipelineStrategy(2, microbatches=2)
    batches = [(SAMPLES[:4], CLASSES[:4]), (SAMPLES, CLASSES)]
    with pytest.raises(ModelError, match=r"as much as the first batch needed.*the largest batch"):
        trainer.fit(lambda: iter(batches), verbose=0)


# --- random numbers ---------------------------------------------------------------------------


@DEVICES
def test_a_model_draws_the_same_whatever_the_data_draws(devices: int) -> None:
    def noisy() -> Iterator[Any]:
        for inputs, targets in BATCHES:
            random.random(), torch.rand(7)
            yield inputs, targets

    quiet, drawing, by_index = (make_trainer(devices, dropout=0.4) for _ in range(3))
    quiet.fit(lambda: iter(BATCHES), epochs=2, verbose=0)
    drawing.fit(noisy, epochs=2, verbose=0)
    by_index.fit((SAMPLES, CLASSES), epochs=2, batch_size=6, shuffle=False, verbose=0)
    assert_equal(quiet, drawing)
    assert_equal(quiet, by_index)


def test_the_order_does_not_depend_on_the_number_of_devices() -> None:
    orders = []
    for devices in (1, 3):
        seen: list[Tensor] = []

        def watch(items: Any, seen: list[Tensor] = seen) -> Any:
            seen.append(torch.stack([target for _, target in items]))
            return torch.stack([inputs for inputs, _ in items]), seen[-1]

        data = TensorDataset(SAMPLES, torch.arange(60) % 3)
        loader = DataLoader(data, batch_size=6, shuffle=True, collate_fn=watch)
        make_trainer(devices).fit(loader, epochs=2, verbose=0)
        orders.append(torch.cat(seen))
    assert torch.equal(*orders)
    assert not torch.equal(orders[0][:60], orders[0][60:])


# --- the end ----------------------------------------------------------------------------------


class StopAt(lockstep.Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trainer.stop_training = batch == self.batch


@DEVICES
def test_a_callback_stops_in_the_midst_of_an_epoch(devices: int) -> None:
    stopped, shorter = make_trainer(devices, StopAt(4)), make_trainer(devices)
    stopped.fit(lambda: iter(BATCHES), epochs=3, verbose=0)
    shorter.fit(lambda: iter(BATCHES[:5]), verbose=0)
    assert_equal(stopped, shorter)
    assert readers() == []


@DEVICES
def test_a_callback_changes_the_model_between_epochs(devices: int) -> None:
    class Freeze(lockstep.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.get_submodule("0").requires_grad_(epoch != 0)

    by_stream, by_index = (make_trainer(devices, Freeze()) for _ in range(2))
    by_stream.fit(lambda: iter(BATCHES), epochs=3, verbose=0)
    by_index.fit((SAMPLES, CLASSES), epochs=3, batch_size=6, shuffle=False, verbose=0)
    assert_equal(by_stream, by_index)


@DEVICES
@pytest.mark.parametrize("batch", [0, 1, 5, 9])
def test_an_error_in_reading_comes_out_and_training_can_go_on(devices: int, batch: int) -> None:
    def failing() -> Iterator[Any]:
        yield from BATCHES[:batch]
        raise OSError("the disk is gone")

    trainer, shorter = make_trainer(devices), make_trainer(devices)
    with pytest.raises(DataError, match=f"Reading batch {batch} of epoch 0") as caught:
        trainer.fit(failing, epochs=2, verbose=0)
    assert isinstance(caught.value.__cause__, OSError)
    assert readers() == []
    if batch:
        shorter.fit(lambda: iter(BATCHES[:batch]), verbose=0)
        assert_equal(trainer, shorter)
    trainer.fit(lambda: iter(BATCHES), verbose=0)


@DEVICES
def test_an_error_of_a_worker_process_comes_out(devices: int) -> None:
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return len(CLASSES)

        def __getitem__(self, index: int) -> Any:
            if index == 40:
                raise KeyError("no such sample")
            return SAMPLES[index], CLASSES[index]

    loader = DataLoader(Broken(), batch_size=6, num_workers=1)
    message = r"Reading batch 6 of .*KeyError in DataLoader worker process 0\. The exception"
    with pytest.raises(DataError, match=message) as caught:
        make_trainer(devices).fit(loader, verbose=0)
    cause = caught.value.__cause__
    assert "no such sample" in str(cause)
    assert cause is not None
    traceback.clear_frames(cause.__traceback__)  # they hold the loader's pass, and its process


@DEVICES
def test_an_error_in_validation_data_names_it(devices: int) -> None:
    def failing() -> Iterator[Any]:
        yield BATCHES[0]
        yield BATCHES[1]
        raise OSError("the disk is gone")

    with pytest.raises(DataError, match="Reading batch 2 of epoch 0 of `validation_data`"):
        make_trainer(devices).fit((SAMPLES, CLASSES), validation_data=failing, verbose=0)


@DEVICES
def test_a_callback_may_evaluate_a_stream_meanwhile(devices: int) -> None:
    class Evaluate(lockstep.Callback):
        losses: tuple[float, ...] = ()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 5:
                found = self.trainer.evaluate(lambda: iter(BATCHES))["loss"]
                self.losses = (*self.losses, found)

    evaluate = Evaluate()
    watched, plain = make_trainer(devices, evaluate), make_trainer(devices)
    watched.fit(lambda: iter(BATCHES), verbose=0)
    plain.fit(lambda: iter(BATCHES), verbose=0)
    assert len(evaluate.losses) == 1
    assert_equal(watched, plain)


@pytest.mark.thorough
def test_a_stream_that_nobody_closes_ends_its_thread() -> None:
    stream = as_stream(lambda: iter(BATCHES), name="data", batch_size=1)
    assert stream is not None
    shared = SharedStream(Reading(stream, seed=0))
    shared.peek()
    assert len(readers()) == 1
    del shared
    wait_until(lambda: not readers())


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
