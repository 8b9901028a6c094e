"""The parity table of pipelines: every schedule on every model against a plain loop, in fp64.

Microbatches do not divide the batches, the last batch is short, and in some cases it has fewer
samples than there are microbatches. Stages have replicas, in equal numbers or not.
"""

import pytest

import lockstep
from lockstep.errors import LockstepError
from tests.parity.test_parity import make_job
from tests.zoo import case, cases

# BatchNorm's statistics are those of a microbatch; see test_batch_norm_agrees_in_one_microbatch.
MODELS = [one.name for one in cases() if one.name != "cnn_batch_norm"]
THREE_LAYERS = ("lstm", "two_inputs")
STRATEGIES = {
    "2-1f1b": lockstep.PipelineStrategy(stages=2, microbatches=3),
    "2-gpipe-again": lockstep.PipelineStrategy(2, None, 4, "gpipe", recompute=True),
    "2-interleaved": lockstep.PipelineStrategy(2, None, 5, "interleaved"),
    "3-zb-h1": lockstep.PipelineStrategy(3, None, 4, "zb-h1"),
    "3-1f1b-first-again": lockstep.PipelineStrategy(3, microbatches=4, recompute=[0, 1]),
    "3-gpipe": lockstep.PipelineStrategy(3, None, 2, "gpipe"),
    "4-1f1b": lockstep.PipelineStrategy(4, None, 6),
    "4-zb-h2": lockstep.PipelineStrategy(4, None, 7, "zb-h2"),
    "data-2-pipe-2": lockstep.HybridStrategy(data=2, pipe=2, microbatches=2),
    "data-3-1": lockstep.HybridStrategy(data=(3, 1), microbatches=2),
    "data-1-3-zb-h1": lockstep.HybridStrategy(data=(1, 3), microbatches=2, schedule="zb-h1"),
}


CELLS = [
    (model, strategy)
    for model in MODELS
    for strategy in STRATEGIES
    if not (model in THREE_LAYERS and strategy.startswith("4"))
]


@pytest.mark.parametrize(("model", "strategy"), CELLS)
def test_training_equals_one_device(model: str, strategy: str) -> None:
    report = lockstep.verify(make_job(case(model)), STRATEGIES[strategy], steps=5)
    assert report.passed, str(report)
    assert not report.undetermined


@pytest.mark.parametrize("model", THREE_LAYERS)
def test_a_model_has_no_more_stages_than_layers(model: str) -> None:
    with pytest.raises(LockstepError, match="4 stages for 3 layers"):
        lockstep.verify(make_job(case(model)), lockstep.PipelineStrategy(4), steps=1)


def test_batch_norm_agrees_in_one_microbatch() -> None:
    strategy = lockstep.PipelineStrategy(stages=3, microbatches=1)
    report = lockstep.verify(make_job(case("cnn_batch_norm")), strategy, steps=5)
    assert report.passed, str(report)
