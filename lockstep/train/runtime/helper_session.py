"""A helper's side of a session: it opens the message, and runs the task."""

import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lockstep import accelerators
from lockstep.accelerators import rank_device
from lockstep.channel.keys import Keys
from lockstep.channel.sealed_channel import Channel
from lockstep.comm.collectives.cross_host_barrier import Crossing
from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.exchange_spec import ExchangeSpec
from lockstep.comm.transports.memfd_store import Meeting
from lockstep.launch.health.failure import noting_on
from lockstep.launch.workers.helper import HelperContext
from lockstep.parallel.data_parallel.buffers import give_own_memory
from lockstep.parallel.exchange.control import FollowerControl, open_region, unpacked
from lockstep.parallel.exchange.engine import ChannelKey, Neighbours
from lockstep.parallel.storage.device_memory import noting_shortage
from lockstep.parallel.storage.device_store import Mirror, Mirrors, flatten_recurrent, on_device
from lockstep.parallel.storage.store import TensorStore
from lockstep.parallel.transfer.copy_registration import register_copies
from lockstep.train.callbacks.driver import TaskDriver
from lockstep.train.runtime.assignment import (
    Assignment,
    compute_settings,
    initialize_own,
    make_worker,
    run_task,
)
from lockstep.train.runtime.call_cache import CachedCall, CallUpdate
from lockstep.train.runtime.stores import Access


@dataclass(frozen=True, kw_only=True)
class Connections:
    """What the ranks of a host are sent about their connections beside shared memory.

    Attributes:
        host: this host.
        names: of the hosts of all ranks; empty if there is one host.
        channels: of this host: the keys of each, by the ranks at this end and the other and its
            use; in the order of their descriptors.
        timeout_seconds: longest wait for another host.
        meeting: the meeting point of ranks of process groups, if any.
    """

    host: int
    names: Mapping[int, str]
    channels: Mapping[ChannelKey, Keys]
    timeout_seconds: float
    meeting: Meeting | None

    def neighbours(
        self,
        rank: int,
        channels: Sequence[Channel],
        mirrored: Sequence[torch.Tensor],
        crossing: Crossing | None = None,
    ) -> Neighbours | None:
        """The connections of one of the host's ranks to other hosts; None without any.

        Args:
            rank: counted over all hosts.
            channels: its channels, in their order.
            mirrored: see ``Neighbours``.
            crossing: see ``Neighbours``.
        """
        if not self.names:
            return None
        own = [channel for channel in self.channels if channel[0] == rank]
        by_use: dict[str, dict[int, Channel]] = {"sums": {}, "mail": {}}
        for (_, other, use), end in zip(own, channels, strict=True):
            by_use[use][other] = end
        return Neighbours(
            host=self.host,
            names=self.names,
            channels=by_use["sums"],
            mail_channels=by_use["mail"],
            crossing=crossing,
            mirrored=mirrored,
            timeout_seconds=self.timeout_seconds,
        )

    def opened(
        self, rank: int, descriptors: Sequence[int], mirrored: Sequence[torch.Tensor] = ()
    ) -> Neighbours | None:
        """As ``neighbours``, from the descriptors of all channels; closes those of other ranks."""
        own = []
        for ((low, _, _), keys), number in zip(self.channels.items(), descriptors, strict=True):
            if low == rank:
                own.append(Channel(socket.socket(fileno=number), keys))
            else:
                os.close(number)
        return self.neighbours(rank, own, mirrored)


@dataclass(frozen=True, kw_only=True)
class TaskRequest:
    """The message that calls helpers, besides its descriptors.

    The descriptors, in order: the exchange's region, the stores', the channels to other hosts, and
    the serialized object's.

    Attributes:
        name: of the task.
        num_groups: of parameters.
        stores: of parameters, then of slots, residuals and options: the ranks of this host that
            have it, its tensors, their access, and the number of the store that it replaces.
        has_options: there is a store of options.
        spec: the layout of the exchange.
        payload: the serialized object with the assignment.
        connections: of the host's ranks.
        keeps: the call may be made again (``train.runtime.call_cache``).
        devices: of all ranks.
    """

    name: str
    num_groups: int
    stores: Sequence[tuple[tuple[int, ...], Sequence[TensorSpec], Access, int | None]]
    has_options: bool
    spec: ExchangeSpec
    payload: bytes
    connections: Connections
    keeps: bool
    devices: tuple[str, ...]


def serve(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> None:
    """A helper's part of ``Session.run``."""
    call: TaskRequest = pickle.loads(body)
    context.kept.pop(call.name, None)
    rank = context.rank
    region = open_region(descriptors[0])
    rest = descriptors[1:]
    stored, rest = rest[: len(call.stores)], rest[len(call.stores) :]
    num_channels = len(call.connections.channels)
    channels, packed = rest[:num_channels], rest[num_channels:]
    device = rank_device(call.devices, rank)
    accelerators.use(device)
    opened, sources = _open_stores(call, stored, rank)
    with noting_shortage(device):
        mirrors = _move_to_device(call, opened, rank, device)
    views = [view for own in opened[: call.num_groups] for view in own]
    parameters = [nn.Parameter(view, requires_grad=False) for view in views]
    others = [view for own in opened[call.num_groups :] for view in own]
    assignment: Assignment = unpacked(call.payload, packed, [*parameters, *others])
    if device.type != "cpu":
        flatten_recurrent(assignment.model, parameters, views)
    register_copies(assignment.model)
    give_own_memory(assignment.model)
    mirrored = opened[-1] if call.has_options else ()
    neighbours = call.connections.opened(rank, channels, mirrored)
    values = _values_of(sources)
    with assignment.settings.applied(), compute_settings(assignment.plan):
        worker = make_worker(
            assignment,
            call.spec,
            region,
            rank=rank,
            look_around=context.look_around,
            neighbours=neighbours,
            meeting=call.connections.meeting,
            values=None if assignment.blank else values,
        )
        if values is not None:
            worker.write_to(values)
        for source in sources:
            source.region.release_pages()
            source.region.close()
        worker.mirrors = mirrors
        if any(access == "copied on write" for _, _, access, _ in call.stores):
            worker.copy_slots()
        has_hosts = neighbours is not None
        control = FollowerControl(context, rank, assignment.plan.num_ranks, has_hosts=has_hosts)
        part = CachedCall(assignment=assignment, worker=worker, control=control)
        _take_part(part)
    for end in () if neighbours is None else neighbours.all_channels:
        end.close()
    if call.keeps:
        context.kept[call.name] = part


def serve_again(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> None:
    """A helper's part of a call that it has cached."""
    news: CallUpdate = unpacked(body, descriptors)
    part: CachedCall = context.kept[news.name]
    part.hear(news)
    with part.assignment.settings.applied(), compute_settings(part.assignment.plan):
        _take_part(part)


def _open_stores(
    call: TaskRequest, descriptors: Sequence[int], rank: int
) -> tuple[list[list[torch.Tensor]], list[TensorStore]]:
    """The tensors of all stores; and the stores that this rank copies its part of, or to.

    Parameters and slots that only other ranks have stay there.
    """
    sources: list[TensorStore] = []
    found = [
        open_store(own, number, rank=rank, ranks=ranks, access=access, sources=sources)
        for (ranks, own, access, _), number in zip(call.stores, descriptors, strict=True)
    ]
    opened = [*found]
    for (ranks, _, _, replaced), own in zip(call.stores, found, strict=True):
        if replaced is not None and rank in ranks:
            opened[replaced] = own
    return opened, sources


def _own_views(specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Tensors of this process, whose memory is taken when they are written."""
    own = TensorStore.create(specs, is_reserved=False)
    own.region.close()
    return own.views


def _values_of(sources: Sequence[TensorStore]) -> dict[str, torch.Tensor] | None:
    """The script's own parameters by name, if this rank has its part of them only."""
    found = {
        spec.name: view for one in sources for spec, view in zip(one.specs, one.views, strict=True)
    }
    return found or None


def _move_to_device(
    call: TaskRequest, opened: list[list[torch.Tensor]], rank: int, device: torch.device
) -> Mirrors:
    """Move what this rank keeps to its device; returns what it shows rank 0, and where."""
    mirrors: tuple[list[Mirror], list[Mirror]] = ([], [])
    for number, (ranks, _, access, _) in enumerate(call.stores):
        if access == "on its device" and rank in ranks:
            views, opened[number] = opened[number], on_device(opened[number], device)
            if rank == ranks[0]:
                mirrors[number >= call.num_groups].append((views, opened[number]))
    return mirrors


def _take_part(part: CachedCall) -> None:
    """Do this rank's part of a task."""
    try:
        initialize_own(part.assignment, part.worker)
        run_task(part.assignment, part.worker, part.control, TaskDriver())
        part.worker.close()
    except BaseException as error:
        with noting_on(error):
            part.worker.abandon()
        raise


def open_store(
    specs: Sequence[TensorSpec],
    descriptor: int,
    *,
    rank: int,
    ranks: Sequence[int],
    access: Access,
    sources: list[TensorStore],
) -> list[torch.Tensor]:
    """The tensors of a store that another process has made; without memory if other ranks have it.

    The first rank that has them allocates the memory, unless rank 0 has done so.

    Args:
        specs: of the tensors.
        descriptor: of the store.
        rank: this rank.
        ranks: those that have it.
        access: how this rank accesses it.
        sources: gets the store if this rank is to copy its part of it, or to it.
    """
    if rank not in ranks:
        os.close(descriptor)
        return [
            torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
            for spec in specs
        ]
    is_first = rank == ranks[0]
    region = open_region(
        descriptor,
        private=not is_first and access == "copied on write",
        is_file=access == "in a file",
    )
    if is_first and access != "made in part":
        region.reserve(0, region.num_bytes)
    store = TensorStore(specs, region)
    if access in ("copied in part", "made in part"):
        sources.append(store)
        return _own_views(specs)
    region.close()
    if is_first or access != "copied":
        return store.views
    own = TensorStore.create(specs)
    for view, value in zip(own.views, store.views, strict=True):
        view.copy_(value)
    own.region.close()
    return own.views
