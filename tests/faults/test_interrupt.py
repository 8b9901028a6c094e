"""Ctrl-C ends training with the step under way: no rank is ahead, and all can go on later."""

import os
import pty
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.checkpoint.reading import read_newest
from tests.faults.jobs import (
    BATCH_SIZE,
    STEPS_PER_EPOCH,
    fit,
    make_data,
    make_trainer,
    model_of,
)
from tests.faults.processes import JOB, running, wait_until
from tests.thorough import core_of

Slots = dict[str, dict[str, Any]]


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def press_ctrl_c_twice() -> None:
    press_ctrl_c()
    press_ctrl_c()


def slots_of(trainer: lockstep.Trainer) -> Slots:
    assert trainer.optimizer is not None
    names = dict(trainer.model.named_parameters())
    return {name: trainer.optimizer.state[parameter] for name, parameter in names.items()}


def check_same(one: lockstep.Trainer, other: lockstep.Trainer) -> None:
    torch.testing.assert_close(one.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(slots_of(one), slots_of(other), rtol=0, atol=0)


class _StopAfter(lockstep.Callback):
    """Ends training by the regular way, after a number of steps."""

    def __init__(self, num_steps: int) -> None:
        self.left = num_steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        self.trainer.stop_training = self.left == 0


@pytest.mark.parametrize(
    ("devices", "step"),
    core_of(
        [(1, 0), *((devices, step) for devices in (1, 2, 4) for step in (1, 2, 4))],
        lambda devices, step: devices < 4 and step != 1,
    ),
)
def test_ctrl_c_ends_training_with_the_step(devices: int, step: int) -> None:
    interrupted = make_trainer(devices, press_ctrl_c, step=step, on="rank 0")
    with pytest.raises(KeyboardInterrupt):
        fit(interrupted, epochs=10)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    expected = make_trainer(devices, callbacks=(_StopAfter(step + 1),))
    fit(expected, epochs=10)
    check_same(interrupted, expected)

    # Both go on: with the next epoch's order, and the next step's random numbers.
    model_of(interrupted).act = None
    expected.callbacks = []
    for trainer in (interrupted, expected):
        fit(trainer, epochs=2)
        assert trainer._runner.steps_trained == step + 1 + 2 * STEPS_PER_EPOCH
        assert trainer._runner.epochs_trained == step // STEPS_PER_EPOCH + 1 + 2
    check_same(interrupted, expected)


def test_helpers_are_kept_after_ctrl_c() -> None:
    trainer = make_trainer(2, press_ctrl_c, step=1, on="rank 0")
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    assert trainer._runner.session._team is not None
    assert trainer._runner.session._team.answers()


@pytest.mark.parametrize("devices", [1, 2])
def test_the_second_ctrl_c_ends_training_at_once(devices: int) -> None:
    trainer = make_trainer(devices, press_ctrl_c_twice, step=1, on="rank 0")
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    assert model_of(trainer).calls == 2
    assert trainer._runner.steps_trained == 0
    model_of(trainer).act = None
    fit(trainer)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


class _Press(lockstep.Callback):
    """Presses Ctrl-C at a given point of the first epoch."""

    def __init__(self, point: str) -> None:
        setattr(self, point, lambda *_: press_ctrl_c())


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("point", "num_steps"),
    [
        ("on_epoch_begin", 0),
        ("on_test_begin", STEPS_PER_EPOCH),
        ("on_epoch_end", STEPS_PER_EPOCH),
    ],
)
def test_ctrl_c_in_a_callback(devices: int, point: str, num_steps: int) -> None:
    trainer = make_trainer(devices, callbacks=(_Press(point),))
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, epochs=5, validation_data=make_data())
    assert trainer._runner.steps_trained == num_steps
    assert trainer._runner.epochs_trained == (1 if num_steps else 0)
    trainer.callbacks = []
    expected = make_trainer(devices)
    if num_steps:
        fit(expected)
    fit(trainer)
    fit(expected)
    check_same(trainer, expected)


@pytest.mark.parametrize("devices", core_of([2, 4], [2]))
def test_ctrl_c_before_the_first_step_leaves_all_as_it_was(devices: int) -> None:
    """While ranks prove that they compute the same."""
    trainer = make_trainer(devices, press_ctrl_c, on="rank 0")
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    torch.testing.assert_close(trainer.model.state_dict(), before, rtol=0, atol=0)
    assert trainer._runner.steps_trained == 0
    model_of(trainer).act = None
    fit(trainer)
    expected = make_trainer(devices)
    fit(expected)
    check_same(trainer, expected)


def test_ctrl_c_before_training_raises_at_once() -> None:
    trainer = make_trainer(2, callbacks=(_Press("on_train_begin"),))
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    assert trainer._runner.session._team is None


def test_ctrl_c_within_a_fit_within_a_fit() -> None:
    """The inner fit ends early, then the outer one."""
    inner = make_trainer(1, press_ctrl_c, step=1, on="rank 0")
    done = []

    class Nest(lockstep.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            fit(inner, epochs=5)
            done.append(inner._runner.steps_trained)

    outer = make_trainer(2, callbacks=(Nest(),))
    with pytest.raises(KeyboardInterrupt):
        fit(outer, epochs=5)
    assert (done, outer._runner.steps_trained) == ([2], STEPS_PER_EPOCH)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_after_ctrl_c_does_not_swallow_it() -> None:
    def press_and_fail() -> None:
        press_ctrl_c()
        raise ValueError("as asked")

    trainer = make_trainer(2, press_and_fail, step=1, on="rank 0")
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(trainer)
    assert isinstance(caught.value.__cause__, ValueError)


def test_handlers_of_the_user_stay() -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append("sigint"))
    try:
        fit(make_trainer(2, press_ctrl_c, step=1, on="rank 0"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == ["sigint"] * 2


def test_a_fit_in_a_thread_leaves_ctrl_c_alone() -> None:
    seen: list[Any] = []

    class Look(lockstep.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=lambda: fit(make_trainer(2, callbacks=(Look(),))))
    thread.start()
    thread.join(60)
    assert seen == [signal.default_int_handler]


@pytest.mark.parametrize(
    "kind", core_of(["mirrored", "in stages", "one device", "keras"], ["mirrored", "in stages"])
)
def test_ctrl_c_writes_a_checkpoint_from_which_all_goes_on(kind: str, tmp_path: Path) -> None:
    """The next run of the script comes to what one without Ctrl-C has come to, in every bit."""
    train = _train_keras if kind == "keras" else partial(_train_torch, kind)
    expected = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt) as caught:
        train(tmp_path / "stopped", press_at=STEPS_PER_EPOCH + 1)
    left = f"a checkpoint is in {tmp_path / 'stopped'}: the same script goes on from there."
    assert caught.value.__notes__[-1] == f"Lockstep: stopped by Ctrl-C; {left}"
    found = read_newest(tmp_path / "stopped")
    assert found is not None
    assert STEPS_PER_EPOCH < found.manifest.summary.step <= STEPS_PER_EPOCH + 2
    torch.testing.assert_close(train(tmp_path / "stopped"), expected, rtol=0, atol=0)


class _PressAfter(lockstep.Callback):
    """Presses Ctrl-C at a step, counted from 1."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step -= 1
        if self.step == 0:
            press_ctrl_c()


def _train_torch(kind: str, folder: Path, press_at: int = 0) -> Any:
    trainer = make_trainer(
        1 if kind == "one device" else 2,
        in_stages=kind == "in stages",
        callbacks=(_PressAfter(press_at),) if press_at else (),
    )
    fit(trainer, epochs=3, checkpoint=lockstep.Checkpoint(folder, every="1000 steps"))
    return dict(trainer.model.state_dict())


def _train_keras(folder: Path, press_at: int = 0) -> Any:
    import keras

    import lockstep.keras

    class Press(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
        left = press_at

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.left -= 1
            if self.left == 0:
                press_ctrl_c()

    keras.utils.clear_session()  # names of layers as in a new process
    keras.utils.set_random_seed(0)
    inputs, targets = make_data()
    with lockstep.MirroredStrategy(2).scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    checkpoint = lockstep.keras.Checkpoint(folder, every="1000 steps")
    callbacks = [checkpoint, Press()]
    model.fit(inputs, targets, batch_size=BATCH_SIZE, epochs=3, verbose=0, callbacks=callbacks)
    return [variable.value.detach() for variable in model.weights]


TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # this session's terminal: Ctrl-C is for the foreground
""" + (
    JOB
    + """
trainer = make_trainer(3)
class Tell(lockstep.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 3:
            print("training", flush=True)
trainer.callbacks.append(Tell())
try:
    train(trainer, epochs=10**6)
finally:
    print("steps", trainer._runner.steps_trained > 4, trainer._runner.session._team.answers())
"""
)


@pytest.mark.thorough
def test_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    """It goes to all of the foreground: the script ends in order, and its helpers with it."""
    keyboard, terminal = pty.openpty()
    try:
        with running(TERMINAL, directory=tmp_path, terminal=terminal) as script:
            script.wait_for_line("training")
            os.write(keyboard, b"\x03")
            status, out, err = script.finish()
            wait_until(lambda: not script.others(), 15, lambda: f"left: {script.others()}")
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert status == -signal.SIGINT
    assert "steps True True" in out
    lines = err.splitlines()[-2:]
    assert lines[0].strip().endswith("KeyboardInterrupt")
    assert (
        lines[1] == "Lockstep: stopped by Ctrl-C; model and optimizer are as after the last step."
    )
    assert sys.stdin is not None
