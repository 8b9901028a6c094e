"""One device: the reference for all other strategies."""

from lockstep.cluster.place import Reach
from lockstep.plan.devices import check_devices
from lockstep.plan.makers.data_parallel import Maker, SingleDevice
from lockstep.strategies.base import Strategy
from lockstep.tracebacks import public_methods


@public_methods
class SingleDeviceStrategy(Strategy):
    """Trains on one device, in the script's own process.

    Args:
        device: ``"cpu"``, or an accelerator such as ``"cuda:0"``: the model is moved there, and
            stays.

    Raises:
        DeviceError: ``device`` is no name of a device.
    """

    reach: Reach = "one process"

    def __init__(self, device: str = "cpu") -> None:
        check_devices([device], "device")
        self.device = device if ":" in device else f"{device}:0"

    def maker(self, precision: str = "fp32") -> Maker:
        return SingleDevice(device=self.device, precision=precision)

    @property
    def num_replicas_in_sync(self) -> int:
        return 1
