"""The profiler: all ranks, on one clock, in a file for Perfetto."""

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import errors
from lockstep.callbacks import Profiler
from lockstep.train.callbacks.callback import Logs
from tests.thorough import core_of

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (64,), generator=torch.Generator().manual_seed(1))


def make_trainer(strategy: Any, *callbacks: lockstep.Callback) -> lockstep.Trainer:
    torch.manual_seed(0)
    return lockstep.Trainer(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=strategy,
        callbacks=callbacks,
    )


def read(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def blocks(events: list[dict[str, Any]], rank: int, name: str) -> list[tuple[float, float]]:
    return [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X" and event["name"] == name and event["pid"] // 1000 == rank
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("devices", core_of([1, 2, 3], [2]))
def test_the_steps_of_all_ranks_are_there_on_one_clock(
    devices: int, name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    trainer = make_trainer(
        lockstep.MirroredStrategy(devices), Profiler(path, first_step=3, num_steps=2)
    )
    trainer.fit((X, Y), epochs=2, batch_size=16, verbose=0)  # 4 steps an epoch
    events = read(path)
    for rank in range(devices):
        for step in range(8):
            assert len(blocks(events, rank, f"step {step}")) == (step in (3, 4)), (rank, step)
        assert len(blocks(events, rank, f"0F{rank}")) == 2
        assert len(blocks(events, rank, "aten::linear")) == 4
        # All begin a step after its data is known, and none ends it before the last has updated.
        begin, end = blocks(events, rank, "step 3")[0]
        for other in range(devices):
            update, _ = blocks(events, other, "STEP")[0]
            assert begin < update < end, "the ranks' clocks differ"
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {name.partition(":")[0] for name in names} == {f"rank {rank}" for rank in range(devices)}


def test_a_pipeline_shows_its_actions(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    strategy = lockstep.PipelineStrategy(2, microbatches=2)
    trainer = make_trainer(strategy, Profiler(path, first_step=1, num_steps=1))
    trainer.fit((X, Y), batch_size=16, verbose=0)
    events = read(path)
    for stage in (0, 1):
        for action in (f"{stage}F0", f"{stage}F1", f"{stage}B0", f"{stage}B1", "REDUCE", "SYNC"):
            assert len(blocks(events, stage, action)) == 1, (stage, action)
        assert not blocks(events, stage, f"{1 - stage}F0")


def test_it_changes_no_bit_and_can_be_used_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    profiler = Profiler(path, first_step=0, num_steps=1)
    traced = make_trainer(lockstep.MirroredStrategy(2), profiler)
    plain = make_trainer(lockstep.MirroredStrategy(2))
    for number in range(2):
        for trainer in (traced, plain):
            trainer.fit((X, Y), batch_size=16, verbose=0)
        assert len(blocks(read(path), 1, f"step {4 * number}")) == 1
    for one, other in zip(traced.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


class StopsAfter(lockstep.Callback):
    def __init__(self, batch: int, error: Exception | None = None) -> None:
        self.batch = batch
        self.error = error

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if batch == self.batch:
            self.trainer.stop_training = True
            if self.error is not None:
                raise self.error


def test_training_that_ends_within_the_steps_is_traced_as_far_as_it_came(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    profiler = Profiler(path, first_step=1, num_steps=9)
    trainer = make_trainer(lockstep.MirroredStrategy(2), profiler, StopsAfter(2))
    trainer.fit((X, Y), batch_size=16, verbose=0)
    assert [len(blocks(read(path), 1, f"step {step}")) for step in range(4)] == [0, 1, 1, 0]


def test_after_an_error_another_trace_can_be_taken(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    profiler = Profiler(path, first_step=1, num_steps=9)
    failing = StopsAfter(2, KeyError("on purpose"))
    with pytest.raises(KeyError):
        make_trainer(None, profiler, failing).fit((X, Y), batch_size=16, verbose=0)
    assert not path.exists()
    make_trainer(None, profiler).fit((X, Y), batch_size=16, verbose=0)
    assert len(blocks(read(path), 0, "step 3")) == 1


def test_a_fit_that_is_too_short_is_warned_of(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "trace.json", first_step=100)
    with pytest.warns(UserWarning, match="training has ended before step 100"):
        make_trainer(None, profiler).fit((X, Y), batch_size=16, verbose=0)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "path": ({"path": None}, "`path` must be a path"),
    "first_step": ({"first_step": -1}, "`first_step` must be an integer of at least 0"),
    "num_steps": ({"num_steps": 0}, "`num_steps` must be an integer of at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_told_at_once(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(errors.OptionError, match=message):
        Profiler(**{"path": "trace.json", **options})


def test_one_profiler_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(errors.OptionError, match="Give the Trainer one Profiler"):
        make_trainer(None, Profiler(path), Profiler(path)).fit((X, Y), verbose=0)
