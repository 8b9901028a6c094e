"""An exception in a helper is one error on rank 0, that says where and shows the traceback."""

import sys
import time
from collections.abc import Callable

import pytest
import torch

from lockstep.errors import DataError, NonFiniteLossError, WorkerError
from tests.faults.jobs import BATCH_SIZE, fit, helpers_of, make_data, make_trainer, model_of
from tests.faults.mishaps import (
    AsAsked,
    BadLoad,
    BadReduce,
    BadStr,
    FailingLoss,
    Rows,
    TwoArguments,
    WithFile,
    fail,
    recurse,
)
from tests.faults.processes import is_alive

ACTS: dict[str, tuple[Callable[[], None], type[BaseException] | None, str]] = {
    "plain": (lambda: fail(AsAsked("as asked")), AsAsked, "AsAsked: as asked"),
    "built in": (lambda: fail(ValueError("as asked")), ValueError, "ValueError: as asked"),
    "two arguments": (lambda: fail(TwoArguments(1, 2)), None, "TwoArguments: 1 and 2"),
    "unpicklable": (lambda: fail(WithFile()), None, "WithFile: it holds a file"),
    "bad __str__": (lambda: fail(BadStr()), BadStr, "BadStr: <its __str__ raised SystemExit>"),
    "bad __reduce__": (lambda: fail(BadReduce("as asked")), None, "BadReduce: as asked"),
    "bad load": (lambda: fail(BadLoad("as asked")), None, "BadLoad: as asked"),
    "exit": (lambda: sys.exit(3), SystemExit, "SystemExit: 3"),
    "interrupt": (lambda: fail(KeyboardInterrupt()), KeyboardInterrupt, "KeyboardInterrupt"),
    "huge": (lambda: fail(AsAsked("a" * 50_000_000)), None, "AsAsked: aaaa"),
    "recursion": (recurse, RecursionError, "RecursionError: maximum recursion depth"),
}


@pytest.mark.parametrize("name", ACTS)
def test_an_exception_of_one_rank(name: str) -> None:
    act, kind, expected = ACTS[name]
    trainer = make_trainer(3, act, step=2)
    fit_begun = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        fit(trainer)
    assert time.monotonic() - fit_begun < 30
    message = str(caught.value)
    rank = message[len("Rank ")]
    assert message.startswith(f"Rank {rank} failed (in fit, step 2): {expected}")
    assert f"--- traceback of rank {rank} ---\nTraceback (most recent call last):" in message
    assert "jobs.py" in message
    assert len(message) < 1_000_000
    assert (caught.value.__cause__ and type(caught.value.__cause__)) is kind
    model_of(trainer).act = None
    fit(trainer)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_an_exception_in_the_data() -> None:
    message = r"Rank 1 failed \(in fit, step 0\): DataError: Sample \d+ .*AsAsked: in __getitem__"
    with pytest.raises(WorkerError, match=message) as caught:
        make_trainer(2).fit(Rows(), batch_size=BATCH_SIZE, verbose=0)
    assert isinstance(caught.value.__cause__, DataError)
    assert isinstance(caught.value.__cause__.__cause__, AsAsked)


def test_an_exception_in_the_loss() -> None:
    trainer = make_trainer(2, loss=FailingLoss())
    with pytest.raises(WorkerError, match=r"Rank 1 failed \(in fit, step 0\).*in the loss"):
        fit(trainer)
    with pytest.raises(WorkerError, match=r"Rank 1 failed \(in evaluate\).*in the loss"):
        trainer.evaluate(make_data())


def test_a_class_of_the_script_comes_home_as_itself() -> None:
    """What __main__ defines travels by value; an except clause must catch it all the same."""
    kind: type[Exception] = type("Homemade", (Exception,), {"__module__": "__main__"})
    sys.modules["__main__"].__dict__["Homemade"] = kind
    try:
        with pytest.raises(WorkerError) as caught:
            fit(make_trainer(2, lambda: fail(kind("as asked"))))
    finally:
        del sys.modules["__main__"].__dict__["Homemade"]
    assert isinstance(caught.value.__cause__, kind)


def test_the_other_helpers_end_at_once() -> None:
    trainer = make_trainer(4)
    fit(trainer)
    before = helpers_of(trainer)
    model_of(trainer).act = lambda: fail(AsAsked())
    with pytest.raises(WorkerError):
        fit(trainer)
    assert not any(is_alive(pid) for pid in before)


def test_where_all_ranks_fail_alike_the_error_is_rank_0s_own() -> None:
    for step in range(6):
        with pytest.raises(AsAsked, match="as asked"):
            fit(make_trainer(4, lambda: fail(AsAsked("as asked")), step=step, on="all"), epochs=3)


def test_a_loss_that_is_not_finite_is_told_by_rank_0() -> None:
    inputs, targets = make_data()
    for sample in range(0, BATCH_SIZE, 2):
        broken = inputs.clone()
        broken[sample] = torch.inf
        trainer = make_trainer(4)
        with pytest.raises(NonFiniteLossError, match="step 0"):
            trainer.fit((broken, targets), batch_size=BATCH_SIZE, shuffle=False, verbose=0)
