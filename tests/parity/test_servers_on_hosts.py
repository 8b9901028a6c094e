"""Parameter servers whose workers are on several hosts: addresses of the loopback interface."""

from pathlib import Path
from typing import Any

import pytest

from tests.launchers import BEGINNING, lines_of_all, on_loopback
from tests.thorough import core_of

SECONDS = 250.0

# Each script begins so. Numbers of servers, and of workers of each host, are its first arguments.
START = f"""{BEGINNING}
from functools import partial
from torch.utils.data import TensorDataset
from lockstep.launch.pool import keep_teams
from tests.parity.test_parameter_servers import (
    SPARSE_OPTIMIZERS, Rated, assert_equal, plain_ratings, ratings)
from tests.zoo import case
servers, workers = map(int, sys.argv[1:3])

def strategy(staleness=0):
    return lockstep.ParameterServerStrategy(servers, workers, staleness, timeout_seconds=60)
"""

PROVE = """
with keep_teams():
    for name in sys.argv[3:]:
        one = case(name)
        job = lockstep.Job(
            model=one.make_model(), loss=one.loss, optimizer=one.optimizer,
            data=(one.inputs, one.targets), batch_size=one.batch_size)
        report = lockstep.verify(job, strategy(), steps=5)
        tell([name, report.passed, str(report), strategy().num_replicas_in_sync])
"""

# Rows that are touched, and slots, are those of a plain loop; the last batch is short.
RATE = """
with keep_teams():
    for name, optimizer_of in SPARSE_OPTIMIZERS.items():
        has_dense = name != "SparseAdam"
        expected, other = plain_ratings(optimizer_of, has_dense=has_dense)
        model = Rated(has_dense=has_dense).double()
        trainer = lockstep.Trainer(
            model, loss=nn.MSELoss(), optimizer=optimizer_of, strategy=strategy(),
            precision="fp64")
        for _ in range(2):
            trainer.fit(ratings(), batch_size=13, shuffle=False, verbose=0)
        assert_equal(model, expected)
        for slots, found in zip(other.state.values(), trainer.optimizer.state.values()):
            for slot, value in slots.items():
                gap = torch.as_tensor(found[slot] - value, dtype=torch.float64).norm()
                assert gap <= 1e-12 * max(torch.as_tensor(value).double().norm(), 1), slot
        tell([name, trainer.plan.hosts])
"""


def told_by_all(folder: Path, script: str, num_hosts: int, arguments: list[Any]) -> list[list[Any]]:
    path = folder / "script.py"
    path.write_text(START + script)
    with on_loopback([str(path), *map(str, arguments)], num_hosts=num_hosts) as processes:
        return lines_of_all(processes, SECONDS)


@pytest.mark.parametrize(
    ("num_hosts", "servers", "workers", "models"),
    [
        (2, 1, 1, ["mlp", "gpt_tied"]),
        pytest.param(
            *(2, 2, 2, ["mlp", "cnn_batch_norm", "gpt_tied", "unused_branch", "wide"]),
            marks=pytest.mark.thorough,
        ),
        pytest.param(3, 2, 1, ["mlp", "gpt_tied", "resnet"], marks=pytest.mark.thorough),
    ],
)
def test_workers_that_wait_train_as_one_device(
    num_hosts: int, servers: int, workers: int, models: list[str], tmp_path: Path
) -> None:
    for told in told_by_all(tmp_path, PROVE, num_hosts, [servers, workers, *models]):
        assert [name for name, *_ in told] == models
        for _, passed, report, num_workers in told:
            assert passed, report
            assert num_workers == num_hosts * workers


@pytest.mark.parametrize(
    ("num_hosts", "servers", "workers"), core_of([(2, 1, 1), (3, 2, 2)], [(2, 1, 1)])
)
def test_rows_of_embeddings_are_those_of_one_device(
    num_hosts: int, servers: int, workers: int, tmp_path: Path
) -> None:
    hosts = [workers] * (num_hosts - 1) + [workers + servers]
    for told in told_by_all(tmp_path, RATE, num_hosts, [servers, workers]):
        assert told == [[name, hosts] for name in ("SGD", "Adagrad", "SparseAdam")]


COUNT = """
from lockstep.comm import tensor_channels, transport
moved = []
transfer = tensor_channels.TensorChannels.transfer
def counting(self, sends, receives):
    for tensors in (*sends.values(), *receives.values()):
        moved.extend(tensor.nbytes for tensor in tensors)
    transfer(self, sends, receives)
tensor_channels.TensorChannels.transfer = counting

class Lookups(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(20_000, 64, sparse=True)
    def forward(self, numbers):
        return self.rows(numbers).mean(1)

class Clear(lockstep.Callback):
    def on_epoch_end(self, epoch, logs=None):
        told.append(sum(moved))
        moved.clear()

told = []
numbers = torch.arange(256) * 70
trainer = lockstep.Trainer(
    Lookups(), loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
    strategy=strategy(), callbacks=[Clear()])
trainer.fit((numbers, torch.randn(256)), batch_size=128, epochs=3, shuffle=False, verbose=0)
tell(told)
"""


def test_only_rows_that_are_touched_travel(tmp_path: Path) -> None:
    """A host sends the rows of its half of a batch, and gets all that have changed."""
    (first,), _ = told_by_all(tmp_path, COUNT, 2, [1, 1])
    row_bytes, num_steps = 64 * 4, 2
    least = num_steps * (64 + 128) * row_bytes
    assert len(first) == 3
    for num_bytes in first:
        assert least < num_bytes <= 1.2 * least
