"""What must be alike on all hosts, and is not, is named on all of them; so is what fails on one."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.host_quarrels import QUARRELS
from tests.launchers import lines_of_all, on_loopback
from tests.thorough import core_of, wanted

pytestmark = pytest.mark.thorough

SECONDS = 240.0
CORE = (
    *("samples", "number of samples", "batch size", "seed", "optimizer", "width", "loss"),
    *("call", "option of host 1", "not a number", "reading", "callback"),
)


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """By host, the error of each quarrel."""
    script = ["-m", "tests.faults.host_quarrels", *wanted(request, "name")]
    with on_loopback(script) as processes:
        yield [
            {line["quarrel"]: line["told"] for line in each}
            for each in lines_of_all(processes, SECONDS)
        ]


@pytest.mark.parametrize("name", core_of(QUARRELS, CORE))
def test_both_hosts_say_what_is_wrong(name: str, told: list[dict[str, Any]]) -> None:
    for host in told:
        assert QUARRELS[name][1] in host[name], host[name]


def test_after_all_that_they_train(told: list[dict[str, Any]]) -> None:
    assert told[0]["none"] == told[1]["none"]
