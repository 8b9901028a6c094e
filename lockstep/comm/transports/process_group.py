"""Groups of torch.distributed: what moves tensors between ranks that share no memory.

The groups are Lockstep's own; the user's default group stays free. Their ranks find each other
where nobody else can look (``comm.transports.memfd_store``). What the backend opens after that is
as open as in any job of torch.distributed: gloo listens on this host's loopback address, or with
several hosts on the one where the control group meets it, and does not ask who connects.

All groups of a Plan are made before the first of them is used, by all ranks in one order. So no
rank waits in one group for a rank that waits in another.

Only data are moved: sums are the engine's own, in its fixed order, so that the bits do not depend
on the backend or on the number of ranks.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
from torch import distributed

from lockstep.accelerators import await_device, pinned, use
from lockstep.channel.sealed_channel import late
from lockstep.comm.codec.message_codec import decode, encode
from lockstep.comm.collectives.cross_host_barrier import Crossing
from lockstep.comm.transports.memfd_store import Meeting, SharedStore
from lockstep.errors import LockstepError, WorkerError

_LOOK_AROUND = timedelta(milliseconds=20)
_SECONDS_TO_THE_CAUSE = 3.0
_LONGEST_NAP_SECONDS = 5 * _LOOK_AROUND.total_seconds()

# Its types do not say what it exports.
_dist: Any = distributed

# A collective ends when all have made it, or when ``look_around`` raises, and never by itself.
_NEVER = timedelta(days=365)

CPU = torch.device("cpu")

# The key under which ranks count that have made their groups.
_DONE = "done"
_BETWEEN_EXCHANGES_SECONDS = 0.002


# Makes a group of a store, the place of this rank in the group, and the number of its ranks.
_MakeGroup = Callable[[Any, int, int], Any]


class ProcessGroups:
    """One rank's groups.

    Args:
        members: by the group's name, its ranks in their order there; groups of other ranks are
            left out.
        rank: this rank.
        backend: see ``plan.engines.BACKENDS``.
        device: this rank's, where what is to be moved lies.
        meeting: where ranks find each other.
        look_around: called every 20 ms of waiting with the seconds waited so far; it raises if
            waiting on is in vain.
        abroad: names of the hosts of all ranks on other hosts, for messages.
        crossing: to the other hosts' leaders; None unless this rank leads one of several hosts.

    Attributes:
        own_device: this rank's.
    """

    def __init__(
        self,
        members: Mapping[str, Sequence[int]],
        *,
        rank: int,
        backend: str,
        device: torch.device = CPU,
        meeting: Meeting,
        look_around: Callable[[float], None],
        abroad: Mapping[int, str] | None = None,
        crossing: Crossing | None = None,
    ) -> None:
        self._abroad = abroad or {}
        self._crossing = crossing
        self._members = {name: ranks for name, ranks in members.items() if rank in ranks}
        self._rank = rank
        self._backend = _BACKENDS[backend]
        self.own_device = device
        self._meeting = meeting
        self._look_around = look_around
        self._groups: dict[str, Any] = {}
        self._store: SharedStore | None = None  # what groups keep of it does not keep it alive
        self._end_groups: Callable[[], object] | None = None
        self._is_open = False

    def __getitem__(self, name: str) -> Any:
        return self._groups[name]

    @property
    def device(self) -> torch.device:
        """Where the backend takes tensors from: this rank's device, or host memory."""
        return CPU if self._backend.by_host else self.own_device

    @property
    def stages(self) -> bool:
        """Whether what lies on the device is brought to host memory, and from there."""
        return self.device != self.own_device

    def buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Memory for what is sent or received, on this rank's device or for it on the host."""
        if device == self.own_device:
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return pinned(num_bytes, self.own_device)

    def open(self) -> None:
        """Make all groups, if that has not been done: all ranks call it before any other thing."""
        if not self._is_open:
            self._groups = self._made_patiently()
            self._is_open = True
            if not self._backend.by_host:
                groups = list(self._groups.values())
                self._end_groups = weakref.finalize(self, _abort, groups, self._store)

    def abandon(self) -> None:
        """After a failure. To destroy a group would wait for hosts that are cut off: it is kept.

        Where collectives run on a device, they would run there for ever: they are aborted.
        """
        for group in self._groups.values() if self._abroad else ():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        if self._end_groups is not None:
            self._end_groups()

    # --- waiting ---------------------------------------------------------------------------------

    def wait(self, work: Any) -> None:
        """Wait for a collective, for as long as ranks that have not come to it may still come.

        Raises:
            WorkerError: another rank is gone.
        """
        if self._backend.by_host:
            self._wait(lambda: _is_done(work))
        else:
            self._finish_on_device(work)

    def finish(self, work: Any) -> None:
        """Wait for a message that the other end has begun to send or receive.

        gloo cannot wait for one for a while and then go on: a wait that is given up closes the
        connection. So nobody looks around meanwhile, and the other end must be at it already, or
        very soon.

        Raises:
            WorkerError: the other rank is gone, or hangs.
        """
        if not self._backend.by_host:
            self._finish_on_device(work)
            return
        with self.naming_the_lost():
            work.wait(timedelta(seconds=self._meeting.timeout_seconds))

    def _finish_on_device(self, work: Any) -> None:
        """The device's stream waits for a collective, and this process for the stream.

        It looks around meanwhile. Whatever waits for the stream otherwise would wait for ever where
        another rank has not come.
        """

        def look_around(waited: float) -> None:
            self._check_patience(waited)
            self._look_around(waited)

        with self.naming_the_lost():
            work.wait()
            await_device(self.own_device, look_around)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        waited, last = 0.0, monotonic()
        while not self._has_ended(is_done):
            now = monotonic()
            waited, last = waited + min(now - last, _LONGEST_NAP_SECONDS), now
            self._check_patience(waited)
            self._look_around(waited)

    def _check_patience(self, waited_seconds: float) -> None:
        """Only ranks of this host are looked at: who waits for others gives up by itself."""
        timeout = self._meeting.timeout_seconds
        if self._abroad and waited_seconds > timeout:
            raise late([" or ".join(dict.fromkeys(self._abroad.values()))], waited_seconds, timeout)

    def _has_ended(self, is_done: Callable[[], bool]) -> bool:
        with self.naming_the_lost():
            return is_done()

    @contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """An error of the backend's says that a connection has ended: within the block, whose.

        Raises:
            WorkerError: the other rank is gone, or hangs.
        """
        begun = monotonic()
        try:
            yield
        except LockstepError:
            raise
        except RuntimeError as error:
            raise self._lost(error, monotonic() - begun) from error

    def _lost(self, error: RuntimeError, waited_seconds: float) -> WorkerError:
        """``look_around`` raises if a rank has died or hangs, but perhaps cannot know it yet."""
        until = monotonic() + _SECONDS_TO_THE_CAUSE
        while monotonic() < until:
            self._look_around(waited_seconds)
            self._check_patience(waited_seconds)
            sleep(_LOOK_AROUND.total_seconds())
        return WorkerError(
            f"Rank {self._rank} cannot reach the others through torch.distributed.",
            received=str(error).splitlines()[0],
            fix="Check whether another rank has ended.",
        )

    # --- making ----------------------------------------------------------------------------------

    def _made_patiently(self) -> dict[str, Any]:
        """The groups. Making one waits for all of its ranks, in vain if one has died."""
        made: list[Any] = []
        thread = threading.Thread(target=lambda: made.append(self._outcome()), daemon=True)
        thread.start()
        addresses = None
        if self._crossing is not None:
            addresses = _Addresses(SharedStore(self._meeting.path), self._meeting.num_ranks)

        def is_done() -> bool:
            if addresses is not None and self._crossing is not None:
                return addresses.are_done(self._crossing)
            thread.join(_LOOK_AROUND.total_seconds())
            return not thread.is_alive()

        self._wait(is_done)
        thread.join()
        if isinstance(made[0], Exception):
            raise made[0]
        return dict(made[0])

    def _outcome(self) -> dict[str, Any] | Exception:
        try:
            use(self.own_device)  # which each thread chooses for itself
            store = self._store = SharedStore(self._meeting.path)
            make = self._backend.maker(self._meeting.address, self.own_device)
            groups = {
                name: make(_dist.PrefixStore(name, store), ranks.index(self._rank), len(ranks))
                for name, ranks in sorted(self._members.items())
            }
            store.add(_DONE, 1)
            return groups
        except Exception as error:
            return error


def _abort(groups: Sequence[Any], store: SharedStore | None) -> None:
    """End groups whose collectives run on a device; their store must be there meanwhile.

    A backend that is not told to warns that nobody has. To abort waits for no other rank, which may
    have ended or be about to; what ranks had to tell each other, they have before their barrier.
    """
    for group in groups:
        group.abort()


class _Addresses:
    """What the ranks of a host have left in its store, on its way to the other hosts."""

    def __init__(self, store: SharedStore, num_ranks: int) -> None:
        self._store = store
        self._num_ranks = num_ranks
        self._known: set[str] = {_DONE}

    def are_done(self, crossing: Crossing) -> bool:
        """Tell the other hosts what is new, and hear of them; whether all ranks are done."""
        entries = self._store.entries()
        new = {key: value for key, value in entries.items() if key not in self._known}
        is_done = int(entries.get(_DONE, b"0")) == self._num_ranks
        told = [decode(each) for each in crossing.exchange(encode((new, is_done)))]
        others = {key: value for one, _ in told for key, value in one.items() if key not in entries}
        self._store.update(others)
        self._known |= new.keys() | others.keys()
        sleep(_BETWEEN_EXCHANGES_SECONDS)
        return all(done for _, done in told)


def _gloo(address: str, device: torch.device) -> _MakeGroup:
    """Groups over TCP, at an address of this host, with one thread for all connections."""
    kind = _dist.ProcessGroupGloo
    device = kind.create_device(hostname=address)

    def make(store: Any, rank: int, size: int) -> Any:
        options = kind._Options()
        options._devices = [device]
        options._timeout = _NEVER
        return kind(store, rank, size, options)

    return make


# Its own watchdogs end the process in which a collective fails: here the cause is looked for, and
# named. What they go by, they read when a group is made.
_NCCL_LEAVES_FAILURES_TO_US = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # messages come one by one
}


def _nccl(address: str, device: torch.device) -> _MakeGroup:
    """Groups whose collectives run on the device; connected at once, not at the first of them."""

    def make(store: Any, rank: int, size: int) -> Any:
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        with _environment(_NCCL_LEAVES_FAILURES_TO_US):
            group = _dist.ProcessGroupNCCL(store, rank, size, options)
            group.eager_connect_single_device(device)
        return group

    return make


def _xccl(address: str, device: torch.device) -> _MakeGroup:
    """The same on Intel's devices."""

    def make(store: Any, rank: int, size: int) -> Any:
        options = _dist.distributed_c10d.ProcessGroupXCCL.Options()
        options._timeout = _NEVER
        group = _dist.distributed_c10d.ProcessGroupXCCL(store, rank, size, options)
        group.eager_connect_single_device(device)
        return group

    return make


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Within the block these variables are set, but for those that the user has set."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@dataclass(frozen=True, kw_only=True)
class _Backend:
    """What there is to know of a backend of torch.distributed.

    Attributes:
        maker: of its groups, by an address of this host and a device.
        by_host: it moves what lies in host memory.
    """

    maker: Callable[[str, torch.device], _MakeGroup]
    by_host: bool = False


_BACKENDS = {
    "gloo": _Backend(maker=_gloo, by_host=True),
    "nccl": _Backend(maker=_nccl),
    "xccl": _Backend(maker=_xccl),
}


def missing_backend(name: str) -> bool:
    """Whether torch was built without a backend."""
    return not distributed.is_backend_available(name)


def _is_done(work: Any) -> bool:
    """Wait a little for an operation.

    Raises:
        RuntimeError: it has failed.
    """
    try:
        work.wait(_LOOK_AROUND)
    except RuntimeError:  # time is up, or it has failed
        if not work.is_completed():
            return False
        work.wait()
    return True
