"""Copies of a divided training: each rank writes its part, and any number of ranks goes on."""

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lockstep
from lockstep.checkpoint.manifest import NAME
from lockstep.checkpoint.partitioned_files import WrittenSpan, write_parts
from lockstep.checkpoint.reading import DamagedCheckpointWarning
from lockstep.errors import CheckpointError, WorkerError
from lockstep.train.checkpointing import stored_parts
from lockstep.train.checkpointing.partitioned_state import PartitionedCopy, write_requested
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.resume.part_loading import PartLoading
from tests.faults.jobs import helpers_of
from tests.parity.test_sharded import INPUTS, TARGETS, Norms
from tests.thorough import core_of

LEVELS = core_of(["parameters", "gradients", "slots"], ["parameters"])
HEADERS = 4096


def make_trainer(
    devices: int | list[str],
    level: str = "parameters",
    *callbacks: lockstep.Callback,
    engine: str | None = None,
) -> lockstep.Trainer:
    torch.manual_seed(0)
    return lockstep.Trainer(
        (lambda: Norms()) if level == "made" else Norms(),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        strategy=lockstep.FullyShardedStrategy(
            devices, level=level.replace("made", "parameters"), engine=engine
        ),
        callbacks=callbacks,
    )


def make_alone(num_shares: int | None = None) -> lockstep.Trainer:
    torch.manual_seed(0)
    return lockstep.Trainer(
        Norms(),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        strategy=lockstep.MirroredStrategy(1, num_shares=num_shares),
    )


def digest(trainer: lockstep.Trainer) -> str:
    return TrainingState.of({**trainer.state_dict(), "callbacks": []}).digest()


class Written:
    """Bytes that each rank writes in each copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: list[list[int]] = []
        end = PartitionedCopy.end

        def counted(copy: PartitionedCopy, found: Sequence[Any]) -> None:
            self.bytes.append([num_bytes(own) for own in found])
            end(copy, found)

        monkeypatch.setattr(PartitionedCopy, "end", counted)


def num_bytes(spans: Sequence[WrittenSpan]) -> int:
    return sum(span.stop - span.start for span in spans)


def bytes_read(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Of a checkpoint, or of weights, by each rank."""
    (read,) = all_bytes_read(caplog)
    return read


def all_bytes_read(caplog: pytest.LogCaptureFixture) -> list[list[int]]:
    """Likewise, of each file of weights and checkpoint."""
    lines = [one.getMessage() for one in caplog.records if "bytes of each rank" in one.msg]
    return [
        [int(one) for one in line.partition("rank: [")[2].rstrip("]").split(", ")] for line in lines
    ]


class BeginsAnew(lockstep.Callback):
    """Gives weights other values when training begins, also where it resumes."""

    def on_train_begin(self, logs: Any = None) -> None:
        with torch.no_grad():
            for one in self.model.parameters():
                one.fill_(0.5)


@pytest.mark.parametrize("level", LEVELS)
def test_no_rank_writes_or_reads_more_than_its_part_of_a_checkpoint(
    level: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    written = Written(monkeypatch)
    trainer = make_trainer(3, level)
    checkpoint = lockstep.Checkpoint(tmp_path, every="1 steps")
    trainer.fit((INPUTS, TARGETS), batch_size=24, verbose=0, checkpoint=checkpoint)
    parameters = sum(one.nbytes for one in trainer.model.parameters())
    # After each of two steps; the last checkpoint is written after the call.
    assert len(written.bytes) == 3
    for own in written.bytes[:2]:
        assert sum(own) == 3 * parameters  # with Adam's two slots
        assert max(own) <= parameters + HEADERS
    alone = list(tmp_path.glob("generation-*/tensors-*"))
    assert max(file.stat().st_size for file in alone) < HEADERS
    shutil.rmtree(max(tmp_path.glob("generation-*")))  # that of the end
    resumed = make_trainer(3, level)
    with caplog.at_level("INFO", "lockstep"):
        resumed.fit((INPUTS, TARGETS), batch_size=24, verbose=0, checkpoint=checkpoint)
    assert digest(resumed) == digest(trainer)
    read = bytes_read(caplog)
    assert sum(read) >= 3 * parameters
    assert max(read) <= parameters + HEADERS


def test_the_process_that_resumes_keeps_no_divided_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = PartLoading.prepared
    found: list[tuple[frozenset[str], set[str]]] = []

    def noted(loading: PartLoading, place: str, state: TrainingState) -> Any:
        state, waiting = prepared(loading, place, state)
        found.append((waiting, {name for name, one in state.flat()[0].items() if one.is_meta}))
        return state, waiting

    monkeypatch.setattr(PartLoading, "prepared", noted)
    for epochs in (1, 2):
        make_trainer(2).fit(
            (INPUTS, TARGETS), batch_size=20, epochs=epochs, checkpoint=tmp_path, verbose=0
        )
    ((waiting, without_memory),) = found
    assert len(waiting) > 3
    assert without_memory == waiting


@pytest.mark.thorough
def test_weights_are_the_checkpoints_whatever_callbacks_did_when_training_began(
    tmp_path: Path,
) -> None:
    expected = make_trainer(2, "parameters", BeginsAnew())
    expected.fit((INPUTS, TARGETS), batch_size=24, verbose=0)
    checkpoint = lockstep.Checkpoint(tmp_path, every="1 steps")
    make_trainer(2, "parameters", BeginsAnew()).fit(
        (INPUTS, TARGETS), batch_size=24, verbose=0, checkpoint=checkpoint
    )
    shutil.rmtree(max(tmp_path.glob("generation-*")))
    resumed = make_trainer(2, "parameters", BeginsAnew())
    resumed.fit((INPUTS, TARGETS), batch_size=24, verbose=0, checkpoint=checkpoint)
    assert digest(resumed) == digest(expected)


def test_all_processes_write_what_is_saved_after_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(3)
    trainer.fit((INPUTS, TARGETS), batch_size=24, verbose=0)
    own: list[int] = []

    def counted(*arguments: Any) -> list[WrittenSpan]:
        spans = write_parts(*arguments)
        own.append(num_bytes(spans))
        return spans

    monkeypatch.setattr(stored_parts, "write_parts", counted)
    trainer.save(tmp_path / "weights")
    parameters = sum(one.nbytes for one in trainer.model.parameters())
    assert 0 < sum(own) <= parameters / 3 + HEADERS
    found = load_file(tmp_path / "weights")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(found[name], value), name


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("level", "engine"),
    core_of(
        [("parameters", None), ("parameters", "gloo"), ("made", "gloo")],
        [("parameters", None), ("made", "gloo")],
        [],
    ),
)
def test_ranks_load_their_parts_of_weights_that_another_strategy_saved(
    level: str, engine: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first training, and after it; what follows has the bits of one device."""
    saved = make_alone()
    with torch.no_grad():
        for one in saved.model.parameters():
            one.normal_()
    saved.save(tmp_path / "weights")
    parameters = sum(one.nbytes for one in saved.model.parameters())
    trainer, digests = make_trainer(3, level, engine=engine), []
    for own in (make_alone(num_shares=3), trainer):
        for _ in range(2):
            with caplog.at_level("INFO", "lockstep"):
                own.load(tmp_path / "weights")
            for name, value in own.model.state_dict().items():
                assert torch.equal(value, saved.model.state_dict()[name]), name
            own.fit((INPUTS, TARGETS), batch_size=24, verbose=0)
        digests.append(digest(own))
    assert digests[0] == digests[1]
    for read in all_bytes_read(caplog):
        assert sum(read) >= parameters
        assert max(read) <= parameters / 3 + HEADERS
    assert len(all_bytes_read(caplog)) == 2


@pytest.mark.thorough
def test_weights_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(2)
    before = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    lockstep.Trainer(nn.Linear(3, 2), loss="mse").save(tmp_path / "weights")
    with pytest.raises(CheckpointError, match="must have the model's names"):
        trainer.load(tmp_path / "weights")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_damaged_part_is_seen_and_an_older_checkpoint_used(tmp_path: Path) -> None:
    check_an_older_one_is_used(tmp_path, make_trainer)


def check_an_older_one_is_used(tmp_path: Path, make: Callable[[int], lockstep.Trainer]) -> None:
    trainer = make(2)
    checkpoint = lockstep.Checkpoint(tmp_path, every="1 steps")
    trainer.fit((INPUTS, TARGETS), batch_size=24, verbose=0, checkpoint=checkpoint)
    newest = max(tmp_path.glob("generation-*"))
    (file,) = newest.glob("parts-*")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    again = make(2)
    with pytest.warns(DamagedCheckpointWarning, match="are damaged"):
        again.fit((INPUTS, TARGETS), batch_size=24, verbose=0, checkpoint=checkpoint)
    assert digest(again) == digest(trainer)
    assert (newest / NAME).exists()


class Kill(lockstep.Callback):
    """Kills a helper after a step, while others go on; once."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._is_done = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == self._batch and not self._is_done:
            self._is_done = True
            os.kill(helpers_of(self.trainer)[-1], signal.SIGKILL)


@pytest.mark.parametrize("level", [*LEVELS, "made"])
def test_a_part_outlives_its_rank(level: str) -> None:
    expected = make_trainer(2, level)
    expected.fit((INPUTS, TARGETS), batch_size=8, verbose=0)
    trainer = make_trainer(2, level, Kill(3))
    history = trainer.fit((INPUTS, TARGETS), batch_size=8, verbose=0, restarts=1)
    assert len(history.restarts) == 1
    assert digest(trainer) == digest(expected)


STAGES: dict[str, Callable[[], lockstep.Strategy]] = {
    "sharded": partial(lockstep.FullyShardedStrategy, 2, engine="gloo"),
    "pipeline": partial(lockstep.PipelineStrategy, 2, microbatches=2),
    "pipeline over gloo": partial(lockstep.PipelineStrategy, 2, microbatches=2, engine="gloo"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", core_of(STAGES, ["pipeline"], []))
def test_a_rank_killed_while_it_writes_leaves_the_checkpoint_before(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped before it can write, and killed when the others have begun."""

    def make() -> lockstep.Trainer:
        torch.manual_seed(0)
        layers = [nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 5)]
        return lockstep.Trainer(
            nn.Sequential(*layers),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.Adam, lr=1e-2),
            strategy=STAGES[kind](),
        )

    expected, killed = make(), make()
    data = INPUTS, TARGETS
    expected.fit(data, batch_size=12, verbose=0)
    begin, num_begun = PartitionedCopy.begin, []

    def beginning(copy: PartitionedCopy, worker: Any) -> Any:
        num_begun.append(worker)
        if len(num_begun) == 3:
            os.kill(helpers_of(killed)[0], signal.SIGSTOP)
        return begin(copy, worker)

    def writing(*arguments: Any) -> Any:
        if len(num_begun) == 3:
            os.kill(helpers_of(killed)[0], signal.SIGKILL)
        return write_requested(*arguments)

    checkpoint = lockstep.Checkpoint(tmp_path, every="1 steps")
    with monkeypatch.context() as patch:
        patch.setattr(PartitionedCopy, "begin", beginning)
        patch.setattr("lockstep.train.callbacks.rank_sync.write_requested", writing)
        with pytest.raises(WorkerError):
            killed.fit(data, batch_size=12, verbose=0, checkpoint=checkpoint)
    assert len([*tmp_path.glob("generation-*")]) == 2
    resumed = make()
    resumed.fit(data, batch_size=12, verbose=0, checkpoint=checkpoint)
    assert digest(resumed) == digest(expected)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", core_of(STAGES, ["sharded"], []))
def test_weights_with_channels_last_are_written_whole(kind: str, tmp_path: Path) -> None:
    """Parts of their memory are no parts of a tensor in a file."""

    def make() -> lockstep.Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 8, 3, padding=1), nn.Tanh()),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(32, 5)),
        )
        return lockstep.Trainer(
            model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.Adam, lr=1e-2),
            strategy=STAGES[kind](),
        )

    expected, stopped, resumed = make(), make(), make()
    expected.fit((INPUTS, TARGETS), batch_size=12, verbose=0)
    checkpoint = lockstep.Checkpoint(tmp_path, every="1 steps")
    stopped.fit((INPUTS, TARGETS), batch_size=12, verbose=0, checkpoint=checkpoint)
    for _ in range(2):  # that of the end, and of the last step
        shutil.rmtree(max(tmp_path.glob("generation-*")))
    resumed.fit((INPUTS, TARGETS), batch_size=12, verbose=0, checkpoint=checkpoint)
    assert digest(resumed) == digest(expected)
