"""Two threads and one model: the second is refused, and the first does not notice.

Two threads with a model and a Trainer each are as two processes.
"""

import copy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.capture.tracing import trace_modes
from lockstep.errors import OptionError
from lockstep.parallel.data_parallel.functional_patch import Redirection

X, Y = torch.rand(24, 4), torch.rand(24, 2)
WAIT_SECONDS = 60.0

CALLS: dict[str, Callable[[lockstep.Trainer, Path], Any]] = {
    "fit": lambda trainer, path: trainer.fit((X, Y), verbose=0),
    "evaluate": lambda trainer, path: trainer.evaluate((X, Y)),
    "predict": lambda trainer, path: trainer.predict(X),
    "save": lambda trainer, path: trainer.save(path),
    "load": lambda trainer, path: trainer.load(path),
    "averaged": lambda trainer, path: trainer.averaged().__enter__(),
    "rewound": lambda trainer, path: trainer.rewound().__enter__(),
}


class Pausing(lockstep.Callback):
    """Stops in the midst of the training until it is let go, and evaluates."""

    def __init__(self) -> None:
        self.has_come, self.may_go = threading.Event(), threading.Event()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1 and not self.has_come.is_set():
            self.trainer.evaluate((X, Y))
            self.has_come.set()
            assert self.may_go.wait(WAIT_SECONDS)


def make_trainer(devices: int, *callbacks: lockstep.Callback) -> lockstep.Trainer:
    torch.manual_seed(0)
    return lockstep.Trainer(
        nn.Linear(4, 2),
        loss=nn.MSELoss(),
        optimizer=torch.optim.Adam,
        strategy=lockstep.MirroredStrategy(devices),
        callbacks=callbacks,
        average=lockstep.EMA(),
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_a_second_thread_is_refused_and_the_first_goes_on(devices: int, tmp_path: Path) -> None:
    expected = make_trainer(devices)
    expected.fit((X, Y), batch_size=8, epochs=2, verbose=0)
    path = tmp_path / "weights"
    expected.save(path)
    saved = path.read_bytes()
    pausing = Pausing()
    trainer = make_trainer(devices, pausing)
    with ThreadPoolExecutor(1) as other:
        first = other.submit(trainer.fit, (X, Y), batch_size=8, epochs=2, verbose=0)
        try:
            assert pausing.has_come.wait(WAIT_SECONDS)
            for name, call in CALLS.items():
                with pytest.raises(OptionError, match=f"{name} while another thread is in fit"):
                    call(trainer, path)
        finally:
            pausing.may_go.set()
        history = first.result(WAIT_SECONDS)
    assert len(history.epoch) == 2
    assert path.read_bytes() == saved
    for one, another in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(one, another)
    for name, call in CALLS.items():  # in this thread, now that the other is done
        if name not in ("averaged", "rewound"):
            call(trainer, path)


def test_a_thread_may_go_on_after_another() -> None:
    trainer = make_trainer(2)
    for _ in range(2):
        with ThreadPoolExecutor(1) as other:
            other.submit(trainer.fit, (X, Y), verbose=0).result(WAIT_SECONDS)


class Slow(nn.Module):
    """Gives other threads time between two draws of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.first(x))
        time.sleep(0.01)
        output: torch.Tensor = self.second(F.dropout(x))
        return output


def test_trainers_in_threads_draw_as_if_alone() -> None:
    torch.manual_seed(0)
    initial = Slow()

    def trained(seed: int) -> torch.Tensor:
        trainer = lockstep.Trainer(
            model := copy.deepcopy(initial),
            loss="mse",
            optimizer="sgd",
            strategy=lockstep.MirroredStrategy(1, num_shares=2),
            seed=seed,
        )
        may_begin.wait()
        trainer.fit(X, Y, batch_size=8, verbose=0)
        trainer.evaluate(X, Y)
        return model.first.weight.detach().clone()

    may_begin = threading.Barrier(1)
    expected = [trained(seed) for seed in (0, 1)]
    may_begin = threading.Barrier(2)
    with ThreadPoolExecutor(2) as others:
        found = list(others.map(trained, (0, 1)))
    assert all(map(torch.equal, found, expected))


def test_a_function_is_redirected_until_each_thread_has_ended() -> None:
    """Two parts of Lockstep redirect it, and end in another order than they began."""
    functions: Any = F
    plain, first, second = F.linear, Redirection("linear"), Redirection("linear")
    with ThreadPoolExecutor(1) as other:
        with first.to(lambda x: f"first of {x}"):
            other.submit(second.begin, lambda x: f"second of {x}").result()
            assert functions.linear("x") == "first of x"
        assert other.submit(lambda: functions.linear("x")).result() == "second of x"
        with first.to(lambda x: f"first of {first.plain is plain}"):
            assert functions.linear("x") == "first of True"
        other.submit(second.end, None).result()
    assert F.linear is plain
    with first.to(lambda x: [x]), second.to(lambda x: [second.plain(x)]):
        assert functions.linear("x") == [["x"]]
    assert F.linear is plain


def test_models_are_traced_one_after_the_other() -> None:
    before = nn.Module.__call__
    with ThreadPoolExecutor(2) as others:
        traces = list(others.map(lambda model: trace_modes(model, X), (Slow(), Slow())))
    assert nn.Module.__call__ is before
    assert all(len(trace.layers) > 1 for modes in traces for trace in modes)


ENDS = """
import atexit, threading, time
atexit.register(lambda: print([one.name for one in threading.enumerate()]))  # the last of all
from lockstep.channel.background import Background
kept = Background("kept")
kept.submit(lambda: time.sleep(0.2))
"""


def test_background_threads_have_ended_when_the_interpreter_ends() -> None:
    """What the end of a thread frees of torch's would abort the process."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['MainThread']", done.stderr
