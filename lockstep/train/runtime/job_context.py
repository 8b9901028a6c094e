"""The other processes that take part in a Trainer's calls: other hosts, or this host's leader.

If a launcher has started the script several times, every process makes the same calls, and all make
each call together. Host 0's script leads, as it has rank 0: callbacks, progress, files and streams
are there, and the others get the results. A call within another one (a callback's ``evaluate``) is
made by that process alone.

Without a launcher there are no other processes, and this module does nothing.
"""

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from lockstep.cluster.place import Reach
from lockstep.cluster.topology import Cluster
from lockstep.errors import LockstepError, ModelError, OptionError
from lockstep.parallel.updater_interface import Updater
from lockstep.plan.makers.data_parallel import Maker
from lockstep.plan.spec import Plan
from lockstep.train.input.data_adapter import DataPipeline
from lockstep.train.input.same_data import check_same_data
from lockstep.train.input.stream_broadcast import SharedStream
from lockstep.train.multihost.discovery import find_follower, find_hosts
from lockstep.train.multihost.followers import Follower
from lockstep.train.multihost.hosts import Hosts

DEFAULT_TIMEOUT_SECONDS = 600.0

_T = TypeVar("_T")


class StrategyLike(Protocol):
    """The strategy, as training uses it."""

    timeout_seconds: float
    reach: Reach

    def maker(self, precision: str) -> Maker:
        """A maker of Plans of this precision."""


class JobContext:
    """The processes that make calls together.

    Args:
        strategy: says which processes take part; None for one process.

    Attributes:
        follower: this process, if another one leads its host; the first call sets it.
        spans_hosts: True if the last call was made with other hosts.
        meeting_seconds: the least to wait for all hosts.
        patience_seconds: the most to wait for all hosts, once enough have met.
    """

    def __init__(self, strategy: StrategyLike | None) -> None:
        self._strategy = strategy
        self.follower: Follower | None = None
        self.spans_hosts = False
        self.meeting_seconds = 0.0
        self.patience_seconds = math.inf
        self._hosts: Hosts | None = None  # of the call that is under way
        self._depth = 0  # calls within calls
        self._entering = threading.Lock()
        self._call = ""  # the outermost call, and its thread
        self._thread = 0
        self._is_at_work = False

    @property
    def timeout_seconds(self) -> float:
        """Longest wait for another process, by the strategy."""
        return DEFAULT_TIMEOUT_SECONDS if self._strategy is None else self._strategy.timeout_seconds

    @property
    def hosts(self) -> Hosts | None:
        """The hosts that make the same call; None if this process makes it alone."""
        return None if self.is_rank_zero_only else self._hosts

    @property
    def cluster(self) -> Cluster | None:
        """The devices of these hosts; None is this host."""
        return None if self.hosts is None else self.hosts.cluster

    @property
    def host(self) -> int:
        """The number of this host among them."""
        return 0 if self._hosts is None else self._hosts.host

    @property
    def num_hosts(self) -> int:
        """The number of these hosts."""
        return 1 if self._hosts is None else self._hosts.control_group.num_hosts

    @property
    def is_rank_zero_only(self) -> bool:
        """True if this call is within another one, and the other ranks do not make it."""
        return self._is_at_work or (self._depth > 1 and self._hosts is not None)

    @property
    def is_chief(self) -> bool:
        """True if this process has rank 0, and so callbacks, progress, files and streams."""
        return self.follower is None and (self.hosts is None or self.hosts.host == 0)

    @contextmanager
    def together(self, call: str) -> Iterator[Hosts | None]:
        """Within the block all hosts make the same call, in this thread.

        Autograd is on, even if the script turned it off: helpers do not know that.

        Args:
            call: its name, which must be the same everywhere.

        Raises:
            OptionError: the strategy cannot use the other processes, or another thread is in a
                call.
            HostError: a host does not come, makes another call, or fails.
            ModelError: a tensor made under inference_mode cannot be changed.
        """
        with self._entering:
            self.check_thread(call)
            self._depth += 1
            if self._depth == 1:
                self._call, self._thread = call, threading.get_ident()
        try:
            with (
                torch.inference_mode(False),
                nullcontext() if self._depth > 1 else self._meeting(call),
                _telling_of_inference_tensors(),
            ):
                yield self.hosts
        finally:
            self._depth -= 1

    def check_thread(self, call: str) -> None:
        """Refuse a call while another thread is in one: both would write to the same weights.

        Raises:
            OptionError: another thread is in one.
        """
        if self._depth and self._thread != threading.get_ident():
            raise OptionError(
                "Only one thread at a time can train, evaluate or save a model.",
                received=f"{call} while another thread is in {self._call}",
                fix="Wait for the other to return, or give each thread a model and Trainer of "
                "its own.",
            )

    @property
    def reach(self) -> Reach:
        """The processes that the strategy's Plans use."""
        return "one process" if self._strategy is None else self._strategy.reach

    @property
    def is_nested(self) -> bool:
        """True if the current call is made within another one, by a callback."""
        return self._is_at_work or self._depth > 1

    @contextmanager
    def _meeting(self, call: str) -> Iterator[None]:
        self.follower = self.follower or find_follower(self.timeout_seconds, self.reach)
        if self.follower is None:
            self._hosts = find_hosts(
                self.timeout_seconds, self.reach, self.meeting_seconds, self.patience_seconds
            )
            self.spans_hosts = self.num_hosts > 1
        try:
            with nullcontext() if self._hosts is None else self._hosts.failing_together():
                self.check_equal({"the call": call})
                yield
        finally:
            self._hosts = None

    @contextmanager
    def at_work(self) -> Iterator[Hosts | None]:
        """Within the block a task runs on all ranks, and other calls run on rank 0 alone."""
        hosts, was_at_work = self.hosts, self._is_at_work
        self._is_at_work = True
        try:
            yield hosts
        finally:
            self._is_at_work = was_at_work

    def from_chief(self, result: _T) -> _T:
        """The chief's result, on every host."""
        if self.hosts is None:
            return result
        received: _T = self.hosts.from_chief(result)
        return received

    def from_all(self, obj: Any) -> list[Any]:
        """Every host's object by host, on every host."""
        return [obj] if self.hosts is None else self.hosts.from_all(obj)

    def check_equal(self, facts: Mapping[str, object]) -> None:
        """See ``Hosts.check_equal``."""
        if self.hosts is not None:
            self.hosts.check_equal(facts)

    def share_values(self, model: nn.Module, updater: Updater | None = None) -> None:
        """Give every host the model values, and optimizer state, of host 0."""
        if self.hosts is not None:
            self.hosts.share_values(model, updater)

    def agreed_plan(self, plan: Plan, maker: Maker) -> Plan:
        """The Plan of host 0, for all hosts; their makers must be equal."""
        if self.hosts is None:
            return plan
        self.hosts.check_equal({"the strategy": maker})
        return Plan.from_json(self.hosts.from_chief(plan.to_json()))

    def agreed_feed(self, feed: DataPipeline, name: str = "data") -> DataPipeline:
        """The data, which is the same on all hosts or read by host 0 alone."""
        if self.hosts is None:
            return feed
        check_same_data(self.hosts, feed.source, name)
        if isinstance(feed.source, SharedStream):
            batch_size, num_steps = self.hosts.from_chief((feed.batch_size, feed.num_steps))
            return replace(feed, batch_size=batch_size, num_steps=num_steps)
        return feed


@contextmanager
def _telling_of_inference_tensors() -> Iterator[None]:
    """Replace torch's error, which does not say where such a tensor was made.

    Raises:
        ModelError: the block has used an inference tensor.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LockstepError) or "nference tensor" not in str(error):
            raise
        raise ModelError(
            "Tensors made under torch.inference_mode() cannot be trained or changed.",
            received=str(error).partition(".")[0],
            fix="Make the model, the loss and the optimizer outside of it, and compile there.",
        ) from error
