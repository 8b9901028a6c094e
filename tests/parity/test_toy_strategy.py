"""A strategy is a maker of Plans, and a class that holds one: written here, from outside."""

from dataclasses import dataclass

import msgspec

import lockstep
from lockstep.cluster.topology import Cluster
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.makers.data_parallel import Maker, Mirrored
from lockstep.strategies.base import Strategy
from tests.zoo import case


@dataclass(frozen=True, kw_only=True)
class _ManyShares(Maker):
    """Mirrored, with as many shares for each device."""

    devices: int
    shares_per_device: int
    precision: str

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> lockstep.Plan:
        maker = Mirrored(
            devices=self.devices,
            num_shares=self.devices * self.shares_per_device,
            precision=self.precision,
        )
        plan = maker(graph, cluster, batch_size)
        return msgspec.structs.replace(plan, strategy="many shares")


class ManySharesStrategy(Strategy):
    """A toy."""

    def maker(self, precision: str = "fp32") -> Maker:
        return _ManyShares(devices=2, shares_per_device=3, precision=precision)

    @property
    def num_replicas_in_sync(self) -> int:
        return 2


def test_a_strategy_from_outside_trains_what_one_device_would() -> None:
    one = case("cnn_batch_norm")
    job = lockstep.Job(
        model=one.make_model(),
        loss=one.loss,
        optimizer=one.optimizer,
        data=(one.inputs, one.targets),
        batch_size=one.batch_size,
    )
    report = lockstep.verify(job, ManySharesStrategy(), steps=3)
    assert report.passed, str(report)
    plan = ManySharesStrategy().plan(one.make_model(), batch_size=one.batch_size)
    assert str(plan).startswith("Plan: many shares, data 2")
