"""Checkpoints of several hosts, each of which has a part only: gone on from on as many, or one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import lockstep
from tests.launchers import by_standalone_torchrun, lines_of_all, on_loopback
from tests.parity import checkpoint_job, shared_folder_job
from tests.thorough import core_of

SCRIPT = str(Path(checkpoint_job.__file__))
COUNTING = str(Path(shared_folder_job.__file__))
SECONDS = 240.0


def told_on_hosts(num_hosts: int, devices: int, *words: str) -> list[Any]:
    """What the job says on every host: the same."""
    with on_loopback([SCRIPT, *words], num_hosts=num_hosts, devices=devices) as processes:
        first, *others = lines_of_all(processes, SECONDS)
    assert all(other == first for other in others)
    return first


def told_here(*words: str) -> list[Any]:
    return [json.loads(json.dumps(one)) for one in checkpoint_job.run(*words)]


STRATEGIES = {"pipeline": 1, "hybrid": 2, "uneven": 2, "mirrored": 1, "sharded replicas": 2}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "devices", "every"),
    core_of(
        [(*row, every) for row in STRATEGIES.items() for every in ("2 steps", "epoch")],
        [("pipeline", 1, "2 steps")],
        [],
    ),
)
def test_a_fit_on_several_hosts_goes_on(
    strategy: str, devices: int, every: str, tmp_path: Path
) -> None:
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    whole = told_here("whole", strategy, every, str(tmp_path / "whole"))
    # On two hosts: a whole run, one that ends in its midst, and the rest of that.
    expected = told_on_hosts(2, devices, "all", strategy, every, two)
    assert expected[0] == whole[0], "the same shares give the same bits"
    for name in ("digest", "history"):
        assert expected[-1][name] == whole[0][name], name
    # What two hosts have begun, one ends; and the other way round.
    shutil.copytree(f"{two}-ended", one)
    (ended,) = told_here("go on", strategy, every, one)
    assert (ended["digest"], ended["history"]) == (whole[0]["digest"], whole[0]["history"])
    assert ended["num_steps"] == expected[-1]["num_steps"] < whole[0]["num_steps"]
    back = str(tmp_path / "back")
    told_here("end", strategy, every, back)
    (again,) = told_on_hosts(2, devices, "go on", strategy, every, back)
    assert again["digest"] == whole[0]["digest"]


@pytest.mark.thorough
@pytest.mark.parametrize("folder", core_of(["run", "run/"], ["run"]), ids=["shared", "own"])
def test_hosts_write_and_read_their_parts_of_a_checkpoint(folder: str, tmp_path: Path) -> None:
    """Host 0 writes all of it where each host has a folder of its own."""
    place = f"{tmp_path}/{folder}"
    parameters = sum(one.nbytes for one in shared_folder_job.make_model().parameters())
    for epochs in (1, 2):
        with on_loopback([COUNTING, place, str(epochs)], num_hosts=2, devices=1) as processes:
            (first,), (second,) = lines_of_all(processes, SECONDS)
        assert first["digest"] == second["digest"]
        written = [first["written"], second["written"]]
        # After each of two steps, and at the end, with Adam's two slots.
        assert sum(written) >= 3 * 3 * parameters if folder == "run" else not any(written)
        assert max(written) <= 0.55 * 3 * 3 * parameters
        read = [first["read"], second["read"]]
        # A small layer stays on every rank.
        assert max(read) <= 0.7 * 3 * parameters
        assert bool(sum(read)) == (epochs == 2 and folder == "run")
        assert first["same"]
        assert second["same"]
        loaded = [first["loaded"], second["loaded"]]
        assert max(loaded) <= 0.7 * parameters
        assert sum(loaded) >= parameters if folder == "run" else not any(loaded)
    here = lockstep.FullyShardedStrategy(2)
    assert shared_folder_job.train(here, str(tmp_path / "here"), 2) == first["digest"]


@pytest.mark.thorough
def test_processes_of_a_launcher_read_their_parts_of_weights(tmp_path: Path) -> None:
    """None looks for a file that the first has not written yet."""
    parameters = sum(one.nbytes for one in shared_folder_job.make_model().parameters())
    first, second = by_standalone_torchrun([COUNTING, f"{tmp_path}/run", "1"], SECONDS)
    assert first["digest"] == second["digest"]
    assert first["same"]
    assert second["same"]
    loaded = [first["loaded"], second["loaded"]]
    assert max(loaded) <= 0.7 * parameters
    assert sum(loaded) >= parameters
