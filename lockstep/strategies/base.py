"""The base of all strategies."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from lockstep.cluster.devices import discover
from lockstep.plan.makers import Maker
from lockstep.plan.spec import Plan

if TYPE_CHECKING:
    from torch import nn


class Strategy(ABC):
    """A way to get a Plan.

    Attributes:
        timeout_seconds: longest wait of rank 0 for a helper; what hangs longer is reported with
            all ranks' stacks.
    """

    timeout_seconds: float = 600.0

    @abstractmethod
    def maker(self, precision: str = "fp32") -> Maker:
        """The pure function (LayerGraph, Cluster, batch size) -> Plan behind this strategy."""

    def plan(self, model: "nn.Module", *, batch_size: int, precision: str = "fp32") -> Plan:
        """The Plan for a model on this host, without training anything."""
        from lockstep.capture.layers import capture_layers

        return self.maker(precision)(capture_layers(model), discover(), batch_size)

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Replicas that train on different shares of a batch and stay equal."""

    def scope(self) -> AbstractContextManager["Strategy"]:
        """Within ``with strategy.scope():`` a Trainer without a strategy uses this one."""
        from lockstep.train.scope import strategy_scope

        return strategy_scope(self)
