"""Two threads and one model: the second is refused, and the first does not notice."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import OptionError

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
