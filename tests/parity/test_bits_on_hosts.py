"""Eight shares, the same bits: on 1, 2, 4 and 8 ranks of one host, and on several hosts."""

import hashlib
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.data.trees import tensors_of
from tests.launchers import BEGINNING, by_tf_config, lines_of_all
from tests.netns import Hosts
from tests.thorough import core_of
from tests.zoo import case, cases

NUM_SHARES = 8
SECONDS = 300.0

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=3e-3),
    "momentum": partial(torch.optim.SGD, lr=3e-2, momentum=0.9),
}
JOBS = [(one.name, optimizer) for one in cases() for optimizer in OPTIMIZERS]
CORE = [("mlp", "adam"), ("cnn_batch_norm", "momentum"), ("wide", "adam")]
LAYOUTS = ["2 + 2", "1 + 1 + 1 + 1", "4 + 4", "3 + 2"]  # devices of each host


def digest_of_training(name: str, optimizer: str, strategy: Any) -> str:
    """Of the weights, buffers and optimizer state that a model of the zoo is trained to."""
    job = case(name)
    model = job.make_model()
    trainer = lockstep.Trainer(
        model, loss=job.loss, optimizer=OPTIMIZERS[optimizer], strategy=strategy, seed=3
    )
    trainer.fit((job.inputs, job.targets), batch_size=job.batch_size, epochs=1, verbose=0)
    trainer.close()
    digest = hashlib.sha256()
    slots = trainer.optimizer.state_dict()["state"]
    for tensor in tensors_of([model.state_dict(), sorted(slots.items())]):
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@cache
def digest_on_one_rank(name: str, optimizer: str) -> str:
    strategy = lockstep.MirroredStrategy(1, num_shares=NUM_SHARES)
    return digest_of_training(name, optimizer, strategy)


@pytest.mark.parametrize("devices", core_of([2, 4, 8], [4]))
@pytest.mark.parametrize(("name", "optimizer"), core_of(JOBS, CORE))
def test_ranks_of_one_host(name: str, optimizer: str, devices: int) -> None:
    strategy = lockstep.MirroredStrategy(devices, num_shares=NUM_SHARES)
    found = digest_of_training(name, optimizer, strategy)
    assert found == digest_on_one_rank(name, optimizer)


SCRIPT = f"""{BEGINNING}
from tests.parity.test_bits_on_hosts import JOBS, NUM_SHARES, digest_of_training

for name, optimizer in JOBS:
    strategy = lockstep.MultiWorkerMirroredStrategy(num_shares=NUM_SHARES, timeout_seconds=180)
    tell([name, optimizer, digest_of_training(name, optimizer, strategy)])
"""


@pytest.mark.parametrize("layout", core_of(LAYOUTS, ["2 + 2"]))
def test_several_hosts(layout: str, make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    """Also where a host's shares are no subtree of the sum: 5 and 3 of them."""
    devices = [int(number) for number in layout.split(" + ")]
    hosts = make_hosts(len(devices))
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    started = [by_tf_config(hosts, host, [str(path)], devices) for host in range(len(hosts))]
    for told in lines_of_all(started, SECONDS):
        assert [(name, optimizer) for name, optimizer, _ in told] == JOBS
        for name, optimizer, digest in told:
            assert digest == digest_on_one_rank(name, optimizer), (name, optimizer)
