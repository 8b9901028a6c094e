"""Scripts that have come to different things on two hosts: a script, run on both.

Each quarrel is about one thing, and ends in an error on both hosts, which it tells.

Arguments: names of quarrels.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torchmetrics.classification import MulticlassAccuracy

import lockstep
from lockstep.callbacks import LambdaCallback
from tests.launching import be_strict

HOST = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if "TF_CONFIG" in os.environ else 0
GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.randn(40, 6, generator=GENERATOR), torch.randint(3, (40,), generator=GENERATOR)
SECONDS = 60.0

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ONE_CYCLE = partial(OneCycleLR, max_lr=0.1, total_steps=30)


def here(on_host_0: Any, on_host_1: Any) -> Any:
    return (on_host_0, on_host_1)[HOST]


def net(*, width: int = 8, middle: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), middle or nn.Tanh(), nn.Linear(width, 3))


def make(*, model: nn.Module | None = None, num_shares: int = 2, **options: Any) -> Any:
    strategy = lockstep.MultiWorkerMirroredStrategy(num_shares=num_shares, timeout_seconds=SECONDS)
    own = {"loss": nn.CrossEntropyLoss(), "optimizer": SGD, "strategy": strategy, **options}
    return lockstep.Trainer(net() if model is None else model, **own)


def fit(data: Any = None, *, trainer: Any = None, **options: Any) -> None:
    own = {"batch_size": 13, "epochs": 2, "verbose": 0, "shuffle": False, **options}
    (trainer or make()).fit((X, Y) if data is None else data, **own)


def stream() -> Iterator[tuple[Tensor, Tensor]]:
    yield X[:13], Y[:13]
    raise OSError("the disk is gone")


def trained_once() -> Any:
    """Host 1 has trained one epoch more; alone, so that host 0 does not hear of it."""
    trainer = make()
    trainer._runner.epochs_trained = HOST
    return trainer


def frozen() -> nn.Module:
    model = net()
    model[0].bias.requires_grad_(HOST == 0)  # type: ignore[index]
    return model


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Draws the same noise on both hosts, and means another thing by it."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + (1 + HOST * (index == 19)) * torch.rand(6), Y[index]


def nan_on_host_1() -> Tensor:
    data = X.clone()
    data[25, 1] = torch.nan  # in the second batch's second share
    return data


def one_more(epoch: int, logs: Any) -> None:
    raise ArithmeticError("a callback's own")


# What they quarrel about: what each host does, and what both errors say.
QUARRELS: dict[str, tuple[Callable[[], Any], str]] = {
    "samples": (lambda: fit((X + HOST, Y)), "the values of inputs of data"),
    "one sample": (
        lambda: fit((X, Y.clone().index_fill(0, torch.tensor(17), 1 + HOST))),
        "the values of targets of data",
    ),
    "type of the data": (
        lambda: fit((here(X, X.double()), Y)),
        "the form of inputs of data. Received: float32 of shape (6,) on Host 0",
    ),
    "weights": (
        lambda: fit(here((X, Y), (X, Y, torch.ones(40)))),
        "the form of sample_weight of data. Received: missing on Host 0",
    ),
    "samples of a dataset": (
        lambda: fit(Noisy(), shuffle=None),
        "the values of inputs of data, samples 0, 4, 9, 14, 19 and 4 more",
    ),
    "number of samples": (
        lambda: fit((X[HOST:], Y[HOST:])),
        "the number of samples of data. Received: 40 on Host 0",
    ),
    "kind of data": (
        lambda: fit(here((X, Y), stream), batch_size=None, shuffle=None),
        "a stream on Host 1",
    ),
    "batch size": (lambda: fit(batch_size=13 + HOST), "`batch_size`. Received: 13 on Host 0"),
    "epochs": (lambda: fit(epochs=2 + HOST), "`epochs`. Received: 2 on Host 0"),
    "order": (lambda: fit(shuffle=HOST == 1), "`shuffle`"),
    "seed": (lambda: fit(trainer=make(seed=HOST)), "`seed`"),
    "steps": (lambda: fit(steps_per_epoch=2 + HOST), "`steps_per_epoch`"),
    "epochs before": (lambda: fit(trainer=trained_once()), "`first_epoch`. Received: 0 on Host 0"),
    "validation": (lambda: fit(validation_data=here(None, (X, Y))), "the kind of validation_data"),
    "validation samples": (
        lambda: fit(validation_data=(X + HOST, Y)),
        "the values of inputs of validation_data",
    ),
    "optimizer": (
        lambda: fit(trainer=make(optimizer=here(SGD, torch.optim.Adam))),
        "the optimizer. Received: SGD of 4 tensors on Host 0",
    ),
    "width": (lambda: fit(trainer=make(model=net(width=8 + HOST))), "the tensor '0.weight'"),
    "activation": (
        lambda: fit(trainer=make(model=net(middle=here(nn.Tanh(), nn.ReLU())))),
        "the layer '1'. Received: Tanh",
    ),
    "dropout": (
        lambda: fit(trainer=make(model=net(middle=nn.Dropout(0.1 + 0.1 * HOST)))),
        "the layer '1'",
    ),
    "frozen": (lambda: fit(trainer=make(model=frozen())), "the tensor '0.bias'"),
    "loss": (
        lambda: fit(trainer=make(loss=nn.CrossEntropyLoss(label_smoothing=0.5 * HOST))),
        "the loss. Received: CrossEntropyLoss",
    ),
    "clipping": (lambda: fit(trainer=make(clip_norm=here(None, 0.1))), "the Trainer's options"),
    "averages": (
        lambda: fit(trainer=make(average=here(None, lockstep.EMA(0.9)))),
        "the Trainer's options",
    ),
    "schedule": (
        lambda: fit(trainer=make(schedule=here(None, ONE_CYCLE))),
        "the schedule. Received: None on Host 0",
    ),
    "pace of the schedule": (
        lambda: fit(trainer=make(schedule=here(ONE_CYCLE, partial(StepLR, step_size=1)))),
        "the schedule. Received: step on Host 0",
    ),
    "metrics": (
        lambda: fit(trainer=make(metrics=here({}, {"one": MulticlassAccuracy(3)}))),
        "the metrics",
    ),
    "shares": (lambda: fit(trainer=make(num_shares=2 + HOST)), "the strategy"),
    "precision": (
        lambda: fit(trainer=make(precision=here("fp32", "fp64"))),
        "differ in the strategy",
    ),
    "call": (
        lambda: here(make().evaluate, make().predict)(here((X, Y), X)),
        "the call. Received: evaluate on Host 0",
    ),
    "inputs": (lambda: make().predict(X + HOST), "the values of inputs of data"),
    "option of host 1": (lambda: fit(epochs=here(2, -1)), "Received: epochs=-1"),
    "option of host 0": (lambda: fit(trainer=make(loss=here(None, nn.MSELoss()))), "loss=None"),
    "search": (lambda: fit(batch_size="auto"), "The batch size search runs on one host only"),
    "not a number": (lambda: fit((nan_on_host_1(), Y)), "nan from share 1"),
    "reading": (lambda: fit(stream, batch_size=None, shuffle=None), "OSError: the disk is gone"),
    "callback": (
        lambda: fit(trainer=make(callbacks=[LambdaCallback(on_epoch_end=one_more)])),
        "a callback's own",
    ),
}


def main() -> None:
    be_strict()
    for name in sys.argv[1:]:
        told = "no error"
        try:
            QUARRELS[name][0]()
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps({"quarrel": name, "told": told}) + "\n")
        sys.stdout.flush()
    trainer = make()
    fit(trainer=trainer)
    weights = [each.tolist() for each in trainer.model.state_dict().values()]
    sys.stdout.write(json.dumps({"quarrel": "none", "told": weights}) + "\n")


if __name__ == "__main__":
    main()
