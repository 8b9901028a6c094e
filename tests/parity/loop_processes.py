"""Processes that run loops of one's own as a launcher would start them, and what they tell."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests import warm
from tests.launchers import environ
from tests.launching import clean_environment, free_port
from tests.netns import HostProcess

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("own_loop.py"))
KERAS_SCRIPT = str(Path(__file__).with_name("keras_loop.py"))
SECONDS = 200.0


def verdicts(out: str, num_replicas: int, loops: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    """What a replica has told, by loop and tensor."""
    told = [json.loads(line) for line in out.splitlines()]
    assert [one["loop"] for one in told] == list(loops)
    for one in told:
        assert one["replicas"] == num_replicas
        assert one["found"], "there is something to compare"
        yield from ((one["loop"], name, value) for name, value in one["found"].items())


def assert_exact(outs: Sequence[str], loops: Sequence[str]) -> None:
    for out in outs:
        bad = [each for each in verdicts(out, len(outs), loops) if not each[2] <= 1e-12]
        assert bad == []


def run_as_torchrun(
    words: list[str], count: int, num_hosts: int = 1, like: str = "torch"
) -> list[str]:
    """What processes say that have the variables of one start of torchrun."""
    here = count // num_hosts
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(here)}
    sizes["GROUP_WORLD_SIZE"] = str(num_hosts)
    with ExitStack() as stack:
        processes = []
        for rank in range(count):
            which = {"RANK": rank, "LOCAL_RANK": rank % here, "GROUP_RANK": rank // here}
            own = {**warm.VARIABLES, **shared, **sizes}
            own |= {name: str(value) for name, value in which.items()}
            environment = {**clean_environment(), **environ(own)}
            process = HostProcess([sys.executable, *words], environment, ROOT, like=like)
            stack.callback(process.close)
            stack.callback(process.end)
            processes.append(process)
        return [process.check(SECONDS) for process in processes]
