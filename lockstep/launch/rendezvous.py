"""The rendezvous: how the leading processes of all hosts find each other.

Host 0 listens where the launcher says, at the address of that one interface (``RendezvousServer``).
The others call, again and again (``RendezvousClient``): host 0 may start later, and its name may
not be known yet. After the handshake each sends its host info. Once all have come, and what they
send goes together, host 0 sends all of it to all, and stops listening.

Meanwhile hosts that were admitted are told which ones are missing, so that each can name them. A
host that goes away again before the control group is closed may come back.
"""

from lockstep.channel.waiting import LookAround, Stopwatch, wait_on
from lockstep.cluster.place import Place
from lockstep.launch.control_group import ControlGroup, HostInfo
from lockstep.launch.deadline import Deadline
from lockstep.launch.rendezvous_client import RendezvousClient
from lockstep.launch.rendezvous_server import RendezvousServer
from lockstep.launch.secret import Secret


def meet(
    place: Place,
    secret: Secret | None,
    info: HostInfo,
    *,
    timeout_seconds: float,
    look_around: LookAround = wait_on,
) -> ControlGroup:
    """Meet the other hosts of the job. Called by the process that leads its host.

    Args:
        place: what the launcher says.
        secret: what all hosts know; where there is one host, None will do.
        info: what this host says of itself.
        timeout_seconds: until all hosts must have come; looking up a name may take longer.
        look_around: called every 20 ms with the seconds waited so far; raises to give up.

    Raises:
        HostError: a host did not come, is not what this one is, or cannot be reached.
    """
    assert place.leads
    if place.num_hosts == 1:
        return ControlGroup(host=0, infos=[info], star={}, secret=None)
    assert secret is not None
    deadline = Deadline(watch=Stopwatch(), timeout_seconds=timeout_seconds, look_around=look_around)
    if place.host == 0:
        return RendezvousServer(place, secret, info, deadline).run()
    return RendezvousClient(place, secret, info, deadline).join()
