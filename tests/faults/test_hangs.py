"""A rank that does not answer: an error in time, which shows what every rank is doing."""

import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import WorkerError
from tests.faults import mishaps
from tests.faults.jobs import (
    BATCH_SIZE,
    fit,
    helpers_of,
    make_data,
    make_trainer,
    sleep_forever,
    warm_up,
)
from tests.faults.mishaps import SlowRows, wait_to_be_told
from tests.faults.processes import is_alive
from tests.thorough import core_of

SECONDS = 4.0  # more than a step takes on a busy machine
STOPPED_SECONDS = 6.0
LIMIT = 60.0  # the helpers' start included


@pytest.mark.thorough
def test_a_rank_that_sleeps_in_forward() -> None:
    warm_up(3)
    trainer = make_trainer(3, sleep_forever, step=1, timeout_seconds=SECONDS)
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        fit(trainer)
    assert time.monotonic() - began < LIMIT
    message = str(caught.value)
    assert f"Rank 0 has waited {SECONDS:.0f} s" in message
    for rank in range(3):
        part = message.split(f"--- rank {rank} (in fit, step 1) ---\n")[1].split("--- rank")[0]
        assert ("sleep_forever" in part) == (rank > 0)
        assert ("in barrier" in part) == (rank == 0)
        assert "test_a_rank_that_sleeps_in_forward" in part or rank > 0


class _Stopper(lockstep.Callback):
    """Stops the first helper after the first epoch, and kills it when it should be gone."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self.pids:
            self.pids = helpers_of(self.trainer)
            threading.Timer(0.02, os.kill, (self.pids[0], signal.SIGSTOP)).start()


@pytest.mark.thorough
@pytest.mark.parametrize("engine", core_of([None, "gloo"], [None], []))
def test_a_helper_that_is_stopped(engine: str | None) -> None:
    warm_up(3)
    stopper = _Stopper()
    trainer = make_trainer(3, callbacks=(stopper,), timeout_seconds=SECONDS, engine=engine)
    with pytest.raises(WorkerError) as caught:
        fit(trainer, epochs=10**6)
    message = str(caught.value)
    stopped, waiting = message.split("--- rank 1 (")[1].split("--- rank 2 (")
    assert "no answer: the process is stopped" in stopped
    places = ["barrier", "announced", *(["transfer"] if engine == "gloo" else [])]
    assert any(f"in {place}" in waiting for place in places)
    assert not any(is_alive(pid) for pid in stopper.pids)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method", ["evaluate", pytest.param("predict", marks=pytest.mark.exhaustive)]
)
def test_a_rank_that_hangs_in_evaluation(method: str) -> None:
    warm_up(2)
    trainer = make_trainer(2, sleep_forever, timeout_seconds=SECONDS)
    inputs, targets = make_data()
    with pytest.raises(WorkerError, match=rf"rank 1 \(in {method}\) ---\n(.|\n)*sleep_forever"):
        trainer.predict(inputs) if method == "predict" else trainer.evaluate((inputs, targets))


@pytest.mark.thorough
def test_a_stopped_script_has_not_waited() -> None:
    """Ctrl-Z for longer than the timeout, then fg: training goes on."""
    script = os.getpid()
    done: list[bool] = []

    def stop_the_script() -> None:
        if not done:
            done.append(True)
            time.sleep(0.1)  # until it waits for this rank
            os.kill(script, signal.SIGSTOP)
            time.sleep(STOPPED_SECONDS)
            os.kill(script, signal.SIGCONT)

    warm_up(2)
    began = time.monotonic()
    fit(make_trainer(2, stop_the_script, step=1, timeout_seconds=SECONDS))
    assert time.monotonic() - began > STOPPED_SECONDS


@pytest.mark.exhaustive
def test_a_dataset_that_hangs_on_rank_0() -> None:
    warm_up(2)
    trainer = make_trainer(2, timeout_seconds=SECONDS)
    before = signal.getsignal(signal.SIGURG)
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        trainer.fit(SlowRows(wait_to_be_told), batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    assert time.monotonic() - began < LIMIT
    message = str(caught.value)
    assert re.match(r"Rank 0 has been reading samples for \d+ s \(in fit, step 1\)", message)
    own, other = message.split("--- rank 0 (in fit, step 1) ---\n")[1].split("--- rank 1 ")
    assert "wait_to_be_told" in own
    assert "in barrier" in other
    assert any("as they were after step 0" in note for note in caught.value.__notes__)
    assert signal.getsignal(signal.SIGURG) is before
    fit(trainer)


@pytest.mark.thorough
def test_a_read_in_a_thread_of_several_shares_that_hangs_on_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BatchNorm has the shares of a rank run in threads of their own."""
    warm_up(2)
    norm = nn.BatchNorm1d(4)
    trainer = lockstep.Trainer(
        nn.Sequential(nn.Linear(16, 4), norm, nn.Linear(4, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        strategy=lockstep.MirroredStrategy(2, num_shares=4, timeout_seconds=SECONDS),
    )
    before = set(threading.enumerate())
    is_told = threading.Event()
    monkeypatch.setattr(mishaps, "IS_TOLD", is_told)
    with pytest.raises(WorkerError, match=r"(?s)Rank 0 has been reading.*wait_to_be_told"):
        trainer.fit(SlowRows(wait_to_be_told), batch_size=BATCH_SIZE, verbose=0)
    # When the read ends after all, its thread and those of the other shares do nothing more.
    state = torch.get_rng_state()
    means = torch.as_tensor(norm.running_mean).clone()
    is_told.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT)
        assert not thread.is_alive(), thread
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.as_tensor(norm.running_mean), means)
