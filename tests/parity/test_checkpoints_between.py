"""A training goes on from the checkpoint of any strategy under any other, with the same bits.

All have the same number of shares. A pipeline sums microbatches one after the other, and layers
divided inside sum over shards, and so round otherwise: their part of a training is compared with
one of the same kind. Models are tiny: what is tried is
who has which part.
"""

import shutil
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoint import generations, partitioned_files
from lockstep.train.checkpointing.training_state import TrainingState
from tests.parity.test_partitioned_copies import all_bytes_read
from tests.parity.test_resume import X, Y
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

NUM_SHARES = 6
STRATEGIES = {
    "single": lockstep.MirroredStrategy(1, num_shares=NUM_SHARES),
    "mirrored 2": lockstep.MirroredStrategy(2, num_shares=NUM_SHARES),
    "sharded 2": lockstep.FullyShardedStrategy(2, num_shares=NUM_SHARES),
    "sharded 3": lockstep.FullyShardedStrategy(3, num_shares=NUM_SHARES),
    "data 2, shard 2": lockstep.HybridStrategy(2, shard=2, num_shares=NUM_SHARES),
    "tensor 1": lockstep.HybridStrategy(1, tensor=1, num_shares=NUM_SHARES, num_tensor_shards=2),
    "tensor 2": lockstep.HybridStrategy(
        1, tensor=2, num_shares=NUM_SHARES, num_tensor_shards=2, engine="gloo"
    ),
    "data 2, tensor 2": lockstep.HybridStrategy(
        2, tensor=2, num_shares=NUM_SHARES, num_tensor_shards=2
    ),
    "pipeline 2": lockstep.PipelineStrategy(2, cuts=["4"], microbatches=NUM_SHARES),
    "pipeline 2, tensor 2": lockstep.HybridStrategy(
        pipe=2, tensor=2, cuts=["4"], microbatches=NUM_SHARES, num_tensor_shards=2
    ),
    "pipeline 2, shard 2": lockstep.HybridStrategy(
        pipe=2,
        shard=2,
        level="slots",
        cuts=["4"],
        microbatches=NUM_SHARES // 2,
        engine="gloo",
    ),
}
NAMES = list(STRATEGIES)
# Each writes once and reads once, but for the one that others are compared with.
OFTEN = [name for name in NAMES if name != "tensor 1"]
CORE = list(zip(OFTEN, [*OFTEN[2:], *OFTEN[:2]], strict=True))


def make_model() -> nn.Module:
    layers = [nn.Linear(6, 64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 64)]
    return nn.Sequential(*layers, nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


NUM_BYTES = 3 * sum(one.nbytes for one in make_model().parameters())  # with Adam's slots
UNEQUAL = 1.15  # small layers are not cut, and stages are not equal


class Ending(lockstep.Callback):
    """Ends a training with an error after its second step."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 1:
            raise ZeroDivisionError


def trained(name: str, folder: Path | None, *callbacks: lockstep.Callback) -> str:
    """The digest of what three steps of a strategy come to."""
    torch.manual_seed(0 if folder is None or callbacks else 1)
    trainer = lockstep.Trainer(
        make_model(),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        strategy=STRATEGIES[name],
        callbacks=callbacks,
    )
    checkpoint = None if folder is None else lockstep.Checkpoint(folder, every="1 steps")
    trainer.fit((X, Y), batch_size=19, checkpoint=checkpoint, verbose=0)
    return TrainingState.of(trainer.state_dict()).digest()


class Checkpoints:
    """Of each strategy after two steps, and what follows from them; made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cache  # noqa: B019  # it lives as long as the module's tests
    def of(self, name: str) -> Path:
        path = self._folder / name
        with pytest.raises(ZeroDivisionError):
            trained(name, path, Ending())
        return path

    def resumed(self, writer: str, reader: str, number: int = 0) -> str:
        path = self._folder / f"{writer} {reader} {number}"
        shutil.copytree(self.of(writer), path)
        return trained(reader, path)

    @cache  # noqa: B019
    def expected(self, writer: str, reader: str) -> str:
        """What one device comes to, or a pipeline, or one from where the other was."""
        return trained(reader, None) if writer == reader else self.resumed(writer, reader, 1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("written"))


@pytest.fixture(autouse=True)
def with_small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a part of a tensor reads whole spans."""
    for module in (generations, partitioned_files):
        monkeypatch.setattr(module, "SPAN_BYTES", 64)


# The most of a training that a rank reads; where a strategy is missing, one process reads all.
PARTS = {
    "sharded 2": 1 / 2,
    "sharded 3": 1 / 3,
    "data 2, shard 2": (1 / 2 + 2 / 4) / 3,
    "tensor 2": 1 / 2,
    "pipeline 2": 1 / 2,
    "pipeline 2, tensor 2": 1 / 4,
    "pipeline 2, shard 2": (1 / 2 + 2 / 4) / 3,
}


def alike(name: str) -> str:
    """A strategy with the same bits."""
    if "pipeline" in name:
        return name
    return "tensor 1" if "tensor" in name else "single"


@pytest.mark.parametrize(
    ("writer", "reader"), core_of([(one, other) for one in NAMES for other in NAMES], CORE, [])
)
def test_any_strategy_goes_on_from_any(
    writer: str, reader: str, checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    """No rank reads more than its part."""
    expected = checkpoints.expected(alike(writer), alike(reader))
    caplog.clear()
    with caplog.at_level("INFO", "lockstep"):
        assert checkpoints.resumed(writer, reader) == expected
    read = all_bytes_read(caplog)
    assert len(read) == (reader in PARTS)
    for own in read:
        assert sum(own) >= NUM_BYTES
        assert max(own) <= PARTS[reader] * NUM_BYTES * UNEQUAL
