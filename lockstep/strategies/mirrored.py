"""Synchronous data parallelism on one host."""

import os

from lockstep.cluster.devices import discover
from lockstep.cluster.environment import find_devices
from lockstep.errors import DeviceError, OptionError, Problems
from lockstep.plan.engines import check_engine, over
from lockstep.plan.makers import Maker, Mirrored, num_mirrored_replicas
from lockstep.strategies.base import Strategy, check_timeout, is_count


class MirroredStrategy(Strategy):
    """Every device holds the whole model and computes its shares of each global batch.

    The replicas' parameters are one copy in shared memory. The script's own process is the first
    replica; ``fit`` starts a helper process for each other one.

    Args:
        devices: number of CPU replicas; None is what ``lockstep run --devices`` says, or else one
            per usable core, at most 8.
        num_shares: parts into which each global batch is divided; None is one per replica. Runs
            with the same ``num_shares`` give the same bits on any number of devices.
        channels_last: whether images run through the model with their channels together in memory,
            which is faster on CPUs; None is for models with convolutions, unless in float64. A
            forward pass that such strides make fail is run again in torch's own format; ``False``
            is for what fails in backward.
        engine: what moves tensors between replicas. None is shared memory, with one copy of the
            parameters; ``"gloo"`` is torch.distributed, with a copy for each replica.
        timeout_seconds: longest wait for a replica; what hangs longer is reported.

    Raises:
        DeviceError: fewer than one device, or more than this host can hold.
        OptionError: another argument that cannot be.
    """

    def __init__(
        self,
        devices: int | None = None,
        *,
        num_shares: int | None = None,
        channels_last: bool | None = None,
        engine: str | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        if devices is not None and (not is_count(devices)):
            raise DeviceError(
                "`devices` must be a number of devices, at least 1.",
                received=f"devices={devices!r}",
                fix="Use devices=2 for two CPU replicas, or leave it out for one per core.",
            )
        problems = Problems()
        check_shares(problems, num_shares)
        check_format(problems, channels_last)
        check_engine(problems, engine)
        check_timeout(problems, timeout_seconds)
        problems.raise_if_any(OptionError)
        self.devices = find_devices(os.environ) if devices is None else devices
        self.num_shares = num_shares
        self.channels_last = channels_last
        self.engine = engine
        self.timeout_seconds = timeout_seconds
        num_mirrored_replicas(self.devices, discover())

    def maker(self, precision: str = "fp32") -> Maker:
        maker = Mirrored(
            devices=self.devices,
            num_shares=self.num_shares,
            channels_last=self.channels_last,
            precision=precision,
        )
        return over(self.engine, maker, num_shares=self.num_shares)

    @property
    def num_replicas_in_sync(self) -> int:
        return num_mirrored_replicas(self.devices, discover())


def check_shares(problems: Problems, num_shares: object) -> None:
    """Note what is neither None nor an integer of at least 1."""
    if num_shares is not None and not is_count(num_shares):
        problems.add(
            "`num_shares` must be an integer of at least 1.",
            received=f"num_shares={num_shares!r}",
            fix="Leave it out for one share per device.",
        )


def check_format(problems: Problems, channels_last: object) -> None:
    """Note what is no flag."""
    if channels_last not in (None, True, False):
        problems.add(
            "`channels_last` must be True, False or None.",
            received=f"channels_last={channels_last!r}",
            fix="Leave it out to have it where convolutions gain.",
        )
