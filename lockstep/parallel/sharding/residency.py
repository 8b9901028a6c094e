"""Residency: the parameters of a unit are in memory while a pass uses them, and at no other time.

A rank keeps the pieces that it updates. Before a unit's forward pass the ranks gather the other
pieces to where they belong, and after it they free that memory; likewise in backward, when autograd
needs a saved parameter (Rajbhandari et al., "ZeRO", SC20, level 3; Zhao et al., "PyTorch FSDP",
VLDB 2023).

All ranks gather the units in one order, one after the other, in forward and in reverse in backward:
also those that a rank's pass skips, and in a pass for which a rank has no samples. So a rank never
waits for a unit that another rank does not use.

In a first step all parameters are there. The order is the one in which rank 0's model uses the
units then. A unit that some rank's model uses again after others, or outside of its modules, stays:
it is gathered before every step.

Hooks of modules and of saved tensors gather a unit in time. A hook before every operation finds
those that read a unit elsewhere: out of the order that is an error, and no operation reads memory
that is not there.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lockstep.comm.collectives.sharded_reduce import ShardedReduce
from lockstep.errors import ModelError
from lockstep.parallel.sharding.read_hook import ReadHook
from lockstep.parallel.sharding.unit_memory import UnitMemory
from lockstep.units import first_few

_log = logging.getLogger("lockstep")

_FORWARD, _BACKWARD = 1, -1


class Residency:
    """One rank's end. Places count the units in the order in which they are used.

    Args:
        model: the model.
        modules: those of units, and their numbers.
        names: of the units.
        parameters: names of the trainable parameters, in order.
        memory: of the units.
        gradients: of the trainable parameters; those of unit n are the bucket n + 1.
        device: of this rank.

    Attributes:
        memory: of the units.
        gathered: names of the parameters in units.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        modules: Mapping[nn.Module, int],
        names: Sequence[str],
        parameters: Sequence[str],
        memory: UnitMemory,
        gradients: ShardedReduce,
        device: torch.device,
    ) -> None:
        self._model = model
        self._device = device
        self._modules = modules
        self._names = names
        self._parameters = parameters
        self.memory = memory
        self.gathered = frozenset(parameters[number] for number in memory.numbers)
        self._gradients = gradients
        self._order = list(range(len(names)))
        self._staying: set[int] = set()  # units that every rank has in all passes
        self._is_ordered = False
        self._last = len(names) - 1
        self._at = -1  # the place of the unit that is used, or was last
        self._direction = _FORWARD
        self._is_whole = True  # all units are there
        self._is_checked = False
        self._used: list[int] = []  # units that a pass has used so far, while all are there
        self._seen: list[int] = []  # those of the forward pass that has used most
        self._rounds = [0, 0]  # forward and backward passes of this batch, made so far
        self._num_rounds = [0, 0]  # the most that any rank makes
        self._forward_first = False
        self._is_moving = False  # from unit to unit

    # --- between steps ---------------------------------------------------------------------------

    def hold_all(self) -> None:
        """Gather all units, and keep them; every rank calls it."""
        for unit in range(len(self._names)):
            self.memory.gather(unit)
        self._is_whole = True

    def release(self) -> None:
        """Free all but this rank's pieces."""
        for unit in range(len(self._names)):
            self.memory.free(unit)
        self._is_whole = False

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
        self._is_checked = is_training and (is_tried or not self._is_ordered)
        if self._is_checked:
            self.hold_all()
        elif is_training and self._is_whole:
            self.release()
        for unit in sorted(self._staying):
            self.memory.gather(unit)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass."""
        self._rounds[0] += 1
        self._start(_FORWARD)
        saved = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with ReadHook(self._before_read, self._device), saved, _entering(self._enter):
            yield
        if len(self._used) > len(self._seen):
            self._seen = self._used
        self._move_to(self._last)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass."""
        self._rounds[1] += 1
        self._start(_BACKWARD)
        with (
            ReadHook(self._before_read, self._device),
            _entering(self._enter),
        ):  # layers may be computed again
            yield
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
        if self._is_checked and not self._is_ordered:
            self._settle_order()

    def _settle_order(self) -> None:
        """Agree with all ranks on the order of the units, and on those that stay."""
        count = len(self._names)
        staying = [int(unit in self._staying) for unit in range(count)]
        found = self._gradients.all_ranks([*_completed(self._seen, count), *staying])
        self._staying = {unit for unit in range(count) if any(own[count + unit] for own in found)}
        self._order = [unit for unit in found[0][:count] if unit not in self._staying]
        self._last = len(self._order) - 1
        self._is_ordered = True
        if self._staying:
            names = first_few([self._names[unit] for unit in sorted(self._staying)])
            _log.info(
                "Units that stay on every rank, because they are used elsewhere, too: %s", names
            )

    # --- from unit to unit -----------------------------------------------------------------------

    def _start(self, direction: int) -> None:
        """Begin before the first unit in a direction; a pass before may have left it there."""
        self._direction = direction
        first = 0 if direction == _FORWARD else self._last
        self._at = first - direction
        if self._is_whole:
            self._used = []
            return
        for place, unit in enumerate(self._order):
            if place != first:
                self.memory.free(unit)
            elif unit in self.memory.present:
                self._at = first
                self._begin_next()

    def _move_to(self, place: int) -> None:
        """Go to a unit, by way of all units before it."""
        self._is_moving = True
        while not self._is_whole and (place - self._at) * self._direction > 0:
            before, self._at = self._at, self._at + self._direction
            is_inside = 0 <= before <= self._last
            if is_inside and self._direction == _BACKWARD and self._rounds == self._num_rounds:
                self._gradients.complete(self._order[before] + 1)
            self.memory.gather(self._order[self._at])
            if is_inside:
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
        if module is self._model and self._is_whole:
            self._used = []
        unit = self._modules.get(module)
        if unit is None:
            return
        if not self._is_whole:
            self._use(unit)
        elif unit not in self._used[-1:]:
            if unit in self._used and self._direction == _FORWARD:
                self._stay(unit, "is used again after another unit")
            self._used.append(unit)

    def _stay(self, unit: int, why: str) -> None:
        """Keep a unit on every rank; after the first step raise an error instead."""
        if self._is_ordered and unit not in self._staying:
            raise self._error(f"A unit of sharded parameters {why}.", repr(self._names[unit]))
        self._staying.add(unit)

    def _use(self, unit: int) -> None:
        """A unit's parameters are used now."""
        if unit in self._staying:
            return
        place = self._order.index(unit)
        if (place - self._at) * self._direction < 0:
            raise self._error(
                "The model uses units of sharded parameters in another order than in its first "
                "step.",
                f"{self._names[unit]!r} after {self._names[self._order[self._at]]!r}",
            )
        self._move_to(place)

    def _before_read(self, tensor: torch.Tensor) -> None:
        """Have a tensor's unit there; in a first step note where it is used."""
        found = None if self._is_moving else self.memory.find(tensor)
        if found is None:
            return
        if not self._is_whole:
            self._use(found[0])
        elif self._is_checked and found[0] not in self._used[-1:] and not _is_in_backward():
            name = self._parameters[found[1]]
            self._stay(found[0], f"is used outside of its modules, by its parameter {name!r}")

    def _error(self, what: str, received: str) -> ModelError:
        return ModelError(
            what,
            received=received,
            fix="Name both as one unit, or leave one out, so that it stays on every rank: "
            'FullyShardedStrategy(units=[...]); or use level="gradients".',
        )

    # --- what autograd saves ---------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int, int | None]:
        """A tensor that autograd saves, its version, and the unit in whose memory it lies."""
        found = self.memory.find(tensor)
        # A graph that is never run backward would keep a tensor that has the graph, and itself.
        kept = tensor if tensor.is_leaf else tensor.detach()
        return kept, tensor._version, None if found is None else found[0]

    def _unpack(self, packed: tuple[torch.Tensor, int, int | None]) -> torch.Tensor:
        tensor, version, unit = packed
        if unit is not None and not self._is_whole:
            self._use(unit)
        elif unit is None and tensor._version != version:  # torch checks it without hooks only
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(tensor.shape)} is at version "
                f"{tensor._version}; expected version {version} instead."
            )
        return tensor


@contextmanager
def _entering(enter: Any) -> Iterator[None]:
    """Within the block, ``enter`` is called with every module whose forward pass begins."""
    hook = register_module_forward_pre_hook(lambda module, inputs: enter(module))
    try:
        yield
    finally:
        hook.remove()


def _is_in_backward() -> bool:
    """True in a backward pass: also in that of a trial, within a forward pass."""
    return torch._C._current_graph_task_id() != -1


def _completed(used: Sequence[int], count: int) -> list[int]:
    """The order of all units: those that were not used come after the one before them."""
    order = list(dict.fromkeys(used))
    for unit in range(count):
        if unit not in order:
            order.insert(order.index(unit - 1) + 1 if unit else 0, unit)
    return order
