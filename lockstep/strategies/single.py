"""One device: the reference all other strategies are held to."""

import re

from lockstep.cluster.place import Reach
from lockstep.errors import DeviceError
from lockstep.plan.makers import Maker, SingleDevice
from lockstep.strategies.base import Strategy


class SingleDeviceStrategy(Strategy):
    """Trains on one device, in the script's own process.

    Args:
        device: ``"cpu"`` or ``"cuda:0"``; the model must be there.

    Raises:
        DeviceError: not the name of a device.
    """

    reach: Reach = "one process"

    def __init__(self, device: str = "cpu") -> None:
        if not isinstance(device, str) or not re.fullmatch(r"(cpu|cuda)(:\d+)?", device):
            raise DeviceError(
                "`device` must be the name of a CPU or GPU.",
                received=f"device={device!r}",
                fix="Use 'cpu' or 'cuda:0'.",
            )
        self.device = device if ":" in device else f"{device}:0"

    def maker(self, precision: str = "fp32") -> Maker:
        return SingleDevice(device=self.device, precision=precision)

    @property
    def num_replicas_in_sync(self) -> int:
        return 1
