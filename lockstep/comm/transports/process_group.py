"""Groups of torch.distributed for ranks that share no memory.

The groups are Lockstep's own; the user's default group stays free. Ranks rendezvous in a store that
only the user's processes can read (``comm.transports.memfd_store``). The backend's own connections
are as open as in any job of torch.distributed: gloo listens on this host's loopback address, or
with several hosts on the address of the control group, and does not authenticate its peers.

All ranks make all groups of a Plan in one order before they use the first, so that no rank waits in
one group for a rank that waits in another.

The groups only move data. Sums are the engine's, in its fixed order, so that the bits do not depend
on the backend or on the number of ranks.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import Any

import torch
from torch import distributed

from lockstep.accelerators import await_device, await_event, pinned, use
from lockstep.channel.background import Background
from lockstep.channel.polling import Stopwatch
from lockstep.channel.sealed_channel import late
from lockstep.comm.codec.message_codec import decode, encode
from lockstep.comm.collectives.cross_host_barrier import Crossing
from lockstep.comm.transports.memfd_store import Meeting, SharedStore
from lockstep.errors import LockstepError, WorkerError

_LOOK_AROUND = timedelta(milliseconds=20)
_CAUSE_WAIT_SECONDS = 3.0

# torch's types do not declare its exports.
_dist: Any = distributed

# A collective ends when all ranks have made it or ``look_around`` raises; it has no timeout.
_NEVER = timedelta(days=365)

CPU = torch.device("cpu")

# The key of the number of ranks that have made their groups.
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
        device: this rank's, where the tensors lie.
        meeting: the ranks' store.
        look_around: called every 20 ms of waiting with the seconds waited so far; it raises if
            it is useless to wait longer.
        remote_hosts: the host's name of each rank on another host, for messages.
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
        remote_hosts: Mapping[int, str] | None = None,
        crossing: Crossing | None = None,
    ) -> None:
        self._remote_hosts = remote_hosts or {}
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
        self._background = Background("lockstep: messages")
        self._followed: Any = None  # an event behind the last collective that was followed

    def __getitem__(self, name: str) -> Any:
        return self._groups[name]

    @property
    def device(self) -> torch.device:
        """Where the backend takes tensors from: this rank's device, or host memory."""
        return CPU if self._backend.by_host else self.own_device

    @property
    def is_staged(self) -> bool:
        """Whether tensors go through host memory."""
        return self.device != self.own_device

    def buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """A buffer to send or receive, on this rank's device or pinned in host memory."""
        if device == self.own_device:
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return pinned(num_bytes, self.own_device)

    def open(self) -> None:
        """Make all groups unless they exist. All ranks call it before anything else."""
        if not self._is_open:
            self._groups = self._make_groups_waiting()
            self._is_open = True
            if not self._backend.by_host:
                groups = list(self._groups.values())
                self._end_groups = weakref.finalize(self, _abort, groups, self._store)

    def abandon(self) -> None:
        """Keep groups after a failure, because destroying one waits for hosts that are cut off.

        Collectives on a device are aborted: they would run for ever.
        """
        for group in self._groups.values() if self._remote_hosts else ():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        if self._end_groups is not None:
            self._end_groups()

    # --- waiting ---------------------------------------------------------------------------------

    def wait(self, work: Any) -> None:
        """Wait for a collective until all ranks have made it.

        Raises:
            WorkerError: another rank is gone.
        """
        if self._backend.by_host:
            self._wait(lambda: _is_done(work))
        else:
            self._finish_on_device(work)

    def finish(self, works: Sequence[Any]) -> None:
        """Wait for messages to or from other ranks.

        gloo closes its connections when a wait times out, so a thread waits.

        Raises:
            WorkerError: another rank is gone, or hangs.
        """
        if self._backend.by_host and works:
            future = self._background.submit(partial(_wait_for_all, works))
            self._wait(partial(_has_returned, future))
        for work in () if self._backend.by_host else works:
            self._finish_on_device(work)

    def finish_begun(self, work: Any) -> None:
        """Wait for a message that the other rank has begun: faster than ``finish``.

        It looks at no other rank: one that is stopped in its midst is noticed at the timeout.

        Raises:
            WorkerError: the other rank is gone, or hangs.
        """
        if not self._backend.by_host:
            self._finish_on_device(work)
            return
        with self.naming_lost_rank():
            work.wait(timedelta(seconds=self._meeting.timeout_seconds))

    def follow(self, work: Any) -> None:
        """The device's stream waits for a collective on it; this process for the one before.

        So it is one collective ahead of its device at most, and notices when another rank is gone.

        Raises:
            WorkerError: another rank is gone.
        """
        with self.naming_lost_rank():
            work.wait()
            before, self._followed = self._followed, torch.Event(self.own_device.type)
            self._followed.record()
            if before is not None:
                await_event(before, self._look)

    def _finish_on_device(self, work: Any) -> None:
        """The device's stream waits for a collective, and this process for the stream.

        It checks other ranks meanwhile: a plain wait for the stream would not end if another rank
        never makes the collective.
        """
        with self.naming_lost_rank():
            work.wait()
            await_device(self.own_device, self._look)

    def _look(self, waited_seconds: float) -> None:
        self._check_timeout(waited_seconds)
        self._look_around(waited_seconds)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        watch = Stopwatch()
        while not self._is_complete(is_done):
            self._check_timeout(watch.tick())
            self._look_around(watch.seconds)

    def _check_timeout(self, waited_seconds: float) -> None:
        """``look_around`` checks ranks of this host only; others are bound by the timeout."""
        timeout = self._meeting.timeout_seconds
        if self._remote_hosts and waited_seconds > timeout:
            raise late(
                [" or ".join(dict.fromkeys(self._remote_hosts.values()))], waited_seconds, timeout
            )

    def _is_complete(self, is_done: Callable[[], bool]) -> bool:
        with self.naming_lost_rank():
            return is_done()

    @contextmanager
    def naming_lost_rank(self) -> Iterator[None]:
        """Within the block an error of the backend becomes one that names the lost rank or host.

        Raises:
            WorkerError: the other rank is gone, or hangs.
        """
        begun = monotonic()
        try:
            yield
        except LockstepError:
            raise
        except RuntimeError as error:
            raise self._lost_rank(error, monotonic() - begun) from error

    def _lost_rank(self, error: RuntimeError, waited_seconds: float) -> WorkerError:
        """Wait for ``look_around`` to raise the cause; else return an error without it."""
        until = monotonic() + _CAUSE_WAIT_SECONDS
        while monotonic() < until:
            self._look_around(waited_seconds)
            self._check_timeout(waited_seconds)
            sleep(_LOOK_AROUND.total_seconds())
        return WorkerError(
            f"Rank {self._rank} cannot reach the others through torch.distributed.",
            received=str(error).splitlines()[0],
            fix="Check whether another rank has ended.",
        )

    # --- making ----------------------------------------------------------------------------------

    def _make_groups_waiting(self) -> dict[str, Any]:
        """Make the groups in a thread, which waits for all ranks; meanwhile check them."""
        outcomes: list[Any] = []
        thread = threading.Thread(target=lambda: outcomes.append(self._outcome()), daemon=True)
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
        if isinstance(outcomes[0], Exception):
            raise outcomes[0]
        return dict(outcomes[0])

    def _outcome(self) -> dict[str, Any] | Exception:
        try:
            use(self.own_device)  # the current device is per thread
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
    """End groups whose collectives run on a device; their store must exist until then.

    The backend warns if its groups are not ended. An abort waits for no other rank, which may have
    ended; all messages were exchanged before the last barrier.
    """
    for group in groups:
        group.abort()


class _Addresses:
    """Copies the entries of a host's store to the stores of the other hosts."""

    def __init__(self, store: SharedStore, num_ranks: int) -> None:
        self._store = store
        self._num_ranks = num_ranks
        self._known: set[str] = {_DONE}

    def are_done(self, crossing: Crossing) -> bool:
        """Exchange new entries with the other hosts; True if all ranks are done."""
        entries = self._store.entries()
        new = {key: value for key, value in entries.items() if key not in self._known}
        is_done = int(entries.get(_DONE, b"0")) == self._num_ranks
        messages = [decode(each) for each in crossing.exchange(encode((new, is_done)))]
        others = {
            key: value for one, _ in messages for key, value in one.items() if key not in entries
        }
        self._store.update(others)
        self._known |= new.keys() | others.keys()
        sleep(_BETWEEN_EXCHANGES_SECONDS)
        return all(done for _, done in messages)


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


# NCCL's watchdogs would end the process in which a collective fails; Lockstep names the cause
# instead. NCCL reads these variables when a group is made.
_NCCL_WITHOUT_WATCHDOGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # messages come one by one
}


def _nccl(address: str, device: torch.device) -> _MakeGroup:
    """Groups whose collectives run on the device; connected at once, not at the first use."""

    def make(store: Any, rank: int, size: int) -> Any:
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        with _environment(_NCCL_WITHOUT_WATCHDOGS):
            group = _dist.ProcessGroupNCCL(store, rank, size, options)
            group.eager_connect_single_device(device)
        return group

    return make


def _xccl(address: str, device: torch.device) -> _MakeGroup:
    """As ``_nccl``, for Intel's devices."""

    def make(store: Any, rank: int, size: int) -> Any:
        options = _dist.distributed_c10d.ProcessGroupXCCL.Options()
        options._timeout = _NEVER
        group = _dist.distributed_c10d.ProcessGroupXCCL(store, rank, size, options)
        group.eager_connect_single_device(device)
        return group

    return make


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Within the block these variables are set, unless the user has set them."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@dataclass(frozen=True, kw_only=True)
class _Backend:
    """A backend of torch.distributed.

    Attributes:
        maker: makes a function that makes groups, from this host's address and the device.
        by_host: it moves tensors in host memory.
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


def _wait_for_all(works: Sequence[Any]) -> None:
    for work in works:
        work.wait(_NEVER)


def _has_returned(future: "Future[None]") -> bool:
    """Wait a little for messages.

    Raises:
        RuntimeError: one of them has failed.
    """
    if not futures.wait([future], _LOOK_AROUND.total_seconds()).done:
        return False
    future.result()
    return True


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
