"""The parity table of losses: own losses and several losses under every strategy, in fp64."""

import pytest

import lockstep
from tests.loss_zoo import JOBS, heads_job
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

STRATEGIES = {
    "single": lockstep.SingleDeviceStrategy(),
    "mirrored-2": lockstep.MirroredStrategy(2),
    "mirrored-3": lockstep.MirroredStrategy(3),
    "mirrored-1-shares-3": lockstep.MirroredStrategy(1, num_shares=3),
    "mirrored-2-shares-5": lockstep.MirroredStrategy(2, num_shares=5),
    "pipeline-2": lockstep.PipelineStrategy(2, microbatches=3),
    "pipeline-2-alone": lockstep.PipelineStrategy(2, microbatches=1),
    "data-2-pipe-2": lockstep.HybridStrategy(data=2, pipe=2, microbatches=2),
}
# BatchNorm takes the statistics of a microbatch, and these two losses weigh differently.
CELLS = [
    (job, strategy)
    for job in JOBS
    for strategy in STRATEGIES
    if not (job == "two losses and BatchNorm" and strategy in ("pipeline-2", "data-2-pipe-2"))
]


@pytest.mark.parametrize(
    ("job", "strategy"),
    core_of(
        CELLS,
        lambda job, strategy: (
            strategy == "mirrored-2"
            or (strategy == "pipeline-2" and job in ("own loss at the end", "two losses"))
        ),
        [],
    ),
)
def test_training_equals_one_device(job: str, strategy: str) -> None:
    report = lockstep.verify(JOBS[job](), STRATEGIES[strategy], steps=5)
    assert report.passed, str(report)
    assert not report.undetermined
    assert not report.notes


@pytest.mark.parametrize("change", [{"digit": 0.0, "parity": 1.0}, {"digit": -1.0}, None])
def test_factors_are_those_given(change: dict[str, float] | None) -> None:
    job = heads_job()
    job = lockstep.Job(job.model, job.loss, job.optimizer, job.data, 11, change)
    report = lockstep.verify(job, STRATEGIES["mirrored-2"], steps=3)
    assert report.passed, str(report)
