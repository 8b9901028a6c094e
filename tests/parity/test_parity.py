"""The parity table: every strategy on every model against a plain loop on one device, in fp64.

Five steps, batches that no number of replicas divides, the last one short: loss, and every
gradient, parameter, buffer and optimizer slot by name, to the measure of docs/exactness.md.
A new strategy or model kind adds its row here. Tensor parallelism with other techniques has a table
of its own, ``test_divided_products``, and so have pipelines.
"""

import tempfile

import pytest

import lockstep
from tests.sharding import UnitByUnit
from tests.thorough import core_of
from tests.zoo import case, cases, make_job

STRATEGIES = {
    "auto": lockstep.AutoStrategy(),
    "auto-memory-3": lockstep.AutoStrategy("memory", devices=3),
    "single": lockstep.SingleDeviceStrategy(),
    "mirrored-1": lockstep.MirroredStrategy(1),
    "mirrored-2": lockstep.MirroredStrategy(2),
    "mirrored-3": lockstep.MirroredStrategy(3),
    "mirrored-4": lockstep.MirroredStrategy(4),
    "mirrored-1-shares-3": lockstep.MirroredStrategy(1, num_shares=3),
    "mirrored-2-shares-5": lockstep.MirroredStrategy(2, num_shares=5),
    "servers-1-of-2": lockstep.ParameterServerStrategy(1, 2),
    "servers-2-of-3": lockstep.ParameterServerStrategy(2, 3),
    "mirrored-2-gloo": lockstep.MirroredStrategy(2, engine="gloo"),
    "mirrored-3-gloo": lockstep.MirroredStrategy(3, engine="gloo"),
    "sharded-3": UnitByUnit(3, engine="gloo"),
    "sharded-2-recomputed": lockstep.FullyShardedStrategy(2, recompute=True),
    "sharded-2-offloaded": lockstep.FullyShardedStrategy(2, offload=tempfile.gettempdir()),
    "data-2-shard-2": lockstep.HybridStrategy(2, shard=2),
    "tensor-2": lockstep.TensorParallelStrategy(2),
}
# CI runs these with one of the other models each.
DEAR = ("auto", "mirrored-4")


@pytest.mark.parametrize(
    ("model", "strategy"),
    core_of(
        [(one.name, strategy) for one in cases() for strategy in STRATEGIES],
        lambda model, strategy: (
            (model == "cnn_batch_norm" and strategy not in DEAR) or strategy == "mirrored-2"
        ),
    ),
)
def test_training_equals_one_device(model: str, strategy: str) -> None:
    report = lockstep.verify(make_job(case(model)), STRATEGIES[strategy], steps=5)
    assert report.passed, str(report)
    assert not report.undetermined
