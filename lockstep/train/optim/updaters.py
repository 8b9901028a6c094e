"""torch optimizers as updaters: they step on pieces, with slots by parameter name.

A rank's optimizer is a clone of the user's whose parameter groups hold the rank's pieces instead of
whole parameters. Options and slots do not depend on the division, so a state made by one number of
ranks fits any other.

How small the pieces may be depends on the optimizer. torch's own are known: most treat every
element separately, some a parameter as a whole. Any other optimizer is unknown: it may clip by the
norm of all gradients, wrap another optimizer, or count its steps. So rank 0 alone steps it, the
user's own object on the user's own Parameters, which is always exact.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from lockstep.comm.collectives.gradients import TensorSpec, cut_piece
from lockstep.data.trees import map_tensors
from lockstep.parallel.storage.allocator import temporary_memory
from lockstep.parallel.transfer.serialization import optimizer_contents, rebuild_optimizer
from lockstep.parallel.updater_interface import (
    BoundPiece,
    PieceSlots,
    SlotKey,
    Slots,
    Updater,
    assemble_slots,
)
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.optim.fused_step import (
    LastStep,
    fastest_form,
    has_guard,
    has_plain_step,
    step_in_fastest_form,
    step_plainly,
    step_unless_refused,
)
from lockstep.train.optim.optimizer_kinds import ELEMENTWISE, LAZY, PARAMETERWISE
from lockstep.train.optim.optimizer_state import optimizer_parts, option_values, set_optimizer
from lockstep.train.optim.slot_windows import SlotWindows
from lockstep.train.optim.stored_pieces import StoredPieces, place_of
from lockstep.train.runtime.shared_options import SharedOptions, options_spec


class TorchUpdater(Updater):
    """Steps a torch optimizer on pieces of its parameters.

    Args:
        optimizer: the user's optimizer; on rank 0 it gets the slots back after training.
        parameters: the model's parameters by name, the same objects that the optimizer holds.
        changes_by_step: options may change at every step.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        parameters: dict[str, nn.Parameter],
        *,
        changes_by_step: bool = False,
    ) -> None:
        self.optimizer = self.owner = optimizer
        self.parameters = parameters
        self.is_known = _is_known(optimizer)  # hooks are not sent, so rank 0 decides for all
        self.is_elementwise = self.is_known and type(optimizer) in ELEMENTWISE | LAZY
        self._changes_by_step = changes_by_step
        self._shared_options: SharedOptions | None = None
        self._active = optimizer
        self._pieces: list[BoundPiece] = []
        self._store: dict[str, dict[str, torch.Tensor]] = {}  # by parameter and slot
        self._stored_pieces = StoredPieces()
        self._windows: SlotWindows | None = None  # if slots are not all where they are stepped
        self._device: torch.device | None = None  # on which they are stepped, if they lie apart
        self._is_alone = False  # it has all pieces
        self._unstored: list[BoundPiece] = []  # pieces whose slots are not all in the store
        self._trained: set[str] = set()  # since it was bound, on any rank

    @property
    def takes_sparse(self) -> bool:  # type: ignore[override]  # of others it is fixed
        """True if it has a lazy form, which updates only the rows of a sparse gradient."""
        groups = self.optimizer.param_groups
        return type(self.optimizer) in LAZY and not any(
            group.get("momentum") or group.get("weight_decay") for group in groups
        )

    @property
    def guarded(self) -> optim.Optimizer | None:  # type: ignore[override]  # of others it is fixed
        """The user's optimizer, if this rank steps it itself, in a form that has a guard."""
        is_stepped = self._active is self.optimizer and self.is_known
        return self.optimizer if is_stepped and has_guard(self.optimizer) else None

    def step_on(self, device: torch.device | None) -> None:
        self._device = device

    def bind(self, pieces: Sequence[BoundPiece]) -> None:
        self._stored_pieces, self._last_step = StoredPieces(), LastStep()
        self._windows = SlotWindows.of(
            pieces, self._store, may_cut=not self.takes_sparse, device=self._device
        )
        self._pieces = list(pieces) if self._windows is None else self._windows.pieces
        self._trained = {name for name, one in self.parameters.items() if one.requires_grad}
        # A rank without pieces takes part with a clone, too.
        same = bool(pieces) and all(piece.tensor is self.parameters[piece.name] for piece in pieces)
        self._is_alone = same
        is_whole = same and self._windows is None
        self._active = self.optimizer if is_whole or not self.is_known else self._clone()
        self._unstored = []
        if self._active is not self.optimizer:
            self._unstored = [bound for bound in self._pieces if self._has_unstored_slots(bound)]

    def slot_keys(self) -> list[SlotKey]:
        if not self.is_elementwise:
            return []
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return [
            SlotKey(parameter=names[id(parameter)], slot=slot)
            for group in self.optimizer.param_groups
            for slot in self._slots_of(group)
            for parameter in group["params"]
            if parameter.requires_grad and id(parameter) in names
        ]

    def _stored_slots(self, bound: BoundPiece) -> dict[str, torch.Tensor]:
        """This piece of the slots that the user's optimizer has in the store."""
        whole = self.optimizer.state[self.parameters[bound.name]]
        kept = self._store.get(bound.name, {})
        return {
            slot: place
            for slot, place in self._places_of(bound).items()
            if whole.get(slot) is kept[slot]
        }

    def _slots_of(self, group: dict[str, Any]) -> list[str]:
        """The slots of a parameter's size that a step with these options makes, by making one."""
        return [
            slot
            for slot, value in self._dummy_state(group).items()
            if isinstance(value, torch.Tensor) and value.shape == (3,)
        ]

    def _dummy_state(self, group: dict[str, Any]) -> Slots:
        """The slots that a step with these options makes for a parameter of three elements."""
        dummy = torch.zeros(3)
        dummy.grad = torch.zeros(3)
        if type(self.optimizer) is optim.SparseAdam:
            dummy.grad = dummy.grad.to_sparse()
        options = map_tensors(torch.Tensor.cpu, option_values(group))
        # The dummy is in host memory, where some implementations of the step do not run.
        ways = {way: False for way in ("capturable", "fused", "foreach") if way in options}
        groups = [{**options, **ways, "params": [dummy]}]
        state: dict[torch.Tensor, Slots] = defaultdict(dict)
        if type(self.optimizer) is optim.Adagrad:  # before torch 2.13 its constructor makes them
            state[dummy] = {"step": torch.tensor(0.0), "sum": torch.zeros(3)}
        contents = {"state": state, "param_groups": groups}
        clone = self._rebuild(contents)
        step_plainly(clone)
        return {name: value for name, value in clone.state[dummy].items() if value is not None}

    def _rebuild(self, contents: dict[str, Any]) -> optim.Optimizer:
        return rebuild_optimizer(
            type(self.optimizer), {**optimizer_contents(self.optimizer), **contents}
        )

    @torch.no_grad()
    @temporary_memory()
    def store_slots(self, store: Mapping[SlotKey, torch.Tensor]) -> None:
        self._store = defaultdict(dict)
        moved = []
        for key, stored in store.items():
            self._store[key.parameter][key.slot] = stored
            slots = self.optimizer.state.get(self.parameters[key.parameter], {})
            value = slots.get(key.slot)
            if isinstance(value, torch.Tensor) and value.is_meta:  # it gets its values there
                slots[key.slot] = stored
            elif value is not stored and getattr(value, "shape", None) == stored.shape:
                # Clone all before any is moved: some may be views of the same memory.
                moved.append((slots, key.slot, stored, value.clone()))
        for slots, slot, stored, value in moved:
            slots[slot] = stored.copy_(value)

    def _clone(self) -> optim.Optimizer:
        by_parameter: dict[int, list[BoundPiece]] = defaultdict(list)
        state: dict[torch.Tensor, Slots] = defaultdict(dict)
        for bound in self._pieces:
            parameter = self.parameters[bound.name]
            by_parameter[id(parameter)].append(bound)
            if parameter in self.optimizer.state:
                stored, slots = self._stored_slots(bound), self.optimizer.state[parameter]
                others = {slot: value for slot, value in slots.items() if slot not in stored}
                state[bound.tensor] = {**_cut_slots(others, parameter, bound), **stored}
        groups = [
            {**option_values(group), "params": _tensors_of(group["params"], by_parameter)}
            for group in self.optimizer.param_groups
        ]
        return self._rebuild({"state": state, "param_groups": groups})

    def options_spec(self) -> TensorSpec | None:
        return options_spec(self.optimizer.param_groups) if self._changes_by_step else None

    def share_options(self, tensor: torch.Tensor) -> None:
        self._shared_options = SharedOptions(self.optimizer.param_groups, tensor)

    def publish_options(self) -> None:
        """On rank 0, between two steps: write the optimizer's options for all ranks."""
        if self._shared_options is not None:
            self._shared_options.write(self.optimizer.param_groups)

    def step(self) -> None:
        if self._active is not self.optimizer:
            if self._shared_options is not None:
                self._shared_options.read_into(self._active.param_groups)
            elif self._is_alone:
                self.set_options(self.options())
            if self._unstored:
                with temporary_memory():
                    self._step_pieces()
                self._unstored = [one for one in self._unstored if self._has_unstored_slots(one)]
            else:
                self._step_pieces()
            vars(self.optimizer)["_opt_called"] = True  # torch's schedulers check it
        elif self._pieces:
            self._step_itself()

    def _step_pieces(self) -> None:
        last = self._last_step if self._windows is None else None
        for pieces in self._turns():
            step_in_fastest_form(self._active, partial(step_plainly, self._active), last)
            if self._unstored:
                self._store_new_slots(pieces)

    def _turns(self) -> Iterable[Sequence[BoundPiece]]:
        """The pieces that are stepped together, one after the other."""
        windows = self._windows
        if windows is None and self.is_elementwise and self._unstored:
            windows = SlotWindows.of_new(self._pieces, self._unstored)
        if windows is None:
            return [self._unstored]
        return windows.turns(self._active, self._places_of)

    def _store_new_slots(self, pieces: Sequence[BoundPiece]) -> None:
        """Move slots to the store that the optimizer has made at a piece's first step."""
        for bound in pieces:
            slots = self._active.state.get(bound.tensor, {})
            for slot, place in self._places_of(bound).items():
                if isinstance(slots.get(slot), torch.Tensor) and not _is_placed(slots[slot], place):
                    slots[slot] = place.copy_(slots[slot])

    def _has_unstored_slots(self, bound: BoundPiece) -> bool:
        """True if a slot of the piece that belongs in the store is missing or lies elsewhere."""
        slots = self._active.state.get(bound.tensor, {})
        names = self._store.get(bound.name, {})
        if not all(isinstance(slots.get(slot), torch.Tensor) for slot in names):
            return True
        places = self._places_of(bound)
        return not all(_is_placed(slots[slot], place) for slot, place in places.items())

    def _places_of(self, bound: BoundPiece) -> dict[str, torch.Tensor]:
        """Where a piece's stored slots lie, by the slot's name."""
        found = place_of if self._device is not None else self._stored_pieces.of
        return {
            slot: found(place, bound).view(bound.tensor.shape)
            for slot, place in self._store.get(bound.name, {}).items()
        }

    def _step_itself(self) -> None:
        """Step the user's own optimizer, on whole Parameters with the pieces' gradients."""
        whole = [(self.parameters[bound.name], bound.tensor) for bound in self._pieces]
        for parameter, tensor in whole:
            parameter.grad = tensor.grad
        if self.is_known and has_plain_step(self.optimizer):
            step = partial(step_plainly, self.optimizer)
            step_in_fastest_form(self.optimizer, step, self._last_step)
        else:
            with fastest_form(self.optimizer):
                step_unless_refused(self.optimizer, self.optimizer.step)
        for parameter, tensor in whole:
            if parameter is not tensor:
                parameter.grad = None

    def slots(self, *, with_stored: bool = False) -> list[PieceSlots]:
        own = self._active is self.optimizer
        keys = [self.parameters[bound.name] if own else bound.tensor for bound in self._pieces]
        return [
            self._piece_slots(bound, self._active.state[key], with_stored)
            for bound, key in zip(self._pieces, keys, strict=True)
            if key in self._active.state
        ]

    def _piece_slots(self, bound: BoundPiece, slots: Slots, with_stored: bool) -> PieceSlots:
        places = {} if with_stored else self._places_of(bound)
        stored = tuple(
            slot
            for slot, place in places.items()
            if slot in slots and _is_placed(slots[slot], place)
        )
        return PieceSlots(
            name=bound.name,
            start=bound.piece.start,
            stop=bound.piece.stop,
            slots={
                slot: _flattened_slot(value, bound, self.parameters[bound.name])
                for slot, value in slots.items()
                if slot not in stored
            },
            stored=stored,
        )

    @property
    def takes_notes(self) -> bool:  # type: ignore[override]  # as above
        """True if all slots but counts are in the store."""
        return self.is_elementwise

    def take_notes(self, notes: Sequence[PieceSlots]) -> None:
        known = {(part.name, part.start): part.slots for part in notes}
        for bound in self._pieces:
            slots = known.get((bound.name, bound.piece.start))
            if slots is None:  # not stepped yet, though other pieces are
                self._active.state.pop(bound.tensor, None)
            else:
                self._active.state[bound.tensor].update(slots)
        self._unstored = [bound for bound in self._pieces if self._has_unstored_slots(bound)]

    def take_slots(self, pieces: Sequence[PieceSlots]) -> None:
        """Give the user's optimizer the slots of whole parameters, assembled from all ranks'."""
        if self._active is self.optimizer:
            return
        parameters, state = self.parameters, self.optimizer.state
        for name, values in assemble_slots(pieces, parameters).items():
            state[parameters[name]] = values
        for part in pieces:
            for slot in part.stored:
                state[parameters[part.name]][slot] = self._store[part.name][slot]

    def write_back_slots(self) -> None:
        self._stored_pieces.write_back()

    def stored(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, place) for name, slots in self._store.items() for place in slots.values()]

    def state(self) -> dict[str, Any]:
        return optimizer_parts(self.optimizer, self.parameters)

    def load_state(self, state: TrainingState) -> None:
        set_optimizer(self.optimizer, self.parameters, state)

    def recover(self) -> list[str]:
        if self._active is self.optimizer:
            return []
        own = {part.name: part for part in self.slots() if self._is_complete(part)}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        lost = []
        for group in self.optimizer.param_groups:
            members = [  # frozen parameters have no slots
                names[id(one)] for one in group["params"] if names.get(id(one)) in self._trained
            ]
            known = [own[name] for name in members if name in own]
            keeps_slots = not self.is_elementwise or bool(self._dummy_state(group))
            for name in members:
                part = own.get(name) or _slots_like_others(name, known)
                if part is not None and self._was_stepped(part):
                    self.take_slots([part])
                elif part is None and keeps_slots:
                    self.optimizer.state.pop(self.parameters[name], None)
                    lost.append(name)
        return lost

    def _is_complete(self, part: PieceSlots) -> bool:
        """True if this rank has all slots outside the store: counts, or the whole parameter's."""
        is_whole = part.stop - part.start == self.parameters[part.name].numel()
        return is_whole or not part.has_arrays

    def _was_stepped(self, part: PieceSlots) -> bool:
        """True if any rank has stepped the parameter."""
        stored = [self._store[part.name][slot] for slot in part.stored]
        return not stored or any(bool(slot.any()) for slot in stored)

    def options(self) -> list[dict[str, Any]]:
        return [option_values(group) for group in self.optimizer.param_groups]

    def set_options(self, options: list[dict[str, Any]]) -> None:
        for group, values in zip(self._active.param_groups, options, strict=True):
            group.update(values)


def _slots_like_others(name: str, known: Sequence[PieceSlots]) -> PieceSlots | None:
    """The slots of a parameter that other ranks own, with the counts of the known parameters.

    None if these differ (parameters that were not used in every step), or none is known.
    """
    if not known or any(part.has_arrays for part in known):
        return None
    counts = [{slot: float(value) for slot, value in part.slots.items()} for part in known]
    if any(count != counts[0] for count in counts):
        return None
    first = known[0]
    return PieceSlots(name=name, start=0, stop=0, slots=first.slots, stored=first.stored)


def _flattened_slot(value: Any, bound: BoundPiece, parameter: torch.Tensor) -> Any:
    """A slot, flattened if the piece is a part of an embedding's rows."""
    is_cut = bound.tensor.numel() != parameter.numel()
    is_slot = isinstance(value, torch.Tensor) and value.shape == bound.tensor.shape
    return value.view(-1) if is_cut and is_slot else value


def _is_placed(value: Any, place: torch.Tensor) -> bool:
    """True if a slot lies in its place in the store."""
    return isinstance(value, torch.Tensor) and value.data_ptr() == place.data_ptr()


def _is_known(optimizer: optim.Optimizer) -> bool:
    """True if its class determines its step: no hooks, no ``step`` on the instance."""
    step = vars(optimizer).get("step")
    return (
        type(optimizer) in ELEMENTWISE | PARAMETERWISE | LAZY
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and (step is None or hasattr(step, "_wrapped_by_lr_sched"))
    )


def _tensors_of(
    parameters: Sequence[torch.Tensor], pieces: dict[int, list[BoundPiece]]
) -> list[torch.Tensor]:
    return [bound.tensor for parameter in parameters for bound in pieces.get(id(parameter), [])]


def _cut_slots(slots: Slots, parameter: torch.Tensor, bound: BoundPiece) -> Slots:
    cut: Slots = {}
    for slot, value in slots.items():
        if isinstance(value, torch.Tensor):
            fits = value.shape == parameter.shape and value.dim() > 0
            cut[slot] = _cut_slot(value, parameter, bound) if fits else value.clone()
        else:
            cut[slot] = value
    return cut


def _cut_slot(value: torch.Tensor, parameter: torch.Tensor, bound: BoundPiece) -> torch.Tensor:
    """Cut the piece's elements from a slot, after giving it the parameter's memory layout."""
    aligned = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=value.dtype, device=bound.tensor.device
    )
    return cut_piece(aligned.copy_(value), bound.piece).clone().view(bound.tensor.shape)
