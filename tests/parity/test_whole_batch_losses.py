"""The parity table of losses that are no means over samples, in fp64."""

import copy

import pytest
import torch

import lockstep
from tests.thorough import core_of
from tests.whole_batch_zoo import JOBS, KNOWN

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


def trainer_of(job: lockstep.Job, strategy: lockstep.Strategy) -> lockstep.Trainer:
    model = copy.deepcopy(job.model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return lockstep.Trainer(
        model, loss=job.loss, optimizer=optimizer, strategy=strategy, precision="fp64"
    )


@pytest.mark.parametrize("strategy", ["mirrored-2", "mirrored-3", "pipeline-2", "data-2-pipe-2"])
@pytest.mark.parametrize("name", ["RMSE", "CLIP", "two means", "by the number of samples"])
def test_evaluation_is_the_loss_of_each_batch(name: str, strategy: str) -> None:
    job = JOBS[name]()
    trainer = trainer_of(job, STRATEGIES[strategy])
    reference = copy.deepcopy(trainer.model).eval()
    inputs, targets = job.data
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    total, size = 0.0, len(targets)
    for start in range(0, size, job.batch_size):
        rows = slice(start, start + job.batch_size)
        with torch.no_grad():
            output = reference(*(one[rows] for one in inputs))
            total += len(targets[rows]) * job.loss(output, targets[rows]).item()
    found = trainer.evaluate(job.data, batch_size=job.batch_size)["loss"]
    assert found == pytest.approx(total / size, rel=1e-12)
    trainer.close()


@pytest.mark.parametrize("name", KNOWN)
def test_outputs_are_not_exchanged_for_what_is_known(name: str) -> None:
    job = JOBS[name]()
    trainer = trainer_of(job, STRATEGIES["mirrored-2"])
    trainer.fit(job.data, batch_size=job.batch_size, epochs=1, verbose=0)
    assert trainer._loss is not None
    assert not trainer._loss.takes_whole
    trainer.close()
