"""Arguments that cannot be are told before anything starts, in words of the user's."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import Dataset

import lockstep
from lockstep import errors
from lockstep.callbacks import BestWeights, ModelCheckpoint
from lockstep.cluster.topology import Cluster, Device, Host
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.makers.data_parallel import SingleDevice

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (20,), generator=torch.Generator().manual_seed(1))
SGD = partial(torch.optim.SGD, lr=0.1)
ACCURACY = partial(torchmetrics.Accuracy, task="multiclass", num_classes=3)


def make_trainer(**options: Any) -> lockstep.Trainer:
    given: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "optimizer": SGD, **options}
    return lockstep.Trainer(nn.Linear(4, 3), **given)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a strategy's name": ({"strategy": "mirrored"}, "`strategy` must be.*'mirrored'.*an instance"),
    "a strategy's class": (
        {"strategy": lockstep.MirroredStrategy},
        "`strategy` must be.*the class MirroredStrategy.*an instance",
    ),
    "a loss's class": (
        {"loss": nn.CrossEntropyLoss},
        "`loss` must be.*the class CrossEntropyLoss.*an instance",
    ),
    "a list of metrics": ({"metrics": [ACCURACY()]}, "`metrics` must be a dict.*list"),
    "a single metric": ({"metrics": ACCURACY()}, "`metrics` must be a dict.*Accuracy"),
    "a collection": (
        {"metrics": {"all": torchmetrics.MetricCollection([ACCURACY()])}},
        "MetricCollection.*members by name",
    ),
    "a single callback": ({"callbacks": lockstep.Callback()}, "list.*Callback.*Put it into a list"),
    "a word for a flag": ({"deterministic": "yes"}, "`deterministic` must be True or False.*'yes'"),
    "a callback's class": ({"callbacks": [lockstep.Callback]}, "instances of lockstep.Callback"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_told_at_once(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(errors.OptionError, match=message):
        make_trainer(**options)


@pytest.mark.parametrize("seconds", ["x", None, 0, -1.0, float("nan"), True])
def test_a_timeout_is_a_positive_number(seconds: Any) -> None:
    with pytest.raises(errors.OptionError, match="`timeout_seconds` must be a positive number"):
        lockstep.MirroredStrategy(2, timeout_seconds=seconds)


# --- counts -------------------------------------------------------------------------------------


def test_counts_may_be_integers_of_numpy() -> None:
    trainer = make_trainer(strategy=lockstep.MirroredStrategy(1, num_shares=2))
    size: Any = np.int64(8)
    epochs: Any = np.int32(2)
    history = trainer.fit((X, Y), batch_size=size, epochs=epochs, verbose=0)
    assert len(history.history["loss"]) == 2
    assert trainer.predict(X, batch_size=size).shape == (20, 3)
    assert trainer.evaluate((X, Y), batch_size=size).keys() == {"loss"}


@pytest.mark.parametrize("name", ["epochs", "batch_size", "steps_per_epoch"])
@pytest.mark.parametrize("count", [8.0, "8", True, 0, np.int64(-1), np.float64(8)])
def test_other_counts_are_refused(name: str, count: Any) -> None:
    with pytest.raises(errors.OptionError, match=f"`{name}` must be an integer"):
        make_trainer().fit((X, Y), **{name: count}, verbose=0)


def test_epochs_must_be_said() -> None:
    nothing: Any = None
    with pytest.raises(errors.OptionError, match=r"`epochs` must be an integer.*epochs=None"):
        make_trainer().fit((X, Y), epochs=nothing)


# --- data, files, devices -----------------------------------------------------------------------


class WithoutTargets(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, None]:
        return X[index], None


@pytest.mark.parametrize(
    ("made", "fitted", "message"),
    [
        ({"devices": 2}, {}, "The strategy has it"),
        ({"gradient_clip_val": 1.0}, {}, "It is clip_norm"),
        ({"metrics": "accuracy"}, {}, r'Pass \["accuracy"\]'),
        ({}, {"validation_freq": 1}, "validation_data="),
        ({}, {"ckpt_path": "a"}, "checkpoint='folder'"),
    ],
)
def test_names_of_other_libraries_lead_to_lockstep_s(
    made: dict[str, Any], fitted: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.OptionError, match=message):
        make_trainer(**made).fit((X, Y), **fitted)


def test_checkpoints_where_no_folder_can_be_are_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        trainer = make_trainer()
        before = [parameter.clone() for parameter in trainer.model.parameters()]
        with pytest.raises(errors.CheckpointError, match="into a folder") as caught:
            trainer.fit((X, Y), verbose=0, checkpoint=folder)
        assert all(map(torch.equal, trainer.model.parameters(), before))
        assert not getattr(caught.value, "__notes__", ())  # no record could be written there


def test_targets_of_none_are_refused_in_training_and_ignored_in_prediction() -> None:
    trainer = make_trainer()
    with pytest.raises(errors.DataError, match=r"tuple of \(Tensor, NoneType\)"):
        trainer.fit(WithoutTargets(), verbose=0)
    assert torch.equal(trainer.predict(WithoutTargets()), trainer.predict(X))


def test_weights_are_not_written_under_the_name_of_another_format(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    for act in (make_trainer().save, ModelCheckpoint, lambda path: BestWeights(filepath=path)):
        with pytest.raises(errors.OptionError, match=r"as safetensors.*torch\.save"):
            act(path)
    with pytest.raises(errors.OptionError, match="on this machine"):
        make_trainer().save("s3://bucket/weights.safetensors")


def test_a_folder_that_is_not_there_is_told_by_the_users_path(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "model.safetensors"
    with pytest.raises(FileNotFoundError) as caught:
        make_trainer().save(path)
    assert str(path) in str(caught.value)


def test_a_gpu_that_is_not_there_is_told_when_planning() -> None:
    strategy = lockstep.SingleDeviceStrategy("cuda:63")
    with pytest.raises(errors.DeviceError, match=r"built for the CPU alone.*cuda:63"):
        strategy.plan(nn.Linear(4, 3), batch_size=8)
    with pytest.raises(errors.DeviceError, match=r"built for the CPU alone.*cuda:63"):
        make_trainer(strategy=strategy).fit((X, Y), verbose=0)


def test_a_gpu_that_is_there_is_taken() -> None:
    gpu = Device(kind="cuda", index=1, memory_bytes=1)
    cluster = Cluster(hosts=(Host(name="a", num_cores=1, devices=(gpu,)),))
    plan = SingleDevice(device="cuda:1")(LayerGraph(layers=()), cluster, 8)
    assert plan.devices == ("cuda:1",)
    with pytest.raises(errors.DeviceError, match=r"accelerators are: cuda:1"):
        SingleDevice(device="cuda:0")(LayerGraph(layers=()), cluster, 8)


@pytest.mark.parametrize("options", [{"checkpoint": 3}, {"record": 3}])
def test_what_names_no_place_to_keep_things_is_refused(options: dict[str, Any]) -> None:
    (option,) = options
    with pytest.raises(errors.OptionError, match=f"`{option}` must be .* Received: {option}="):
        make_trainer().fit((X, Y), verbose=0, **options)
