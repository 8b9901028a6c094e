"""Synchronous data parallelism on one host."""

import os
from collections.abc import Sequence

from lockstep.cluster.devices import discover
from lockstep.cluster.environment import find_devices
from lockstep.errors import OptionError, Problems
from lockstep.options import check_count, check_timeout
from lockstep.plan.devices import Devices, check_devices, device_names
from lockstep.plan.engines import backend_for, check_engine, check_leave, over
from lockstep.plan.makers.data_parallel import Maker, Mirrored
from lockstep.plan.makers.threaded import check_threads, threaded
from lockstep.strategies.base import Strategy
from lockstep.tracebacks import public_methods


@public_methods
class MirroredStrategy(Strategy):
    """Every device holds the whole model and computes its shares of each global batch.

    The replicas' parameters are one copy in shared memory. The script's own process is the first
    replica; ``fit`` starts a helper process for each other one.

    Args:
        devices: how many, or their names, such as ``["cuda:0", "cuda:1"]``, one for each replica. A
            number counts accelerators if there are any, else CPU replicas. None is the number of
            ``lockstep run --devices``, or else all accelerators, or else one CPU replica per usable
            core, at most 8. The model is moved to the first device, and stays there.
        num_shares: parts into which each global batch is divided; None is one per replica. Runs
            with the same ``num_shares`` give the same bits on any number of devices.
        channels_last: True for images with their channels together in memory, which is faster on
            CPUs; None is True for models with convolutions, unless in float64. A forward pass that
            fails with such strides is run again in torch's own format; pass ``False`` if backward
            fails.
        engine: moves tensors between replicas. None fits the devices: on cores shared memory, with
            one copy of the parameters; on accelerators their own backend of torch.distributed
            (``"nccl"``, ``"xccl"``), with a copy for each replica. ``"gloo"`` works for all, and
            copies tensors of accelerators through host memory. With a named engine, ``devices`` may
            name an accelerator twice, for tests.
        threads_per_device: compute threads of each replica on cores; None is one. Sums within a
            replica depend on it, in the last bits.
        timeout_seconds: longest wait for a replica; a longer one is an error.

    Raises:
        DeviceError: devices that do not exist, of two kinds, or named twice.
        OptionError: another invalid argument.
    """

    def __init__(
        self,
        devices: Devices = None,
        *,
        num_shares: int | None = None,
        channels_last: bool | None = None,
        engine: str | None = None,
        threads_per_device: int | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        check_devices(devices)
        if isinstance(devices, Sequence):
            check_leave(devices, engine)
        problems = Problems()
        check_shares(problems, num_shares)
        check_format(problems, channels_last)
        check_engine(problems, engine)
        check_threads(problems, threads_per_device)
        check_timeout(problems, timeout_seconds)
        problems.raise_if_any(OptionError)
        self.devices = find_devices(os.environ) if devices is None else devices
        self.num_shares = num_shares
        self.channels_last = channels_last
        self.engine = engine
        self.threads_per_device = threads_per_device
        self.timeout_seconds = timeout_seconds
        backend_for(engine, device_names(self.devices, discover().hosts[0]))

    def maker(self, precision: str = "fp32") -> Maker:
        maker: Maker = Mirrored(
            devices=tuple(self.devices) if isinstance(self.devices, Sequence) else self.devices,
            num_shares=self.num_shares,
            channels_last=self.channels_last,
            precision=precision,
        )
        maker = over(self.engine, maker, num_shares=self.num_shares)
        return threaded(self.threads_per_device, maker)

    @property
    def num_replicas_in_sync(self) -> int:
        return len(device_names(self.devices, discover().hosts[0]))


def check_shares(problems: Problems, num_shares: object) -> None:
    """Note a number that is neither None nor an integer of at least 1."""
    fix = "Leave it out for one share per device."
    check_count("num_shares", num_shares, problems, optional=True, fix=fix)


def check_format(problems: Problems, channels_last: object) -> None:
    """Note a value that is neither None nor a bool."""
    if channels_last not in (None, True, False):
        problems.add(
            "`channels_last` must be True, False or None.",
            received=f"channels_last={channels_last!r}",
            fix="Leave it out to use it for models with convolutions.",
        )
