"""A rank that does not answer: an error in time, which shows what every rank is doing."""

import os
import signal
import threading
import time
from typing import Any

import pytest

import lockstep
from lockstep.errors import WorkerError
from tests.faults.jobs import fit, helpers_of, make_data, make_trainer, sleep_forever, warm_up
from tests.faults.processes import is_alive

SECONDS = 6.0  # more than a step takes on a busy machine
STOPPED_SECONDS = 8.0
LIMIT = 60.0  # the helpers' start included


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


def test_a_helper_that_is_stopped() -> None:
    warm_up(3)
    stopper = _Stopper()
    trainer = make_trainer(3, callbacks=(stopper,), timeout_seconds=SECONDS)
    with pytest.raises(WorkerError) as caught:
        fit(trainer, epochs=10**6)
    message = str(caught.value)
    stopped, waiting = message.split("--- rank 1 (")[1].split("--- rank 2 (")
    assert "no answer: the process is stopped" in stopped
    assert "in barrier" in waiting
    assert not any(is_alive(pid) for pid in stopper.pids)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["evaluate", "predict"])
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
