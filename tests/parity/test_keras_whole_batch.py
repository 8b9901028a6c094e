"""Keras losses that look across samples, under every strategy: what plain Keras makes of them."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import lockstep
from tests import keras_zoo as zoo
from tests.keras_whole_batch_zoo import BATCH, JOBS, KNOWN, Job
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "one": lambda: lockstep.SingleDeviceStrategy(),
    "mirrored 2": lambda: lockstep.MirroredStrategy(2),
    "mirrored 3": lambda: lockstep.MirroredStrategy(3),
    "pipeline 2": lambda: lockstep.PipelineStrategy(2, microbatches=3),
    "hybrid 2 x 2": lambda: lockstep.HybridStrategy(data=2, pipe=2, microbatches=2),
}
# Of those in the core one is of each way: a mean over a mask, one over pairs, several losses, ...
MIRRORED = (
    *("masked mean", "RMSE, weighted", "InfoNCE", "own loss", "VAE"),
    *("masks", "by sample, weighted"),
)
CELLS = core_of(
    [(job, strategy) for job in JOBS for strategy in STRATEGIES],
    lambda job, strategy: (
        (strategy == "mirrored 2" and job in MIRRORED)
        or (strategy == "pipeline 2" and job == "siamese")
    ),
    [],
)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with zoo.true_float64():
        yield


def made(job: Job) -> Any:
    model = job.make()
    if not model.built:
        model([one[:2] for one in job.x] if isinstance(job.x, list) else job.x[:2])
    zoo.set_weights(model)
    model.compile(optimizer=keras.optimizers.SGD(0.01, momentum=0.9), loss=job.loss())
    return model


def rows_of(data: Any, rows: slice) -> Any:
    return [one[rows] for one in data] if isinstance(data, list) else data[rows]


def told(model: Any, job: Job) -> dict[str, Any]:
    """Everything that calls of a model come to."""
    validation: tuple[Any, ...] = (job.x, job.y)
    if "sample_weight" in job.fit:
        validation = (*validation, job.fit["sample_weight"])
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **job.fit}
    history = model.fit(job.x, job.y, epochs=2, validation_data=validation, **options).history
    first = slice(7)
    step = [
        model.train_on_batch(rows_of(job.x, first), rows_of(job.y, first), return_dict=True)
        for _ in range(2)
    ]
    evaluated = model.evaluate(*validation[:2], batch_size=BATCH, verbose=0, return_dict=True)
    return {"history": history, "step": step, "evaluated": evaluated}


@pytest.mark.parametrize(("name", "strategy"), CELLS)
def test_as_plain_keras(name: str, strategy: str) -> None:
    job = JOBS[name]
    plain = made(job)
    with STRATEGIES[strategy]().scope():
        model = made(job)
    wanted, found = told(plain, job), told(model, job)
    assert zoo.distance(plain, model) < 1e-12
    ours, theirs = map(keras.tree.flatten_with_path, (found, wanted))
    for (path, value), (wanted_path, wanted_value) in zip(ours, theirs, strict=True):
        assert path == wanted_path
        np.testing.assert_allclose(value, wanted_value, rtol=1e-6, err_msg=str(path))
    is_gathered = any("whole batch" in note for note in model._lockstep.plan.notes)
    assert is_gathered == (strategy != "one" and name not in KNOWN and "by sample" not in name)
