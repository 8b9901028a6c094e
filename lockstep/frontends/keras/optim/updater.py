"""Keras optimizers as updaters: stepping on pieces, with slots by parameter name.

An optimizer of Keras keeps its slots in lists, a variable for each variable that it was built for.
So a rank builds a copy for its own pieces: variables whose values are cut from the whole ones, with
slots that are cut from the whole slots. Learning rate, schedule, clipping by value, weight decay,
averages and accumulated gradients are the copy's as they are the optimizer's.

How small the pieces may be depends on the optimizer. Most of Keras's own treat every element by
itself; some treat a variable as a whole, and so does clipping by its norm, or a constraint on it.
Of any other nothing is known, or it looks at all gradients at once: rank 0 alone steps it, the
user's own object on the model's own variables, and that is exact whatever it does.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from keras import device, optimizers

from lockstep.comm.collectives.gradients import cut_piece
from lockstep.errors import CheckpointError
from lockstep.frontends.keras.optim.fused_adam import step_bare_adam, use_fused_adam
from lockstep.frontends.keras.optim.optimizer_copy import (
    Slot,
    built,
    listed_slots,
    made_variables,
    options_of,
    set_options,
    stand_in,
    unbuilt,
)
from lockstep.parallel.storage.allocator import temporary_memory
from lockstep.parallel.update import BoundPiece, PieceSlots, SlotKey, Updater, assemble_slots
from lockstep.plan.layout import Extent, Piece
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.units import first_few

# Exact types: a subclass may do anything. Keras makes some as subclasses of its own for torch.
_ELEMENTWISE = frozenset(
    (
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Ftrl",
        "Lion",
        "Nadam",
        "RMSprop",
        "SGD",
        "ScheduleFreeAdamW",
    )
)
_PARAMETERWISE = frozenset(("Adafactor", "Lamb", "Muon"))

_Key = tuple[str, str]  # the name of a variable, and of its slot


class KerasUpdater(Updater):
    """Steps a Keras optimizer on pieces of the variables.

    Args:
        optimizer: the user's, built; on rank 0 it gets the slots back after training.
        variables: the model's variables by the names of their Parameters.
    """

    def __init__(self, optimizer: Any, variables: Mapping[str, Any]) -> None:
        self.optimizer = self.owner = optimizer
        self._variables = dict(variables)
        names = {id(variable): name for name, variable in variables.items()}
        known = [one for one in optimizer._trainable_variables if id(one) in names]
        self._names = [names[id(one)] for one in known]
        self.parameters = frozenset(self._names)
        # One that was built for another model, too, has slots of no use here.
        is_all = len(known) == len(optimizer._trainable_variables)
        self.is_known = is_all and _is_known(optimizer)
        self.is_elementwise = self.is_known and is_elementwise(optimizer, variables.values())
        self.shares_all = self.is_elementwise and not optimizer.use_ema
        self._template = unbuilt(optimizer)
        self._undecayed = {
            name
            for name, variable in variables.items()
            if id(variable) in getattr(optimizer, "_exclude_from_weight_decay", ())
        }
        self._slots = self._own_slots()  # the user's variables
        self._values: dict[_Key, torch.Tensor] = {}  # of slots, where there are no such variables
        self._store: dict[_Key, torch.Tensor] = {}
        self._active: Any = None
        self._steps_own = True  # one device steps the user's optimizer itself, as Keras does
        self._idle: Any = None  # a copy for a variable that is no part of the model
        self._pieces: list[BoundPiece] = []
        self._stepped: list[Any] = []  # the variables that are stepped on, by piece
        self._active_slots: list[dict[str, Any]] = []  # likewise, by name

    def __getstate__(self) -> dict[str, Any]:
        """What helpers need: the values of slots, but for those that lie in the store."""
        own = {"optimizer": None, "owner": None, "_slots": {}, "_values": self._unshared()}
        lists: dict[str, Any] = {"_pieces": [], "_stepped": [], "_active_slots": []}
        state = {**vars(self), **own, "_active": None, "_idle": None, **lists}
        return state if self.is_known else {**state, "_template": None}

    def _unshared(self) -> dict[_Key, torch.Tensor]:
        """The values of the slots that do not lie in the store."""
        return {
            key: variable.value.detach()
            for key, variable in self._slots.items()
            if key not in self._store
        }

    def _own_slots(self) -> dict[_Key, Any]:
        """The variables of the user's optimizer, by what they are."""
        if not self.is_known:
            return {}
        with device("meta"):
            variables = [self._variables[name] for name in self._names]
            _, kinds = built(self._template, [_on_meta(variable) for variable in variables])
        keys = _keys(kinds, self._names)
        return dict(zip(keys, made_variables(self.optimizer), strict=True))

    def divide(
        self, extents: Sequence[Extent], num_ranks: int, num_shares: int
    ) -> list[list[Piece]]:
        self._steps_own = num_shares == 1
        return super().divide(extents, num_ranks, num_shares)

    def bind(self, pieces: Sequence[BoundPiece]) -> None:
        self._pieces = list(pieces)
        own = [self._variables[bound.name] for bound in pieces]
        pairs = list(zip(own, pieces, strict=True))
        is_whole = pieces and all(variable._value is bound.tensor for variable, bound in pairs)
        if not self.is_known or (self._steps_own and self.optimizer is not None and is_whole):
            self._active, self._stepped = self.optimizer, own
            return
        self._stepped = [stand_in(variable, bound.tensor) for variable, bound in pairs]
        self._active, kinds = built(self._template, self._stepped)
        self._exclude_from_decay()
        use_fused_adam(self._active)
        self._active_slots = [{} for _ in pieces]
        keys = _keys(kinds, [bound.name for bound in pieces])
        for key, kind, made in zip(keys, kinds, made_variables(self._active), strict=True):
            whole = self._whole(key)
            if kind is None:
                made._value = whole
            else:
                made._value = self._cut(whole, pieces[kind.index], is_shared=key in self._store)
                self._active_slots[kind.index][kind.name] = made

    def _whole(self, key: _Key) -> torch.Tensor:
        """The whole value of a slot, in memory that may be written to."""
        if key in self._store:
            return self._store[key]
        return self._slots[key]._value if key in self._slots else self._values[key]

    def _cut(self, whole: torch.Tensor, bound: BoundPiece, *, is_shared: bool) -> torch.Tensor:
        """A slot's piece; a slot that lies in memory as its parameter is cut where that is."""
        if bound.piece.stop - bound.piece.start == self._variables[bound.name]._value.numel():
            return whole
        assert is_shared or whole.dim() == 0  # who cuts parameters has their slots in the store
        return cut_piece(whole, bound.piece) if is_shared else whole

    def _exclude_from_decay(self) -> None:
        """What is excluded from weight decay is known by its address."""
        excluded = {
            id(variable)
            for variable, bound in zip(self._stepped, self._pieces, strict=True)
            if bound.name in self._undecayed
        }
        active = self._active
        vars(active).update(
            _exclude_from_weight_decay=excluded, _exclude_from_weight_decay_cache={}
        )
        if not any(active._use_weight_decay(variable) for variable in self._stepped):
            vars(active)["weight_decay"] = None

    def slot_keys(self) -> list[SlotKey]:
        if not self.is_elementwise:
            return []
        return [
            SlotKey(parameter=name, slot=slot, dtype=variable._value.dtype)
            for (name, slot), variable in self._slots.items()
            if name and self._variables[name]._value.requires_grad
        ]

    @torch.no_grad()
    @temporary_memory()
    def store_slots(self, store: Mapping[SlotKey, torch.Tensor]) -> None:
        self._store = {(key.parameter, key.slot): stored for key, stored in store.items()}
        moved = [
            (self._slots[key]._value, stored)
            for key, stored in self._store.items()
            if self._slots[key]._value.data_ptr() != stored.data_ptr()
        ]
        # All are copied before any moves: some may be views of the same memory.
        values = [value.clone() for value, _ in moved]
        for (value, stored), copied in zip(moved, values, strict=True):
            value.data = stored.copy_(copied)

    @torch.no_grad()
    def step(self) -> None:
        optimizer = self._active
        if optimizer is None:
            return
        used = [
            (bound.tensor.grad, variable)
            for bound, variable in zip(self._pieces, self._stepped, strict=True)
            if bound.tensor.grad is not None
        ]
        if not used:
            self._average_own()
            self._step_on_nothing()
            return
        grads, variables = map(list, zip(*used, strict=True))
        if optimizer is not self.optimizer and step_bare_adam(optimizer, grads, variables):
            return
        # Losses are not scaled here, so gradients are not to be scaled back.
        scale = vars(optimizer).pop("loss_scale_factor")
        vars(optimizer)["loss_scale_factor"] = None
        try:
            optimizer.apply(grads, variables)
        finally:
            vars(optimizer)["loss_scale_factor"] = scale

    def _average_own(self) -> None:
        """Averages move in every step, be there gradients or not."""
        optimizer = self._active
        if not (self.is_known and optimizer.use_ema):
            return
        own = optimizer._trainable_variables
        optimizer._update_model_variables_moving_average(own)
        every = optimizer.ema_overwrite_frequency
        if every and (int(optimizer._iterations.value) + 1) % every == 0:
            optimizer._overwrite_model_variables_with_average_value(own)

    @torch.no_grad()
    def count_steps(self, number: int) -> None:
        for _ in range(number):
            self._step_on_nothing()

    def _step_on_nothing(self) -> None:
        """Have what an optimizer has once, its count of steps and the like, go on."""
        if not self.is_known:
            self._active._iterations.assign_add(1)
            return
        if self._idle is None:
            every = list(self._variables.values())  # those of other stages have no values here
            here = [one for one in every if not one._value.is_meta]
            like = (here or every)[0]
            idle = like._value.detach().new_zeros(1, device=None if here else "cpu")
            variable = stand_in(like, idle)
            self._idle, kinds = built(self._template, [variable])
            for key, kind, made in zip(
                _keys(kinds, [""]), kinds, made_variables(self._idle), strict=True
            ):
                if kind is None:
                    made._value = self._whole(key)
        (variable,) = self._idle._trainable_variables
        self._idle.apply([torch.zeros_like(variable._value)], [variable])

    def slots(self, *, with_stored: bool = False) -> list[PieceSlots]:
        if self._active is None or self._active is self.optimizer:
            return []
        return [
            self._piece_slots(bound, slots, with_stored)
            for bound, slots in zip(self._pieces, self._active_slots, strict=True)
        ]

    def _piece_slots(
        self, bound: BoundPiece, slots: Mapping[str, Any], with_stored: bool
    ) -> PieceSlots:
        stored = [slot for slot in slots if (bound.name, slot) in self._store]
        shown = slots if with_stored else [slot for slot in slots if slot not in stored]
        return PieceSlots(
            name=bound.name,
            start=bound.piece.start,
            stop=bound.piece.stop,
            slots={slot: slots[slot]._value for slot in shown},
            stored=() if with_stored else tuple(stored),
        )

    def take_slots(self, pieces: Sequence[PieceSlots]) -> None:
        """Give the user's optimizer the slots that other ranks have kept to themselves."""
        if self._active is self.optimizer:
            return
        parameters = {name: variable._value for name, variable in self._variables.items()}
        for name, slots in assemble_slots(pieces, parameters).items():
            for slot, value in slots.items():
                self._slots[name, slot].assign(value)

    def stored(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, place) for (name, _), place in self._store.items()]

    def state(self) -> dict[str, Any]:
        found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for (name, slot), variable in self._named_slots().items():
            found[name][slot] = variable.value.detach()
        return {"optimizer": dict(found), "options": self.options()}

    def load_state(self, state: TrainingState) -> None:
        slots = self._named_slots()
        told = {(name, slot) for name, own in state.optimizer.items() for slot in own}
        if told != slots.keys():
            raise _other_slots(sorted(map(str, told ^ slots.keys())))
        set_options(self._known_optimizer, state.options[0])
        for (name, slot), variable in slots.items():
            variable.assign(state.optimizer[name][slot])

    @property
    def _known_optimizer(self) -> Any:
        """The user's; in a helper, which has it not, the copy that it steps."""
        return self._active if self.optimizer is None else self.optimizer

    def _named_slots(self) -> dict[_Key, Any]:
        """The variables of the known optimizer, but for its options, by parameter and slot.

        What belongs to no parameter is called as the attribute that holds it, or by its path.
        """
        known = {id(variable): key for key, variable in self._slots.items() if key[0]}
        if self.optimizer is None:
            for bound, slots in zip(self._pieces, self._active_slots, strict=True):
                known |= {id(variable): (bound.name, slot) for slot, variable in slots.items()}
        if not self.is_known:
            names = {id(variable): name for name, variable in self._variables.items()}
            trained = [names.get(id(one)) for one in self.optimizer._trainable_variables]
            for key, slot in listed_slots(self.optimizer, len(trained)).items():
                if (name := trained[slot.index]) is not None:
                    known[key] = name, slot.name
        held = {id(one): ("", name) for name, one in vars(self._known_optimizer).items()}
        numbers: dict[str, count[int]] = defaultdict(count)
        return {
            known.get(id(one))
            or held.get(id(one))
            or ("", f"{one.path} {next(numbers[one.path])}"): one
            for one in made_variables(self._known_optimizer)
        }

    def changing(self) -> Any:
        if not self.shares_all:
            return None
        return {"options": self.options(), "values": self._unshared()}

    @torch.no_grad()
    def set_changing(self, changing: Any) -> None:
        self.set_options(changing["options"])
        for key, value in changing["values"].items():
            self._whole(key).copy_(value)

    def unshared_slots(self) -> list[Any]:
        """The variables of the user's optimizer that other ranks have copies of."""
        return [variable for key, variable in self._slots.items() if key not in self._store]

    def recover(self) -> list[str]:
        if self._active is self.optimizer:
            return []
        known = {bound.name for bound in self._pieces}
        lost = {name for name, slot in self._slots if name and (name, slot) not in self._store}
        return [name for name in self._names if name in lost - known]

    def options(self) -> list[dict[str, Any]]:
        return [options_of(self._known_optimizer)]

    def set_options(self, options: list[dict[str, Any]]) -> None:
        if self._active is not None:
            set_options(self._active, options[0])


def _keys(kinds: Sequence[Slot | None], names: Sequence[str]) -> list[_Key]:
    """Names for what building has made; what is there once is numbered."""
    numbers = count()
    return [
        ("", str(next(numbers))) if kind is None else (names[kind.index], kind.name)
        for kind in kinds
    ]


def _other_slots(differing: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        "The optimizer's state must have the same slots as the optimizer.",
        received=f"slots of only one of them: {first_few(differing)}",
        fix="Compile the model with the optimizer of the run that saved the state.",
    )


def _on_meta(variable: Any) -> Any:
    """A variable of the same shape, without memory."""
    return stand_in(variable, torch.empty_like(variable._value, device="meta"))


def _is_known(optimizer: Any) -> bool:
    """Whether its class alone says what a step does, and variable by variable."""
    kind = type(optimizer)
    is_own = kind.__module__.startswith("keras.src.") and issubclass(kind, optimizers.Optimizer)
    named = kind.__name__ in (*_ELEMENTWISE, *_PARAMETERWISE)
    return is_own and named and not optimizer.global_clipnorm


def is_elementwise(optimizer: Any, variables: Iterable[Any]) -> bool:
    """Whether it treats every element of these variables by itself, so that pieces may be cut."""
    is_free = all(variable.constraint is None for variable in variables)
    return type(optimizer).__name__ in _ELEMENTWISE and is_free and not optimizer.clipnorm
