"""The base of all strategies."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from lockstep.cluster.devices import discover
from lockstep.cluster.place import Reach
from lockstep.errors import OptionError, Problems, problem
from lockstep.plan.makers import Maker
from lockstep.plan.spec import Plan

if TYPE_CHECKING:
    from torch import nn


class Strategy(ABC):
    """A way to get a Plan.

    Attributes:
        timeout_seconds: longest wait of rank 0 for a helper; what hangs longer is reported with
            all ranks' stacks.
        reach: how far its Plans go, where a launcher has started several processes.
    """

    timeout_seconds: float = 600.0
    reach: Reach = "one host"

    @abstractmethod
    def maker(self, precision: str = "fp32") -> Maker:
        """The pure function (LayerGraph, Cluster, batch size) -> Plan behind this strategy."""

    def plan(
        self,
        model: "nn.Module",
        *,
        batch_size: int,
        precision: str = "fp32",
        sample: Any = None,
    ) -> Plan:
        """The Plan for a model on this host, without training anything.

        Args:
            model: the model.
            batch_size: of the global batch.
            precision: see ``Trainer``.
            sample: data as ``Trainer.fit`` or ``Trainer.predict`` take it, a microbatch of it at
                least. Needed by strategies that cut the model, which run and time its layers.

        Raises:
            OptionError: no sample where one is needed, or options that cannot be.
        """
        maker = self.maker(precision)
        maker.check_batch_size(batch_size)
        if maker.sample_size(discover(), batch_size) is None:
            from lockstep.capture.layers import capture_layers

            return maker(capture_layers(model), discover(), batch_size)
        if sample is None:
            raise OptionError(
                problem(
                    "Where to cut the model depends on what its layers cost, on your data.",
                    received="sample=None",
                    fix="Pass sample=(inputs, targets), or inputs alone.",
                )
            )
        from lockstep.train.planning import plan_for

        return plan_for(model, maker, precision, sample, batch_size)

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Replicas that train on different shares of a batch and stay equal."""

    def scope(self) -> AbstractContextManager["Strategy"]:
        """Within ``with strategy.scope():`` a Trainer without a strategy uses this one.

        And Keras models made or compiled within train under it.

        Raises:
            OptionError: Keras was imported with another backend than PyTorch.
        """
        from lockstep.frontends.keras.scope import scope_of

        return scope_of(self)


def is_count(value: object) -> bool:
    """Whether it is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_timeout(problems: Problems, seconds: object) -> None:
    """Note what is no positive number."""
    if not (isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds > 0):
        problems.add(
            "`timeout_seconds` must be a positive number.",
            received=f"timeout_seconds={seconds!r}",
            fix="Leave it out for 600 s.",
        )
