"""A helper is killed: one clear error, soon; the others end; the next fit has fresh helpers."""

import os
import random
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch

import lockstep
from lockstep.errors import WorkerError
from tests.faults.jobs import fit, helpers_of, make_data, make_trainer
from tests.faults.processes import is_alive, num_kills, wait_until
from tests.thorough import core_of

NUM_KILLS = num_kills(3)


class _Killer(lockstep.Callback):
    """Kills a random helper at a random moment after the first epoch."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._thread: threading.Thread | None = None
        self.rank = 0
        self.pids: list[int] = []
        self.killed_at = 0.0

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if self._thread is None:
            self.pids = helpers_of(self.trainer)
            self.rank = self._random.randint(1, len(self.pids))
            self._thread = threading.Thread(target=self._kill)
            self._thread.start()

    def _kill(self) -> None:
        time.sleep(self._random.uniform(0.0, 0.1))
        self.killed_at = time.monotonic()
        os.kill(self.pids[self.rank - 1], signal.SIGKILL)


@pytest.mark.parametrize("engine", [None, "gloo"])
@pytest.mark.parametrize("devices", core_of([2, 4], [2], []))
def test_a_helper_is_killed_at_any_moment(devices: int, engine: str | None) -> None:
    seconds = [kill_a_helper(devices, seed, engine=engine) for seed in range(NUM_KILLS)]
    assert max(seconds) < 15  # on a busy machine; else a moment


@pytest.mark.thorough
def test_a_stage_is_killed_at_any_moment() -> None:
    seconds = [kill_a_helper(3, seed, engine="gloo", in_stages=True) for seed in range(NUM_KILLS)]
    assert max(seconds) < 15


def kill_a_helper(devices: int, seed: int, **options: Any) -> float:
    """Returns the seconds from the kill to the error."""
    killer = _Killer(seed)
    trainer = make_trainer(devices, callbacks=(killer,), **options)
    with pytest.raises(WorkerError) as caught:
        fit(trainer, epochs=10**6)
    seconds = time.monotonic() - killer.killed_at
    message = str(caught.value)
    assert message.startswith(f"Rank {killer.rank} (process {killer.pids[killer.rank - 1]})")
    assert "in fit, step " in message
    assert "SIGKILL" in message
    assert not any(is_alive(pid) for pid in killer.pids)
    check_weights(trainer, caught.value, devices, **options)
    check_goes_on(trainer, killer.pids)
    return seconds


def check_weights(
    trainer: lockstep.Trainer, error: WorkerError, devices: int, **options: Any
) -> None:
    """The error says of which step the weights and the optimizer are."""
    *_, note = error.__notes__
    whole = re.match(
        r"The weights and the optimizer are complete, as they were (before fit|after step (\d+))\.",
        note,
    )
    assert whole, note
    reference = make_trainer(devices, **options)
    if whole[2]:
        reference.callbacks = [_StopAfter(int(whole[2]))]
        fit(reference, epochs=10**6)
    for left, right in zip(trainer.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(left, right), note
    assert_same_slots(trainer.optimizer, reference.optimizer)


def assert_same_slots(left: Any, right: Any) -> None:
    for ours, theirs in zip(
        left.state_dict()["state"].values(), right.state_dict()["state"].values(), strict=True
    ):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[slot], theirs[slot]) for slot in ours)


class _StopAfter(lockstep.Callback):
    """Ends training after a step, counted from 0."""

    def __init__(self, step: int) -> None:
        self._left = step + 1

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._left -= 1
        self.trainer.stop_training = self._left == 0


def check_goes_on(trainer: lockstep.Trainer, before: list[int]) -> None:
    trainer.callbacks = []
    fit(trainer)
    assert not set(before) & set(helpers_of(trainer))
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    trainer.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_helper_that_dies_in_its_model(number: signal.Signals) -> None:
    trainer = make_trainer(2, lambda: os.kill(os.getpid(), number), step=2)
    with pytest.raises(WorkerError, match=rf"in fit, step 2\): killed by {number.name}") as caught:
        fit(trainer)
    assert "memory ran out, for which" not in str(caught.value)
    # Where faulthandler has the last word, its stack is shown, and nothing after that.
    *_, last = str(caught.value).splitlines()
    is_told = number == signal.SIGSEGV
    assert (f'{__file__}", line' in str(caught.value)) == last.startswith("  File ") == is_told


class _Slow(lockstep.Callback):
    """Counts the steps of rank 0, each of which takes a moment."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.steps += 1
        time.sleep(0.05)


@pytest.mark.thorough
def test_a_replica_of_local_sgd_dies_long_before_replicas_meet() -> None:
    inputs, targets = make_data()
    inputs, targets = inputs.repeat(40, 1), targets.repeat(40)
    slow = _Slow()
    trainer = make_trainer(
        2,
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        step=2,
        callbacks=(slow,),
        strategy=lockstep.LocalSGDStrategy("epoch", devices=2),
    )
    with pytest.raises(WorkerError, match=r"Rank 1 .*SIGKILL"):
        trainer.fit((inputs, targets), batch_size=2, verbose=0)
    assert slow.steps < len(inputs) // 2 // 2  # rank 0 has not gone through its half of the epoch


def test_a_helper_that_leaves_by_itself() -> None:
    trainer = make_trainer(2, lambda: os._exit(7), step=1)
    with pytest.raises(WorkerError, match=r"Rank 1 .*step 1\): it exited with status 7"):
        fit(trainer)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_a_helper_dies_in_evaluation(method: str) -> None:
    trainer = make_trainer(2, lambda: os._exit(7))
    inputs, targets = make_data()
    with pytest.raises(WorkerError, match=rf"Rank 1 .*\(in {method}\): it exited"):
        trainer.predict(inputs) if method == "predict" else trainer.evaluate((inputs, targets))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_idle_helper_is_killed_or_stopped(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was lost: the next fit has fresh helpers, and the log names the one that ended."""
    trainer = make_trainer(3)
    fit(trainer)
    before = helpers_of(trainer)
    os.kill(before[1], number)
    fit(trainer)
    after = helpers_of(trainer)
    assert not set(before) & set(after)
    named = [one.getMessage() for one in caplog.records if "between calls" in one.msg]
    assert len(named) == (number == signal.SIGKILL)
    for text in named:
        assert text.startswith(f"rank 2 (process {before[1]}) ended between calls: killed by SIG")
    wait_until(lambda: not any(is_alive(pid) for pid in before), 15)
    expected = make_trainer(3)
    fit(expected)
    fit(expected)
    for left, right in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(left, right)
