"""The other hosts, as this process sees them.

The same script runs on every host, so each has a model, an optimizer and a Trainer of its own.
Before the hosts work together they make sure that these are alike: what the script has decided must
be equal, or the difference is named; values (weights, slots, options) are those of host 0.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from time import sleep
from typing import Any

from torch import nn, optim

from lockstep.channel.polling import Stopwatch
from lockstep.channel.sealed_channel import Channel
from lockstep.checkpoint.trees import Tree, assembled, flattened
from lockstep.cluster.place import Place
from lockstep.cluster.topology import Cluster, Host
from lockstep.comm.codec.message_codec import decode, encode
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.errors import HostError, OptionError, WorkerError
from lockstep.launch.health.failure import as_raised, causes_of, noting_on, summary_of
from lockstep.launch.rendezvous.control_group import ControlGroup
from lockstep.launch.rendezvous.pair_channels import open_channels
from lockstep.launch.untrusted import decode_untrusted
from lockstep.launch.workers.external_workers import attach_team
from lockstep.launch.workers.team import Team
from lockstep.parallel.exchange.engine import ChannelKey
from lockstep.parallel.update import Updater
from lockstep.plan.spec import Plan
from lockstep.train.callbacks.model_changes import ModelLayout, take_changes
from lockstep.train.checkpointing.run_state import set_state, state_of
from lockstep.train.fit.fit_hooks import FitHooks
from lockstep.train.fit.fit_task import FitTask
from lockstep.train.multihost.followers import host_key
from lockstep.units import format_seconds

LookAround = Callable[[float], None]

_PART_BYTES = 1 << 24
_EXPLANATION_SECONDS = 1.0
_HEAD_START_SECONDS = 1.0
_PAUSE_SECONDS = 0.02


class Hosts:
    """All hosts of the job, from one of which this process speaks.

    Args:
        place: this process's.
        control_group: the hosts' leaders.

    Attributes:
        timeout_seconds: longest wait for another host.
        is_open: False once ``close`` was called.
    """

    def __init__(self, place: Place, control_group: ControlGroup, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.is_open = True
        self.place = place
        self.control_group = control_group
        self._channels: dict[ChannelKey, Channel] = {}
        self._connected: object = None  # for which Plan
        hosts = [decode_untrusted(str(info.about["host"]), Host) for info in control_group.infos]
        self.cluster = Cluster(hosts=tuple(hosts))

    @property
    def host(self) -> int:
        """The number of this host."""
        return self.control_group.host

    @property
    def names(self) -> list[str]:
        """Of all hosts, for messages."""
        return [self.control_group.name_of(host) for host in range(self.control_group.num_hosts)]

    def look_around(self, waited_seconds: float) -> None:
        """See whether waiting on is in vain.

        Raises:
            HostError: another host has failed, is gone, or does not come to where this one waits.
        """
        self.control_group.look_around()
        # Host 0 knows whom all wait for, so it has the first word.
        patience = self.timeout_seconds + (_HEAD_START_SECONDS if self.host else 0.0)
        if waited_seconds > patience and self.control_group.awaited:
            names = " and ".join(self.names[host] for host in self.control_group.awaited)
            raise HostError.of_loss(
                f"{names} must come to the same call, and the same step, within "
                f"{format_seconds(self.timeout_seconds)}.",
                received=f"nothing for {format_seconds(waited_seconds)}",
                fix="See whether its script calls fit, evaluate and predict as often as the "
                "others do, hangs, or is cut off.",
            )

    @property
    def address(self) -> str:
        """Of this host, where the others reach it."""
        return self.control_group.interface[1]

    def from_chief(self, obj: Any) -> Any:
        """Host 0's object, on every host."""
        leads = self.host == 0
        payload = self.control_group.broadcast(encode(obj) if leads else None, self.look_around)
        return obj if leads else decode(payload)

    def from_host(self, host: int, obj: Any) -> Any:
        """One host's object, on every host."""
        told = self._exchanged(encode(obj) if self.host == host else b"")[host]
        return obj if self.host == host else decode(told)

    def from_all(self, obj: Any) -> list[Any]:
        """Every host's object by host, on every host."""
        return [decode(each) for each in self._exchanged(encode(obj))]

    @property
    def is_one_process(self) -> bool:
        """Whether one host is there, with helpers of its own: as without a launcher."""
        return self.control_group.num_hosts == 1 and not self.has_followers

    @property
    def first_rank(self) -> int:
        """Of this host, where the launcher has started a process for each of its devices."""
        before = self.cluster.hosts[: self.host]
        return sum((host.num_given or 0) + host.num_servers or 1 for host in before)

    @property
    def has_followers(self) -> bool:
        """Whether the launcher has started a process for each of this host's devices."""
        return self.place.num_processes > 1

    def attach_team(self, num_helpers: int, first_rank: int, timeout_seconds: float) -> Team:
        """The other processes of this host, as helpers.

        Raises:
            OptionError: the Plan has another number of devices here.
            WorkerError: they do not come.
        """
        if num_helpers != self.place.num_processes - 1:
            raise OptionError(
                f"Under {self.place.launcher} each process is one device.",
                received=f"{num_helpers + 1} devices on a host with "
                f"{self.place.num_processes} processes",
                fix="Leave `devices_per_host` out.",
            )
        return attach_team(
            self.place,
            host_key(),
            num_helpers=num_helpers,
            first_rank=first_rank,
            timeout_seconds=timeout_seconds,
        )

    def crossing(self, look_around: LookAround) -> "LeaderCrossing":
        """The control group, as a board uses it."""
        return LeaderCrossing(self.control_group, look_around)

    def open_channels(
        self, plan: Plan, keys: Iterable[ChannelKey], timeout_seconds: float
    ) -> dict[ChannelKey, Channel]:
        """This host's channels between pairs of ranks; they stay open for the next time.

        Returns:
            Channels by the ranks at this end and at the other, and by their use; with new keys
            each time, since the records of the last time were counted where that rank is.
        """
        ordered = sorted(keys)
        if (plan.hosts, ordered) != self._connected:
            self._close_channels()
            self._channels = self.new_channels(plan, ordered, timeout_seconds)
            self._connected = plan.hosts, ordered
        else:
            self._channels = {key: channel.renewed() for key, channel in self._channels.items()}
        return self._channels

    def new_channels(
        self, plan: Plan, keys: Sequence[ChannelKey], timeout_seconds: float
    ) -> dict[ChannelKey, Channel]:
        """Channels that nobody else has: they belong to the caller."""
        by_hosts: dict[tuple[int, int], list[ChannelKey]] = {}
        for key in keys:
            by_hosts.setdefault((plan.host_of(key[0]), plan.host_of(key[1])), []).append(key)
        counts = {hosts: len(own) for hosts, own in by_hosts.items()}
        channels = {}
        for other, ends in open_channels(
            self.control_group, counts, timeout_seconds, self.look_around
        ).items():
            own = by_hosts[min(self.host, other), max(self.host, other)]
            for (low, high, use), end in zip(own, ends, strict=True):
                ranks = (low, high) if self.host < other else (high, low)
                channels[*ranks, use] = end
        return channels

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Where the block fails on one host, it fails on all, and each says why.

        Raises:
            HostError: another host is cut off or has failed, whichever rank here learned it first.
            Exception: of a type that all have, as another host has raised it.
        """
        try:
            yield
        except BaseException as error:
            found = self._explained(error) if isinstance(error, HostError) else error
            with noting_on(found), suppress(OSError, HostError):  # the others may be gone
                self.control_group.fail(_said(found), found)
            with noting_on(found):
                self.close()
            if found is not error:
                found.__cause__ = error
                for note in getattr(error, "__notes__", ()):
                    found.add_note(note)
            if (raised := as_raised(found)) is error:
                raise
            raise raised from raised.__cause__

    def _explained(self, news: HostError) -> HostError:
        """A connection that ends says little: another host may be about to say more."""
        if self.control_group.has_reported:
            return news
        watch = Stopwatch()
        try:
            while watch.tick() < _EXPLANATION_SECONDS:
                self.control_group.look_around()
                sleep(_PAUSE_SECONDS)
        except HostError as reason:
            return reason
        return news

    def close(self) -> None:
        """Part from the other hosts; the next call meets them anew."""
        self._close_channels()
        self.control_group.close()
        self.is_open = False

    def _close_channels(self) -> None:
        while self._channels:
            self._channels.popitem()[1].close()
        self._connected = None

    # --- being alike -----------------------------------------------------------------------------

    def check_equal(self, facts: Mapping[str, object]) -> None:
        """Every host must have the same facts, or all raise what differs first.

        Raises:
            HostError: with the fact's name and what both hosts have.
        """
        told = self.from_all(_as_text(facts))
        for name in dict.fromkeys(name for one in told for name in one):
            values = [one.get(name, "missing") for one in told]
            other = next((host for host, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                error = HostError(
                    f"Hosts must run the same script on the same data; these differ in {name}.",
                    received=f"{values[0]} on {self.names[0]}, {values[other]} on "
                    f"{self.names[other]}",
                    fix="Start the same script with the same arguments everywhere.",
                )
                self.control_group.fail(str(error), error)  # all find it: nobody waits for reasons
                raise error

    def wait(self) -> None:
        """Wait for all hosts."""
        self._exchanged(b"")

    def agree_on_task(self, task: FitTask, facts: Mapping[str, object]) -> FitTask:
        """The task, with what callbacks ask for, which are those of host 0.

        Args:
            task: this host's.
            facts: what else must be equal.

        Raises:
            HostError: something else differs.
        """
        fixed = ("epochs", "batch_size", "shuffle", "seed", "first_epoch", "first_step")
        others = ("steps_per_epoch", "counts_skipped", "loss_parts", "turns")
        own = {f"`{name}`": getattr(task, name) for name in (*fixed, *others)}
        self.check_equal({**own, **facts})
        traced = self.from_chief(
            None if task.traced is None else (task.traced.start, task.traced.stop)
        )
        return replace(
            task,
            hooks=FitHooks(*self.from_chief(tuple(task.hooks))),
            traced=None if traced is None else range(*traced),
        )

    def bring(self, region: SharedRegion, owner: int, *, is_here: bool) -> None:
        """Have the regions of all hosts hold what that of host ``owner`` holds.

        Args:
            region: this host's.
            owner: whose values count.
            is_here: this host has the same values already.
        """
        for start in range(0, region.num_bytes, _PART_BYTES):
            stop = min(start + _PART_BYTES, region.num_bytes)
            own = bytes(region.memory[start:stop]) if self.host == owner else b""
            told = self._exchanged(own)[owner]
            if not is_here:
                region.memory[start:stop] = told

    def share_values(self, model: nn.Module, updater: Updater | None) -> None:
        """Have every host's model and optimizer be as those of host 0."""
        own = state_of(model, updater)
        mine = own.digests()
        told = self.from_all(mine)
        for part in mine:
            if any(one[part] != told[0][part] for one in told):
                own = replace(own, **{part: self._told_part(getattr(own, part))})
        if self.host != 0 and told[0] != mine:
            set_state(model, updater, own)

    def _told_part(self, part: Tree) -> Tree:
        """Host 0's part of a state, sent one tensor at a time."""
        tensors, values = flattened(part)
        names = self.from_chief((list(tensors), values))
        return assembled({name: self.from_chief(tensors.get(name)) for name in names[0]}, names[1])

    def share_changes(
        self, model: nn.Module, optimizers: Sequence[optim.Optimizer], before: ModelLayout
    ) -> None:
        """Have all be as callbacks have made those of host 0, but for values.

        Raises:
            OptionError: on host 0, something that cannot be told.
        """
        leads = self.host == 0
        changes = self.from_chief(before.changes(ModelLayout(model, optimizers)) if leads else None)
        if not leads:
            take_changes(model, optimizers, changes)

    def _exchanged(self, payload: bytes) -> list[bytes]:
        return self.control_group.exchange(payload, self.look_around)


class LeaderCrossing:
    """See ``comm.collectives.cross_host_barrier.Crossing``."""

    def __init__(self, control_group: ControlGroup, look_around: LookAround) -> None:
        self._control_group = control_group
        self._look_around = look_around

    def exchange(self, payload: bytes, among: int | None = None) -> list[bytes]:
        """The payloads of the first ``among`` hosts."""
        return self._control_group.exchange(payload, self._look_around, among=among)

    def broadcast(self, payload: bytes | None) -> bytes:
        """Host 0's payload."""
        return self._control_group.broadcast(payload, self._look_around)


def _said(error: BaseException) -> str:
    """An error for the other hosts; what was learned of one of them says what it is by itself."""
    if isinstance(error, HostError):
        return str(error)
    rank = next((one for one in causes_of(error) if isinstance(one, WorkerError)), None)
    return summary_of(error) if rank is None else str(rank)


def _as_text(facts: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in facts.items()}
