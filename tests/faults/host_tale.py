"""A script on several hosts, to which something happens; it tells what comes of it.

Arguments: how (with " over " and an engine behind it, if one is asked for), timeout in seconds,
number of epochs, and a file at whose sight host 0 ends training, if any. Each step takes some
milliseconds.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lockstep
from lockstep.launch.workers import process_state
from tests.launching import be_strict

STEPS = 4  # of an epoch
SPECIAL_PASS = 12
# In place of 30, where a host computes for longer, and is stopped then.
MOST_STOPPED_SECONDS, COMPUTING_SECONDS = 1.5, 4


def fail() -> None:
    raise ArithmeticError("a bad day on host 1")


def compute() -> None:
    """For long, in one call that keeps all other threads of this process from running."""
    ctypes.PyDLL(None).sleep(COMPUTING_SECONDS)
    tell("COMPUTED")


class Net(nn.Module):
    def __init__(self, special: Callable[[], None] | None) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)
        self.special = special
        self.passes_left = SPECIAL_PASS

    def forward(self, x: Tensor) -> Tensor:
        self.passes_left -= 1
        if self.passes_left == 0 and self.special is not None:
            self.special()
        time.sleep(0.005)
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out


class Tell(lockstep.Callback):
    """Says when training is under way."""

    is_observer = True
    num_steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_steps += 1
        if self.num_steps == 2 * STEPS:
            tell("TRAINING")


class UntilSeen(lockstep.Callback):
    """Ends training with the epoch in which a file is there."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.trainer.stop_training = self.file.exists()


def tell(word: str, value: object = "") -> None:
    sys.stdout.write(f"{word} {value}\n")
    sys.stdout.flush()


def make(
    timeout: float, engine: str | None = None, special: Callable[[], None] | None = None
) -> lockstep.Trainer:
    torch.manual_seed(1)
    return lockstep.Trainer(
        Net(special),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        callbacks=[Tell(), *map(UntilSeen, sys.argv[4:])],
        strategy=lockstep.MultiWorkerMirroredStrategy(engine=engine, timeout_seconds=timeout),
    )


def train(trainer: lockstep.Trainer, epochs: int) -> lockstep.History:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(8 * STEPS, 16, generator=generator)
    targets = torch.randint(4, (8 * STEPS,), generator=generator)
    return trainer.fit((data, targets), batch_size=8, epochs=epochs, verbose=0)


def state(trainer: lockstep.Trainer) -> list[list[float]]:
    """Weights and momenta, in digits enough for every bit."""
    slots = trainer.optimizer.state_dict()["state"].values()
    tensors = [*trainer.model.state_dict().values(), *(one["momentum_buffer"] for one in slots)]
    return [each.double().flatten().tolist() for each in tensors]


def main() -> None:
    be_strict()
    how, _, engine = sys.argv[1].partition(" over ")
    timeout, epochs = float(sys.argv[2]), int(sys.argv[3])
    host = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    special = {"error": fail, "compute": compute}.get(how) if host == 1 else None
    trainer = make(timeout, engine or None, special)
    if how == "compute":
        process_state.STOPPED_SECONDS = MOST_STOPPED_SECONDS
    if how == "absent" and host == 1:
        tell("HERE")
        time.sleep(10 * timeout)
    if how == "leaves" and host == 1:
        train(trainer, 1)
        return
    if how == "leaves":
        train(trainer, 1)
    try:
        history = train(trainer, epochs)
        tell("EPOCHS", len(history.epoch))
        tell("STATE", json.dumps(state(trainer)))
    except (Exception, KeyboardInterrupt) as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        tell("FAILED", json.dumps([type(error).__name__, str(error), notes]))
        if how in ("SIGINT", "error"):
            tell("STATE", json.dumps(state(trainer)))
    if how == "error":
        again = make(timeout)
        train(again, 3)
        tell("AGAIN", json.dumps(state(again)))


if __name__ == "__main__":
    main()
