"""The Trainer's options on two hosts: the weights of one device, and the same on both.

Hosts are addresses of the loopback interface. One start trains all jobs of ``host_jobs`` with
gradients that cross the network, another with activations where they may.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launchers import lines_of_all, on_loopback
from tests.loss_zoo import JOBS as LOSS_JOBS
from tests.parity.host_jobs import JOBS
from tests.thorough import core_of, wanted

NETWORKS = {"gradients": 10_000.0, "activations": 0.001}  # Gbit/s
SECONDS = 300.0
CORE = (
    *("clip_norm", "accumulate with BatchNorm", "averages", "schedule by loss", "muon"),
    *("bf16-mixed", "token weights", "metrics", "generator and BatchNorm", "skip", "change slots"),
    *("early stopping", "own loss"),
)

# Options whose like is in the core: they are proven on the ranks of one host, too.
RARE: tuple[str, ...] = (
    *("adam", "accumulate", "averages of adam", "schedule by step", "schedule by epoch"),
    *("bf16", "fp32", "fp16-mixed", "adafactor", "own optimizer", "sample weights", "shares"),
    *("shares with dropout", "BatchNorm", "generator", "steps per epoch", "rate rule"),
    *("clip weights", "lambda", "at the end"),
)
# Losses do not know of hosts: test_losses_table.py has all of them on the ranks of one.
RARE += tuple(name for name in LOSS_JOBS if name not in ("own loss", "two losses"))
CASES = [
    *core_of([name for name in (*JOBS, *LOSS_JOBS) if name not in RARE], CORE),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in RARE),
]

Told = dict[str, Any]


@pytest.fixture(scope="module", params=core_of(NETWORKS, ["gradients"], []))
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[dict[str, Told]]]:
    """By host, what it tells of each job."""
    folder: Path = tmp_path_factory.mktemp("jobs")
    names = wanted(request, "name")
    script = ["-m", "tests.parity.host_jobs", str(NETWORKS[request.param]), str(folder), *names]
    with on_loopback(script) as processes:
        yield [{line["job"]: line for line in each} for each in lines_of_all(processes, SECONDS)]


@pytest.mark.parametrize("name", CASES)
def test_two_hosts_train_as_one_device(name: str, told: list[dict[str, Told]]) -> None:
    ours = [host[name] for host in told]
    for each in ours:
        assert "error" not in each, each["error"]
    differences, tolerance = ours[0]["differences"], ours[0]["tolerance"]
    assert differences
    assert {part: gap for part, gap in differences.items() if not gap <= tolerance} == {}
    assert ours[0]["digests"] == ours[1]["digests"]
