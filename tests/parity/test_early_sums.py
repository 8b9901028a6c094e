"""Ranks over a process group: their gradients are on their way while backward still runs.

That the sums are right is shown by the parity table and ``test_process_group.py``. Here: that they
begin early, what changes after it was sent, and that a step asks no tensor for its value.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep import accelerators
from lockstep.comm.collectives.late_losses import LateLosses, LateTotal
from lockstep.comm.collectives.overlapped_reduce import OverlappedReduce
from lockstep.comm.collectives.shm_gradient_buffer import SharedGradientBuffer
from lockstep.comm.transports.process_group_transport import ProcessGroupTransport
from lockstep.parallel.loss.share_losses import ShareLoss
from lockstep.parallel.worker import Worker
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

GLOO = partial(lockstep.MirroredStrategy, engine="gloo")
DATA = (
    torch.randn(48, 64, generator=torch.Generator().manual_seed(1)),
    torch.arange(48) % 3,
)


def perceptron() -> nn.Module:
    """Large enough for several buckets."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 3)
    )


class Recomputed(nn.Module):
    """Goes backward bit by bit: a weight's gradient grows once for each of its uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(64, 1100), nn.Linear(1100, 3)
        self.twice = nn.Sequential(nn.Linear(1100, 1100), nn.LayerNorm(1100))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.twice, x, use_reentrant=True)
        output: Tensor = self.last(x)
        return output


class Patchy(nn.Module):
    """Parameters of all sizes, some frozen, some used by some samples only, or by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 40)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.table = nn.Embedding(3000, 600)
        self.seldom = nn.Parameter(torch.ones(()))
        self.never = nn.Linear(600, 600)
        self.empty = nn.Parameter(torch.zeros(0))
        self.last = nn.Linear(640, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table((x[:, 0].abs() * 1000).long())
        output: Tensor = self.last(torch.cat([self.first(x), rows], 1)) * self.frozen
        is_special = x[:, 1:2] > 1.2
        if is_special.any():
            output = torch.where(is_special, output * self.seldom, output)
        return output


def trained(model: nn.Module, strategy: Any, **options: Any) -> dict[str, Tensor]:
    """What training comes to: the state, and the losses of the epochs."""
    trainer = lockstep.Trainer(
        model,
        optimizer=partial(torch.optim.Adam, lr=1e-2, fused=True),
        strategy=strategy,
        seed=3,
        **{"loss": nn.CrossEntropyLoss(), **options},
    )
    history = trainer.fit(DATA, batch_size=20, epochs=2, verbose=0)
    return {**model.state_dict(), "losses": torch.tensor(history.history["loss"])}


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=["plain", "accumulate"])
def test_buckets_are_sent_while_backward_runs(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but what is complete only when the last share has gone backward: nothing."""
    events: list[str] = []
    send, hand_over, begin = (
        ProcessGroupTransport.send,
        OverlappedReduce.hand_over,
        OverlappedReduce.expect,
    )

    def sent(self: ProcessGroupTransport, *args: Any) -> Any:
        events.append("send")
        return send(self, *args)

    def handed_over(self: OverlappedReduce, num_rows: int) -> None:
        events.append("|")
        hand_over(self, num_rows)
        events.append("end")

    def begun(self: OverlappedReduce, num_rows: int) -> None:
        events.append("step")
        begin(self, num_rows)

    monkeypatch.setattr(ProcessGroupTransport, "send", sent)
    monkeypatch.setattr(OverlappedReduce, "hand_over", handed_over)
    monkeypatch.setattr(OverlappedReduce, "expect", begun)
    trained(perceptron(), GLOO(2), **options)
    steps = "".join(f" {event}" for event in events).split(" step")[1:]
    before, after = zip(*(step.split(" end")[0].split(" |") for step in steps), strict=True)
    assert len(steps) == 6
    assert {each.count("send") for each in before} == {2}
    assert {each.count("send") for each in after} == {0}


@pytest.mark.exhaustive
def test_what_changes_after_it_was_sent_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[int] = []
    mark = SharedGradientBuffer.mark

    def marked(self: SharedGradientBuffer, rows: range, parameters: Any) -> None:
        marks.append(len(parameters))
        mark(self, rows, parameters)

    monkeypatch.setattr(SharedGradientBuffer, "mark", marked)
    expected = trained(Recomputed(), lockstep.SingleDeviceStrategy(), precision="fp64")
    found = trained(Recomputed(), GLOO(2), precision="fp64")
    assert marks
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-12 * value.norm(), name


@pytest.mark.parametrize(
    ("devices", "options"),
    [(2, {}), (3, {"clip_norm": 0.1}), (2, {"accumulate": 3})],
    ids=["2", "3 clipped", "2 accumulating"],
)
def test_sums_in_buckets_are_those_of_one_device(devices: int, options: dict[str, Any]) -> None:
    expected = trained(Patchy(), lockstep.SingleDeviceStrategy(), precision="fp64", **options)
    found = trained(Patchy(), GLOO(devices), precision="fp64", **options)
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-12 * value.norm(), name


@pytest.mark.parametrize(("devices", "shares"), core_of([(2, 8), (4, 8), (3, 5)], [(3, 5)]))
def test_sums_in_buckets_have_the_bits_of_shared_memory(devices: int, shares: int) -> None:
    expected = trained(Patchy(), lockstep.MirroredStrategy(1, num_shares=shares))
    found = trained(Patchy(), GLOO(devices, num_shares=shares))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


_ASKS = {
    torch.ops.aten._local_scalar_dense.default,  # item, float, bool, int
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
}


class _Guard(TorchDispatchMode):
    """Fails on what waits for a device to have a tensor's value in Python."""

    asks = _ASKS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self.asks, "the step asks for a tensor's value"
        return func(*args, **(kwargs or {}))


@contextmanager
def guarded(guard: TorchDispatchMode | None = None) -> Iterator[None]:
    def refuse(tensor: Tensor) -> None:
        raise AssertionError("the step asks for a tensor's values")

    guard = guard or _Guard()  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as patch, guard:
        patch.setattr(Tensor, "tolist", refuse)
        # The first step tries the model on samples and on their halves, and waits for the result.
        patch.setattr("lockstep.parallel.batch_run.is_tried", lambda step: False)
        yield


@pytest.mark.parametrize("ask", [methodcaller("item"), methodcaller("tolist"), float, bool])
def test_the_guard_sees_it(ask: Any) -> None:
    with pytest.raises(AssertionError, match="the step asks"), guarded():
        ask(torch.ones(()))


class _Copied:
    """Stands in for ``torch.Event``: a copy that takes a while."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self._num_asked = 0

    def record(self) -> None:
        self._events.append("copy")

    def query(self) -> bool:
        self._num_asked += 1
        if self._num_asked == 3:
            self._events.append("there")
        return self._num_asked >= 3


class _DeviceGuard(_Guard):
    """Fails also on what is copied from a device to memory that ranks share, or to lines like it.

    Each tensor counts as a device's, but for plain numbers and what was waited for.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        exchange = worker.exchange
        self._lines = [torch.from_numpy(exchange._late_losses._lines)]
        self._lines += [] if exchange.board is None else [exchange.board._own_numbers]
        self.on_host: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            self.on_host.append(result)
        if func is torch.ops.aten.copy_.default and _lies_in(self._lines, args[0]):
            assert _lies_in(self.on_host, args[1]), "a copy that is waited for"
        return result


def _lies_in(tensors: list[Tensor], part: Tensor) -> bool:
    return any(0 <= part.data_ptr() - one.data_ptr() < max(one.nbytes, 1) for one in tensors)


@contextmanager
def as_on_a_device(worker: Worker, events: list[str]) -> Iterator[None]:
    """Within the block what tensors have counts as a device's, which takes a while to tell it."""
    wait, backward = accelerators.Fetch.wait, ShareLoss.backward
    guard = _DeviceGuard(worker)

    def waited(self: accelerators.Fetch, look_around: Any) -> Tensor:
        guard.on_host.append(wait(self, look_around))
        return guard.on_host[-1]

    def went_backward(self: ShareLoss, denominator: Any) -> None:
        events.append("backward")
        backward(self, denominator)

    with pytest.MonkeyPatch.context() as patch, guarded(guard):
        patch.setattr(accelerators, "computes", lambda one: isinstance(one, Tensor))
        patch.setattr(torch, "Event", lambda kind: _Copied(events))
        patch.setattr(accelerators.Fetch, "wait", waited)
        patch.setattr(ShareLoss, "backward", went_backward)
        yield


def test_the_guard_sees_a_copy_to_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was done before: by assignment."""

    def assign(self: LateLosses, share: int, *numbers: Any) -> None:
        for place, number in enumerate(numbers):
            torch.from_numpy(self._lines)[share, place] = number

    monkeypatch.setattr(LateLosses, "put", assign)
    with pytest.raises(AssertionError, match="a copy that is waited for"):
        trained_as_on_a_device(monkeypatch, lockstep.SingleDeviceStrategy(), [])


def trained_as_on_a_device(
    monkeypatch: pytest.MonkeyPatch,
    strategy: Any,
    steps: list[str],
    make_model: Callable[[], nn.Module] = perceptron,
    **options: Any,
) -> dict[str, Tensor]:
    """What training comes to; what happened in each step is added to ``steps``."""
    step = Worker.train_step

    def train_step(self: Worker, *args: Any) -> Any:
        events: list[str] = []
        with as_on_a_device(self, events):
            result = step(self, *args)
        steps.append(" ".join(events))
        return result

    monkeypatch.setattr(Worker, "train_step", train_step)
    return trained(make_model(), strategy, **options)


@pytest.mark.parametrize(
    ("strategy", "options", "backwards"),
    [
        (lockstep.SingleDeviceStrategy, {}, 1),
        (lockstep.SingleDeviceStrategy, {"accumulate": 2}, 2),
        (partial(GLOO, 2), {}, 1),
        (partial(GLOO, 2), {"accumulate": 2}, 2),
    ],
    ids=["alone", "alone accumulating", "2", "2 accumulating"],
)
@pytest.mark.parametrize("rule", ["raise", "ignore"])
def test_a_step_on_a_device_waits_for_its_losses_and_its_verdict(
    strategy: Any,
    options: dict[str, Any],
    backwards: int,
    rule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The losses begin to come before the last backward pass, and are waited for after it."""
    options = {**options, "on_nonfinite": rule}
    expected = trained(perceptron(), strategy(), **options)
    steps: list[str] = []
    found = trained_as_on_a_device(monkeypatch, strategy(), steps, **options)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    losses = "backward " * (backwards - 1) + "copy backward there"
    verdict = " copy there" if rule == "raise" else ""
    assert steps == [losses + verdict] * 6


def test_a_device_alone_is_asked_for_its_loss_a_step_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the host knows what that weighs, and takes whatever comes: it waits for nothing."""
    options: dict[str, Any] = {
        "on_nonfinite": "ignore",
        "loss": lambda output, target: (output - target[:, None]).square().mean(),
    }
    alone = lockstep.SingleDeviceStrategy()
    expected = trained(perceptron(), alone, **options)
    steps: list[str] = []
    told: list[int] = []
    number = LateTotal.__float__

    def made_number(self: LateTotal) -> float:
        told.append(len(steps))
        return number(self)

    monkeypatch.setattr(LateTotal, "__float__", made_number)
    found = trained_as_on_a_device(monkeypatch, alone, steps, **options)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert steps == ["copy backward"] * 6
    assert told[:2] == [2, 3]


class Counting(nn.Sequential):
    """What it computes depends on how many batches it has seen."""

    num_seen: Tensor

    def __init__(self) -> None:
        super().__init__(perceptron())
        self.register_buffer("num_seen", torch.zeros(()))
        self.register_buffer("expanded", torch.zeros(1).expand(3))

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self[0](input) * (1 + self.num_seen.clone())
        self.num_seen.add_(1)
        return output


def test_buffers_of_a_device_are_put_back_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expanded one, of which elements share memory, cannot be written: that one is looked at."""
    options = {"accumulate": 2, "on_nonfinite": "ignore"}
    alone = lockstep.SingleDeviceStrategy()
    expected = trained(Counting(), alone, **options)
    monkeypatch.setattr(_Guard, "asks", _ASKS - {torch.ops.aten.equal.default})
    looks: list[int] = []
    steps: list[str] = []
    equal = Tensor.equal

    def looked(self: Tensor, other: Tensor) -> bool:
        looks.append(self.numel())
        return equal(self, other)

    monkeypatch.setattr(Tensor, "equal", looked)
    found = trained_as_on_a_device(monkeypatch, alone, steps, Counting, **options)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert found["num_seen"] == len(steps) == 6
    assert {*looks} == {3}


class _Killer(lockstep.Callback):
    """After the second step: its connection is closed when the third begins to receive."""

    trainer: Any

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            trainer: Any = self.trainer
            os.kill(trainer._runner.session._team.pids()[0], signal.SIGKILL)
            time.sleep(0.3)


def test_a_rank_that_is_gone_before_anything_is_sent_is_named() -> None:
    """So the fit goes on with another one."""
    found, expected = perceptron(), perceptron()
    for model, restarts, callbacks in ((expected, 0, []), (found, 1, [_Killer()])):
        trainer = lockstep.Trainer(
            model,
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.SGD, lr=1e-2),
            strategy=GLOO(2),
            callbacks=callbacks,
        )
        history = trainer.fit(DATA, batch_size=24, epochs=2, verbose=0, restarts=restarts)
    assert len(history.restarts) == 1
    assert "SIGKILL" in str(history.restarts[0])
    assert all(map(torch.equal, found.parameters(), expected.parameters()))
