"""Slots in a file: the bits of slots in memory, in little memory, and a file that goes away."""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.comm.shared_memory import file_region
from lockstep.comm.shared_memory.file_region import FileRegion, in_turn, is_in_file, write_behind
from lockstep.errors import DeviceError, OptionError
from tests.thorough import core_of

INPUTS = torch.randn(48, 12, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(0, 5, (48,), generator=torch.Generator().manual_seed(2))
ADAM = partial(torch.optim.Adam, lr=1e-3)
WIDTH = 1100  # a weight has more elements than a window


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(12, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 5))


def make_trainer(
    strategy: lockstep.Strategy, model: Callable[[], nn.Module] = make_model, **options: Any
) -> lockstep.Trainer:
    options = {"optimizer": ADAM, "loss": nn.CrossEntropyLoss(), **options}
    torch.manual_seed(0)
    return lockstep.Trainer(model(), strategy=strategy, seed=3, **options)


def fit(trainer: lockstep.Trainer, **options: Any) -> None:
    trainer.fit((INPUTS, TARGETS), **{"batch_size": 16, "epochs": 2, "verbose": 0, **options})


def state_of(trainer: lockstep.Trainer) -> dict[str, Tensor]:
    """Weights and slots, in host memory."""
    assert trainer.optimizer is not None
    slots = trainer.optimizer.state_dict()["state"]
    return {
        **{name: value.cpu().clone() for name, value in trainer.model.state_dict().items()},
        **{
            f"slot {number} {slot}": torch.as_tensor(value).cpu().clone()
            for number, own in slots.items()
            for slot, value in own.items()
        },
    }


def check_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)]


OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {},
    "some parameters": {"optimizer": lambda parameters: ADAM([*parameters][1:])},
    "clipping": {"clip_norm": 0.1},
    "accumulation": {"accumulate": 3},
    "momentum": {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)},
    "Adagrad": {"optimizer": partial(torch.optim.Adagrad, lr=0.01)},
    "averages": {"average": lockstep.EMA(0.9)},
    "bf16": {"precision": "bf16"},
    "a schedule": {
        "schedule": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    },
}


@pytest.mark.parametrize(
    ("name", "devices", "level"),
    core_of(
        [
            (name, devices, level)
            for name in OPTIONS
            for devices, level in ((1, "parameters"), (2, "parameters"), (2, "slots"))
        ],
        [("clipping", 1, "parameters"), ("Adam", 2, "parameters")],
        [("bf16", 2, "slots")],
    ),
)
def test_slots_in_a_file_have_the_same_bits(
    name: str, devices: int, level: str, tmp_path: Path
) -> None:
    """Also in a second call of ``fit``, which finds them in the file."""
    found = []
    for offload in (None, tmp_path):
        strategy = lockstep.FullyShardedStrategy(devices, level=level, offload=offload)
        trainer = make_trainer(strategy, **OPTIONS[name])
        fit(trainer)
        fit(trainer)
        found.append(state_of(trainer))
        assert trainer.optimizer is not None
        slots = [
            slot
            for own in trainer.optimizer.state.values()
            for slot in own.values()
            if isinstance(slot, Tensor) and slot.dim()
        ]
        assert slots
        assert all(is_in_file(slot) == (offload is not None) for slot in slots)
    check_same_bits(found[1], found[0])
    assert not os.listdir(tmp_path)  # it has no name


@pytest.mark.exhaustive
def test_checkpoints_resume_wherever_the_slots_are(tmp_path: Path) -> None:
    slots, kept = tmp_path / "slots", tmp_path / "kept"
    slots.mkdir()
    strategies = [
        lockstep.FullyShardedStrategy(1, num_shares=2, offload=slots),
        lockstep.FullyShardedStrategy(2, num_shares=2),
        lockstep.FullyShardedStrategy(2, num_shares=2, offload=slots),
        lockstep.FullyShardedStrategy(1, num_shares=2),
    ]
    for epochs, strategy in enumerate(strategies, 1):
        trainer = make_trainer(strategy)
        fit(trainer, checkpoint=lockstep.Checkpoint(kept, every="2 steps"), epochs=epochs)
    expected = make_trainer(strategies[1])
    fit(expected, epochs=len(strategies))
    check_same_bits(state_of(trainer), state_of(expected))


class Kills(lockstep.Callback):
    """Kills the helper after a step."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        trainer: Any = self.trainer
        team = trainer._runner.session._team
        if trainer._runner.session.num_ended == 0 and batch == 1 and team is not None:
            os.kill(team.pids()[-1], signal.SIGKILL)


def test_a_killed_helper_leaves_no_file_and_is_outlived(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [Kills()]):
        strategy = lockstep.FullyShardedStrategy(2, offload=tmp_path)
        trainer = make_trainer(strategy, callbacks=callbacks)
        fit(trainer, restarts=1)
        found.append(state_of(trainer))
    check_same_bits(found[1], found[0])
    assert not os.listdir(tmp_path)


def resident_bytes(region: FileRegion) -> int:
    """Of the mapping of a file."""
    found, is_own = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            is_own = int(head.split("-")[0], 16) == region.memory.address
        elif head == "Rss:" and is_own:
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("is_direct", [True, False])
def test_of_a_file_few_windows_are_in_memory(
    is_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a file system that goes by way of the kernel's cache."""
    if not is_direct:
        monkeypatch.setattr(file_region, "_direct", lambda descriptor: -1)
    size, count = 1 << 20, 16
    region = FileRegion.create_in(str(tmp_path), size * count)
    windows = [
        [region.tensor(number * size, torch.float32, (size // 4,), (1,))] for number in range(count)
    ]
    for turn in range(2):
        for number in in_turn(windows):
            (tensor,) = windows[number]
            assert torch.equal(tensor, torch.full_like(tensor, turn * (number + 1)))
            tensor.add_(number + 1)
            assert resident_bytes(region) <= 10 * size
    assert resident_bytes(region) == 0
    assert float(windows[3][0].sum()) == 2 * 4 * size // 4
    write_behind(windows[3])
    assert resident_bytes(region) == 0


def test_an_error_in_a_window_ends_the_turns(tmp_path: Path) -> None:
    """What was read is in the file again, also the window that was changed."""
    size, count = 5000, 20  # windows begin within pages
    region = FileRegion.create_in(str(tmp_path), 4 * size * count)
    whole = region.tensor(0, torch.float32, (size * count,), (1,))
    whole.copy_(torch.arange(size * count))
    turns = in_turn([[one] for one in whole.split(size)])
    assert next(turns) == 0
    whole[500] = -1
    turns.close()  # type: ignore[attr-defined]  # a generator
    expected = torch.arange(size * count)
    expected[500] = -1
    assert torch.equal(whole, expected.float())
    assert not [one for one in threading.enumerate() if "ThreadPool" in one.name]


def test_a_directory_must_exist(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="existing directory"):
        lockstep.FullyShardedStrategy(2, offload=tmp_path / "none")
    strategy = lockstep.FullyShardedStrategy(2, offload=tmp_path / ".")
    os.rmdir(tmp_path)
    with pytest.raises(DeviceError, match="of disk"):
        fit(make_trainer(strategy))


def test_a_disk_that_is_too_small_is_an_error_before_training(tmp_path: Path) -> None:
    """As large as the file system allows no file to be, or has no room for."""
    with pytest.raises(DeviceError, match=r"needs 8\.0 PiB of disk|of disk"):
        FileRegion.create_in(str(tmp_path), 1 << 53)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("kind", ["Muon", "hooks"])
def test_other_optimizers_are_refused(kind: str, tmp_path: Path) -> None:
    model = nn.Linear(12, 5, bias=False)
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.Muon(model.parameters()) if kind == "Muon" else ADAM(model.parameters())
    if kind == "hooks":
        optimizer.register_step_post_hook(lambda *_: None)
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        strategy=lockstep.FullyShardedStrategy(2, offload=tmp_path),
    )
    with pytest.raises(OptionError, match="treat each element separately"):
        fit(trainer)
