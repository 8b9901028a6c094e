"""The rendezvous: how the leading processes of all hosts find each other.

Host 0 listens at the launcher's address, on one interface (``RendezvousServer``). The others call
repeatedly (``RendezvousClient``): host 0 may start later, and its name may not be known yet. After
the handshake each sends its host info. When all have joined, and their infos are consistent, host 0
sends all infos to all hosts, and stops listening. If the job may start with fewer hosts
(``Place.min_hosts``), host 0 does so when the time is up; the hosts that have joined get new
consecutive numbers in the same order. A later host can join only when the others meet again.

Host 0 sends the admitted hosts the numbers of the missing ones, so that each can name them. A host
that leaves before the control group is complete may join again.
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
    make_entry,
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

# A candidate that does not answer must not delay the next one for long.
_CALL_SECONDS = HANDSHAKE_SECONDS / 2

# For a host that is too late: while the others train, no process listens.
_JOIN_LATER = (
    " If the others train without this host, it can join when they meet again after a loss: start "
    "it repeatedly until then (`lockstep run --restarts`)."
)


class RendezvousClient:
    """The side of a host other than host 0.

    Attributes:
        answers: the result of the last call, by address.
        missing: hosts that have not joined, as host 0 says.
        where: the address at which host 0 has admitted this host.
    """

    def __init__(self, place: Place, secret: Secret, info: HostInfo, deadline: Deadline) -> None:
        self.place = place
        self.secret = secret
        self.info = info
        self.deadline = deadline.announced(self._describe)
        self.answers: dict[str, str] = {}
        self.missing: list[int] = []
        self.where = ""

    def join(self) -> ControlGroup:
        """Call until host 0 answers, and wait until the control group is complete."""
        try:
            while True:
                for address in self.place.rendezvous:
                    control_group = self._call_at(address)
                    if control_group:
                        return control_group
                self.deadline.pause()
        except DeadlineError:
            raise self._timeout_error() from None

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
                    look_around=self.deadline.check,
                )
            except (HandshakeError, OSError) as error:
                self.answers[str(address)] = reason_of(error)
                continue
            control_group = self._wait_for_others(
                FramedChannel(channel, RemotePeer(host=0, name=address_of(channel))), str(address)
            )
            if control_group:
                return control_group
        return None

    def _wait_for_others(self, channel: FramedChannel, address: str) -> ControlGroup | None:
        """Send this host's info, and wait for the others; None if host 0 closes the connection.

        Raises:
            HostError: host 0 has sent the reason why there will be no control group, or the
                connection was tampered with.
        """
        entry, self.where = make_entry(self.place, self.info), address
        # If fewer hosts may start, host 0 decides when the time is up.
        deadline = self.deadline if self.place.min_hosts is None else self.deadline.extended()
        try:
            channel.send(INFO, msgspec.json.encode(entry), deadline.check)
            while (frame := channel.receive(deadline.check)).kind == WAITING:
                self.missing = decode_untrusted(frame.payload, list[int], "Host 0")
            found = decode_untrusted(frame.payload, list[tuple[int, HostInfo]], "Host 0")
        except HostError as error:
            if channel.was_tampered_with:
                channel.fail(f"{name_of(self.place.host, self.info)} failed: {error}")
            channel.close()
            if channel.has_report or channel.was_tampered_with:
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

    def _timeout_error(self) -> HostError:
        if self.missing:
            return HostError(
                f"{needed_hosts(self.place)} must connect to host 0 within {self.deadline}.",
                received=f"no connection from {numbers_of(self.missing)}, on host "
                f"{self.place.host}",
                fix="Check that each was started, with the same rendezvous, job and secret.",
            )
        if OTHER_SECRET in self.answers.values():
            return HostError(
                f"Host 0 and host {self.place.host} must have the same secret.",
                received=f"{self._listed()}, whose secret is from {self.secret.source}",
                fix="Give both the same secret. If that is another job's host 0, give this job "
                "another rendezvous.",
            )
        return HostError(
            f"Host {self.place.host} must reach host 0 at the rendezvous within {self.deadline}.",
            received=self._listed() or "no answer",
            fix="Check that host 0 was started, with the same rendezvous, job and secret, and that "
            f"no firewall blocks it.{'' if self.place.min_hosts is None else _JOIN_LATER}",
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
        place: this process's.
        secret: the job's; may be None for a single host.
        info: this host's.
        timeout_seconds: until all hosts must have joined; looking up a name may take longer.
        patience_seconds: the same, if enough hosts have joined to start (``Place.min_hosts``).
        look_around: called every 20 ms with the seconds waited so far; raises to give up.

    Raises:
        HostError: a host did not join, has other versions or another script, or cannot be reached.
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
