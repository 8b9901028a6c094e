"""Communication between the hosts of a job, and the checks that they agree.

The same script runs on every host, so each has a model, an optimizer and a Trainer of its own.
Before they train together, hosts check that what the script has decided is equal, and name the
difference; values (weights, slots, options) are those of host 0.
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
from lockstep.formatting import format_seconds
from lockstep.launch.health.failure import as_raised, causes_of, noting_on, summary_of
from lockstep.launch.rendezvous.control_group import ControlGroup
from lockstep.launch.rendezvous.pair_channels import open_channels
from lockstep.launch.untrusted import decode_untrusted
from lockstep.launch.workers.external_workers import attach_team
from lockstep.launch.workers.team import Team
from lockstep.parallel.exchange.engine import ChannelKey
from lockstep.parallel.updater_interface import Updater
from lockstep.plan.spec import Plan
from lockstep.train.callbacks.model_changes import ModelLayout, take_changes
from lockstep.train.checkpointing.run_state import set_state, state_of
from lockstep.train.fit.fit_hooks import FitHooks
from lockstep.train.fit.fit_task import FitTask
from lockstep.train.multihost.followers import host_key

LookAround = Callable[[float], None]

_CHUNK_BYTES = 1 << 24
_EXPLANATION_SECONDS = 1.0
_HEAD_START_SECONDS = 1.0
_PAUSE_SECONDS = 0.02


class Hosts:
    """All hosts of the job; this process leads one of them.

    Args:
        place: of this process.
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
        self._channels_key: object = None  # the hosts and pairs of ranks that they connect
        hosts = [decode_untrusted(str(info.about["host"]), Host) for info in control_group.infos]
        self.cluster = Cluster(hosts=tuple(hosts))

    @property
    def host(self) -> int:
        """The number of this host."""
        return self.control_group.host

    @property
    def names(self) -> list[str]:
        """The names of all hosts, for messages."""
        return [self.control_group.name_of(host) for host in range(self.control_group.num_hosts)]

    def look_around(self, waited_seconds: float) -> None:
        """Check while waiting that the other hosts can still answer.

        Raises:
            HostError: another host has failed, is lost, or does not reach the same call in time.
        """
        self.control_group.look_around()
        # Host 0 knows for which host all wait, so it times out first.
        patience = self.timeout_seconds + (_HEAD_START_SECONDS if self.host else 0.0)
        if waited_seconds > patience and self.control_group.awaited:
            names = " and ".join(self.names[host] for host in self.control_group.awaited)
            raise HostError.of_loss(
                f"{names} must reach the same call, and the same step, within "
                f"{format_seconds(self.timeout_seconds)}.",
                received=f"nothing for {format_seconds(waited_seconds)}",
                fix="Check that its script calls fit, evaluate and predict as often as the others "
                "do, does not hang, and has network.",
            )

    @property
    def address(self) -> str:
        """The address of this host at which the others reach it."""
        return self.control_group.interface[1]

    def from_chief(self, obj: Any) -> Any:
        """Host 0's object, on every host."""
        leads = self.host == 0
        payload = self.control_group.broadcast(encode(obj) if leads else None, self.look_around)
        return obj if leads else decode(payload)

    def from_host(self, host: int, obj: Any) -> Any:
        """One host's object, on every host."""
        payload = self._exchanged(encode(obj) if self.host == host else b"")[host]
        return obj if self.host == host else decode(payload)

    def from_all(self, obj: Any) -> list[Any]:
        """Every host's object by host, on every host."""
        return [decode(each) for each in self._exchanged(encode(obj))]

    @property
    def is_one_process(self) -> bool:
        """True if the job is one host whose ranks are its own helpers, as without a launcher."""
        return self.control_group.num_hosts == 1 and not self.has_followers

    @property
    def first_rank(self) -> int:
        """The first rank of this host if the launcher has started a process for each device."""
        before = self.cluster.hosts[: self.host]
        return sum((host.num_given or 0) + host.num_servers or 1 for host in before)

    @property
    def has_followers(self) -> bool:
        """True if the launcher has started a process for each of this host's devices."""
        return self.place.num_processes > 1

    def check_devices(self, num_devices: int) -> None:
        """Check that a Plan has a device on this host for each process of the launcher.

        Raises:
            OptionError: it has another number.
        """
        if num_devices != self.place.num_processes:
            raise OptionError(
                f"Under {self.place.launcher} each process is one device.",
                received=f"{num_devices} devices on a host with "
                f"{self.place.num_processes} processes",
                fix="Leave `devices_per_host` out.",
            )

    def attach_team(self, first_rank: int, timeout_seconds: float) -> Team:
        """The other processes of this host, as helpers.

        Raises:
            WorkerError: they do not connect.
        """
        return attach_team(
            self.place,
            host_key(),
            num_helpers=self.place.num_processes - 1,
            first_rank=first_rank,
            timeout_seconds=timeout_seconds,
        )

    def crossing(self, look_around: LookAround) -> "LeaderCrossing":
        """The control group, in the form that a status board uses."""
        return LeaderCrossing(self.control_group, look_around)

    def open_channels(
        self, plan: Plan, keys: Iterable[ChannelKey], timeout_seconds: float
    ) -> dict[ChannelKey, Channel]:
        """This host's channels between pairs of ranks; they stay open for the next call.

        Returns:
            Channels by the ranks at this end and at the other, and by their use. Each call gets new
            encryption keys: the record counters of the last call are in the ranks' processes.
        """
        ordered = sorted(keys)
        if (plan.hosts, ordered) != self._channels_key:
            self._close_channels()
            self._channels = self.new_channels(plan, ordered, timeout_seconds)
            self._channels_key = plan.hosts, ordered
        else:
            self._channels = {key: channel.renewed() for key, channel in self._channels.items()}
        return self._channels

    def new_channels(
        self, plan: Plan, keys: Sequence[ChannelKey], timeout_seconds: float
    ) -> dict[ChannelKey, Channel]:
        """New channels, which the caller owns."""
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
        """If the block fails on one host, it fails on all, with the reason.

        Raises:
            HostError: another host is cut off or has failed.
            Exception: of a type that all hosts have, as another host has raised it.
        """
        try:
            yield
        except BaseException as error:
            found = self._explained(error) if isinstance(error, HostError) else error
            with noting_on(found), suppress(OSError, HostError):  # the others may be gone
                self.control_group.fail(_message_for_others(found), found)
            with noting_on(found):
                self.close()
            if found is not error:
                found.__cause__ = error
                for note in getattr(error, "__notes__", ()):
                    found.add_note(note)
            if (raised := as_raised(found)) is error:
                raise
            raise raised from raised.__cause__

    def _explained(self, lost: HostError) -> HostError:
        """The reason that another host sends within a second, or the error at hand."""
        if self.control_group.has_reported:
            return lost
        watch = Stopwatch()
        try:
            while watch.tick() < _EXPLANATION_SECONDS:
                self.control_group.look_around()
                sleep(_PAUSE_SECONDS)
        except HostError as reason:
            return reason
        return lost

    def close(self) -> None:
        """Disconnect from the other hosts; the next call connects anew."""
        self._close_channels()
        self.control_group.close()
        self.is_open = False

    def _close_channels(self) -> None:
        while self._channels:
            self._channels.popitem()[1].close()
        self._channels_key = None

    # --- agreement -----------------------------------------------------------------------------

    def check_equal(self, facts: Mapping[str, object]) -> None:
        """Check that all hosts have the same facts.

        Raises:
            HostError: on all hosts, with the first fact that differs and two hosts' values.
        """
        by_host = self.from_all({name: str(value) for name, value in facts.items()})
        for name in dict.fromkeys(name for one in by_host for name in one):
            values = [one.get(name, "missing") for one in by_host]
            other = next((host for host, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                error = HostError(
                    f"Hosts must run the same script on the same data; these differ in {name}.",
                    received=f"{values[0]} on {self.names[0]}, {values[other]} on "
                    f"{self.names[other]}",
                    fix="Start the same script with the same arguments everywhere.",
                )
                self.control_group.fail(str(error), error)  # all raise it: none waits for a reason
                raise error

    def wait(self) -> None:
        """Wait for all hosts."""
        self._exchanged(b"")

    def agree_on_task(self, task: FitTask, facts: Mapping[str, object]) -> FitTask:
        """The task with the requests of callbacks, which run on host 0.

        Args:
            task: this host's.
            facts: other facts that must be equal.

        Raises:
            HostError: another field of the task, or a fact, differs.
        """
        names = ("epochs", "first_step", "counts_skipped", "loss_parts", "turns")
        own = {name: getattr(task, name) for name in names} | vars(task.order)
        self.check_equal({**{f"`{name}`": value for name, value in own.items()}, **facts})
        traced = self.from_chief(
            None if task.traced is None else (task.traced.start, task.traced.stop)
        )
        return replace(
            task,
            hooks=FitHooks(*self.from_chief(tuple(task.hooks))),
            traced=None if traced is None else range(*traced),
        )

    def broadcast_region(self, region: SharedRegion, owner: int, *, is_current: bool) -> None:
        """Copy a region from one host to all.

        Args:
            region: this host's.
            owner: the host that has the values.
            is_current: this host has the same values already.
        """
        for start in range(0, region.num_bytes, _CHUNK_BYTES):
            stop = min(start + _CHUNK_BYTES, region.num_bytes)
            own = bytes(region.memory[start:stop]) if self.host == owner else b""
            chunk = self._exchanged(own)[owner]
            if not is_current:
                region.memory[start:stop] = chunk

    def share_values(
        self, model: nn.Module, updater: Updater | None, *, are_blank: bool = False
    ) -> None:
        """Set every host's model and optimizer to the values of host 0.

        Args:
            model: the model.
            updater: the optimizer.
            are_blank: the parameters have no values yet.
        """
        state = state_of(model, updater)
        own = (replace(state, parameters={}) if are_blank else state).digests()
        by_host = self.from_all(own)
        for part in own:
            if any(one[part] != by_host[0][part] for one in by_host):
                state = replace(state, **{part: self._part_from_chief(getattr(state, part))})
        if self.host != 0 and by_host[0] != own:
            set_state(model, updater, state)

    def _part_from_chief(self, part: Tree) -> Tree:
        """Host 0's part of a state, sent one tensor at a time."""
        tensors, values = flattened(part)
        names = self.from_chief((list(tensors), values))
        return assembled({name: self.from_chief(tensors.get(name)) for name in names[0]}, names[1])

    def share_changes(
        self, model: nn.Module, optimizers: Sequence[optim.Optimizer], before: ModelLayout
    ) -> None:
        """Repeat on all hosts the changes that callbacks have made on host 0, but for values.

        Raises:
            OptionError: on host 0, a change cannot be sent.
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


def _message_for_others(error: BaseException) -> str:
    """An error's message for the other hosts; a HostError's needs no summary."""
    if isinstance(error, HostError):
        return str(error)
    rank = next((one for one in causes_of(error) if isinstance(one, WorkerError)), None)
    return summary_of(error) if rank is None else str(rank)
