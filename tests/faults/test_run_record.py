"""The record of a run, and what `lockstep doctor` makes of it: each kind of fault, by its name."""

import errno
import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from soak import until_named
from torch import Tensor, nn

import lockstep
from lockstep.cli.main import main
from lockstep.errors import (
    BadRecordError,
    HostError,
    NonFiniteLossError,
    OptionError,
    WorkerError,
)
from lockstep.launch.workers import process_state
from lockstep.launch.workers.process_state import start_of
from lockstep.train.fault_tolerance.rank_states import RankState, kind_of, last_line
from lockstep.train.fault_tolerance.run_record import NAME, Event, Fault, read_record
from tests.faults.jobs import fit, make_trainer, warm_up
from tests.faults.processes import JOB, running, wait_until

pytestmark = pytest.mark.thorough


def doctor(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status, and what is said on lines of any length."""
    capsys.readouterr()
    status = main(["doctor", str(folder)])
    return status, " ".join(capsys.readouterr().out.split())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def take_too_much() -> None:
    raise MemoryError


def break_down() -> None:
    raise ArithmeticError("a bug")


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/data/out")


FAULTS: dict[str, tuple[Callable[[], None], type[BaseException]]] = {
    "dead": (die, WorkerError),
    "hung": (stop, WorkerError),
    "out of memory": (take_too_much, MemoryError),
    "disk full": (fill_disk, OSError),
    "failed": (break_down, ArithmeticError),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_the_verdict_names_fault_rank_step_and_line(
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_state, "STOPPED_SECONDS", 0.5)
    warm_up(2)
    act, error = FAULTS[kind]
    with pytest.raises(error) as caught:
        fit(make_trainer(2, act, step=2), record=tmp_path)
    notes = "\n".join(caught.value.__notes__)
    assert "Rank 1 was at step 2 (forward), waited for by rank 0." in notes
    assert f"`lockstep doctor {tmp_path}` tells more" in notes
    status, said = doctor(tmp_path, capsys)
    assert status == 1
    assert f"Verdict: {kind}. Rank 1 (process " in said
    assert "was at step 2 (forward); rank 0 waited for it." in said
    fault = read_record(tmp_path)[-1].fault
    assert fault is not None
    own, other = fault.ranks
    assert "jobs.py" in own.line  # where fit was called
    assert (act.__name__ in other.line) == (kind not in ("dead", "hung")), other.line


@pytest.mark.thorough
def test_who_hangs_is_whom_all_wait_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warm_up(3)
    trainer = make_trainer(3, partial(time.sleep, 1000), step=1, timeout_seconds=2)
    with pytest.raises(WorkerError):
        fit(trainer, record=tmp_path)
    status, said = doctor(tmp_path, capsys)
    assert (status, "Verdict: hung. Rank " in said) == (1, True)
    fault = read_record(tmp_path)[-1].fault
    assert fault is not None
    assert fault.rank in (1, 2)
    assert all("jobs.py" in state.line for state in fault.ranks[1:])  # the model that sleeps


def test_data_that_ends_too_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield torch.ones(4, 16), torch.zeros(4, dtype=torch.long)

    source = iter(batches())
    with pytest.raises(lockstep.LockstepError):
        make_trainer(1).fit(source, steps_per_epoch=3, verbose=0, record=tmp_path)
    assert "Verdict: data exhausted. " in doctor(tmp_path, capsys)[1]


def torn() -> WorkerError:
    error = WorkerError("Rank 1 ended")
    error.kind = "out of memory"
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torn(), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), "out of memory"),
        (OSError(errno.EDQUOT, "quota"), "disk full"),
        (HostError("Host 1 no longer answers"), "network cut"),
        (BadRecordError("Sample 3", index=3), "bad record"),
        (NonFiniteLossError("step 3"), "not finite"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(143), "told to end"),
    ],
)
def test_kinds(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind


class Slow(nn.Module):
    """In helpers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.script = nn.Linear(4, 2), os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.script:
            time.sleep(0.1)
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.exhaustive
def test_a_straggler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = lockstep.Trainer(
        Slow(),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        strategy=lockstep.MirroredStrategy(2),
    )
    trainer.fit((torch.ones(60, 4), torch.ones(60, 2)), batch_size=4, verbose=0, record=tmp_path)
    status, said = doctor(tmp_path, capsys)
    assert status == 0
    assert "It has ended well. Straggler: the others have waited " in said
    assert "% of the time for rank 1." in said
    times = [event.time for event in read_record(tmp_path) if event.what == "at"]
    assert len(times) == 2  # the first step, and a second later


def test_what_was_outlived(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = tmp_path / "once"

    def die_once() -> None:
        if not once.exists():
            once.touch()
            die()

    fit(make_trainer(2, die_once, step=2), record=tmp_path / "run", restarts=1)
    status, said = doctor(tmp_path / "run", capsys)
    assert status == 0
    assert "Survived: dead. Rank 1 (process" in said
    assert "was at step 2 (forward); rank 0 waited for it." in said
    assert "Restart 1 of 1: resuming " in said


def test_bad_records_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if index == 5:
                raise OSError("damaged")
            return torch.ones(16), torch.tensor(1)

    make_trainer(1).fit(Rows(), verbose=0, record=tmp_path, on_bad_record="skip")
    assert "skipped: 1, the first of them sample 5." in doctor(tmp_path, capsys)[1]


# --- a run that can say no more -------------------------------------------------------------------


@pytest.mark.thorough
def test_a_script_that_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = JOB + "os.environ['LOCKSTEP_RECORD'] = 'run'\ntrain(make_trainer(), epochs=10**6)\n"
    folder = tmp_path / "run"

    def is_training() -> bool:
        return (folder / NAME).exists() and any(event.what == "at" for event in read_record(folder))

    with running(source, directory=tmp_path) as script:
        wait_until(is_training, 60)
        status, said = doctor(folder, capsys)
        assert (status, "It is running (process " in said) == (0, True)
        os.kill(script.process.pid, signal.SIGKILL)
        script.process.wait(10)
    status, said = doctor(folder, capsys)
    assert status == 1
    assert "Verdict: dead. The script (process " in said
    assert "its last entry, " in said


def test_a_soak_leaves_out_hits_after_the_last_step() -> None:
    fault = Fault(kind="dead", message="Rank 1 ended.", rank=1)
    events = [Event(what="fault", time=5.25, fault=fault), Event(what="end", time=9.75)]
    hits = [(1, 5.0), (1, 9.0), (1, 9.5)]  # the second was in need of a line
    assert until_named(hits, events, last_step_at=9.25) == [0.25, math.inf]


def write(folder: Path, *events: Event) -> None:
    (folder / NAME).write_bytes(b"\n".join(map(msgspec.json.encode, events)))


@pytest.mark.parametrize(("silent_seconds", "is_well"), [(5, True), (60, False)])
def test_a_script_that_lives_and_makes_no_step(
    silent_seconds: float, is_well: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {"host": socket.gethostname(), "pid": os.getpid(), "start": start_of(os.getpid())}
    then = time.time() - silent_seconds
    ranks = [RankState(rank=0, pid=os.getpid(), step=7, phase="backward")]
    at = Event(what="at", time=then, epoch=1, batch=2, next_seconds=1.0, ranks=ranks)
    write(tmp_path, Event(what="begin", time=then, run=run), at)
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'\n{"what": "at", "ti')  # cut off
    status, said = doctor(tmp_path, capsys)
    assert status == (not is_well)
    assert ("Verdict: hung, or in a long operation" in said) == (not is_well)
    assert "after batch 2 of epoch 1" in said
    assert "step 7 (backward)" in said


def test_a_record_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2
    assert "RUN must be a folder in which a fit has written" in capsys.readouterr().err
    (tmp_path / NAME).write_text("\x1b[31m not JSON\n")
    assert main(["doctor", str(tmp_path)]) == 2


def test_a_record_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    assert fit(make_trainer(1), record=tmp_path).history["loss"]


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_record_that_can_never_be_written_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    expected = "The record of a run needs a folder.*where .*/file is a file"
    with pytest.raises(OptionError, match=expected):
        fit(make_trainer(1), record=tmp_path / name)
    monkeypatch.setenv("LOCKSTEP_RECORD", str(tmp_path / name))
    with pytest.raises(OptionError, match=expected):
        fit(make_trainer(1))


def test_names_that_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["\udce4.py"])
    fit(make_trainer(1), record=tmp_path)
    assert read_record(tmp_path)[0].run["script"] == "?.py"


def test_beside_checkpoints(tmp_path: Path) -> None:
    fit(make_trainer(1), checkpoint=lockstep.Checkpoint(tmp_path))
    lines = (tmp_path / NAME).read_text().splitlines()
    kinds = [json.loads(line)["what"] for line in lines]
    assert kinds == ["begin", "ranks", "at", "epoch", "measured", "end"]
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


def test_where_a_stack_ends() -> None:
    assert last_line("") == ""
    library = '  File "/x/site-packages/torch/nn.py", line 3, in call\n'
    own = '  File "/home/me/train.py", line 7, in forward\n'
    assert last_line(own + library) == "/home/me/train.py:7 in forward"
    assert last_line(
        f"Thread 0x1\n{library}\nCurrent thread 0x2\n{library}{own}", is_newest_first=True
    ) == ("/home/me/train.py:7 in forward")
