"""How often the host waits for its device: not once in a step, whatever the number of steps."""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep.accelerators import Fetch
from lockstep.data.trees import tensors_of
from tests.devices.found import ACCELERATORS, KIND

aten = torch.ops.aten

# They give the host a number, or a shape that depends on values.
READS = (
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
)

# Operators of the host's own doing, between a copy and its read.
FEW = 3


class Waits(TorchDispatchMode):
    """Counts how often a host waits until its device has come as far as it has been asked.

    Those are operators that give the host a value, copies that end before they return, and reads of
    what the device was asked to copy right before.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._num_asked = 0
        begin, wait = Fetch.__init__, Fetch.wait
        begun: WeakKeyDictionary[Fetch, int] = WeakKeyDictionary()

        def noted(fetch: Fetch, tensor: torch.Tensor) -> None:
            begin(fetch, tensor)
            begun[fetch] = self._num_asked

        def waited(fetch: Fetch, look_around: Callable[[float], None]) -> torch.Tensor:
            self.count += self._num_asked < begun[fetch] + FEW
            return wait(fetch, look_around)

        monkeypatch.setattr(Fetch, "__init__", noted)
        monkeypatch.setattr(Fetch, "wait", waited)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [*tensors_of((args, kwargs))]
        if any(one.device.type == KIND for one in given):
            self._num_asked += 1
            is_read = func in READS
            self.count += is_read or (_copies(func, args, kwargs) and not _stay(given, result))
        return result


def _copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is a copy that ends before it returns."""
    if func is aten.copy_.default:
        return not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    return func is aten._to_copy.default and not kwargs.get("non_blocking", False)


def _stay(given: list[torch.Tensor], result: torch.Tensor) -> bool:
    """Whether what is copied is on the device before and afterwards."""
    return all(one.device.type == KIND for one in (*given, result))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(ACCELERATORS[0])


def by_fit(num_steps: int, **options: Any) -> None:
    trainer = lockstep.Trainer(
        make_model(), loss=nn.CrossEntropyLoss(), optimizer=torch.optim.Adam, **options
    )
    trainer.fit(data(num_steps), batch_size=4, verbose=0)


def by_loop(num_steps: int) -> None:
    model = make_model()
    optimizer = lockstep.CrossReplicaOptimizer(torch.optim.Adam(model.parameters()), model)
    x, y = data(num_steps)
    for rows in range(0, len(x), 4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows : rows + 4]), y[rows : rows + 4]).backward()
        optimizer.step()


def data(num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4 * num_steps, 8, generator=torch.Generator().manual_seed(1))
    return x.to(ACCELERATORS[0]), (torch.arange(len(x)) % 3).to(ACCELERATORS[0])


def num_waits(train: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """The waits of 24 steps."""
    train(2)  # what a device can do is tried once
    counts = []
    for num_steps in (12, 36):
        with monkeypatch.context() as patch, Waits(patch) as waits:
            train(num_steps)
        counts.append(int(waits.count))
    return counts[1] - counts[0]


@pytest.mark.parametrize("train", [by_fit, by_loop])
def test_no_step_waits(train: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_waits(train, monkeypatch) == 0


@pytest.mark.exhaustive  # of the count itself
def test_a_step_that_must_know_a_norm_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_waits(partial(by_fit, clip_norm=1.0), monkeypatch) >= 24


def test_a_wait_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.ones(2, device=ACCELERATORS[0])
    with Waits(monkeypatch) as waits:
        value.sum().item()
        value.cpu()
        torch.empty(2).copy_(value)
        Fetch(value).wait(lambda waited_seconds: None)
        value.clone().copy_(value)
        value.to("cpu", non_blocking=True)
    assert waits.count == 4
