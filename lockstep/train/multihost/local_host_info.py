"""What a host says of itself when hosts meet."""

import msgspec
import torch

from lockstep.cluster.devices import discover, processor_name
from lockstep.cluster.place import Place
from lockstep.launch.rendezvous.control_group import HostInfo
from lockstep.version import __version__


def own_info(place: Place) -> HostInfo:
    """What this host says of itself when hosts meet."""
    host = discover().hosts[0]
    host = msgspec.structs.replace(
        host,
        num_given=place.devices,
        num_servers=place.num_servers_here,
        arithmetic=_arithmetic(),
    )
    return HostInfo(
        facts={
            "the version of Lockstep": __version__,
            "the version of torch": str(torch.__version__),
        },
        about={"name": host.name, "host": msgspec.json.encode(host).decode()},
    )


def _arithmetic() -> str:
    """Where this is equal, the same products have the same bits."""
    return f"{torch.backends.cpu.get_cpu_capability()} {processor_name()}"
