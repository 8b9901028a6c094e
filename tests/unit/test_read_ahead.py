"""Reading ahead: what is refused, what comes out of a failed read, and what is left afterwards."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep import accelerators
from lockstep.data import prefetch
from lockstep.data.iterable.read_ahead import Prefetch, Read
from lockstep.data.map_style.sources import as_source
from lockstep.data.order import seed_streams
from lockstep.errors import DataError, OptionError, WorkerError
from lockstep.parallel.data_parallel.staging import Staged
from lockstep.parallel.transfer import readers
from lockstep.parallel.transfer.readers import reading_ahead
from tests.faults.processes import children_of, wait_until
from tests.map_datasets import AsRead, Noisy, Rows, readers_in, reads_in

pytestmark = pytest.mark.thorough

INPUTS = torch.rand(40, 3)
TARGETS = torch.rand(40, 1)
EVERY = list(range(40))


class Net(nn.Module):
    """Acts at its n-th forward pass in training, on every rank."""

    def __init__(self, act: Callable[[], None], at: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.act = act
        self.left = at

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            self.act()
        output: torch.Tensor = self.layer(rows)
        return output


def nothing() -> None:
    pass


def fail() -> None:
    raise AsRead("in the model")


def rows(**options: Any) -> Rows:
    return Rows(INPUTS, TARGETS, **options)


def make_trainer(
    devices: int = 1, act: Callable[[], None] = nothing, **options: Any
) -> lockstep.Trainer:
    return lockstep.Trainer(
        Net(act, at=3),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        strategy=lockstep.MirroredStrategy(devices),
        **options,
    )


def fit(trainer: lockstep.Trainer, data: Any, epochs: int = 2) -> lockstep.History:
    return trainer.fit(data, batch_size=4, epochs=epochs, shuffle=False, verbose=0)


def check_nothing_left(before: set[int]) -> None:
    assert [one.name for one in threading.enumerate() if one.name == "lockstep-reader"] == []
    wait_until(lambda: set(children_of(os.getpid())) <= before, 15)


# --- arguments ----------------------------------------------------------------------------------

BAD_ARGUMENTS: dict[str, tuple[Callable[[], object], str]] = {
    "arrays": (lambda: prefetch((INPUTS, TARGETS)), "Received: tuple. Arrays are in memory"),
    "loader": (lambda: prefetch(DataLoader(rows())), "Received: DataLoader. Wrap its dataset"),
    "twice": (lambda: prefetch(prefetch(rows())), "Leave one of them out"),
    "workers": (lambda: prefetch(rows(), workers=-1), "Received: workers=-1"),
    "depth": (lambda: prefetch(rows(), depth=0), "Received: depth=0"),
    "bool": (lambda: prefetch(rows(), workers=True), "Received: workers=True"),
    "all": (lambda: prefetch(3, workers=1.5, depth=None), "3 problems"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_arguments_that_cannot_be(name: str) -> None:
    act, message = BAD_ARGUMENTS[name]
    with pytest.raises(OptionError, match=message):
        act()


def test_it_is_a_dataset_like_the_one_it_wraps() -> None:
    ahead = prefetch(rows())
    assert len(ahead) == 40
    assert torch.equal(ahead[3][0], INPUTS[3])
    assert [int(inputs.shape[0]) for inputs, _ in DataLoader(ahead, batch_size=16)] == [16, 16, 8]
    assert as_source(ahead).ahead == ahead.ahead


# --- reading ------------------------------------------------------------------------------------


def reads(*bounds: tuple[int, int]) -> Any:
    for start, stop in bounds:
        yield [Read(indices=torch.arange(start, stop), dtype=torch.float32, seed=start)]


def read(ahead: Any, start: int, stop: int) -> torch.Tensor:
    """As a rank reads: after the seeding that was foreseen."""
    seed_streams(start)
    inputs: torch.Tensor = ahead.read(torch.arange(start, stop), torch.float32).inputs
    return inputs


@pytest.mark.parametrize("workers", [0, 1])
def test_the_next_batches_are_read_while_the_present_one_is_used(
    workers: int, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    source = as_source(prefetch(rows(log=log), workers=workers, depth=2))
    bounds = [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20)]
    with reading_ahead(source, reads(*bounds)) as ahead:
        assert torch.equal(read(ahead, 0, 4), INPUTS[:4])
        wait_until(lambda: len(reads_in(log)) == 12, 30)
        time.sleep(0.05)
        assert sorted(reads_in(log)) == EVERY[:12]  # no further than two ahead
        assert torch.equal(read(ahead, 4, 8), INPUTS[4:8])
        wait_until(lambda: len(reads_in(log)) == 16, 30)
    assert len(readers_in(log)) == 1
    assert (os.getpid() in readers_in(log)) == (workers == 0)


class _Staging:
    """Stands in for what copies to a device: notes which thread did it."""

    threads: list[str] = []  # noqa: RUF012

    def __init__(self, device: torch.device) -> None:
        assert device == torch.device("cuda", 0)

    def stage(self, batch: Any) -> Staged:
        self.threads.append(threading.current_thread().name)
        return Staged(batch=batch, device=torch.device("cuda", 0), copied=None)


@pytest.mark.parametrize("workers", [0, 1])
def test_for_an_accelerator_a_thread_copies_what_is_read_ahead(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's DataLoader has one, which it begins where there is an accelerator."""
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: cuda)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(accelerators, "kind", lambda: "cuda")
    monkeypatch.setattr(readers, "Staging", _Staging)
    monkeypatch.setattr(Staged, "take", lambda staged: staged.batch)
    monkeypatch.setattr(_Staging, "threads", [])
    source = as_source(prefetch(rows(), workers=workers, depth=2))
    bounds = [(0, 4), (4, 8), (8, 12)]
    with reading_ahead(source, reads(*bounds), cuda) as ahead:
        for start, stop in bounds:
            assert torch.equal(read(ahead, start, stop), INPUTS[start:stop])
            wait_until(lambda: len(_Staging.threads) == 2 + workers, 30)
    assert threading.current_thread().name not in _Staging.threads


@pytest.mark.parametrize("workers", [0, 1])
def test_what_was_not_foreseen_is_read_at_once(workers: int) -> None:
    source = as_source(prefetch(rows(), workers=workers))
    with reading_ahead(source, reads((0, 4), (4, 8))) as ahead:
        for start, stop, dtype in (
            *((0, 4, torch.float32), (2, 5, torch.float32), (4, 8, torch.float64)),
            *((4, 8, torch.float32), (4, 8, torch.float32)),
        ):
            seed_streams(start)
            batch = ahead.read(torch.arange(start, stop), dtype)
            assert torch.equal(batch.inputs, INPUTS[start:stop].to(dtype))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_thread_refuses_to_draw_from_the_models_streams(devices: int) -> None:
    trainer = make_trainer(devices)
    before = set(children_of(os.getpid()))
    noisy = prefetch(Noisy(INPUTS, TARGETS))
    for act in (
        lambda: fit(trainer, noisy),
        lambda: trainer.evaluate(noisy),
        lambda: trainer.predict(noisy),
    ):
        with pytest.raises(DataError, match=r"draws random numbers.*prefetch\(dataset, workers=1"):
            act()
    if devices == 1:
        check_nothing_left(before)


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [None, 0, 2])
@pytest.mark.parametrize("bad", [0, 30])
def test_a_sample_that_cannot_be_read(bad: int, workers: int | None) -> None:
    dataset: Dataset[Any] = rows(bad=bad)
    dataset = dataset if workers is None else prefetch(dataset, workers=workers)
    before = set(children_of(os.getpid()))
    with pytest.raises(DataError, match=f"Sample {bad} of the dataset.*AsRead: as asked") as caught:
        fit(make_trainer(), dataset)
    assert isinstance(caught.value.__cause__, AsRead)
    check_nothing_left(before)


@pytest.mark.parametrize("workers", [None, 0, 1])
def test_a_sample_that_a_helper_cannot_read(workers: int | None) -> None:
    dataset: Dataset[Any] = rows(bad=30)
    dataset = dataset if workers is None else prefetch(dataset, workers=workers)
    with pytest.raises(DataError, match="Sample 30 of the dataset") as caught:
        fit(make_trainer(2), dataset)
    assert isinstance(caught.value.__cause__, AsRead)
    assert caught.value.__notes__[0].startswith("Rank 1 failed (in fit, step 7): BadRecordError")


class Unsendable(Rows):
    """Inputs that no process can send to another."""

    def __getitem__(self, index: int) -> Any:
        row, target = super().__getitem__(index)
        return (row.requires_grad_() * 1, target)


def test_what_a_reader_cannot_send_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(RuntimeError, match="requires grad"):
        fit(make_trainer(), prefetch(Unsendable(INPUTS, TARGETS), workers=1))


class Deadly(Rows):
    """A sample that ends the process."""

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            os._exit(3)
        return super().__getitem__(index)


def test_a_reader_that_dies() -> None:
    before = set(children_of(os.getpid()))
    with pytest.raises(WorkerError, match="A process that reads ahead"):
        fit(make_trainer(), prefetch(Deadly(INPUTS, TARGETS, bad=20), workers=1))
    check_nothing_left(before)


def test_a_reader_whose_death_shows_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_reader_pids", set())
    plain = readers._Processes.close

    def close(reader: readers._Processes) -> None:
        plain(reader)
        raise told_by_torch(*readers._reader_pids)

    monkeypatch.setattr(readers._Processes, "close", close)
    with pytest.raises(WorkerError, match="A process that reads ahead"):
        fit(make_trainer(), prefetch(Rows(INPUTS, TARGETS), workers=1))


def told_by_torch(pid: int) -> RuntimeError:
    return RuntimeError(f"DataLoader worker (pid {pid}) exited unexpectedly with exit code 3.")


@pytest.mark.parametrize("is_own", [True, False], ids=["reader", "a DataLoader of the callback"])
def test_a_reader_whose_death_shows_in_a_callback(
    is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_reader_pids", set())

    class Fails(lockstep.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise told_by_torch(*readers._reader_pids) if is_own else told_by_torch(7)

    expected, message = (WorkerError, "A process that reads") if is_own else (RuntimeError, "^Data")
    with pytest.raises(expected, match=message):
        fit(make_trainer(callbacks=[Fails()]), prefetch(Rows(INPUTS, TARGETS), workers=1))


class _Stop(lockstep.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trainer.stop_training = batch == 3


class _Evaluate(lockstep.Callback):
    """Reads the data that is being read ahead."""

    def __init__(self, data: Prefetch) -> None:
        self.data = data

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trainer.evaluate(self.data, batch_size=7)


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_left_when_training_is_stopped(workers: int) -> None:
    before = set(children_of(os.getpid()))
    fit(make_trainer(callbacks=[_Stop()]), prefetch(rows(seconds=0.001), workers=workers))
    check_nothing_left(before)


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_left_after_a_failure_of_the_model(workers: int) -> None:
    before = set(children_of(os.getpid()))
    with pytest.raises(AsRead, match="in the model"):
        fit(make_trainer(act=fail), prefetch(rows(seconds=0.001), workers=workers))
    check_nothing_left(before)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_callback_may_evaluate_on_what_is_read_ahead(workers: int) -> None:
    data = prefetch(rows(), workers=workers)
    before = set(children_of(os.getpid()))
    fit(make_trainer(callbacks=[_Evaluate(data)]), data, epochs=1)
    check_nothing_left(before)


def test_the_scripts_streams_stay_where_they_are() -> None:
    trainer = make_trainer()
    before = torch.get_rng_state()
    fit(trainer, prefetch(rows(), workers=1))
    assert torch.equal(torch.get_rng_state(), before)
