"""A script of ordinary mistakes: what each shows on a user's screen, one after the other.

Its argument is the layout: "mirrored", "pipeline" or "single".
"""

import os
import signal
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lockstep

# How each screen begins.
MARK = "=== "
LAYOUT = sys.argv[-1]
CrossEntropy = nn.CrossEntropyLoss

x, y = torch.randn(20, 6), torch.arange(20) % 3


def strategy() -> lockstep.Strategy:
    if LAYOUT == "mirrored":
        return lockstep.MirroredStrategy(devices=2)
    if LAYOUT == "pipeline":
        return lockstep.PipelineStrategy(stages=2, microbatches=2)
    return lockstep.SingleDeviceStrategy()


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(width, 3))


def trainer(model: nn.Module | None = None, **options: Any) -> lockstep.Trainer:
    given: dict[str, Any] = {
        "loss": CrossEntropy(),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "strategy": strategy(),
        **options,
    }
    return lockstep.Trainer(model or net(), **given)


def fit(data: Any = (x, y), model: nn.Module | None = None, **options: Any) -> None:
    own = {name: options.pop(name) for name in ("batch_size", "checkpoint") if name in options}
    size: dict[str, Any] = {} if isinstance(data, DataLoader) else {"batch_size": 10}
    trainer(model, **options).fit(data, verbose=0, **(size | own))


class Samples(Dataset[Any]):
    """Cannot read one of its samples."""

    def __len__(self) -> int:
        return len(x)

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise FileNotFoundError("7.png")
        return x[index], y[index]


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.layer(image)
        return result


class Bad(nn.Module):
    """Fails in code of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        result: Tensor = self.last(hidden[:, :5])
        return result


class Fails(lockstep.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.log = {"a": 1}["b"]


class Presses(lockstep.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def loss_of_halves(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.float().view(2, -1)).mean()


# What is wrong -> who does it, and what the last lines say.
MISTAKES: dict[str, tuple[Any, str]] = {
    "wrong width": (lambda: fit(model=net(7)), "Lockstep: in layer '2' (Linear(in_features=7"),
    "wrong inputs": (lambda: fit((x[:, :5], y)), "Lockstep: in layer '0' (Linear(in_features=6"),
    "a wrong slice": (lambda: fit(model=Bad()), "Lockstep: in layer 'last' (Linear("),
    "class out of range": (lambda: fit((x, y + 1)), "Lockstep: in the loss (CrossEntropyLoss())"),
    "targets of another shape": (lambda: fit((x, x)), "Lockstep: in the loss"),
    "targets of another type": (lambda: fit((x, y.to(torch.int8))), "Lockstep: in the loss"),
    "a loss of one's own": (lambda: fit(loss=loss_of_halves), "Lockstep: in the loss (loss_of"),
    "no loss": (lambda: fit(loss=None), "Give the Trainer one"),
    "no optimizer": (lambda: fit(optimizer=None), "Give the Trainer one"),
    "another model's optimizer": (
        lambda: fit(optimizer=torch.optim.SGD(net().parameters(), lr=0.1)),
        "model.parameters()",
    ),
    "a dataset that raises": (lambda: fit(Samples()), "dataset[7]"),
    "a loader that raises": (lambda: fit(DataLoader(Samples(), batch_size=10)), "7.png"),
    "a loader's worker that raises": (
        lambda: fit(DataLoader(Samples(), batch_size=10, num_workers=1)),
        "The exception above says where",
    ),
    "a lambda that fails": (
        lambda: fit(loss=lambda output, target: output.nothing),
        "in the loss (<lambda>)",
    ),
    "a callback that raises": (lambda: fit(callbacks=[Fails()]), "KeyError: 'b'"),
    "a wrong key": (lambda: fit(({"picture": x}, y), Keyed()), "'picture'"),
    "a loss that is NaN": (lambda: fit((x * torch.nan, y)), "on_nonfinite="),
    "Ctrl-C": (lambda: fit(callbacks=[Presses()]), "Lockstep: stopped by Ctrl-C; "),
    "a wrong strategy": (lambda: fit(strategy="mirrored"), "lockstep.MirroredStrategy("),
    "a wrong number of devices": (lambda: lockstep.MirroredStrategy(devices=0), "devices"),
    "a misspelled option": (lambda: trainer().fit((x, y), epoch=3), "'epoch'"),  # type: ignore[call-arg]
    "a wrong precision": (lambda: fit(precision="fp8"), "'bf16-mixed'"),
    "a wrong metric": (lambda: fit(metrics={"a": nn.ReLU()}), "torchmetrics"),
    "a file that is not there": (lambda: trainer().load("none.safetensors"), "none.safetensors"),
    "a wrong checkpoint": (lambda: fit(checkpoint=3), 'checkpoint="run"'),
    "batch_size=0": (lambda: fit(batch_size=0), "Pass a positive integer"),
    "no data": (lambda: fit((x[:0], y[:0])), "Received"),
    "other lengths": (lambda: fit((x, y[:10])), "10"),
    "no targets": (lambda: fit(x), "(inputs, targets)"),
    "nothing to train": (lambda: fit(model=nn.Sequential(nn.Tanh())), "no parameters to train"),
    "prediction of a wrong width": (lambda: trainer().predict(x[:, :5]), "Lockstep: in layer '0'"),
    "evaluation of a wrong width": (
        lambda: trainer().evaluate((x[:, :5], y)),
        "Lockstep: in layer",
    ),
}


def main() -> None:
    for name, (make, _) in MISTAKES.items():
        print(f"{MARK}{name}", flush=True)  # noqa: T201  # the test reads it
        try:
            make()
        except BaseException:
            sys.excepthook(*sys.exc_info())


if __name__ == "__main__":
    sys.stderr = sys.stdout
    main()
