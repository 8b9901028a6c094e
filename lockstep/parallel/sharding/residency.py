"""Residency: the parameters of a unit are in memory while a pass uses them, and at no other time.

A rank keeps the pieces that it updates. Before a unit's forward pass the ranks gather the other
pieces to where they belong, and after it they free that memory; likewise in backward, when autograd
needs a saved parameter (Rajbhandari et al., "ZeRO", SC20, level 3; Zhao et al., "PyTorch FSDP",
VLDB 2023).

All ranks gather the units in one order, one after the other, in forward and in reverse in backward:
also those that a rank's pass skips, and in a pass for which a rank has no samples. So a rank never
waits for a unit that another rank does not use.

Before that order is known, and while the model is tried, ranks gather units by request: whenever a
rank needs one, all tell each other which they need, and gather these. A rank that needs none any
more goes on telling so until all are as far: at the end of a pass, and at a BatchNorm, where all
exchange statistics. After the first forward pass the order is settled: the one in which rank 0's
model has used the units; with BatchNorm layers, once every unit was used (``norm_places``). A unit
that some rank's model uses again after others, or outside of its modules, stays: it is gathered
before every step.

Hooks of modules and of saved tensors gather a unit in time. A hook before every operation finds
those that read a unit elsewhere: out of the order that is an error, and no operation reads memory
that is not there.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.comm.collectives.sharded_reduce import ShardedReduce
from lockstep.formatting import first_few
from lockstep.parallel.sharding import unit_errors
from lockstep.parallel.sharding.norm_places import NormPlaces
from lockstep.parallel.sharding.read_hook import entering, is_in_backward, reading
from lockstep.parallel.sharding.unit_memory import UnitMemory
from lockstep.parallel.sharding.units import completed_order

_log = logging.getLogger("lockstep")

_FORWARD, _BACKWARD = 1, -1

# Asked for by a rank that needs no unit: in this pass, or before it has others' statistics.
_NONE, _AT_NORM = -1, -2


class Residency:
    """One rank's end. Places count the units in the order in which they are used.

    Args:
        model: the model.
        modules: those of units, and their numbers.
        names: of the units.
        parameters: names of the trainable parameters, in order.
        memory: of the units.
        gradients: of the trainable parameters, unit n's in bucket n + 1; None without training.
        norms: places of the model's BatchNorm layers.
        device: of this rank.
        leads: this rank has the model of its host's script.
        meet: waits for all ranks, if these can write to the memory of the script's model; else
            None.

    Attributes:
        memory: of the units.
        gathered: names of the parameters in units.
        complete: called with the number of a bucket once backward has left its unit.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        modules: Mapping[nn.Module, int],
        names: Sequence[str],
        parameters: Sequence[str],
        memory: UnitMemory,
        gradients: ShardedReduce | None,
        norms: NormPlaces,
        device: torch.device,
        leads: bool,
        meet: Callable[[], None] | None,
    ) -> None:
        self._model = model
        self._leads = leads
        self._meet = meet
        self._scripts_own: list[torch.Tensor] = []
        self._device = device
        self._modules = modules
        self._names = names
        self._parameters = parameters
        self.memory = memory
        self.gathered = frozenset(parameters[number] for number in memory.numbers)
        self._gradients: Any = gradients
        self.complete: Callable[[int], None] = gradients.complete if gradients else lambda _: None
        self._norms = norms
        self._order = list(range(len(names)))
        self._staying: set[int] = set()  # units that every rank has in all passes
        self._is_ordered = self._is_settled = False  # until it is settled, a step may change it
        self._last = len(names) - 1
        self._at = -1  # the place of the unit that is used, or was last
        self._direction = _FORWARD
        self._is_shown = True  # hosts' first ranks have all units
        self._is_tried = False  # so is the model in this batch
        self._by_request = False
        self._has_met = False  # all ranks have made their trials in this pass
        self._used: list[int] = []  # units that the model has used so far, by request
        self._seen: list[int] = []  # those of the forward pass that has used most
        self._rounds = [0, 0]  # forward and backward passes of this batch, made so far
        self._num_rounds = [0, 0]  # the most that any rank makes
        self._forward_first = False
        self._is_moving = False  # from unit to unit

    def copy_pieces(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's pieces from the parameters' values, by name."""
        self.memory.copy_pieces([values[name] for name in self._parameters])

    def kept_parts(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Name, first element and memory of each piece that this rank keeps."""
        for piece, place in self.memory.places():
            yield self._parameters[piece.parameter], piece.start, place

    def keep_parts(self, names: Collection[str]) -> None:
        """Keep only this rank's pieces of parameters that have been set; no rank has others."""
        self._is_shown = False
        numbers = {number for number, name in enumerate(self._parameters) if name in names}
        self.memory.keep_parts(numbers & self.memory.numbers)

    # --- between steps ---------------------------------------------------------------------------

    def show(self, *, everywhere: bool = False) -> None:
        """Gather all units, and keep them where scripts are, or everywhere; all ranks call it."""
        if self._is_shown and not everywhere:
            return
        if self._meet is not None and not everywhere:
            self._write_to_script(self._meet)
        self.memory.is_held |= everywhere or self._leads
        for unit in range(len(self._names)) if self._meet is None or everywhere else ():
            self.memory.gather(unit)
            self.memory.free(unit)
        self._is_shown = True

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around passes of all ranks outside of a batch."""
        self.show(everywhere=True)
        yield

    def _write_to_script(self, meet: Callable[[], None]) -> None:
        """Have every rank write its pieces to the memory of the script's model."""
        meet()  # the script's process frees no memory any more
        if self._scripts_own:
            self.memory.write_pieces(self._scripts_own)
        meet()

    def write_to(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write to these from now on, the script's own parameters by name, to show this rank's."""
        self._scripts_own = [values[name] for name in self._parameters]

    def release(self) -> None:
        """Free all but this rank's pieces."""
        self.memory.release()
        self._is_shown = False

    def free_gradients(self) -> None:
        """Free the gradients' sums: the step has used them."""
        self._gradients.free()

    # --- the passes over a batch -----------------------------------------------------------------

    def begin(
        self, num_rounds: int, *, is_training: bool, is_tried: bool, forward_first: bool
    ) -> None:
        """Begin a batch; every rank calls it.

        Args:
            num_rounds: the most passes that any rank makes.
            is_training: they go backward, too.
            is_tried: the model is tried on parts of the batch.
            forward_first: no pass goes backward before all have gone forward.
        """
        self._num_rounds = [num_rounds, num_rounds if is_training else 0]
        self._rounds = [0, 0]
        self._forward_first = forward_first
        self._is_tried = is_tried
        if is_training:
            self.release()
        self._gather_staying()

    def _gather_staying(self) -> None:
        for unit in sorted(self._present_always):
            self.memory.gather(unit)

    @property
    def _present_always(self) -> Collection[int]:
        return self._staying if self._is_ordered else ()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass."""
        self._rounds[0] += 1
        if self._is_tried or not self._is_settled:
            self._has_met = not self._is_tried
            with self.by_request():
                yield
                self.meet()
            if self._num_rounds[1]:
                self._settle_order()
            return
        self._start(_FORWARD)
        with self._watching():
            yield
        self._move_to(self._last)

    @contextmanager
    def by_request(self) -> Iterator[None]:
        """Around passes for which ranks gather the units that each of them needs."""
        self._free_others(())
        self._by_request, self._used = True, []
        self._norms.begin()
        with self._watching():
            yield
        self._keep_longest()
        self._await_all()
        self._by_request = False

    def before_statistics(self, norm: int, *, is_backward: bool) -> None:
        """Take part in what other ranks gather before they wait for statistics of a BatchNorm."""
        if self._by_request:
            self._norms.note(norm, self._used)
            present = [*self.memory.present]
            self._is_moving = True
            while max(self._gather_requested(_AT_NORM, present)) >= 0:
                pass
            self._is_moving = False
        elif is_backward and self._direction == _BACKWARD:
            if (after := self._norms.units_before(norm)) <= self._last:
                self._move_to(after)
        elif not is_backward and self._direction == _FORWARD:
            self._move_to(self._norms.units_before(norm) - 1)

    def meet(self) -> None:
        """The trials of this rank's share are over: wait for the other ranks'."""
        if not self._has_met:
            self._await_all()
            self._has_met = True

    @contextmanager
    def _watching(self) -> Iterator[None]:
        saved = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        reads = reading(self._before_read, self._device)
        with unit_errors.refusing_transforms(), reads, saved, entering(self._enter):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass."""
        self._rounds[1] += 1
        self._start(_BACKWARD)
        with reading(self._before_read, self._device), entering(self._enter):
            yield  # layers may be computed again
        self._move_to(0)

    def finish_forward(self) -> None:
        """Before a backward pass: take part in the forward passes that other ranks make first."""
        while self._forward_first and self._rounds[0] < self._num_rounds[0]:
            with self.forward():
                pass

    def finish(self) -> None:
        """Take part in the passes that other ranks still make; every rank calls it."""
        self.finish_forward()
        while self._rounds != self._num_rounds:
            for own, pass_ in enumerate((self.forward, self.backward)):
                if self._rounds[own] < self._num_rounds[own]:
                    with pass_():
                        pass

    def _settle_order(self) -> None:
        """Agree with all ranks on the order of the units, and on those that stay."""
        if self._is_settled:
            return
        count = len(self._names)
        staying = [int(unit in self._staying) for unit in range(count)]
        norms = self._gradients.all_ranks(self._norms.row(count))
        found = self._gradients.all_ranks([*completed_order(self._seen, count), *staying])
        self._staying = {unit for unit in range(count) if any(own[count + unit] for own in found)}
        self._order = [unit for unit in found[0][:count] if unit not in self._staying]
        self._is_settled = self._norms.settle(norms, found[0][:count], self._staying)
        self._last = len(self._order) - 1
        self._is_ordered = True
        self._gather_staying()
        if self._staying:
            names = first_few([self._names[unit] for unit in sorted(self._staying)])
            _log.info(
                "Units that stay on every rank, because they are used elsewhere, too: %s", names
            )

    # --- by request ------------------------------------------------------------------------------

    def _need(self, units: Collection[int]) -> None:
        """Have units there."""
        if not self.memory.present.issuperset(units):
            unit_errors.check_no_transform()
            self._is_moving = True
            self._free_others(units)
            while not self.memory.present.issuperset(units):
                self._gather_requested(min({*units} - self.memory.present), units)
            self._is_moving = False

    def _await_all(self) -> None:
        """Take part until no rank needs a unit."""
        self._is_moving = True
        self._free_others(())
        while self._gather_requested(_NONE, ()) != {_NONE}:
            pass
        self._is_moving = False

    def _gather_requested(self, wanted: int, kept: Collection[int]) -> set[int]:
        """Gather what the ranks need now, and free what this one does not; returns the requests.

        Args:
            wanted: what this rank needs.
            kept: what it keeps.
        """
        requests = {unit for (unit,) in self._gradients.all_ranks([wanted])}
        for unit in sorted(requests - {_NONE, _AT_NORM}):
            self.memory.gather_again(unit)
            self._free_others(kept)
        return requests

    def _free_others(self, kept: Collection[int]) -> None:
        for unit in [*self.memory.present]:
            if unit not in kept and unit not in self._present_always:
                self.memory.free(unit)

    def _note_use(self, unit: int) -> None:
        """The model's forward pass enters a module of a unit, while the order is open."""
        if not self._is_settled and unit not in self._used[-1:] and not is_in_backward():
            if unit in self._used:
                self._stay(unit, "is used again after another unit")
            self._used.append(unit)

    def _keep_longest(self) -> None:
        if len(self._used) > len(self._seen):
            self._seen = self._used
        self._norms.end(self._used)
        self._used = []

    # --- from unit to unit -----------------------------------------------------------------------

    def _start(self, direction: int) -> None:
        """Begin before the first unit in a direction; a pass may have left it and the next."""
        self._direction = direction
        first = 0 if direction == _FORWARD else self._last
        self._at = first - direction
        for place, unit in enumerate(self._order):
            if place not in (first, first + direction):
                self.memory.free(unit)
            elif place == first and unit in self.memory.present:
                self._at = first
                self._begin_next()

    def _move_to(self, place: int) -> None:
        """Go to a unit, by way of all units before it."""
        self._is_moving = True
        while (place - self._at) * self._direction > 0:
            before, self._at = self._at, self._at + self._direction
            is_inside = 0 <= before <= self._last
            if is_inside and self._direction == _BACKWARD and self._rounds == self._num_rounds:
                self.complete(self._order[before] + 1)
            self.memory.gather(self._order[self._at])
            is_turning = self._direction == _FORWARD and self._at == self._last
            if is_inside and not (is_turning and self._num_rounds[1]):  # backward needs both first
                self.memory.free(self._order[before])
            self._begin_next()
        self._is_moving = False

    def _begin_next(self) -> None:
        """Gather the next unit in this direction while the present one is used."""
        following = self._at + self._direction
        if 0 <= following <= self._last:
            self.memory.begin(self._order[following])

    def _enter(self, module: nn.Module) -> None:
        """A module's forward pass begins."""
        if module is self._model and self._by_request and not is_in_backward():
            self._keep_longest()
        unit = self._modules.get(module)
        if unit is not None and self._by_request:
            self._note_use(unit)
            self._need([unit])
        elif unit is not None:
            self._use(unit, is_entered=True)

    def _stay(self, unit: int, why: str) -> None:
        """Keep a unit on every rank; after the first step raise an error instead."""
        if self._is_ordered and unit not in self._staying:
            raise unit_errors.misused(why, self._names[unit])
        self._staying.add(unit)

    def _use(self, unit: int, *, is_entered: bool = False) -> None:
        """A unit's parameters are used now, or its module's forward pass begins."""
        if unit in self._staying:
            return
        place = self._order.index(unit)
        if (place - self._at) * self._direction < 0:
            names = [self._names[self._order[self._at]], self._names[unit]]
            raise unit_errors.disorder(names, is_again=is_entered and self._direction == _BACKWARD)
        self._move_to(place)

    def _before_read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the units of tensors there; before the order is settled note where it is used."""
        if self._is_moving:
            return
        found = dict(one for one in map(self.memory.find, tensors) if one is not None)
        if not self._by_request:
            for unit in found:
                self._use(unit)
            return
        is_noted = not (self._is_ordered or is_in_backward())
        for unit, number in found.items() if is_noted else ():
            if unit not in self._used[-1:]:
                name = self._parameters[number]
                self._stay(unit, f"is used outside of its modules, by its parameter {name!r}")
        self._need(found)

    # --- what autograd saves ---------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int, int | None]:
        """A tensor that autograd saves, its version, and the unit in whose memory it lies."""
        found = self.memory.find(tensor)
        # A graph that is never run backward would keep a tensor that has the graph, and itself.
        kept = tensor if tensor.is_leaf else tensor.detach()
        return kept, tensor._version, None if found is None else found[0]

    def _unpack(self, packed: tuple[torch.Tensor, int, int | None]) -> torch.Tensor:
        tensor, version, unit = packed
        if unit is not None and self._by_request:
            self._need([unit])
        elif unit is not None:
            self._use(unit)
        elif unit is None and tensor._version != version:  # torch checks it without hooks only
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(tensor.shape)} is at version "
                f"{tensor._version}; expected version {version} instead."
            )
        return tensor
