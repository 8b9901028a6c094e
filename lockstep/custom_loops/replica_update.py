"""The update that all replicas make together, between a backward pass and the next forward pass.

It is the end of a Worker's step without passes (``parallel.update_worker``). The weights of
replicas are known when all have met.
"""

import copy
import math
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn, optim
from torch.utils.weak import WeakIdKeyDictionary

from lockstep import accelerators
from lockstep.comm.collectives.gradients import Gradients, TensorSpec
from lockstep.comm.exchange_spec import ExchangeSpec
from lockstep.comm.transports.process_group import CPU
from lockstep.custom_loops.job import Job, Shared, check_accelerators
from lockstep.data.trees import map_tensors
from lockstep.errors import DeviceError, ModelError, OptionError
from lockstep.parallel.build import owned_groups
from lockstep.parallel.data_parallel.gradient_rules import GradientRules
from lockstep.parallel.exchange.exchange_layout import group_spec
from lockstep.parallel.groups import ParameterGroup
from lockstep.parallel.storage.device_store import DeviceStore
from lockstep.parallel.storage.store import (
    TensorStore,
    check_separate,
    copy_to_views,
    slot_spec,
    tensor_spec,
)
from lockstep.parallel.update_worker import UpdateWorker
from lockstep.parallel.updater_interface import SlotKey, Updater
from lockstep.train.optim.optimizer_state import place_slots
from lockstep.train.runtime.helper_session import open_store
from lockstep.train.runtime.stores import Access


class StatefulOptimizer(Protocol):
    """The user's optimizer, with its whole state."""

    def state_dict(self) -> dict[str, Any]:
        """The whole state: numbers, text and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Resume from a state."""


# In place of a factor: this replica's loop has ended.
_JOINED = -1.0

# By parameter: its memory, and its version after the last update that it took part in. All updates
# of a parameter have the same list.
_placed: MutableMapping[torch.Tensor, list[int]] = WeakIdKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What a replica brings to an update.

    Attributes:
        gradients: one per trained parameter; None if it has none.
        factor: multiplies them, which makes them sums over samples; NaN if they have overflowed.
        weight: the number of samples.
        is_given: the script has passed this number.
    """

    gradients: Gradients
    factor: float
    weight: float
    is_given: bool


class ReplicaUpdate:
    """One replica's part. All replicas make it together, and then have the same values.

    Args:
        job: the replicas.
        updater: of the user's optimizer.
        optimizer: loads and returns its whole state.
        parameters: those that it updates, by name.
        values: other tensors that must be equal, by name.
        facts: other values that must be the same on all replicas.
        rules: for gradients.

    Raises:
        DeviceError: parameters on several devices, or replicas that share an accelerator.
        OptionError: on all replicas, with what differs.

    Attributes:
        step: the number of the next update.
        trained: the parameters that are trained.
        frozen: the other parameters, by name.
    """

    def __init__(
        self,
        job: Job,
        updater: Updater,
        optimizer: StatefulOptimizer,
        parameters: Mapping[str, nn.Parameter],
        values: Mapping[str, torch.Tensor],
        facts: Mapping[str, str],
        rules: GradientRules,
    ) -> None:
        self._job = job
        self.step = 0
        self._is_alone = job.num_replicas == 1
        self._parameters = dict(parameters)
        trained = {name: one for name, one in parameters.items() if one.requires_grad}
        self._names, self.trained = list(trained), list(trained.values())
        self.frozen = {name: one for name, one in parameters.items() if not one.requires_grad}
        self._updater, self._optimizer = updater, optimizer
        self._slots: dict[SlotKey, torch.Tensor] = {}
        self._options: list[torch.Tensor] = []
        self._device = _device_of(parameters)
        ranks = tuple(range(job.num_replicas))
        self._group = ParameterGroup(ranks=ranks, names=tuple(self._names))
        check_separate(parameters.items(), values.items())
        described = _described({**parameters, **values})
        facts = {
            **facts,
            "the model's parameters": described,
            "the kind of their device": self._device.type,
        }
        self._on_accelerator = self._device != CPU
        identity = accelerators.identity(self._device) if self._on_accelerator else ""
        devices = job.check_equal(facts, (str(self._device), identity))
        if self._on_accelerator:
            check_accelerators(job, devices)
            accelerators.use(self._device)
        self._plan = job.plan([name for name, _ in devices] if self._on_accelerator else None)
        spec = self._layout()
        # Kept, since the exchange needs it for as long as it is used.
        self._shared = (
            job.share(self._plan, []) if self._is_alone else self._become_alike(spec, values)
        )
        neighbours = self._shared.neighbours
        for channel in () if neighbours is None else neighbours.all_channels:
            weakref.finalize(self, channel.close)
        exchange = job.exchange(
            self._plan,
            spec,
            self._shared,
            self._position,
            mirrored=self._options,
            device=self._device,
        )
        self._worker = UpdateWorker(
            plan=self._plan,
            rank=job.rank,
            exchange=exchange,
            groups=owned_groups(self._plan, spec, updater, self._parameters, exchange),
            updater=updater,
            rules=rules,
            names=self._names,
        )
        job.barrier()
        self._versions = [_placed.setdefault(one, []) for one in self.trained]
        self._note_versions()

    def _layout(self) -> ExchangeSpec:
        """The layout of what replicas exchange: a row of gradients for each."""
        tensors = [*map(tensor_spec, self._names, self.trained)]
        # The script may change gradients before `step`: none is reduced early.
        group = group_spec(self._plan, self._group, tensors, {}, frozenset(), is_early=False)
        ranks = self._group.ranks
        return ExchangeSpec(
            num_ranks=len(ranks),
            share_ranks=ranks,
            groups=(group,),
            on_accelerators=self._on_accelerator,
        )

    # --- being alike -----------------------------------------------------------------------------

    def _become_alike(self, spec: ExchangeSpec, values: Mapping[str, torch.Tensor]) -> Shared:
        """Give all replicas the first one's values.

        On cores the replicas of a host then have one copy of the parameters, in shared memory; on
        accelerators each has its own, and shared memory only brings it the values. Parameters that
        another ``ReplicaUpdate`` has moved stay where it needs them.
        """
        job, updater = self._job, self._updater
        keys = updater.slot_keys()
        options = updater.options_spec()
        assert options is not None
        slots = [slot_spec(key, self._parameters[key.parameter]) for key in keys]
        layouts: list[list[TensorSpec]] = [
            [tensor_spec(name, one) for name, one in self._parameters.items()],
            [tensor_spec(name, one) for name, one in values.items()],
            [] if self._on_accelerator else slots,
            [options],
        ]
        stores = [*map(TensorStore.create, layouts)] if job.leads else []
        for store, named in zip(stores, (self._parameters, values), strict=False):
            copy_to_views(store.views, list(named.values()))
        regions = [store.region for store in stores]
        made = [spec.create(job.ranks_here)] if job.leads else []
        shared = job.share(self._plan, [*made, *regions], [self._group])
        for region in regions[:2]:
            job.bring(region)
        job.barrier()
        views = [store.views for store in stores] or self._open(shared.stores, layouts)
        for value, view in zip(values.values(), views[1], strict=True):
            _take_value(value, view)
        if self._on_accelerator:
            copy_to_views(DeviceStore.of(list(self._parameters.items())).views, views[0])
            views[2] = DeviceStore.zeros(slots, self._device).views
        else:
            for parameter, view in zip(self._parameters.values(), views[0], strict=True):
                if _is_placed(parameter):
                    _take_value(parameter, view)
                else:
                    parameter.data = view
        self._options = views[3]
        updater.share_options(views[3][0])
        self._slots = dict(zip(keys, views[2], strict=True))
        updater.store_slots(self._slots)
        return shared

    def _open(
        self, stores: Sequence[int], layouts: Sequence[Sequence[TensorSpec]]
    ) -> list[list[torch.Tensor]]:
        """The stores that the leader of this host has made."""
        access: Access = "shared" if self._plan.engine.shares_memory else "copied"
        return [
            # Each replica writes only its own slots and options.
            open_store(
                layout,
                descriptor,
                rank=self._job.rank,
                ranks=self._job.ranks_here,
                access=access if number < 2 else "shared",
                sources=[],
            )
            for number, (descriptor, layout) in enumerate(zip(stores, layouts, strict=True))
        ]

    @property
    def places(self) -> Sequence[torch.Tensor] | None:
        """Memory for this replica's gradients, by trained parameter."""
        return self._worker.exchange.gradients[0].places(self._job.rank)

    # --- updating --------------------------------------------------------------------------------

    def make(self, contribution: Contribution, *, has_joined: bool = False) -> bool:
        """Make an update; every replica calls it.

        Args:
            contribution: of this replica.
            has_joined: its loop has ended.

        Returns:
            True if some replica had not joined.

        Raises:
            OptionError: on all replicas, if only some have passed their number of samples.
            ModelError: parameters were changed or moved outside of updates.
        """
        self._check_parameters()
        if self._job.rank == 0:
            self._updater.publish_options()
        gathered = self._worker.hand_in(
            contribution.gradients,
            self.step,
            _JOINED if has_joined else contribution.factor,
            contribution.weight,
            # Two marks of a loss are used for this: the weight was passed, and was not.
            is_refused=contribution.is_given and not has_joined,
            is_guess=not contribution.is_given and not has_joined,
        )
        is_mixed = gathered.is_refused and gathered.is_guess
        is_over = all(factor == _JOINED for factor in gathered.totals)
        has_overflowed = any(map(math.isnan, gathered.totals))
        if any(gathered.weights) and not (is_mixed or is_over or has_overflowed):
            self._update(gathered.totals, gathered.weights)
        self._worker.exchange.end_step()  # no replica sends anything else before all have read it
        if is_mixed:
            raise OptionError(
                "All replicas must give `step` a weight, or none of them.",
                received=f"at step {self.step} weights on some replicas",
                fix="Use step(weight=len(inputs)) everywhere.",
            )
        if is_over:
            return False
        self.step += 1
        self._note_versions()
        return True

    @torch.no_grad()
    def _update(self, factors: Sequence[float], weights: Sequence[float]) -> None:
        weight = math.fsum(weights)
        counted = {factor for factor, own in zip(factors, weights, strict=True) if own}
        if len(counted) == 1:
            self._worker.apply(self.step, counted.pop() / weight)
        else:
            self._worker.apply(self.step, 1.0, [factor / weight for factor in factors])
        self._worker.drop_gradients()

    def _position(self) -> str:
        return f"step {self.step} of a CrossReplicaOptimizer"

    # --- what the script may do meanwhile --------------------------------------------------------

    def _note_versions(self) -> None:
        for before, one in zip(self._versions, self.trained, strict=True):
            before[:] = one.data_ptr(), one._version

    def _check_parameters(self) -> None:
        """Refuse parameters whose memory or values have changed since the last update.

        Raises:
            ModelError: with a parameter's name.
        """
        if self._is_alone:
            return
        shares = self._plan.engine.shares_memory and len(self._job.ranks_here) > 1
        for name, before, one in zip(self._names, self._versions, self.trained, strict=True):
            if before[0] != one.data_ptr():
                raise ModelError(
                    "Parameters must stay in the memory of the CrossReplicaOptimizer.",
                    received=f"{name!r} in other memory, at step {self.step}",
                    fix="Convert and load the model before it is wrapped, and write into "
                    "parameters with `copy_`.",
                )
            if shares and self.step and before[1] != one._version:
                raise ModelError(
                    "Replicas of a host share one copy of the parameters, so a change by each of "
                    "them is made several times.",
                    received=f"{name!r} changed between two steps, before step {self.step}",
                    fix='Call lockstep.init(engine="gloo"), which gives each replica parameters '
                    "of its own.",
                )

    def accept_parameters(self) -> None:
        """Accept values that all replicas have set alike; every replica calls it."""
        self._job.barrier()
        self._note_versions()

    # --- the optimizer's state -------------------------------------------------------------------

    def whole_state(self) -> dict[str, Any]:
        """The state of the whole optimizer; every replica calls it."""
        self.gather_slots()
        return self._optimizer.state_dict()

    def gather_slots(self) -> None:
        """Give the user's optimizer its whole state, on every replica."""
        updater = self._updater
        if self._is_alone:
            return
        if not updater.is_known:  # only the first replica steps it
            own = self._optimizer.state_dict() if self._job.rank == 0 else None
            gathered = self._job.all_gather(map_tensors(torch.Tensor.cpu, own))
            if self._job.rank:
                self._optimizer.load_state_dict(gathered[0])
            return
        self._worker.gather_slots()
        own = map_tensors(torch.Tensor.cpu, updater.slots())
        updater.take_slots([part for gathered in self._job.all_gather(own) for part in gathered])
        if self._on_accelerator and isinstance(self._optimizer, optim.Optimizer):
            place_slots(self._optimizer)
        self._job.barrier()

    def take_state(self, state: dict[str, Any]) -> None:
        """Load a whole state into the user's optimizer; every replica calls it with the same."""
        updater = self._updater
        self._job.barrier()  # another replica may still read the state that is there
        self._optimizer.load_state_dict(copy.deepcopy(state))
        kept = set(updater.slot_keys())
        updater.store_slots({key: place for key, place in self._slots.items() if key in kept})
        self._job.barrier()
        self._worker.rebind()


def _is_placed(parameter: torch.Tensor) -> bool:
    """True if a ``ReplicaUpdate`` has moved it, and nothing has since."""
    return _placed.get(parameter, [])[:1] == [parameter.data_ptr()]


@torch.no_grad()
def _take_value(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Copy values that differ: replicas may share this tensor, which then has them."""
    if not torch.equal(tensor, view.to(tensor.device)):
        tensor.copy_(view)


def _device_of(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    """The device of a model: the CPU, or one accelerator.

    Raises:
        DeviceError: its parameters are on several devices, or on one that is not supported.
    """
    devices = {parameter.device: name for name, parameter in parameters.items()}
    if len(devices) > 1:
        listed = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise DeviceError(
            "All parameters of a replica must be on one device.",
            received=listed,
            fix="Move the model to one device, before the optimizer is made.",
        )
    (device,) = devices or (CPU,)
    if device.type not in ("cpu", accelerators.kind()):
        raise DeviceError(
            "Replicas exchange gradients of parameters on CPUs and accelerators.",
            received=f"parameters on {device}",
            fix="Leave the model on the CPU.",
        )
    return device


def _described(tensors: Mapping[str, torch.Tensor]) -> str:
    """The names, shapes and types, which must be the same on all replicas."""
    return str(
        {
            name: (tuple(one.shape), str(one.dtype), one.requires_grad)
            for name, one in tensors.items()
        }
    )
