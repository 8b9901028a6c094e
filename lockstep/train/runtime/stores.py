"""Stores: memory in which a host's ranks share parameters, slots and options between calls."""

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.shared_memory.file_region import write_behind
from lockstep.parallel.groups import ParameterGroup
from lockstep.parallel.storage.allocator import give_back_freed_memory
from lockstep.parallel.storage.device_memory import noting_shortage
from lockstep.parallel.storage.device_store import DeviceStore
from lockstep.parallel.storage.store import (
    ParameterStore,
    TensorStore,
    check_attributes,
    check_separate,
    slot_spec,
)
from lockstep.parallel.updater_interface import SlotKey
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.devices import is_cpu
from lockstep.train.runtime.assignment import Assignment, divides_parameters

# How ranks other than the store's first, which has the store itself, access it: they map it, too;
# and keep no pages that they do not use; or copy it; or map it and get their own pages when they
# write; or copy it to their device.
# The parts that a rank keeps are copied when it knows them, or it makes them.
Access = Literal[
    "shared",
    "in a file",
    "copied",
    "copied in part",
    "made in part",
    "copied on write",
    "on its device",
]


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """A store, and the ranks that have it.

    Attributes:
        ranks: the ranks that have it.
        store: the store.
        access: how they access it.
        in_place_of: the number of the store that this one replaces on its ranks; None for a store
            of its own.
    """

    ranks: tuple[int, ...]
    store: TensorStore
    access: Access = "shared"
    in_place_of: int | None = None

    def ranks_among(self, here: Collection[int]) -> tuple[int, ...]:
        """Its ranks on a host."""
        return tuple(rank for rank in self.ranks if rank in here)


class Stores:
    """A model's parameters, one store per group, and the slots of its optimizer."""

    def __init__(self) -> None:
        self._parameters: list[ParameterStore] = []
        # Of a call on devices; the call keeps them.
        self._beside_devices: list[weakref.ref[ParameterStore | DeviceStore]] = []
        self._slots: list[TensorStore] = []
        self._directory: str | None = None  # of slots
        self._residuals: TensorStore | None = None
        self._slots_owner: Callable[[], object] = lambda: None

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def adopt_all(self, assignment: Assignment, leader: int) -> list[Mapped]:
        """The stores of parameters, then of slots, residuals and options.

        Behind them are the parameters of pipelines with local steps, other than the first's.

        Args:
            assignment: the assignment that uses them.
            leader: this process's rank.
        """
        check_attributes(assignment.model)
        is_apart = isinstance(assignment.plan.update, AveragedUpdate)
        sharding = assignment.plan.sharding
        shares_memory = assignment.plan.engine.shares_memory or _has_one_copy(assignment)
        shares = shares_memory and not is_apart
        if not is_cpu(assignment.plan.devices):
            with noting_shortage(assignment.device):
                return self._adopt_on_device(assignment, leader)
        access: Access = "shared" if shares else "copied"
        if divides_parameters(assignment):
            access = "made in part" if assignment.blank else "copied in part"
        stores = _mapped(assignment, self._adopt(assignment, leader), access)
        if assignment.updater is not None and not is_apart:
            # Ranks that share no memory may update the same piece, each for itself, unless each has
            # its part. A rank writes only to the slots of its pieces, so it has no pages of others.
            are_shared = shares or sharding is not None
            own_access: Access = "shared" if are_shared else "copied on write"
            if _directory_of(assignment) is not None:
                own_access = "in a file"
            stores += _mapped(assignment, self.adopt_slots(assignment, leader), own_access)
        stores += self._adopt_residuals(assignment)
        stores += options_store(assignment)
        if is_apart and assignment.plan.pipeline is not None:
            here = assignment.plan.ranks_of_host(assignment.plan.host_of(leader))
            stores = _of_pipelines(assignment, stores, here)
            self.release_pages()
        return stores

    def _adopt_on_device(self, assignment: Assignment, leader: int) -> list[Mapped]:
        """Leave what the leader has on its device, and place the rest in host memory.

        Values on the device are published for other ranks that need them.
        """
        is_here = [leader in group.ranks for group in assignment.groups]
        members = _members(assignment.model, assignment.groups)
        sharding = assignment.plan.sharding
        if sharding is not None and sharding.streams_parameters:
            return self._adopt_streamed(assignment, leader)
        stores = [
            DeviceStore.of(own) if here else ParameterStore.adopt(own)
            for own, here in zip(members, is_here, strict=True)
        ]
        self._beside_devices = [weakref.ref(store) for store in stores]
        mapped = _mapped(assignment, stores, "on its device")
        is_apart = isinstance(assignment.plan.update, AveragedUpdate)
        if assignment.plan.sharding is not None and assignment.updater is not None:
            # Each rank has its pieces on its device, and writes them here when others read them.
            slots_access: Access = "shared" if _directory_of(assignment) is None else "in a file"
            mapped += _mapped(assignment, self.adopt_slots(assignment, leader), slots_access)
        elif assignment.updater is not None and not is_apart:  # else each rank has its own
            slots: list[TensorStore] = [
                DeviceStore.zeros(specs, assignment.device) if here else TensorStore.create(specs)
                for specs, here in zip(_slots(assignment)[1], is_here, strict=True)
            ]
            _store_slots(assignment, slots)
            mapped += _mapped(assignment, slots, "on its device")
        for one in mapped:
            if isinstance(one.store, DeviceStore):
                one.store.publish()
        return mapped + options_store(assignment)

    def _adopt_streamed(self, assignment: Assignment, leader: int) -> list[Mapped]:
        """One copy of everything, in host memory."""
        mapped = _mapped(assignment, self._adopt(assignment, leader), "shared")
        if assignment.updater is not None:
            mapped += _mapped(assignment, self.adopt_slots(assignment, leader), "shared")
        return mapped + options_store(assignment)

    def adopt_alone(self, assignment: Assignment) -> None:
        """For a single rank: what does not lie where it is used."""
        if assignment.updater is None:
            return
        options_store(assignment)
        sharding = assignment.plan.sharding
        if sharding is not None and sharding.streams_parameters:
            self._adopt(assignment, 0)
        if sharding is not None and sharding.offload is not None:
            self.adopt_slots(assignment, 0)

    def _adopt(self, assignment: Assignment, leader: int) -> Sequence[ParameterStore]:
        """Place the parameters of each group in a store."""
        model, groups = assignment.model, assignment.groups
        members = _members(model, groups)
        if not (
            len(self._parameters) == len(members)
            and all(
                store.region.is_shared and store.fits(own)
                for store, own in zip(self._parameters, members, strict=True)
            )
        ):
            check_separate(model.named_parameters(), model.named_buffers())
            self._parameters = [
                ParameterStore.adopt(
                    own,
                    are_blank=bool(assignment.blank),
                    is_reserved=_is_reserved(assignment, group, leader),
                )
                for own, group in zip(members, groups, strict=True)
            ]
            give_back_freed_memory()
        for store, own, group in zip(self._parameters, members, groups, strict=True):
            store.readopt(own)
            is_divided = divides_parameters(assignment) or _has_one_copy(assignment)
            store.is_elsewhere = is_divided or leader not in group.ranks
        self.release_pages()
        return self._parameters

    def adopt_slots(self, assignment: Assignment, leader: int) -> list[TensorStore]:
        """Place the slots of each group in a store."""
        updater, directory = assignment.updater, _directory_of(assignment)
        assert updater is not None
        specs = _slots(assignment)[1]
        if not (
            [store.specs for store in self._slots] == specs
            and all(store.region.is_shared for store in self._slots)
            and self._slots_owner() is updater.owner
            and self._directory == directory
        ):
            self._slots = [
                TensorStore.create(
                    own,
                    is_reserved=_is_reserved(assignment, group, leader),
                    directory=directory,
                )
                for own, group in zip(specs, assignment.groups, strict=True)
            ]
            self._slots_owner = weakref.ref(updater.owner)
            self._directory = directory
        _store_slots(assignment, self._slots)
        write_behind(view for store in self._slots for view in store.views)
        for slots, group in zip(self._slots, assignment.groups, strict=True):
            is_divided = assignment.plan.sharding is not None and directory is None
            slots.is_elsewhere = is_divided or leader not in group.ranks
        self.release_pages()
        return self._slots

    def _adopt_residuals(self, assignment: Assignment) -> list[Mapped]:
        """Place the residuals of compressed tensors in a store, if there are any."""
        if assignment.residuals is None or not assignment.residuals.tensors:
            return []
        self._residuals = assignment.residuals.stored(self._residuals)
        return [Mapped(ranks=tuple(range(assignment.plan.num_ranks)), store=self._residuals)]

    def readopt(self, model: nn.Module) -> None:
        """Bring parameters that a callback moved back into their stores."""
        parameters = dict(model.named_parameters())
        beside = (found for one in self._beside_devices if (found := one()) is not None)
        for store in (*self._parameters, *beside):
            store.readopt([(spec.name, parameters[spec.name]) for spec in store.specs])

    def all(self) -> list[TensorStore]:
        """The stores of parameters and slots in host memory."""
        stores = (*self._parameters, *self._slots)
        return [one for one in stores if one.region.is_shared]

    def release_pages(self) -> None:
        """Release this process's pages of what only other ranks have."""
        for store in (*self._parameters, *self._slots):
            store.release_pages()


def _slots(assignment: Assignment) -> tuple[list[list[SlotKey]], list[tuple[TensorSpec, ...]]]:
    """The optimizer's slots by group, and their layout in memory."""
    assert assignment.updater is not None
    parameters = dict(assignment.model.named_parameters())
    all_keys = assignment.updater.slot_keys()
    keys = [
        [key for key in all_keys if key.parameter in group.names] for group in assignment.groups
    ]
    return keys, [tuple(slot_spec(key, parameters[key.parameter]) for key in own) for own in keys]


def _store_slots(assignment: Assignment, stores: Sequence[TensorStore]) -> None:
    assert assignment.updater is not None
    assignment.updater.store_slots(
        {
            key: view
            for own, store in zip(_slots(assignment)[0], stores, strict=True)
            for key, view in zip(own, store.views, strict=True)
        }
    )


def _is_reserved(assignment: Assignment, group: ParameterGroup, leader: int) -> bool:
    """True if the leader allocates a group's memory: if it has values to place there."""
    if assignment.blank and divides_parameters(assignment):
        return False
    return not assignment.blank or leader in group.ranks


def _has_one_copy(assignment: Assignment) -> bool:
    """True if ranks that divide the training have one copy of the parameters."""
    sharding = assignment.plan.sharding
    return sharding is not None and sharding.shares_parameters


def _directory_of(assignment: Assignment) -> str | None:
    """The directory of the file for slots; None if they are in memory."""
    sharding = assignment.plan.sharding
    return None if sharding is None else sharding.directory


def has_options(assignment: Assignment) -> bool:
    """True if options of the optimizer may change at every step."""
    updater = assignment.updater
    return updater is not None and updater.options_spec() is not None


def options_store(assignment: Assignment) -> list[Mapped]:
    """A store for the optimizer's options, if they may change at every step."""
    updater = assignment.updater
    spec = None if updater is None else updater.options_spec()
    if updater is None or spec is None:
        return []
    store = TensorStore.create([spec])
    updater.share_options(store.views[0])
    return [Mapped(ranks=tuple(range(assignment.plan.num_ranks)), store=store)]


def _mapped(assignment: Assignment, stores: Sequence[TensorStore], access: Access) -> list[Mapped]:
    return [
        Mapped(ranks=group.ranks, store=store, access=access)
        for group, store in zip(assignment.groups, stores, strict=True)
    ]


def _of_pipelines(assignment: Assignment, stores: list[Mapped], here: range) -> list[Mapped]:
    """Stores of pipelines with local steps: each has its own parameters, which its ranks share.

    The host's first pipeline has the model's.
    """
    size = assignment.plan.ranks_per_replica
    count, first = len(assignment.groups), range(here.start, here.start + size)
    own = [replace(one, ranks=one.ranks_among(first), access="shared") for one in stores[:count]]
    others = [
        Mapped(
            ranks=stores[number].ranks_among(range(start, start + size)),
            store=stores[number].store.copy(),
            in_place_of=number,
        )
        for start in here[size::size]
        for number in range(count)
    ]
    return [*own, *stores[count:], *others]


def _members(
    model: nn.Module, groups: Sequence[ParameterGroup]
) -> list[list[tuple[str, nn.Parameter]]]:
    parameters = dict(model.named_parameters())
    return [[(name, parameters[name]) for name in group.names] for group in groups]
