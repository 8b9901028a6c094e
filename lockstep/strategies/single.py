"""One device: the reference for all other strategies."""

from lockstep.cluster.place import Reach
from lockstep.errors import OptionError, Problems
from lockstep.plan.devices import check_devices
from lockstep.plan.makers.data_parallel import Maker, SingleDevice
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import check_format
from lockstep.tracebacks import public_methods


@public_methods
class SingleDeviceStrategy(Strategy):
    """Trains on one device, in the script's own process.

    Args:
        device: ``"cpu"``, or an accelerator such as ``"cuda:0"``: the model is moved there, and
            stays.
        channels_last: see ``MirroredStrategy``; None chooses on cores only.

    Raises:
        DeviceError: ``device`` is no name of a device.
        OptionError: ``channels_last`` is no bool.
    """

    reach: Reach = "one process"

    def __init__(self, device: str = "cpu", *, channels_last: bool | None = None) -> None:
        check_devices([device], "device")
        problems = Problems()
        check_format(problems, channels_last)
        problems.raise_if_any(OptionError)
        self._channels_last = channels_last
        self.device = device if ":" in device else f"{device}:0"

    def maker(self, precision: str = "fp32") -> Maker:
        return SingleDevice(
            device=self.device, channels_last=self._channels_last, precision=precision
        )

    @property
    def num_replicas_in_sync(self) -> int:
        return 1
