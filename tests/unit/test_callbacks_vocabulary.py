"""What callbacks can say of themselves, functions as callbacks, and how errors reach them."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import errors
from lockstep.callbacks import LambdaCallback
from lockstep.train.callbacks.callback import Logs

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))


def make_trainer(*callbacks: lockstep.Callback, devices: int = 1) -> lockstep.Trainer:
    torch.manual_seed(0)
    return lockstep.Trainer(
        nn.Linear(4, 3),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=lockstep.MirroredStrategy(devices),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_functions_are_called_with_all_arguments(devices: int) -> None:
    calls: list[tuple[Any, ...]] = []
    callback = LambdaCallback(
        on_train_begin=lambda logs: calls.append(("begin", logs)),
        on_epoch_begin=lambda epoch, logs: calls.append(("epoch", epoch, logs)),
        on_train_batch_end=lambda batch, logs: calls.append(("batch", batch, logs["size"])),
        on_epoch_end=lambda epoch, logs: calls.append(("end", epoch, sorted(logs))),
        on_train_end=lambda logs: calls.append(("over", sorted(logs))),
    )
    make_trainer(callback, devices=devices).fit((X, Y), batch_size=16, verbose=0)
    assert calls == [
        ("begin", None),
        ("epoch", 0, None),
        ("batch", 0, 16),
        ("batch", 1, 16),
        ("batch", 2, 8),
        ("end", 0, ["loss"]),
        ("over", ["loss"]),
    ]


def test_ranks_wait_only_for_those_who_act() -> None:
    class Acts(lockstep.Callback):
        def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
            """Overrides."""

    class SaysNo(Acts):
        def acts_in(self, method: str) -> bool:
            return method != "on_train_batch_end" and super().acts_in(method)

    assigned: Any = lockstep.Callback()
    assigned.on_train_batch_end = lambda batch, logs: None
    acting: dict[str, Any] = {
        "overridden": Acts(),
        "assigned": assigned,
        "function": LambdaCallback(on_train_batch_end=print),
    }
    idle: dict[str, Any] = {
        "base": lockstep.Callback(),
        "says no": SaysNo(),
        "other function": LambdaCallback(on_epoch_end=print),
    }
    assert all(one.acts_in("on_train_batch_end") for one in acting.values())
    assert not any(one.acts_in("on_train_batch_end") for one in idle.values())
    assert not any(one.acts_in("on_train_batch_begin") for one in acting.values())


@pytest.mark.parametrize("devices", [1, 2])
def test_who_says_no_is_not_called_at_steps(devices: int) -> None:
    class SaysNo(lockstep.Callback):
        def acts_in(self, method: str) -> bool:
            return method != "on_train_batch_end" and super().acts_in(method)

        def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
            raise AssertionError("called")

    trainer = make_trainer(SaysNo(), devices=devices)
    assert trainer.fit((X, Y), batch_size=16, verbose=0).epoch == [0]


class Listens(lockstep.Callback):
    def __init__(self) -> None:
        self.heard: list[object] = []

    def on_train_end(self, logs: Logs | None = None) -> None:
        self.heard.append("end")

    def on_train_error(self, error: BaseException) -> None:
        self.heard.append(error)


@pytest.mark.parametrize("method", ["on_train_begin", "on_train_batch_end", "on_epoch_end"])
@pytest.mark.parametrize("devices", [1, 2])
def test_an_error_reaches_callbacks_instead_of_the_end(devices: int, method: str) -> None:
    error = KeyError("on purpose")

    def fail(*arguments: Any) -> None:
        raise error

    listens = Listens()
    fails: Any = LambdaCallback(**{method: fail})
    with pytest.raises(KeyError):
        make_trainer(fails, listens, devices=devices).fit((X, Y), batch_size=16, verbose=0)
    assert listens.heard == [error]
    make_trainer(listens).fit((X, Y), batch_size=16, verbose=0)
    assert listens.heard == [error, "end"]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"on_batch_end": print}, "must be one of.*'on_train_batch_end'.*'on_batch_end'"),
        ({"on_epoch_end": 3}, "`on_epoch_end` must be a function"),
        ({"on_epoch_end": 3, "acts_in": print}, "2 problems"),
    ],
)
def test_a_wrong_function_is_told_at_once(functions: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.OptionError, match=message):
        LambdaCallback(**functions)


# --- rewound ------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2])
def test_a_trainer_rewinds_after_an_error_too(devices: int) -> None:
    once, twice = make_trainer(devices=devices), make_trainer(devices=devices)

    def train_and_fail() -> None:
        assert twice.optimizer is not None
        with twice.rewound():
            twice.fit((X, Y), epochs=3, batch_size=16, verbose=0)
            twice.optimizer.param_groups[0]["lr"] = 9.0
            twice.optimizer.param_groups[0]["more"] = 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_and_fail()
    histories = [one.fit((X, Y), batch_size=16, verbose=0).history for one in (once, twice)]
    assert histories[0] == histories[1]
    for one, other in zip(once.model.parameters(), twice.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert once.optimizer is not None
    assert twice.optimizer is not None
    assert (
        once.optimizer.state_dict()["param_groups"] == twice.optimizer.state_dict()["param_groups"]
    )
