"""Losses of whole batches over several hosts: training and evaluation as on one device, in fp64."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launchers import BEGINNING, by_tf_config, lines_of_all
from tests.netns import Hosts
from tests.thorough import core_of

MakeHosts = Callable[[int], Hosts]

SECONDS = 300.0
MODELS = ("RMSE", "CLIP", "VAE", "siamese", "masked mean")
# The devices of each host, and the strategy.
ROWS = {
    "replicas": ((1, 1), "lockstep.MultiWorkerMirroredStrategy(timeout_seconds=180)"),
    "replicas, two on a host": (
        (2, 2),
        "lockstep.MultiWorkerMirroredStrategy(timeout_seconds=180)",
    ),
    "a stage on each host": (
        (1, 1),
        "lockstep.PipelineStrategy(2, microbatches=3, timeout_seconds=180)",
    ),
    "replicas of a pipeline": (
        (2, 2),
        "lockstep.HybridStrategy(data=2, pipe=2, microbatches=2, timeout_seconds=180)",
    ),
    "replicas of a stage on both hosts": (
        (2, 2),
        "lockstep.HybridStrategy((1, 3), microbatches=3, timeout_seconds=180)",
    ),
}

SCRIPT = f"""{BEGINNING}
import copy
from tests.whole_batch_zoo import JOBS

strategy = eval(sys.argv[1])
for name in sys.argv[2:]:
    job = JOBS[name]()
    report = lockstep.verify(job, strategy, steps=5)
    found = []
    for one in (strategy, lockstep.SingleDeviceStrategy()):
        trainer = lockstep.Trainer(
            copy.deepcopy(job.model).double(), loss=job.loss, strategy=one, precision="fp64")
        found.append(trainer.evaluate(job.data, batch_size=job.batch_size)["loss"])
    tell({{"model": name, "report": str(report), "passed": report.passed, "losses": found}})
"""


@pytest.mark.thorough  # the core has one of them in test_host_options
@pytest.mark.parametrize("name", core_of(ROWS, ["a stage on each host"], []))
def test_hosts_equal_one_device(name: str, make_hosts: MakeHosts, tmp_path: Path) -> None:
    devices, strategy = ROWS[name]
    hosts = make_hosts(len(devices))
    path = tmp_path / "prove.py"
    path.write_text(SCRIPT)
    script = [str(path), strategy, *MODELS]
    started = [by_tf_config(hosts, host, script, devices) for host in range(len(hosts))]
    for told in lines_of_all(started, SECONDS):
        for line in told:
            assert line["passed"], line["report"]
            assert line["losses"][0] == pytest.approx(line["losses"][1], rel=1e-12)
        assert [line["model"] for line in told] == list(MODELS)
