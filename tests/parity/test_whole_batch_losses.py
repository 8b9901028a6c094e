"""The parity table of losses that are no means over samples, in fp64."""

import pytest

import lockstep
from tests.thorough import core_of
from tests.whole_batch_zoo import JOBS

STRATEGIES = {
    "single": lockstep.SingleDeviceStrategy(),
    "mirrored-2": lockstep.MirroredStrategy(2),
    "mirrored-3": lockstep.MirroredStrategy(3),
    "mirrored-2-shares-5": lockstep.MirroredStrategy(2, num_shares=5),
    "pipeline-2": lockstep.PipelineStrategy(2, microbatches=3),
    "pipeline-2-zb-h1": lockstep.PipelineStrategy(2, microbatches=4, schedule="zb-h1"),
    "data-2-pipe-2": lockstep.HybridStrategy(data=2, pipe=2, microbatches=2),
}
CELLS = [(job, strategy) for job in JOBS for strategy in STRATEGIES]


@pytest.mark.parametrize(
    ("job", "strategy"),
    core_of(CELLS, lambda _, strategy: strategy in ("mirrored-2", "pipeline-2")),
)
def test_training_equals_one_device(job: str, strategy: str) -> None:
    report = lockstep.verify(JOBS[job](), STRATEGIES[strategy], steps=5)
    assert report.passed, str(report)
    assert not report.undetermined
    assert not report.notes
