"""An exception in a helper is raised on rank 0 as itself; a note says where, with its traceback."""

import bdb
import gc
import pdb
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import lockstep
from lockstep.errors import DataError, NonFiniteLossError, WorkerError
from lockstep.launch.health.failure import as_raised, failure_error, pack_failure, unpack_failure
from lockstep.train.callbacks.fit_driver import FitDriver
from lockstep.train.input.data_adapter import DataPipeline
from lockstep.train.runtime.running_call import RunningCall
from lockstep.train.runtime.session import Session
from tests.faults.jobs import (
    BATCH_SIZE,
    fit,
    helpers_of,
    make_data,
    make_stages,
    make_trainer,
    model_of,
)
from tests.faults.mishaps import (
    AsAsked,
    BadLoad,
    BadReduce,
    BadStr,
    FailingLoss,
    Frozen,
    Rows,
    TwoArguments,
    WithLock,
    fail,
    recurse,
)
from tests.faults.processes import is_alive
from tests.thorough import core_of

ACTS: dict[str, tuple[Callable[[], None], type[BaseException], str]] = {
    "plain": (lambda: fail(AsAsked("as asked")), AsAsked, "AsAsked: as asked"),
    "built in": (lambda: fail(ValueError("as asked")), ValueError, "ValueError: as asked"),
    "two arguments": (lambda: fail(TwoArguments(1, 2)), TwoArguments, "TwoArguments: 1 and 2"),
    "unpicklable": (lambda: fail(WithLock()), WorkerError, "WithLock: it holds a lock"),
    "bad __str__": (lambda: fail(BadStr()), BadStr, "BadStr: <its __str__ raised SystemExit>"),
    "bad __reduce__": (lambda: fail(BadReduce("as asked")), BadReduce, "BadReduce: as asked"),
    "bad load": (lambda: fail(BadLoad("as asked")), BadLoad, "BadLoad: as asked"),
    "exit": (lambda: sys.exit(3), SystemExit, "SystemExit: 3"),
    "interrupt": (lambda: fail(KeyboardInterrupt()), KeyboardInterrupt, "KeyboardInterrupt"),
    "huge": (lambda: fail(AsAsked("a" * 50_000_000)), WorkerError, "AsAsked: aaaa"),
    "recursion": (recurse, RecursionError, "RecursionError: maximum recursion depth"),
}


@pytest.mark.parametrize("name", core_of(ACTS, ["plain", "unpicklable", "exit"]))
def test_an_exception_of_one_rank(name: str) -> None:
    act, kind, expected = ACTS[name]
    trainer = make_trainer(3, act, step=2)
    fit_begun = time.monotonic()
    with pytest.raises(BaseException) as caught:  # noqa: PT011  # some are no Exception
        fit(trainer)
    assert time.monotonic() - fit_begun < 30
    error = caught.value
    assert type(error) is kind
    texts = [str(error)] if kind is WorkerError else []
    message, state, weights, *last = (*texts, *error.__notes__)
    rank = message[len("Rank ")]
    where = f"Rank {rank} failed (in fit, step 2): {expected}"
    assert message.startswith(where)
    assert f"--- traceback of rank {rank} ---\nTraceback (most recent call last):" in message
    assert "jobs.py" in message
    assert len(message) < 1_000_000
    assert state.startswith(f"Rank {rank} was at step 2 (forward), ")
    assert weights.startswith("The weights ")
    by_layer = "Lockstep: in the model (Net); inputs ("
    if kind is KeyboardInterrupt:
        by_layer = "Lockstep: stopped by Ctrl-C; the weights "
    assert [note.startswith(by_layer) for note in last] == [True] * (
        kind not in (WorkerError, SystemExit)
    )
    if kind is not WorkerError:
        assert isinstance(error.__cause__, WorkerError)
        assert str(error.__cause__).startswith(where[:70])
        assert "traceback" not in str(error.__cause__)
    model_of(trainer).act = None
    fit(trainer)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


@pytest.mark.thorough
def test_a_debugger_in_a_helper_says_where_there_is_a_terminal() -> None:
    trainer = make_trainer(3, lambda: pdb.Pdb(nosigint=True).set_trace(), step=2)
    with pytest.raises(bdb.BdbQuit) as caught:
        fit(trainer)
    assert any("SingleDeviceStrategy() while you debug" in note for note in caught.value.__notes__)


def causes(error: BaseException | None) -> list[str]:
    """Of an error: types of what it comes from, and of rank 1's what that says."""
    found = []
    while error is not None:
        found.append(str(error) if isinstance(error, WorkerError) else type(error).__name__)
        error = error.__cause__
    return found


def test_an_exception_in_the_data() -> None:
    with pytest.raises(DataError, match=r"Sample \d+ .*AsAsked: in __getitem__") as caught:
        make_trainer(2).fit(Rows(), batch_size=BATCH_SIZE, verbose=0)
    assert causes(caught.value) == [
        "BadRecordError",
        "AsAsked",
        f"Rank 1 failed (in fit, step 0): BadRecordError: {caught.value}",
    ]


def test_an_exception_in_the_loss() -> None:
    trainer = make_trainer(2, loss=FailingLoss())
    with pytest.raises(AsAsked, match="in the loss") as caught:
        fit(trainer)
    assert causes(caught.value)[1] == "Rank 1 failed (in fit, step 0): AsAsked: in the loss"
    with pytest.raises(AsAsked, match="in the loss") as caught:
        trainer.evaluate(make_data())
    assert causes(caught.value)[1] == "Rank 1 failed (in evaluate): AsAsked: in the loss"


@pytest.mark.parametrize("on", ["helpers", "rank 0"])
def test_one_except_clause_catches_what_any_rank_raises(on: str) -> None:
    trainer = make_trainer(2, lambda: fail(TwoArguments(3, 4)), on=on)
    try:
        fit(trainer)
    except TwoArguments as error:
        caught = error
    assert (str(caught), caught.two) == ("3 and 4", 4)


def test_the_error_reads_well() -> None:
    with pytest.raises(AsAsked) as caught:
        fit(make_trainer(2, lambda: fail(AsAsked("as asked"))))
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Rank 1 failed (in fit, step 0): AsAsked: as asked") == 2
    assert shown.count("--- traceback of rank 1 ---") == 1
    assert shown.index("WorkerError: Rank 1") < shown.index("direct cause")
    assert "During handling" not in shown


def test_a_class_of_the_script_comes_home_as_itself() -> None:
    """What __main__ defines travels by value; an except clause must catch it all the same."""
    kind: type[Exception] = type("Homemade", (Exception,), {"__module__": "__main__"})
    sys.modules["__main__"].__dict__["Homemade"] = kind
    try:
        with pytest.raises(kind, match="as asked"):
            fit(make_trainer(2, lambda: fail(kind("as asked"))))
    finally:
        del sys.modules["__main__"].__dict__["Homemade"]


def test_an_exception_that_lets_no_attribute_be_set_can_be_told_of_all_the_same() -> None:
    one = Frozen(7)
    BaseException.__setattr__(one, "__cause__", ValueError("the cause"))
    failure = unpack_failure(pack_failure(one))
    error = as_raised(failure_error("rank 1", failure, "in fit"))
    assert error == one
    assert causes(error) == ["Frozen", "ValueError", "Rank 1 failed (in fit): Frozen: 7"]
    assert "Frozen: 7\n--- traceback of rank 1 ---\n" in error.__notes__[0]


class _FailsTwice(lockstep.Callback):
    """Fails after a step, and once more when it is told of that."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.act()

    def on_train_error(self, error: BaseException) -> None:
        raise LookupError("while tidying up")


@pytest.mark.parametrize("make", [torch.optim.Muon, torch.optim.Adafactor, torch.optim.Adam])
@pytest.mark.parametrize("end", [lambda: fail(AsAsked("true")), lambda: fail(KeyboardInterrupt())])
def test_nothing_that_tidies_up_hides_an_error(
    make: type[torch.optim.Optimizer], end: Callable[[], None]
) -> None:
    """Muon refuses vectors, of which a clone of it was made after an error."""
    trainer = lockstep.Trainer(
        torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(2))),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=make,
        strategy=lockstep.MirroredStrategy(2),
        callbacks=[_FailsTwice(end)],
    )
    with pytest.raises((AsAsked, KeyboardInterrupt)) as caught:
        fit(trainer)
    notes = " ".join(caught.value.__notes__)
    assert "LookupError: while tidying up" in notes
    assert notes.count("could not clean up") == 1
    assert "The weights " in notes


def test_each_failure_of_what_ends_a_call_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever part of the end fails, the others take place and the error is the true one."""
    trainer = make_trainer(2, lambda: fail(AsAsked("true")), on="rank 0")
    gc.collect()  # trainers of other tests end as they should
    ends = {
        (Session, "close"): "the team",
        (RunningCall, "look_at_ranks"): "the ranks",
        (RunningCall, "abandon"): "the weights",
        (FitDriver, "close"): "the screen",
        (DataPipeline, "close"): "the data",
    }
    for (kind, name), what in ends.items():
        plain = getattr(kind, name)

        def fails(self: object, *args: object, plain: Any = plain, what: str = what) -> None:
            plain(self, *args)
            raise LookupError(what)

        monkeypatch.setattr(kind, name, fails)
    with pytest.raises(AsAsked, match="true") as caught:
        fit(trainer)
    monkeypatch.undo()
    notes = " ".join(caught.value.__notes__)
    assert [what for what in ends.values() if f"LookupError: {what}" not in notes] == []
    trainer.close()


def test_the_other_helpers_end_at_once() -> None:
    trainer = make_trainer(4)
    fit(trainer)
    before = helpers_of(trainer)
    model_of(trainer).act = lambda: fail(AsAsked())
    with pytest.raises(AsAsked):
        fit(trainer)
    assert not any(is_alive(pid) for pid in before)


class Failing(lockstep.Callback):
    """Fails in one of its methods, when so many steps are made."""

    def __init__(self, method: str, steps: int, *, is_observer: bool = False) -> None:
        self.is_observer = is_observer
        self._made = 0
        self._failing = method, steps

    def _at(self, method: str) -> None:
        if self._failing == (method, self._made):
            raise AsAsked("as asked")

    def takes_state(self, batch: int) -> bool:
        self._at("takes_state")
        return False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._at("on_epoch_begin")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._at("on_epoch_end")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._at("on_train_batch_begin")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._made += 1
        self._at("on_train_batch_end")

    def on_test_end(self, logs: Any = None) -> None:
        self._at("on_test_end")


def stream_of(num_batches: int) -> Iterator[Any]:
    inputs, targets = make_data()
    for number in range(num_batches):
        rows = slice(number % 3 * BATCH_SIZE, (number % 3 + 1) * BATCH_SIZE)
        yield inputs[rows].double(), targets[rows]
    raise AsAsked("as asked")


# What fails between two steps, and after how many steps the training ends.
MISHAPS: dict[str, tuple[Callable[[], lockstep.Callback], int]] = {
    "a batch begins": (lambda: Failing("on_train_batch_begin", 4), 4),
    "a batch ends": (lambda: Failing("on_train_batch_end", 4), 4),
    "an epoch begins": (lambda: Failing("on_epoch_begin", 3), 3),
    "an epoch ends": (lambda: Failing("on_epoch_end", 3), 3),
    "a validation ends": (lambda: Failing("on_test_end", 3), 3),
    "a state is asked for": (lambda: Failing("takes_state", 3), 4),
    "an observer": (lambda: Failing("on_train_batch_end", 4, is_observer=True), 5),
    "a stream": (lockstep.Callback, 4),
}
ADAM, MOMENTUM = partial(optim.Adam, lr=1e-3), partial(optim.SGD, lr=0.1, momentum=0.9)
# Where slots are in the memory of other processes, and where they are shared.
KEPT: dict[str, tuple[lockstep.Strategy, Any]] = {
    "gloo": (lockstep.MirroredStrategy(2, engine="gloo"), ADAM),
    "servers": (lockstep.ParameterServerStrategy(servers=1, workers=1), MOMENTUM),
    "gloo pipeline": (lockstep.PipelineStrategy(2, microbatches=2, engine="gloo"), ADAM),
    "shared": (lockstep.MirroredStrategy(2), MOMENTUM),
}
ROWS = [(strategy, what) for strategy in KEPT for what in MISHAPS]
CORE = [row for row in ROWS if row[0] == "gloo" or row[1] == "a batch ends"]


def plain_state(num_steps: int, make_optimizer: Any) -> tuple[nn.Module, optim.Optimizer]:
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        model = make_stages().double()
    optimizer = make_optimizer(model.parameters())
    batches = stream_of(num_steps + 1)
    for _ in range(num_steps):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("name", "what"), core_of(ROWS, CORE))
def test_what_fails_between_two_steps_leaves_the_last_whole_one(name: str, what: str) -> None:
    (strategy, optimizer), (make, num_steps) = KEPT[name], MISHAPS[what]
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        model = make_stages().double()
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        precision="fp64",
        strategy=strategy,
        callbacks=[make()],
    )
    inputs, targets = make_data()
    arrays = inputs.double(), targets
    options: dict[str, Any] = {"epochs": 3, "batch_size": BATCH_SIZE, "shuffle": False}
    data: Any = arrays
    if what == "a stream":
        data, options = partial(stream_of, 4), {}
    with pytest.raises((AsAsked, DataError), match="as asked") as caught:
        trainer.fit(data, validation_data=arrays, verbose=0, **options)
    left = f"as they were after step {num_steps - 1}."
    assert left in "\n".join(caught.value.__notes__)
    plain, slots = plain_state(num_steps, optimizer)
    for (key, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(other, one, rtol=0, atol=1e-12), key
        found = trainer.optimizer.state[other]
        for slot, value in slots.state[one].items():
            assert torch.allclose(found[slot], value, rtol=0, atol=1e-12), (key, slot)
    before = helpers_of(trainer)
    trainer.callbacks = []
    trainer.fit(arrays, batch_size=BATCH_SIZE, verbose=0)
    assert helpers_of(trainer) == before, "the helpers have left that call with everybody"


@pytest.mark.thorough
def test_where_all_ranks_fail_alike_the_error_is_rank_0s_own() -> None:
    for step in range(6):
        with pytest.raises(AsAsked, match="as asked"):
            fit(make_trainer(4, lambda: fail(AsAsked("as asked")), step=step, on="all"), epochs=3)


@pytest.mark.thorough
def test_a_loss_that_is_not_finite_is_told_by_rank_0() -> None:
    inputs, targets = make_data()
    for sample in range(0, BATCH_SIZE, 2):
        broken = inputs.clone()
        broken[sample] = torch.inf
        trainer = make_trainer(4)
        with pytest.raises(NonFiniteLossError, match="step 0"):
            trainer.fit((broken, targets), batch_size=BATCH_SIZE, shuffle=False, verbose=0)
