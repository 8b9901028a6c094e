"""Eight shares, the same bits: on 1, 2, 4 and 8 ranks of one host, and on several hosts."""

import hashlib
import itertools
import json
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
from tests.parity.test_bits import three_batches
from tests.thorough import core_of
from tests.zoo import case, cases

NUM_SHARES = 8
SECONDS = 300.0

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=3e-3),
    "momentum": partial(torch.optim.SGD, lr=3e-2, momentum=0.9),
}
NAMES = [one.name for one in cases()]
# An optimizer steps pieces, whatever model they are of: not every pair is needed.
IN_TURN = list(zip(NAMES, itertools.cycle(OPTIMIZERS), strict=False))
CORE = [("cnn_batch_norm", "adam"), ("mlp", "momentum")]
# Devices of each host, and what is trained on them in one start.
LAYOUTS = {
    ("2 + 2", "core"): CORE,
    ("2 + 2", "rest"): [job for job in IN_TURN if job not in CORE],
    ("1 + 1 + 1 + 1", "a third"): IN_TURN[::3],
    ("4 + 4", "a third"): IN_TURN[1::3],
    ("3 + 2", "a third"): IN_TURN[2::3],
    ("2 + 1", "sharded"): [("mlp", "momentum"), ("gpt_tied", "adam")],
    ("2 + 2", "sharded replicas"): [("mlp", "adam"), ("unused_branch", "momentum")],
}
IN_CI = [("2 + 1", "sharded")]
RANKS = {2: IN_TURN[::2], 4: [*CORE, *IN_TURN[2:]], 8: IN_TURN[1::2]}

Job = tuple[str, str]
MakeHosts = Callable[[int], Hosts]


def digest_of_training(name: str, optimizer: str, strategy: Any) -> str:
    """Of the weights, buffers and optimizer state that three steps train a model of the zoo to."""
    job = case(name)
    model = job.make_model()
    trainer = lockstep.Trainer(
        model, loss=job.loss, optimizer=OPTIMIZERS[optimizer], strategy=strategy, seed=3
    )
    trainer.fit(three_batches(job), batch_size=job.batch_size, epochs=1, verbose=0)
    digest = hashlib.sha256()
    slots = trainer.optimizer.state_dict()["state"]
    for tensor in tensors_of([model.state_dict(), sorted(slots.items())]):
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@cache
def digest_on_one_rank(name: str, optimizer: str) -> str:
    strategy = lockstep.MirroredStrategy(1, num_shares=NUM_SHARES)
    return digest_of_training(name, optimizer, strategy)


@pytest.mark.parametrize(
    ("devices", "job"),
    core_of(
        [(devices, job) for devices, jobs in RANKS.items() for job in jobs],
        lambda devices, job: devices == 4 and job in CORE,
        [],
    ),
)
def test_ranks_of_one_host(job: Job, devices: int) -> None:
    strategy = lockstep.MirroredStrategy(devices, num_shares=NUM_SHARES)
    assert digest_of_training(*job, strategy) == digest_on_one_rank(*job)


SCRIPT = f"""{BEGINNING}
from tests.kept_teams import keep_teams
from tests.parity.test_bits_on_hosts import NUM_SHARES, digest_of_training

with keep_teams():
    for job in json.loads(sys.argv[1]):
        name, options = json.loads(sys.argv[2])
        make = getattr(lockstep, name)
        strategy = make(num_shares=NUM_SHARES, timeout_seconds=180, **options)
        tell([*job, digest_of_training(*job, strategy)])
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("layout", "jobs"), core_of(LAYOUTS, IN_CI, []))
def test_several_hosts(layout: str, jobs: str, make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Also where a host's shares are no subtree of the sum: 5 and 3 of them."""
    devices = [int(number) for number in layout.split(" + ")]
    hosts = make_hosts(len(devices))
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    strategies = {
        "sharded": ("FullyShardedStrategy", {}),
        "sharded replicas": ("HybridStrategy", {"data": 2, "shard": 2}),
    }
    strategy = strategies.get(jobs, ("MultiWorkerMirroredStrategy", {}))
    script = [str(path), json.dumps(LAYOUTS[layout, jobs]), json.dumps(strategy)]
    started = [by_tf_config(hosts, host, script, devices) for host in range(len(hosts))]
    for told in lines_of_all(started, SECONDS):
        assert [(name, optimizer) for name, optimizer, _ in told] == LAYOUTS[layout, jobs]
        for name, optimizer, digest in told:
            assert digest == digest_on_one_rank(name, optimizer), (name, optimizer)
