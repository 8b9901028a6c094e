"""Processes and threads that read ahead end with the training, whatever ends it."""

import os
import pty
import signal
from pathlib import Path

import pytest

from tests.faults.processes import running, wait_until

READING = """
import os, sys, time
import torch
from torch import nn
import lockstep

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.ones(8), torch.ones(1)

class Tell(lockstep.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            print("training", flush=True)

trainer = lockstep.Trainer(
    nn.Linear(8, 1), loss=nn.MSELoss(), optimizer=torch.optim.SGD,
    strategy=lockstep.MirroredStrategy(2), callbacks=[Tell()])
data = lockstep.data.prefetch(Rows(), workers=WORKERS)

def fit():
    trainer.fit(data, batch_size=4, verbose=0)
"""


def source(workers: int, end: str = "fit()") -> str:
    return READING.replace("WORKERS", str(workers)) + end


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_script_leaves_no_reader(workers: int, tmp_path: Path) -> None:
    with running(source(workers), directory=tmp_path) as script:
        script.wait_for_line("training")
        assert len(script.others()) == 2 + 2 * workers  # the template, a helper, their readers
        os.kill(script.process.pid, signal.SIGKILL)
        wait_until(lambda: not script.others(), 15, lambda: f"left: {script.others()}")


@pytest.mark.thorough
def test_a_killed_helper_leaves_no_reader(tmp_path: Path) -> None:
    end = """
try:
    fit()
except lockstep.LockstepError as error:
    print("caught", "SIGKILL" in str(error), flush=True)
    sys.stdin.read()
"""
    with running(source(2, end), directory=tmp_path) as script:
        script.wait_for_line("training")
        (helper,) = [pid for pid in script.others() if name_of(pid) == "lockstep:1"]
        os.kill(helper, signal.SIGKILL)
        assert script.wait_for_line("caught ") == "True"
        status, _, err = script.finish()
        # A reader that was handing over a tensor at that moment may say so before it ends.
        assert status == 0
        assert not err or "resource_sharer" in err
        wait_until(lambda: not script.others(), 15, lambda: f"left: {script.others()}")


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # this session's terminal: Ctrl-C is for the foreground
"""

INTERRUPTED = """
try:
    fit()
finally:
    import multiprocessing, threading
    readers = [one for one in threading.enumerate() if one.name == "lockstep-reader"]
    print("left", readers, multiprocessing.active_children(), trainer._runner.steps_trained > 3)
    print("answers", trainer._runner.session._team.answers())
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_in_a_terminal(workers: int, tmp_path: Path) -> None:
    """It goes to the readers, too: the step under way still gets its samples from them."""
    keyboard, terminal = pty.openpty()
    try:
        text = TERMINAL + source(workers, INTERRUPTED)
        with running(text, directory=tmp_path, terminal=terminal) as script:
            script.wait_for_line("training")
            os.write(keyboard, b"\x03")
            status, out, err = script.finish()
            wait_until(lambda: not script.others(), 15, lambda: f"left: {script.others()}")
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert status == -signal.SIGINT
    assert "left [] [] True" in out
    assert "answers True" in out
    *_, error, note = err.strip().splitlines()
    assert error == "KeyboardInterrupt"
    assert note.startswith("Lockstep: stopped by Ctrl-C; model and optimizer are as after")
    assert "Traceback" not in err.partition("KeyboardInterrupt")[2]
