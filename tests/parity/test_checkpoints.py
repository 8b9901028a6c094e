"""A ``fit`` with checkpoints that is begun anew goes on where the last of them was taken.

What a training consists of, under which strategy and feature, is ``test_resume``'s table.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.checkpoint.generations import generations, write_generation
from lockstep.checkpoint.reading import read_checkpoint, read_newest
from lockstep.errors import CheckpointError, DataError, OptionError
from lockstep.train.checkpointing import checkpoint_files, checkpoints
from lockstep.train.checkpointing.training_state import TrainingState
from tests.parity.test_resume import BATCH, STRATEGIES, X, Y, make_model, make_trainer
from tests.states import first_difference
from tests.thorough import core_of

STEPS_PER_EPOCH = 5


class Ending(lockstep.Callback):
    """Ends a training with an error at a step, counted from 1; counts steps."""

    def __init__(self, step: int = 0) -> None:
        self._step = step
        self.num_steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_steps += 1
        if self.num_steps == self._step:
            raise ZeroDivisionError


def early() -> lockstep.Callback:
    return lockstep.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)


def fit(trainer: lockstep.Trainer, folder: Path | None, **options: Any) -> dict[str, Any]:
    every = options.pop("every", "2 steps")
    checkpoint = None if folder is None else lockstep.Checkpoint(folder, every=every)
    data = options.pop("data", (X, Y))
    if isinstance(data, tuple):
        options = {"batch_size": BATCH, **options}
    options = {"epochs": 3, "validation_data": (X[:20], Y[:20]), "verbose": 0, **options}
    found: dict[str, Any] = trainer.fit(data, checkpoint=checkpoint, **options).history
    return found


def fit_until(step: int, trainer: lockstep.Trainer, folder: Path, **options: Any) -> None:
    trainer.callbacks = [*trainer.callbacks, Ending(step)]
    with pytest.raises(ZeroDivisionError):
        fit(trainer, folder, **options)


def assert_same(one: lockstep.Trainer, other: lockstep.Trainer) -> None:
    states = [TrainingState.of(each.state_dict()) for each in (one, other)]
    assert first_difference(states[0], states[1]) is None


# --- exact resume --------------------------------------------------------------------------------

ROWS = [
    (strategy, feature, every)
    for strategy in STRATEGIES
    for feature in ("Adam", "one cycle", "averages of bfloat16", "float16")
    for every in ("2 steps", "epoch")
    if feature == "Adam" or (every == "2 steps" and strategy in ("single", "mirrored-2"))
]
CORE = [
    ("single", "averages of bfloat16", "2 steps"),
    ("mirrored-2", "Adam", "2 steps"),
    ("mirrored-2", "Adam", "epoch"),
    ("pipeline-2", "Adam", "2 steps"),
]
MORE = [
    ("hybrid-2x2", "Adam", "2 steps"),
]


@pytest.mark.parametrize(("strategy", "feature", "every"), core_of(ROWS, CORE, MORE))
def test_a_script_that_is_started_again_goes_on(
    strategy: str, feature: str, every: str, tmp_path: Path
) -> None:
    def make(seed: int = 1) -> lockstep.Trainer:
        trainer = make_trainer(feature, strategy, seed=seed)
        if trainer.schedule is not None:
            vars(trainer.schedule.scheduler)["total_steps"] = 3 * STEPS_PER_EPOCH
        trainer.callbacks = [early()]
        return trainer

    whole = make(0)
    expected = fit(whole, None)
    first = make(0)
    fit_until(8, first, tmp_path, every=every)
    second, counting = make(), Ending()
    second.callbacks += [counting]
    assert fit(second, tmp_path, every=every) == expected
    assert counting.num_steps == 3 * STEPS_PER_EPOCH - (6 if every == "2 steps" else 5)
    assert_same(whole, second)
    third, counting = make(), Ending()
    third.callbacks += [counting]
    assert fit(third, tmp_path, every=every) == expected
    assert counting.num_steps == 0, "a finished run trains nothing"
    assert_same(whole, third)
    model = make_trainer(feature, strategy, seed=2).model
    model.load_state_dict(lockstep.checkpoint.load_state_dict(tmp_path))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.exhaustive
def test_every_second_attempt_may_have_another_number_of_devices(tmp_path: Path) -> None:
    def make(devices: int, seed: int = 1) -> lockstep.Trainer:
        torch.manual_seed(seed)
        return lockstep.Trainer(
            make_model(),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(optim.Adam, lr=1e-2),
            strategy=lockstep.MirroredStrategy(devices, num_shares=8),
        )

    whole = make(2, 0)
    expected = fit(whole, None)
    fit_until(4, make(1, 0), tmp_path)
    fit_until(6, make(4), tmp_path)
    last = make(2)
    assert fit(last, tmp_path) == expected
    assert_same(whole, last)


@pytest.mark.thorough
@pytest.mark.parametrize("every", ["2 steps", "epoch"])
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"outer": lockstep.Nesterov()}, marks=pytest.mark.thorough)]
)
def test_replicas_that_train_apart_each_go_on(
    options: dict[str, Any], every: str, tmp_path: Path
) -> None:
    def make(num_replicas: int = 2) -> lockstep.Trainer:
        torch.manual_seed(0)
        return lockstep.Trainer(
            make_model(),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(optim.Adam, lr=1e-2),
            metrics={"accuracy": torchmetrics.Accuracy("multiclass", num_classes=3)},
            strategy=lockstep.LocalSGDStrategy(every=3, devices=num_replicas, **options),
        )

    whole = make()
    expected = fit(whole, None)
    fit_until(10, make(), tmp_path, every=every)
    second, counting = make(), Ending()
    second.callbacks = [counting]
    assert fit(second, tmp_path, every=every) == expected
    # They have averaged after steps 3 and 5 of an epoch; it was due after step 2, 4 and so on.
    assert counting.num_steps == 3 * STEPS_PER_EPOCH - (8 if every == "2 steps" else 5)
    assert_same(whole, second)


@pytest.mark.parametrize(
    "strategy",
    [
        lockstep.MirroredStrategy(2),
        pytest.param(lockstep.LocalSGDStrategy(2, devices=3), marks=pytest.mark.thorough),
    ],
)
def test_an_epoch_that_other_replicas_have_begun_counts_all_samples(
    strategy: lockstep.Strategy, tmp_path: Path
) -> None:
    def make(strategy: lockstep.Strategy) -> lockstep.Trainer:
        torch.manual_seed(0)
        return lockstep.Trainer(
            nn.Linear(6, 3),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(optim.SGD, lr=0.0),  # so that every loss is of the same weights
            strategy=strategy,
        )

    expected = fit(make(lockstep.SingleDeviceStrategy()), None)
    fit_until(4, make(lockstep.LocalSGDStrategy(every=3, devices=2)), tmp_path)
    assert fit(make(strategy), tmp_path)["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_a_run_that_had_stopped_early_stays_where_it_was(tmp_path: Path) -> None:
    def run() -> tuple[dict[str, Any], lockstep.Trainer]:
        trainer = make_trainer("Adam", "single")
        trainer.callbacks = [lockstep.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0)]
        return fit(trainer, tmp_path, every="epoch"), trainer

    (first, one), (second, other) = run(), run()
    assert len(first["loss"]) == 2
    assert second == first
    assert_same(one, other)


def test_each_fit_has_a_folder_of_its_own(tmp_path: Path) -> None:
    def script(ends: bool) -> lockstep.Trainer:
        trainer = make_trainer("Adam", "single")
        fit(trainer, tmp_path / "one", epochs=1)
        if ends:
            fit_until(3, trainer, tmp_path / "two", epochs=2)
        else:
            trainer.callbacks = []
            fit(trainer, tmp_path / "two", epochs=2)
        return trainer

    script(ends=True)
    found, whole = script(ends=False), make_trainer("Adam", "single")
    fit(whole, None, epochs=1)
    fit(whole, None, epochs=2)
    assert_same(whole, found)
    with pytest.raises(CheckpointError, match=r"began after 5 steps. Received: .* after 0"):
        fit(make_trainer("Adam", "single"), tmp_path / "two", epochs=2)


@pytest.mark.parametrize(
    "options",
    [
        {"every": "sometimes"},
        {"every": "0 steps"},
        {"every": 3},
        {"keep": 0},
        {"on_difference": "ask"},
    ],
)
def test_options_are_checked(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        lockstep.Checkpoint(tmp_path, **options)


# --- streams -------------------------------------------------------------------------------------


def loader(*, seed: int | None = 3) -> DataLoader[Any]:
    """With a generator of its own, which goes on from epoch to epoch."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(X, Y), batch_size=BATCH, shuffle=True, generator=generator)


def drawing() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(STEPS_PER_EPOCH):
        chosen = np.random.permutation(len(X))[:BATCH]
        yield X[chosen], Y[chosen]


STREAMS: dict[str, Callable[[], Any]] = {"a loader": loader, "a function": lambda: drawing}


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", core_of(["single", "mirrored-2"], ["mirrored-2"]))
@pytest.mark.parametrize(("name", "steps"), [("a loader", None), ("a function", 3)])
def test_a_stream_is_read_again_up_to_there(
    name: str, steps: int | None, strategy: str, tmp_path: Path
) -> None:
    def options() -> dict[str, Any]:
        data = STREAMS[name]()
        return {"data": data, "steps_per_epoch": steps, "validation_data": loader(seed=4)}

    whole, again = (make_trainer("Adam", strategy) for _ in range(2))
    expected = fit(whole, None, **options())
    fit_until(8, make_trainer("Adam", strategy), tmp_path, every="1 step", **options())
    assert fit(again, tmp_path, every="1 step", **options()) == expected
    assert_same(whole, again)


def test_a_stream_that_gives_something_else_is_an_error(tmp_path: Path) -> None:
    fit_until(8, make_trainer("Adam", "single"), tmp_path, data=loader())
    for other in (loader(seed=8), lambda: iter([(X[:BATCH], Y[:BATCH])])):
        with pytest.raises(DataError, match="must give the same batches"):
            fit(make_trainer("Adam", "single"), tmp_path, data=other)
    with pytest.raises(CheckpointError, match="data: a stream in the checkpoint"):
        fit(make_trainer("Adam", "single"), tmp_path)
    with pytest.raises(OptionError, match="gone through once only"):
        fit(make_trainer("Adam", "single"), tmp_path, data=drawing(), epochs=1)


# --- writing -------------------------------------------------------------------------------------


def test_what_was_read_is_not_kept_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    alive = []

    def noted(folder: Path, **options: Any) -> Any:
        found = read_newest(folder, **options)
        if found is not None:
            large = (name for name in found.tensors if not name.startswith("position/"))
            read.extend(weakref.ref(found.tensors[name]) for name in large)
        return found

    class Looking(lockstep.Callback):
        is_observer = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            alive.append(sum(tensor() is not None for tensor in read))

    fit_until(3, make_trainer("Adam", "single"), tmp_path)
    monkeypatch.setattr(checkpoints, "read_newest", noted)
    trainer = make_trainer("Adam", "single")
    trainer.callbacks = [Looking()]
    fit(trainer, tmp_path)
    assert read
    assert {*alive} == {0}


def test_training_goes_on_while_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_ahead = threading.Event()

    class Ahead(lockstep.Callback):
        is_observer = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                is_ahead.set()

    def slowly(*args: Any) -> Any:
        assert is_ahead.wait(60), "no step is made while a checkpoint is written"
        return write_generation(*args)

    monkeypatch.setattr(checkpoint_files, "write_generation", slowly)
    whole, trainer = make_trainer("Adam", "single"), make_trainer("Adam", "single")
    trainer.callbacks = [Ahead()]
    assert fit(trainer, tmp_path) == fit(whole, None)
    assert_same(whole, trainer)
    assert len(generations(tmp_path)) == 3


@pytest.mark.parametrize("failing", [1, 8])
def test_what_cannot_be_written_is_an_error_at_the_next_one_or_at_the_end(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def fail(*args: Any) -> Any:
        written.append(args)
        if len(written) == failing:
            raise OSError(28, "No space left on device", "a file")
        return write_generation(*args)

    monkeypatch.setattr(checkpoint_files, "write_generation", fail)
    with pytest.raises(OSError, match="No space left on device: 'a file'"):
        fit(make_trainer("Adam", "single"), tmp_path)
    assert len(written) == failing
    assert len(generations(tmp_path)) == (0 if failing == 1 else 3)


def test_a_run_that_ends_before_its_last_checkpoint_has_nothing_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path, saved: Any, keep: int) -> Path:
        if saved.manifest.summary.is_finished:
            raise OSError(28, "No space left on device", "a file")
        return write_generation(folder, saved, keep)

    whole, first, second = (make_trainer("Adam", "single") for _ in range(3))
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_files, "write_generation", fail)
        with pytest.raises(OSError, match="No space left"):
            fit(first, tmp_path, every="epoch")
    assert fit(second, tmp_path, every="epoch") == fit(whole, None)
    assert_same(whole, second)
    assert read_checkpoint(tmp_path).manifest.summary.is_finished


def test_an_error_in_training_is_the_one_that_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise OSError(28, "No space left on device", "a file")

    monkeypatch.setattr(checkpoint_files, "write_generation", fail)
    trainer = make_trainer("Adam", "single")
    trainer.callbacks = [Ending(3)]
    with pytest.raises(ZeroDivisionError) as caught:
        fit(trainer, tmp_path)
    assert any("No space left" in note for note in caught.value.__notes__)


def test_nothing_is_trained_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = make_trainer("Adam", "single")
    before = TrainingState.of(trainer.state_dict()).digest()
    with pytest.raises(CheckpointError, match=os.fspath(tmp_path / "file")):
        fit(trainer, tmp_path / "file" / "run")
    assert TrainingState.of(trainer.state_dict()).digest() == before


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"must be written into a folder.*/file, a file"):
        fit(make_trainer("Adam", "single"), tmp_path / "file")
