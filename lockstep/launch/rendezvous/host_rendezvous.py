"""The rendezvous: how the leading processes of all hosts find each other.

Host 0 listens where the launcher says, at the address of that one interface (``RendezvousServer``).
The others call, again and again (``RendezvousClient``): host 0 may start later, and its name may
not be known yet. After the handshake each sends its host info. Once all have come, and what they
send goes together, host 0 sends all of it to all, and stops listening. Where the job may go on with
fewer (``Place.min_hosts``), that is when time is up: those that have come are numbered anew, in the
order of their numbers. Who comes later finds nobody who listens, until the others meet again.

Meanwhile hosts that were admitted are told which ones are missing, so that each can name them. A
host that goes away again before the control group is closed may come back.
"""

import math

import msgspec

from lockstep.channel.polling import LookAround, Stopwatch, wait_on
from lockstep.cluster.place import Address, Place
from lockstep.errors import HostError
from lockstep.launch.rendezvous.control_group import ControlGroup, HostInfo, name_of
from lockstep.launch.rendezvous.framed_channel import FramedChannel, RemotePeer
from lockstep.launch.rendezvous.rendezvous_server import (
    INFO,
    WAITING,
    Deadline,
    DeadlineError,
    RendezvousServer,
    address_of,
    awaited_hosts,
    entry_of,
    needed_hosts,
    numbers_of,
    peer_of,
    purpose_of_meeting,
    reason_of,
)
from lockstep.launch.security.handshake import HANDSHAKE_SECONDS, OTHER_SECRET, HandshakeError, call
from lockstep.launch.security.secret import Secret
from lockstep.launch.sockets import resolve
from lockstep.launch.untrusted import decode_untrusted

# A host that does not answer must not keep the next candidate waiting for long.
_CALL_SECONDS = HANDSHAKE_SECONDS / 2

# For a host that has come too late. While the others train, nobody listens who could tell it more.
_LATE = (
    " If the others go on without this host, it can join them when they meet again, after a loss: "
    "start it until then (`lockstep run --restarts`)."
)


class RendezvousClient:
    """The side of any other host."""

    def __init__(self, place: Place, secret: Secret, info: HostInfo, deadline: Deadline) -> None:
        self.place = place
        self.secret = secret
        self.info = info
        self.deadline = deadline.announced(self._describe)
        self.answers: dict[str, str] = {}  # what came of the last call, by address
        self.missing: list[int] = []  # once this host was let in
        self.where = ""  # host 0 has let it in

    def join(self) -> ControlGroup:
        """Call until host 0 answers, and wait for the control group to close."""
        try:
            while True:
                for address in self.place.rendezvous:
                    control_group = self._call_at(address)
                    if control_group:
                        return control_group
                self.deadline.pause()
        except DeadlineError:
            raise self._in_vain() from None

    def _describe(self) -> str:
        if self.missing:
            return awaited_hosts(self.where, self.missing, self.place.num_hosts)
        return f"Waiting for host 0 at {self._listed() or self.place.rendezvous[0]}."

    def _listed(self) -> str:
        return "; ".join(f"{address}: {answer}" for address, answer in self.answers.items())

    def _call_at(self, address: Address) -> ControlGroup | None:
        try:
            found = resolve(address)
        except OSError as error:
            self.answers[str(address)] = reason_of(error)
            return None
        for family, where in found:
            try:
                channel = call(
                    family,
                    where,
                    self.secret,
                    purpose_of_meeting(self.place),
                    seconds=_CALL_SECONDS,
                    look_around=self.deadline.look,
                )
            except (HandshakeError, OSError) as error:
                self.answers[str(address)] = reason_of(error)
                continue
            control_group = self._stay(
                FramedChannel(channel, RemotePeer(host=0, name=address_of(channel))), str(address)
            )
            if control_group:
                return control_group
        return None

    def _stay(self, channel: FramedChannel, address: str) -> ControlGroup | None:
        """Hand in the info, and wait for the others; None if host 0 goes away without a word.

        Raises:
            HostError: host 0 has said why there will be no control group, or something else
                came than it has sent.
        """
        entry, self.where = entry_of(self.place, self.info), address
        # Where fewer may go on, host 0 says when time is up.
        deadline = self.deadline if self.place.min_hosts is None else self.deadline.extended()
        try:
            channel.send(INFO, msgspec.json.encode(entry), deadline.look)
            while (frame := channel.receive(deadline.look)).kind == WAITING:
                self.missing = decode_untrusted(frame.payload, list[int], "Host 0")
            found = decode_untrusted(frame.payload, list[tuple[int, HostInfo]], "Host 0")
        except HostError as error:
            if channel.was_tampered_with:
                channel.fail(f"{name_of(self.place.host, self.info)} failed: {error}")
            channel.close()
            if channel.was_told or channel.was_tampered_with:
                raise
            self.answers[address], self.missing = str(error), []
            return None
        except BaseException:
            channel.close()
            raise
        hosts, infos = zip(*found, strict=True)
        channel.peer = peer_of(0, infos[0], channel.peer.name)
        host = hosts.index(self.place.host)
        return ControlGroup(host=host, infos=infos, star={0: channel}, secret=self.secret)

    def _in_vain(self) -> HostError:
        if self.missing:
            return HostError(
                f"{needed_hosts(self.place)} must come to host 0 within {self.deadline}.",
                received=f"nothing from {numbers_of(self.missing)}, on host {self.place.host}",
                fix="See that each was started, with the same rendezvous, job and secret.",
            )
        if OTHER_SECRET in self.answers.values():
            return HostError(
                f"Host 0 and host {self.place.host} must have the same secret.",
                received=f"{self._listed()}, whose secret is from {self.secret.origin}",
                fix="Give both the same one. If that is another job's host 0, give this job "
                "a rendezvous of its own.",
            )
        return HostError(
            f"Host {self.place.host} must reach host 0 at the rendezvous within {self.deadline}.",
            received=self._listed() or "no answer",
            fix="See that host 0 was started, with the same rendezvous, job and secret, and "
            f"that no firewall is in the way.{'' if self.place.min_hosts is None else _LATE}",
        )


def meet(
    place: Place,
    secret: Secret | None,
    info: HostInfo,
    *,
    timeout_seconds: float,
    patience_seconds: float = math.inf,
    look_around: LookAround = wait_on,
) -> ControlGroup:
    """Meet the other hosts of the job. Called by the process that leads its host.

    Args:
        place: what the launcher says.
        secret: what all hosts know; where there is one host, None will do.
        info: what this host says of itself.
        timeout_seconds: until all hosts must have come; looking up a name may take longer.
        patience_seconds: until then, where enough have come to go on (``Place.min_hosts``).
        look_around: called every 20 ms with the seconds waited so far; raises to give up.

    Raises:
        HostError: a host did not come, is not what this one is, or cannot be reached.
    """
    assert place.leads
    if place.num_hosts == 1:
        return ControlGroup(host=0, infos=[info], star={}, secret=None)
    assert secret is not None
    deadline = Deadline(
        watch=Stopwatch(),
        timeout_seconds=timeout_seconds,
        look_around=look_around,
        patience_seconds=patience_seconds,
    )
    if place.host == 0:
        return RendezvousServer(place, secret, info, deadline).run()
    return RendezvousClient(place, secret, info, deadline).join()
