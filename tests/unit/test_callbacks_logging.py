"""The loggers: what is in their files afterwards, read with their own readers if there are any."""

import csv
import json
import struct
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

import lockstep
from lockstep import errors
from lockstep.callbacks import CSVLogger, MLflow, TensorBoard, WandB
from lockstep.train.callbacks.callback import Logs

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))


def make_trainer(callback: lockstep.Callback, *others: lockstep.Callback) -> lockstep.Trainer:
    torch.manual_seed(0)
    accuracy = partial(torchmetrics.Accuracy, task="multiclass", num_classes=3)
    return lockstep.Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.25),
        metrics={"accuracy": accuracy(), "recall": accuracy(average=None)},
        strategy=lockstep.MirroredStrategy(2),
        callbacks=[callback, *others],
    )


def fit(trainer: lockstep.Trainer, epochs: int = 2) -> dict[str, list[Any]]:
    return trainer.fit(
        (X, Y), epochs=epochs, batch_size=16, validation_data=(X, Y), verbose=0
    ).history


class Fails(lockstep.Callback):
    """Ends training in its second epoch."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if epoch == 1:
            raise self.error


# --- CSV ----------------------------------------------------------------------------------------


def rows_of(path: Path, separator: str = ",") -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter=separator))


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_row_per_epoch_at_full_precision(separator: str, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    history = fit(make_trainer(CSVLogger(path, separator=separator)))
    rows = rows_of(path, separator)
    assert [row["epoch"] for row in rows] == ["0", "1"]
    for name, values in history.items():
        shown = [row[name] for row in rows]
        assert [json.loads(text) for text in shown] == values


def test_a_log_is_written_anew_or_added_to(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    for appends, expected in ((False, 2), (False, 2), (True, 4), (True, 6), (False, 2)):
        fit(make_trainer(CSVLogger(path, append=appends)))
        assert len(rows_of(path)) == expected
    logger = CSVLogger(tmp_path / "new.csv", append=True)
    trainer = make_trainer(logger)
    fit(trainer)
    fit(trainer)
    assert [row["epoch"] for row in rows_of(tmp_path / "new.csv")] == ["0", "1", "0", "1"]


def test_a_value_that_is_missing_is_marked_and_one_too_many_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    fit(make_trainer(CSVLogger(path)))
    trainer = make_trainer(CSVLogger(path, append=True))
    trainer.fit((X, Y), batch_size=16, verbose=0)
    assert [row["val_loss"] == "NA" for row in rows_of(path)] == [False, False, True]
    path.write_text("epoch,loss\n")
    with pytest.raises(errors.OptionError, match=r"columns \['epoch', 'loss'\].*'accuracy'"):
        trainer.fit((X, Y), batch_size=16, verbose=0)


def test_after_an_error_what_was_logged_is_there(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with pytest.raises(KeyError):
        fit(make_trainer(CSVLogger(path), Fails(KeyError("on purpose"))))
    assert len(rows_of(path)) == 2


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    fit(make_trainer(CSVLogger(tmp_path / "new" / "log.csv")))
    assert (tmp_path / "new" / "log.csv").read_text().startswith("epoch,")


# --- TensorBoard --------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def no_tensorflow() -> Iterator[None]:
    """TensorBoard's own switch: its readers do not import TensorFlow where there is one.

    What they remember of that is not for other tests.
    """
    others = _forget_tensorboard()
    name = "tensorboard.compat.notf"
    sys.modules[name] = types.ModuleType(name)
    yield
    _forget_tensorboard()
    sys.modules.update(others)


def _forget_tensorboard() -> dict[str, types.ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]
    return {name: sys.modules.pop(name) for name in names}


def events_of(folder: Path) -> Any:
    """What TensorBoard's own reader, which checks every record's sum, finds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def curve(folder: Path, tag: str) -> Any:
    return [(point.step, point.value) for point in events_of(folder).Scalars(tag)]


def test_tensorboard_has_the_values_of_training_and_validation(tmp_path: Path) -> None:
    trainer = make_trainer(TensorBoard(tmp_path))
    history, more = fit(trainer), fit(trainer, 1)
    for folder, prefix in (("train", ""), ("validation", "val_")):
        for name in ("loss", "accuracy"):
            values = [*history[prefix + name], *more[prefix + name]]
            points = curve(tmp_path / folder, f"epoch_{name}")
            assert points == [
                (epoch, pytest.approx(value, rel=1e-6)) for epoch, value in enumerate(values)
            ]
    recall = curve(tmp_path / "train", "epoch_recall/2")
    assert recall[1] == (1, pytest.approx(history["recall"][1][2], rel=1e-6))
    assert curve(tmp_path / "train", "epoch_learning_rate") == [(0, 0.25), (1, 0.25), (2, 0.25)]


def test_tensorboard_shows_the_plan(tmp_path: Path) -> None:
    trainer = make_trainer(TensorBoard(tmp_path))
    fit(trainer)
    (text,) = events_of(tmp_path / "train").Tensors("plan")
    (shown,) = text.tensor_proto.string_val
    assert [line.removeprefix("    ") for line in shown.decode().splitlines()] == str(
        trainer.plan
    ).splitlines()


def test_tensorboard_shows_steps_where_asked(tmp_path: Path) -> None:
    losses = []

    class Losses(lockstep.Callback):
        def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
            assert logs is not None
            losses.append(logs["loss"])

    logger = TensorBoard(tmp_path, update_freq=2)
    assert logger.acts_in("on_train_batch_end")
    assert not TensorBoard(tmp_path).acts_in("on_train_batch_end")
    fit(make_trainer(logger, Losses()))  # 3 steps an epoch
    assert curve(tmp_path / "train", "batch_loss") == [
        (step, pytest.approx(losses[step - 1], rel=1e-6)) for step in (2, 4, 6)
    ]
    assert curve(tmp_path / "train", "batch_learning_rate") == [(2, 0.25), (4, 0.25), (6, 0.25)]


def test_tensorboard_shows_how_weights_are_distributed(tmp_path: Path) -> None:
    trainer = make_trainer(TensorBoard(tmp_path, histogram_freq=2))
    fit(trainer, 3)
    events = events_of(tmp_path / "train")
    for name, parameter in trainer.model.named_parameters():
        (only,) = events.Histograms(name)
        assert only.step == 1
        assert only.histogram_value.num == parameter.numel() == sum(only.histogram_value.bucket)


def test_a_histogram_is_that_of_the_values(tmp_path: Path) -> None:
    from lockstep.callbacks.event_file import EventFile

    file = EventFile(tmp_path)
    values = torch.tensor([0.0, 0.0, 1.0, 3.0, float("nan"), float("inf")])
    file.add_histogram("some", values, 0)
    file.add_histogram("equal", torch.full((5,), 2.0), 0)
    file.add_histogram("none", torch.empty(0), 0)
    file.close()
    events = events_of(tmp_path)
    some = events.Histograms("some")[0].histogram_value
    assert (some.min, some.max, some.num, some.sum, some.sum_squares) == (0, 3, 4, 4, 10)
    assert [
        (edge, count) for edge, count in zip(some.bucket_limit, some.bucket, strict=True) if count
    ] == [
        (pytest.approx(0.1), 2),
        (pytest.approx(1.1), 1),
        (pytest.approx(3.0), 1),
    ]
    equal = events.Histograms("equal")[0].histogram_value
    assert (equal.min, equal.max, sum(equal.bucket)) == (2, 2, 5)
    assert events.Tags()["histograms"] == ["some", "equal"]


NO_TENSORFLOW = """
import sys
from pathlib import Path

class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name != "tensorflow", "imported"

sys.meta_path.insert(0, Refuse())
import torch
from lockstep.callbacks import TensorBoard
from lockstep.callbacks.event_file import EventFile

TensorBoard(sys.argv[1])
file = EventFile(Path(sys.argv[1]))
file.add_scalar("loss", 0.5, 0)
file.add_text("plan", "text", 0)
file.add_histogram("weights", torch.ones(3), 0)
file.close()
"""


@pytest.mark.thorough
def test_tensorboard_imports_no_tensorflow(tmp_path: Path) -> None:
    """Not even where it is installed: that takes seconds, and sets Keras's backend."""
    command = [sys.executable, "-c", NO_TENSORFLOW, str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    assert curve(tmp_path, "loss") == [(0, 0.5)]


# --- MLflow -------------------------------------------------------------------------------------

# MLflow tells users of its file store that it prefers databases.
quiet_mlflow = pytest.mark.filterwarnings(
    "ignore::FutureWarning:mlflow", "ignore::DeprecationWarning"
)


@pytest.fixture
def mlflow_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return (tmp_path / "mlruns").as_uri()


def mlflow_client(uri: str) -> Any:
    import mlflow

    return mlflow.MlflowClient(tracking_uri=uri)


@pytest.mark.thorough
@quiet_mlflow
def test_mlflow_has_the_values_and_the_plan(mlflow_uri: str) -> None:
    logger = MLflow("digits", run_name="first", tracking_uri=mlflow_uri, params={"width": 8})
    trainer = make_trainer(logger)
    history = fit(trainer)
    client = mlflow_client(mlflow_uri)
    run = client.get_run(logger.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.params == {"width": "8"}
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        points = client.get_metric_history(logger.run_id, name)
        assert [(point.step, point.value) for point in points] == list(enumerate(history[name]))
    assert run.data.metrics["learning_rate"] == 0.25
    assert run.data.metrics["recall/1"] == pytest.approx(history["recall"][1][1])
    (plan,) = client.list_artifacts(logger.run_id)
    path = Path(client.download_artifacts(logger.run_id, plan.path))
    assert path.read_text() == str(trainer.plan)


@quiet_mlflow
def test_mlflow_has_a_run_of_every_fit_in_one_experiment(mlflow_uri: str) -> None:
    logger = MLflow("digits", tracking_uri=mlflow_uri)
    trainer = make_trainer(logger)
    numbers = []
    for _ in range(2):
        fit(trainer, 1)
        numbers.append(logger.run_id)
    client = mlflow_client(mlflow_uri)
    experiment = client.get_experiment_by_name("digits")
    found = client.search_runs([experiment.experiment_id])
    assert {run.info.run_id for run in found} == set(numbers)
    assert len(set(numbers)) == 2


@quiet_mlflow
@pytest.mark.parametrize(
    ("error", "status"), [(KeyError("on purpose"), "FAILED"), (KeyboardInterrupt(), "KILLED")]
)
def test_mlflow_knows_how_a_run_ended(error: BaseException, status: str, mlflow_uri: str) -> None:
    logger = MLflow(tracking_uri=mlflow_uri)
    with pytest.raises(type(error)):
        fit(make_trainer(logger, Fails(error)))
    assert mlflow_client(mlflow_uri).get_run(logger.run_id).info.status == status


# --- Weights & Biases ---------------------------------------------------------------------------


@pytest.fixture
def wandb_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb-files"))


def wandb_records(folder: Path) -> list[Any]:
    """The records of an offline run, which ``wandb sync`` would send, up to that of its exit."""
    from wandb.proto import wandb_internal_pb2

    parse: Any = vars(wandb_internal_pb2)["Record"].FromString
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # another process writes it, and is not done with the run
        records = [parse(data) for data in chunks_of(path.read_bytes())]
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError("the run's exit was never written")


def chunks_of(data: bytes) -> Iterator[bytes]:
    """LevelDB's log format: after 7 bytes, blocks of chunks, each with sum, length and kind."""
    assert data[:4] == b":W&B"
    whole, first, last = 1, 2, 4
    place, parts = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        part = data[place + 7 : place + 7 + length]
        parts = part if kind in (whole, first) else parts + part
        place += 7 + length
        if kind in (whole, last) and place <= len(data):
            yield parts


def items_of(fields: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in fields}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("wandb_settings")
def test_wandb_offline_has_the_values_and_the_plan(tmp_path: Path) -> None:
    logger = WandB("digits", name="first", mode="offline", folder=tmp_path, config={"width": 8})
    trainer = make_trainer(logger)
    history = fit(trainer)
    assert logger.run is None
    records = wandb_records(tmp_path)
    rows = [items_of(one.history.item) for one in records if one.HasField("history")]
    assert [row["epoch"] for row in rows] == [0, 1]
    for name in ("loss", "accuracy", "val_loss"):
        assert [row[name] for row in rows] == history[name]
    assert [row["learning_rate"] for row in rows] == [0.25, 0.25]
    (run,) = (one.run for one in records if one.HasField("run"))
    assert (run.project, run.display_name) == ("digits", "first")
    config = items_of(run.config.update)
    assert config["width"] == 8
    assert config["seed"] == 0
    changes = [items_of(one.config.update) for one in records if one.HasField("config")]
    assert {"plan": str(trainer.plan)} in changes
    (end,) = (one.exit for one in records if one.HasField("exit"))
    assert end.exit_code == 0


@pytest.mark.exhaustive
@pytest.mark.usefixtures("wandb_settings")
def test_wandb_knows_of_an_error(tmp_path: Path) -> None:
    logger = WandB("digits", mode="offline", folder=tmp_path)
    with pytest.raises(KeyError):
        fit(make_trainer(logger, Fails(KeyError("on purpose"))))
    (end,) = (one.exit for one in wandb_records(tmp_path) if one.HasField("exit"))
    assert end.exit_code == 1
    assert logger.run is None


# --- errors -------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "csv path": (lambda: CSVLogger(None), "`filename` must be a path"),  # type: ignore[arg-type]
    "csv separator": (lambda: CSVLogger("a", separator=", "), "`separator` must be one character"),
    "csv quote": (lambda: CSVLogger("a", separator='"'), "`separator` must be one character"),
    "csv flag": (lambda: CSVLogger("a", append=1), "`append` must be True"),  # type: ignore[arg-type]
    "folder": (lambda: TensorBoard(""), "`log_dir` must be a path"),
    "frequency": (lambda: TensorBoard(update_freq=True), "`update_freq` must be 'epoch'"),
    "batch": (lambda: TensorBoard(update_freq="batch"), "`update_freq` must be 'epoch'.*'batch'"),
    "histograms": (lambda: TensorBoard(histogram_freq=-1), "`histogram_freq` must be an integer"),
    "experiment": (lambda: MLflow(""), "`experiment` must be a string"),
    "run name": (lambda: MLflow(run_name=3), "`run_name` must be"),  # type: ignore[arg-type]
    "address": (lambda: MLflow(tracking_uri=""), "`tracking_uri` must be a string"),
    "params": (lambda: MLflow(params=[1]), "`params` must be a dict"),  # type: ignore[arg-type]
    "project": (lambda: WandB(""), "`project` must be a string"),
    "name": (lambda: WandB(name=1), "`name` must be a string"),  # type: ignore[arg-type]
    "mode": (lambda: WandB(mode="local"), r"`mode` must be one of \['online', 'offline'"),
    "dir": (lambda: WandB(folder=1), "`folder` must be a path"),  # type: ignore[arg-type]
    "config": (lambda: WandB(config=1), "`config` must be a dict"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_told_at_once(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(errors.OptionError, match=message):
        make()


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [
        (TensorBoard, "tensorboard.summary.writer.record_writer", "tensorboard"),
        (MLflow, "mlflow", "mlflow"),
        (WandB, "wandb", "wandb"),
    ],
)
def test_a_missing_extra_is_told_when_the_callback_is_made(
    kind: Callable[[], Any], module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(errors.ExtraError, match=rf'`pip install "\.\[{extra}\]"` in a clone'):
        kind()
