"""Workers and parameter servers whose roles a launcher says: by TF_CONFIG, or ``lockstep run``."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.launchers import BEGINNING, ROOT, SECRET
from tests.launching import TIMEOUT_SECONDS, clean_environment, free_port
from tests.netns import HostProcess
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

SCRIPT = f"""{BEGINNING}
import functools
def trained(strategy):
    torch.manual_seed(0)
    trainer = lockstep.Trainer(
        nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3)), loss=nn.MSELoss(),
        optimizer=functools.partial(torch.optim.Adam, lr=0.01), strategy=strategy,
        precision="fp64")
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(23, 4, generator=generator), torch.randn(23, 3, generator=generator)
    trainer.fit(data, batch_size=5, epochs=2, verbose=0)
    plan = trainer.plan if trainer._runner.last_plan is not None else None
    weights = [weight.flatten().tolist() for weight in trainer.model.parameters()]
    return plan and [plan.num_ranks, plan.num_servers], weights
staleness = json.loads(sys.argv[1])
strategy = lockstep.ParameterServerStrategy(staleness=staleness, timeout_seconds=60)
numbers, own = trained(strategy)
tell([numbers, own, trained(lockstep.SingleDeviceStrategy())[1]])
"""


def started(folder: Path, variables: dict[str, str], command: list[str]) -> HostProcess:
    if not (
        folder / "script.py"
    ).exists():  # else it would be empty for a moment, as another reads it
        (folder / "script.py").write_text(SCRIPT)
    environment = clean_environment() | warm.VARIABLES | {"PYTHONPATH": str(ROOT)} | variables
    return HostProcess([sys.executable, *command], environment, folder, like="torch")


def told(processes: list[HostProcess]) -> list[Any]:
    try:
        said = [each.finish(TIMEOUT_SECONDS) for each in processes]
    finally:
        for each in processes:
            each.end()
            each.close()
    assert [status for status, _, _ in said] == [0] * len(processes), said
    return [json.loads(out) for _, out, _ in said]


def assert_near(own: list[list[float]], others: list[list[float]]) -> None:
    for one, other in zip(own, others, strict=True):
        assert all(abs(a - b) <= 1e-12 for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("staleness", core_of([0, 2], [0], []))
def test_the_tasks_of_tf_config_are_workers_and_servers(staleness: int, tmp_path: Path) -> None:
    """A chief, a worker and two servers; all end with the weights of one device."""
    roles = {"chief": 1, "worker": 1, "ps": 2}
    cluster = {
        role: [f"localhost:{free_port()}" for _ in range(count)] for role, count in roles.items()
    }
    processes = [
        started(
            tmp_path,
            {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})},
            ["script.py", str(staleness)],
        )
        for role, count in roles.items()
        for index in range(count)
    ]
    everywhere = told(processes)
    assert everywhere[0][0] == [4, 2]
    for _, own, alone in everywhere:
        assert own == everywhere[0][1]
        if staleness == 0:
            assert_near(own, alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize("staleness", core_of([0, 2], [2], []))
def test_lockstep_run_says_how_many_there_are(staleness: int, tmp_path: Path) -> None:
    command = ["-m", "lockstep", "run", "--devices", "2", "--servers", "3", "script.py"]
    ((numbers, own, alone),) = told([started(tmp_path, {}, [*command, str(staleness)])])
    assert numbers == [5, 3]
    if staleness == 0:
        assert_near(own, alone)


@pytest.mark.parametrize("staleness", core_of([0, 2], [2], []))
def test_lockstep_run_has_servers_on_the_last_of_several_hosts(
    staleness: int, tmp_path: Path
) -> None:
    rendezvous = f"127.0.0.1:{free_port()}"
    processes = [
        started(
            tmp_path,
            SECRET,
            [
                *("-m", "lockstep", "run", "--hosts", "2", "--host-index", str(host)),
                *("--rendezvous", rendezvous, "--devices", "1", "--servers", "2"),
                *("script.py", str(staleness)),
            ],
        )
        for host in range(2)
    ]
    (numbers, own, alone), other = told(processes)
    assert numbers == [4, 2]
    assert other[:2] == [numbers, own]
    if staleness == 0:
        assert_near(own, alone)
