"""The accelerators of this host, and ranks on them: several on each, where there are few."""

from lockstep.cluster.devices import discover

_HOST = discover().hosts[0]

ACCELERATORS = [device.name for device in _HOST.accelerators]

REASON = "" if ACCELERATORS else f"No accelerator here. {_HOST.lack}"

KIND = ACCELERATORS[0].partition(":")[0] if ACCELERATORS else "cpu"


def ranks_on_devices(count: int) -> list[str]:
    """Devices for so many ranks, which share them where they must."""
    names = ACCELERATORS or ["cpu"]
    return [names[rank % len(names)] for rank in range(count)]
