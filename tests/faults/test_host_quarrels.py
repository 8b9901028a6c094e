"""What must be alike on all hosts, and is not, is named on all of them; so is what fails on one."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.host_quarrels import QUARRELS
from tests.launchers import lines_of_all, on_loopback

SECONDS = 240.0


@pytest.fixture(scope="module")
def told() -> Iterator[list[dict[str, Any]]]:
    """By host, the error of each quarrel."""
    with on_loopback(["-m", "tests.faults.host_quarrels"]) as processes:
        yield [
            {line["quarrel"]: line["told"] for line in each}
            for each in lines_of_all(processes, SECONDS)
        ]


@pytest.mark.parametrize("name", QUARRELS)
def test_both_hosts_say_what_is_wrong(name: str, told: list[dict[str, Any]]) -> None:
    for host in told:
        assert QUARRELS[name][1] in host[name], host[name]


def test_after_all_that_they_train(told: list[dict[str, Any]]) -> None:
    assert told[0]["none"] == told[1]["none"]
