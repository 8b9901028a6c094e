"""What a training tells ``logging.getLogger("lockstep")``."""

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import WorkerError
from lockstep.train.fault_tolerance.run_record import RunRecord

pytestmark = pytest.mark.thorough

X, Y = torch.randn(16, 4), torch.randint(0, 3, (16,))


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "lockstep")
    return lambda: [re.sub(r"\d\.\d{4}", "N", one.getMessage()) for one in caplog.records]


def make_trainer(**options: Any) -> lockstep.Trainer:
    return lockstep.Trainer(
        nn.Linear(4, 3),
        loss="cross_entropy",
        optimizer="sgd",
        strategy=lockstep.MirroredStrategy(2),
        **options,
    )


def test_a_fit_and_where_it_is_gone_on_from(tmp_path: Path, told: Any) -> None:
    checkpoint = lockstep.Checkpoint(tmp_path)
    make_trainer().fit(X, Y, epochs=1, batch_size=8, checkpoint=checkpoint, verbose=0)
    events = told()
    assert events[:3] == [
        "fit begins: MirroredStrategy(devices=2)",
        "plan: mirrored on cpu:0, cpu:1, fp32, num_shares=2",
        "epoch 1 ends: loss N",
    ]
    assert f"checkpoint written: {tmp_path / 'generation-000000'}, step 2" in events
    assert events[-1] == "fit ends"
    make_trainer().fit(X, Y, epochs=1, batch_size=8, checkpoint=checkpoint, verbose=0)
    assert told()[len(events) + 1 :] == [
        f"{tmp_path} is complete (1 epoch): nothing to do",
        "fit ends",
    ]


def test_what_goes_wrong_is_more_than_information(
    caplog: pytest.LogCaptureFixture, told: Any
) -> None:
    record = RunRecord(None, logs=True)
    record.note_restart(WorkerError("Rank 1 died.\nIts last words"), "Restart 1 of 3.")
    record.note_bad_record(7, "it is empty")
    with pytest.raises(KeyboardInterrupt), record.kept(None):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="no"):
        make_trainer(callbacks=[Failing()]).fit(X, Y, verbose=0)
    levels = [(one.levelname, one.getMessage()) for one in caplog.records]
    assert levels[:2] == [
        ("WARNING", "Rank 1 died. Restart 1 of 3."),
        ("WARNING", "sample 7 is left out: it is empty"),
    ]
    assert levels[3] == ("WARNING", "fit is interrupted: KeyboardInterrupt")
    assert levels[-1] == ("ERROR", "fit fails: ValueError: no")


class Failing(lockstep.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        raise ValueError("no")


def test_a_model_of_keras(told: Any) -> None:
    with lockstep.MirroredStrategy(2).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    model.fit(X.numpy(), X[:, :3].numpy(), verbose=0)
    assert [event.partition(":")[0] for event in told()] == [
        "fit begins",
        "plan",
        "epoch 1 ends",
        "fit ends",
    ]


def test_nothing_is_written_where_nobody_listens() -> None:
    code = (
        "from lockstep.train.fault_tolerance.run_record import RunRecord\n"
        "RunRecord(None, logs=True).note_bad_record(7, 'it is empty')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout == done.stderr == ""
