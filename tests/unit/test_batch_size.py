"""``batch_size="auto"``, with real trials of small models in processes of their own."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep
from lockstep import errors
from lockstep.cluster.memory_limits import FreeMemory, Kills
from lockstep.data.map_style.sources import as_source
from lockstep.launch.health.failure import describe_exit
from lockstep.launch.workers import pool
from lockstep.train.batch_size_search import batch_size as batch_sizes
from lockstep.train.batch_size_search.batch_size_cache import SIZES, BatchSizeCache
from lockstep.train.batch_size_search.search_algorithm import Doubling, Measured, TooLarge, Trial
from lockstep.train.callbacks.callback import stopping
from lockstep.train.runtime import session
from lockstep.train.trials.trial_process import Trials, _Figures, is_shortage
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(1))
SEARCH = lockstep.BatchSizeSearch(smallest=8, largest=16)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """All searches of this process measure for a moment only."""
    preload = (*session.PRELOAD, "torch._dynamo", "tests.short_trials", __name__)
    monkeypatch.setattr("lockstep.train.trials.trial_process.PRELOAD", preload)


class Net(nn.Module):
    """With dropout, a buffer that counts, and whatever ``act`` does with a batch."""

    def __init__(self, act: Callable[[Tensor], None] = lambda x: None) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)
        )
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.act(x)
        output: Tensor = self.layers(x)
        return output


def make_trainer(act: Callable[[Tensor], None] = lambda x: None, **options: Any) -> Any:
    given: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=1e-3),
        **options,
    }
    torch.manual_seed(0)
    return lockstep.Trainer(given.pop("model", None) or Net(act), **given)


def trials_of(trainer: Any) -> Trials:
    return Trials(
        trainer, as_source((X, Y)), loss=None, others=0, limit_bytes=None, timeout_seconds=60
    )


def forbid_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(batch_sizes, "Trials", fail)


def forget_trials(monkeypatch: pytest.MonkeyPatch, found: int) -> list[int]:
    """Find a size without any process; returns how long the data of every search was."""
    searched: list[int] = []

    def search(training: batch_sizes.Training, *rest: object) -> BatchSizeCache:
        searched.append(len(training.source))
        return BatchSizeCache(
            batch_size=found,
            seconds_per_step=1.0,
            peak_bytes=1000,
            num_samples=len(training.source),
        )

    monkeypatch.setattr(batch_sizes, "_search", search)
    return searched


# --- what is found ------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", core_of([1, 2], [2], []))
def test_a_size_is_found_said_and_trained_with(
    devices: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_servers", {})
    trainer = make_trainer(strategy=lockstep.MirroredStrategy(devices))
    history = trainer.fit((X, Y), batch_size="auto")
    assert (sys.executable, None) not in pool._servers  # the trials' own has ended
    assert trainer.batch_size in (8, 16, 32, 60)
    assert len(history.history["loss"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["batch_size", "a", "step", "samples/s", "memory"]
    assert said[1].split()[0] == str(8 * devices)
    assert f"batch_size {trainer.batch_size}: the fastest per sample (remembered in" in "".join(
        said
    )


@pytest.mark.exhaustive
def test_trials_change_nothing_in_the_script() -> None:
    """The weights are, bit by bit, those of a fit that was given the size."""
    first, second = make_trainer(), make_trainer()
    for trainer in (first, second):
        trainer.fit((X, Y), batch_size=30, verbose=0)  # the optimizer has slots
    before = {name: value.clone() for name, value in first.model.state_dict().items()}
    streams = torch.get_rng_state()
    with closing(trials_of(first)) as trials:
        assert isinstance(trials.try_size(8), Measured)
    assert torch.equal(torch.get_rng_state(), streams)
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    first.fit((X, Y), batch_size=SEARCH, verbose=0)
    second.fit((X, Y), batch_size=first.batch_size, verbose=0)
    for ours, theirs in zip(
        first.model.state_dict().values(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert first._runner.steps_trained == second._runner.steps_trained
    for group, other in zip(
        first.optimizer.param_groups, second.optimizer.param_groups, strict=True
    ):
        assert group["lr"] == other["lr"] == 1e-3


def test_callbacks_see_nothing_of_trials() -> None:
    calls: list[str] = []

    class Listener(lockstep.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            calls.append("begin")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            calls.append("batch")

    trainer = make_trainer(callbacks=[Listener()])
    trainer.fit((X, Y), batch_size=SEARCH, verbose=0)
    assert calls == ["begin", *["batch"] * -(-60 // trainer.batch_size)]


class Squares(Dataset[Any]):
    """A dataset with samples that are made when they are read."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(4) * index, index % 3


@pytest.mark.thorough
@pytest.mark.parametrize("objective", ["speed", "memory"])
def test_no_batch_is_larger_than_the_data(objective: Any) -> None:
    trainer = make_trainer()
    search = lockstep.BatchSizeSearch(objective=objective, smallest=16)
    trainer.fit(Squares(), batch_size=search, verbose=0)
    assert trainer.batch_size in ((16, 20) if objective == "speed" else (20,))


def test_a_model_made_by_a_function_gets_its_values_afterwards() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    searched, plain = make_trainer(model=make), make_trainer(model=make)
    searched.fit((X, Y), batch_size=SEARCH, verbose=0)
    plain.fit((X, Y), batch_size=searched.batch_size, verbose=0)
    for ours, theirs in zip(searched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.thorough
def test_a_pipeline_begins_with_a_sample_for_every_microbatch() -> None:
    strategy = lockstep.PipelineStrategy(2, microbatches=4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    trainer = make_trainer(model=model, strategy=strategy)
    trainer.fit((X, Y), batch_size=lockstep.BatchSizeSearch(largest=32), verbose=0)
    assert trainer.batch_size == 32  # 8 for each of the 4, and no more than the largest
    with pytest.raises(errors.OptionError, match="Every microbatch needs a sample"):
        trainer.fit((X, Y), batch_size=lockstep.BatchSizeSearch(smallest=2), verbose=0)


def test_a_trial_learns_nothing_and_so_cannot_diverge() -> None:
    trainer = make_trainer(
        model=nn.Linear(4, 1),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=1e30),
    )
    data = (X, X[:, :1])
    with pytest.raises(errors.NonFiniteLossError):
        make_trainer(
            model=nn.Linear(4, 1), loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=1e30)
        ).fit(data, batch_size=8, epochs=3, verbose=0)
    with pytest.raises(errors.NonFiniteLossError):  # of the training itself
        trainer.fit(data, batch_size=SEARCH, epochs=3, verbose=0)
    assert trainer.batch_size in (8, 16)


class Watcher(lockstep.Callback):
    """Acts on batches, or says that it only looks on."""

    def __init__(self, is_observer: bool) -> None:
        self.is_observer = is_observer
        self.ends = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends += 1


@pytest.mark.parametrize("devices", [1, 2])
def test_ranks_do_not_wait_for_callbacks_that_only_look_on(devices: int) -> None:
    watched, idle = Watcher(False), Watcher(True)
    assert stopping([watched, idle], "on_train_batch_end") == [watched]
    watcher = Watcher(True)
    trainer = make_trainer(callbacks=[watcher], strategy=lockstep.MirroredStrategy(devices))
    trainer.fit((X, Y), batch_size=20, verbose=0)
    assert watcher.ends == 3


# --- memory between trainers --------------------------------------------------------------------


def test_a_second_trainer_reads_the_file_and_starts_no_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_trainer()
    first.fit((X, Y), batch_size=SEARCH, verbose=0)
    forbid_trials(monkeypatch)
    second = make_trainer()
    second.fit((X, Y), batch_size=SEARCH)
    assert second.batch_size == first.batch_size
    assert f"batch_size {first.batch_size}: found before for this model and machine" in (
        capsys.readouterr().out
    )
    with pytest.raises(AssertionError, match="a process was started"):
        make_trainer(precision="bf16-mixed").fit((X, Y), batch_size=SEARCH, verbose=0)


@pytest.mark.thorough
def test_a_broken_file_is_told_and_the_search_made_again() -> None:
    make_trainer().fit((X, Y), batch_size=SEARCH, verbose=0)
    whole = SIZES.path.read_bytes()
    SIZES.path.write_bytes(whole[:-9])
    with pytest.warns(UserWarning, match="is ignored, and written anew"):
        make_trainer().fit((X, Y), batch_size=SEARCH, verbose=0)
    assert len(SIZES.path.read_bytes()) == pytest.approx(len(whole), abs=20)


def test_what_was_found_holds_for_as_much_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found at the end of the data: more data may want more, less may not have as much."""
    searched = forget_trials(monkeypatch, found=20)
    for num_samples in (30, 30, 25, 60, 10):
        data = X[:num_samples], Y[:num_samples]
        make_trainer().fit(data, batch_size="auto", verbose=0)
    assert searched == [30, 60, 10]


def test_what_was_found_holds_while_its_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = forget_trials(monkeypatch, found=20)
    for free in (2000, 2000, 1100):  # it took 1000, which is more than 90 % of 1100
        monkeypatch.setattr(batch_sizes, "free_memory", lambda free=free: FreeMemory(free, "here"))
        make_trainer().fit((X, Y), batch_size="auto", verbose=0)
    assert searched == [60, 60]


def test_no_size_that_fits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(trials: Trials, batch_size: int) -> Trial:
        return TooLarge(batch_size=batch_size, reason="killed")

    monkeypatch.setattr(Trials, "try_size", fail)
    with pytest.raises(errors.DeviceError, match=r"not enough memory .* batches of 1\..*killed"):
        make_trainer().fit((X, Y), batch_size="auto", verbose=0)


# --- trials that fail ---------------------------------------------------------------------------


class MineError(Exception):
    pass


def refuse_all(x: Tensor) -> None:
    raise MineError("this model never runs")


def refuse_large(x: Tensor) -> None:
    if len(x) > 16:
        raise MineError("too many")


def leave_if_large(x: Tensor) -> None:
    if len(x) > 16:
        os._exit(3)


def hoard_if_large(x: Tensor) -> None:
    if len(x) > 16:
        raise MemoryError


def test_an_error_of_the_users_own_code_is_that_error() -> None:
    with pytest.raises(MineError, match="this model never runs") as caught:
        make_trainer(refuse_all).fit((X, Y), batch_size="auto", verbose=0)
    note = caught.value.__notes__[0]
    assert "in a trial of batch_size 8" in note
    assert "in refuse_all" in note


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 2])
def test_in_a_helper_of_a_trial_too(devices: int) -> None:
    trainer = make_trainer(refuse_all, strategy=lockstep.MirroredStrategy(devices))
    with pytest.raises(MineError, match="this model never runs"):
        trainer.fit((X, Y), batch_size="auto", verbose=0)


@pytest.mark.parametrize(
    ("act", "said"),
    core_of(
        [
            (refuse_large, "MineError: too many"),
            (leave_if_large, "it exited with status 3"),
            (hoard_if_large, "MemoryError"),
        ],
        lambda _, said: said == "MemoryError",
    ),
)
def test_a_larger_size_that_fails_ends_the_search(act: Callable[[Tensor], None], said: str) -> None:
    trainer = make_trainer(act)
    with closing(trials_of(trainer)) as trials:
        told: list[Trial] = []
        found = Doubling(
            objective="memory",
            smallest=8,
            floor=8,
            largest=60,
            limit_bytes=None,
            try_size=trials.try_size,
            report=told.append,
        ).run()
    assert isinstance(found, Measured)
    assert found.batch_size == 16
    assert [trial.batch_size for trial in told] == [8, 16, 32, 24, 20, 18]
    assert all(said in trial.reason for trial in told[2:] if not isinstance(trial, Measured))
    assert not any(isinstance(trial, Measured) for trial in told[2:])


def test_a_size_must_fit_the_device_too() -> None:
    trainer = make_trainer()
    with closing(trials_of(trainer)) as trials:
        figures = {
            peak: trials._measured(8, _Figures(0.1, 1, 1, peak, 1000), 0)
            for peak in (None, 900, 901)
        }
    assert isinstance(figures[None], Measured)
    assert isinstance(figures[900], Measured)
    assert isinstance(figures[901], TooLarge)
    assert "on the device" in figures[901].reason


def test_what_cannot_be_sent_to_a_trial_is_named() -> None:
    trainer = make_trainer()
    trainer.model.lock = threading.Lock()
    with pytest.raises(errors.ShippingError, match="`lock` of the model"):
        trainer.fit((X, Y), batch_size="auto", verbose=0)


def test_shortages_are_told_from_failures() -> None:
    end = "Rank 1 (process 7) ended (in fit): {}."
    killed = errors.WorkerError(end.format(describe_exit(-9)))
    known = Kills(0, "this host"), Kills(1, "this host")
    starved = errors.WorkerError(end.format(describe_exit(-9, *known)))
    murdered = errors.WorkerError(end.format(describe_exit(-9, known[0], known[0])))
    crashed = errors.WorkerError("Rank 1 (process 7) ended (in fit): killed by SIGSEGV.")
    wrapped = errors.WorkerError("Rank 1 failed (in fit, step 0): MemoryError: ")
    outer = RuntimeError("a step failed")
    outer.__cause__ = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")
    assert all(map(is_shortage, (killed, starved, wrapped, outer, MemoryError())))
    assert not any(map(is_shortage, (murdered, crashed, ValueError("out of memory lane"), None)))


# --- arguments ----------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another objective": ({"objective": "fast"}, "`objective` must be.*'fast'"),
    "no sample": ({"smallest": 0}, "`smallest` must be.*smallest=0"),
    "a float": ({"largest": 8.0}, "`largest` must be.*largest=8.0"),
    "a flag": ({"largest": True}, "`largest` must be.*largest=True"),
    "bounds the wrong way round": (
        {"smallest": 9, "largest": 8},
        "`smallest` must not be larger than `largest`.*smallest=9, largest=8",
    ),
    "several": ({"objective": 1, "smallest": -1}, "2 problems(.|\n)*objective(.|\n)*smallest"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_searches_are_refused(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(errors.OptionError, match=message):
        lockstep.BatchSizeSearch(**options)


@pytest.mark.parametrize("size", ["largest", "AUTO", lockstep.BatchSizeSearch])
def test_other_words_are_refused(size: Any) -> None:
    with pytest.raises(errors.OptionError, match=r'`batch_size` must be an integer.*"auto"'):
        make_trainer().fit((X, Y), batch_size=size, verbose=0)


def test_a_smallest_size_beyond_the_data_is_refused() -> None:
    with pytest.raises(errors.OptionError, match=r"larger than the data set.*smallest=61 with 60"):
        make_trainer().fit((X, Y), batch_size=lockstep.BatchSizeSearch(smallest=61), verbose=0)


def test_arguments_are_checked_before_any_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_trials(monkeypatch)
    with pytest.raises(errors.OptionError, match="fit needs an optimizer"):
        make_trainer(optimizer=None).fit((X, Y), batch_size="auto", verbose=0)
    with pytest.raises(errors.DataError, match="must have at least one sample"):
        make_trainer().fit((X[:0], Y[:0]), batch_size="auto", verbose=0)
    with pytest.raises(errors.OptionError, match="`epochs` must be"):
        make_trainer().fit((X, Y), batch_size="auto", epochs=0, verbose=0)
