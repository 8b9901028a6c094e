"""The rendezvous: how the leading processes of all hosts find each other.

Host 0 listens where the launcher says, at the address of that one interface (``RendezvousServer``).
The others call, again and again (``RendezvousClient``): host 0 may start later, and its name may
not be known yet. After the handshake each hands in its card. Once all have come, and all cards go
together, host 0 gives everybody all cards, and stops listening.

Meanwhile whoever was let in is told whom the others wait for, so each can name the missing ones. A
host that goes away again before the control group is closed may come back.
"""

from lockstep.channel.waiting import LookAround, Stopwatch, wait_on
from lockstep.cluster.place import Place
from lockstep.launch.control_group import Card, ControlGroup
from lockstep.launch.patience import Patience
from lockstep.launch.rendezvous_client import RendezvousClient
from lockstep.launch.rendezvous_server import RendezvousServer
from lockstep.launch.secret import Secret


def meet(
    place: Place,
    secret: Secret | None,
    card: Card,
    *,
    timeout_seconds: float,
    look_around: LookAround = wait_on,
) -> ControlGroup:
    """Meet the other hosts of the job. Called by the process that leads its host.

    Args:
        place: what the launcher says.
        secret: what all hosts know; where there is one host, None will do.
        card: what this host says of itself.
        timeout_seconds: until all hosts must have come; looking up a name may take longer.
        look_around: called every 20 ms with the seconds waited so far; raises to give up.

    Raises:
        HostError: a host did not come, is not what this one is, or cannot be reached.
    """
    assert place.leads
    if place.num_hosts == 1:
        return ControlGroup(host=0, cards=[card], star={}, secret=None)
    assert secret is not None
    patience = Patience(watch=Stopwatch(), timeout_seconds=timeout_seconds, look_around=look_around)
    if place.host == 0:
        return RendezvousServer(place, secret, card, patience).hold()
    return RendezvousClient(place, secret, card, patience).pay()
