"""Keras optimizers as updaters: they step on pieces of variables, with slots by parameter name.

A Keras optimizer keeps its slots in lists, with a variable for each variable that it was built for.
So a rank builds a copy for its own pieces: variables whose values are cut from the whole ones, with
slots that are cut from the whole slots. The copy has the optimizer's learning rate, schedule,
clipping by value, weight decay, averages and accumulated gradients.

How small the pieces may be depends on the optimizer. Most of Keras's own are elementwise. Some
work on a whole variable, as do clipping by its norm and a constraint on it. All others are unknown,
or need all gradients at once: only rank 0 steps the user's own object, on the model's own
variables, which is exact for any optimizer.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from keras import device, optimizers

from lockstep.errors import CheckpointError
from lockstep.formatting import first_few
from lockstep.frontends.keras.optim.fused_adam import step_bare_adam, use_fused_adam
from lockstep.frontends.keras.optim.optimizer_copy import (
    Slot,
    built,
    built_variables,
    listed_slots,
    options_of,
    set_options,
    unbuilt,
    variable_like,
)
from lockstep.parallel.storage.allocator import temporary_memory
from lockstep.parallel.updater_interface import (
    BoundPiece,
    PieceSlots,
    SlotKey,
    Updater,
    assemble_slots,
)
from lockstep.plan.layout import Extent, Piece
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.optim.stored_pieces import StoredPieces

# Names of classes in keras.src: a user's subclass may do anything. Keras itself makes subclasses
# for torch.
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

_Key = tuple[str, str]  # the names of a variable and of its slot


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
        # An optimizer that was built for another model as well has slots of that one.
        is_all = len(known) == len(optimizer._trainable_variables)
        self.is_known = is_all and _is_known(optimizer)
        self.is_elementwise = self.is_known and is_elementwise(optimizer, variables.values())
        self.shares_all = self.is_elementwise and not optimizer.use_ema
        self._template = unbuilt(optimizer)
        self._without_decay = {
            name
            for name, variable in variables.items()
            if id(variable) in getattr(optimizer, "_exclude_from_weight_decay", ())
        }
        self._slots = self._user_slots()  # the user's variables
        self._values: dict[_Key, torch.Tensor] = {}  # of slots, in helpers, which lack variables
        self._store: dict[_Key, torch.Tensor] = {}
        self._active: Any = None
        self._may_step_directly = True  # the user's optimizer itself, on one device
        self._dummy: Any = None  # a copy for a variable outside of the model
        self._pieces: list[BoundPiece] = []
        self._stored_pieces = StoredPieces()
        self._step_variables: list[Any] = []  # by piece
        self._active_slots: list[dict[str, Any]] = []  # by piece, and name

    def __getstate__(self) -> dict[str, Any]:
        """What helpers need: the values of slots that are not in the store."""
        own = {"optimizer": None, "owner": None, "_slots": {}, "_values": self._unshared()}
        lists: dict[str, Any] = {"_pieces": [], "_step_variables": [], "_active_slots": []}
        state = {**vars(self), **own, "_active": None, "_dummy": None, **lists}
        return state if self.is_known else {**state, "_template": None}

    def _unshared(self) -> dict[_Key, torch.Tensor]:
        """The values of the slots that are not in the store."""
        return {
            key: variable.value.detach()
            for key, variable in self._slots.items()
            if key not in self._store
        }

    def _user_slots(self) -> dict[_Key, Any]:
        """The slot variables of the user's optimizer."""
        if not self.is_known:
            return {}
        with device("meta"):
            variables = [self._variables[name] for name in self._names]
            _, kinds = built(self._template, [_on_meta(variable) for variable in variables])
        keys = _keys(kinds, self._names)
        return dict(zip(keys, built_variables(self.optimizer), strict=True))

    def divide(
        self, extents: Sequence[Extent], num_ranks: int, num_shares: int
    ) -> list[list[Piece]]:
        self._may_step_directly = num_shares == 1
        return super().divide(extents, num_ranks, num_shares)

    def bind(self, pieces: Sequence[BoundPiece]) -> None:
        self._pieces, self._stored_pieces = list(pieces), StoredPieces()
        own = [self._variables[bound.name] for bound in pieces]
        pairs = list(zip(own, pieces, strict=True))
        is_whole = pieces and all(variable._value is bound.tensor for variable, bound in pairs)
        if not self.is_known or (
            self._may_step_directly and self.optimizer is not None and is_whole
        ):
            self._active, self._step_variables = self.optimizer, own
            return
        self._step_variables = [variable_like(variable, bound.tensor) for variable, bound in pairs]
        self._active, kinds = built(self._template, self._step_variables)
        self._exclude_from_decay()
        use_fused_adam(self._active)
        self._active_slots = [{} for _ in pieces]
        keys = _keys(kinds, [bound.name for bound in pieces])
        for key, kind, made in zip(keys, kinds, built_variables(self._active), strict=True):
            whole = self._whole(key)
            if kind is None:
                made._value = whole
            else:
                made._value = self._cut(whole, pieces[kind.index], is_shared=key in self._store)
                self._active_slots[kind.index][kind.name] = made

    def _whole(self, key: _Key) -> torch.Tensor:
        """The whole value of a slot, in writable memory."""
        if key in self._store:
            return self._store[key]
        return self._slots[key]._value if key in self._slots else self._values[key]

    def _cut(self, whole: torch.Tensor, bound: BoundPiece, *, is_shared: bool) -> torch.Tensor:
        """A slot's piece; a slot with its parameter's layout in memory is cut where that is."""
        if is_shared:
            return self._stored_pieces.of(whole, bound)
        is_whole = (
            bound.piece.stop - bound.piece.start == self._variables[bound.name]._value.numel()
        )
        assert is_whole or whole.dim() == 0  # if parameters are cut, slots are in the store
        return whole

    def _exclude_from_decay(self) -> None:
        """Exclude the pieces of excluded variables, which Keras knows by id, from weight decay."""
        excluded = {
            id(variable)
            for variable, bound in zip(self._step_variables, self._pieces, strict=True)
            if bound.name in self._without_decay
        }
        active = self._active
        vars(active).update(
            _exclude_from_weight_decay=excluded, _exclude_from_weight_decay_cache={}
        )
        if not any(active._use_weight_decay(variable) for variable in self._step_variables):
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
        # Copy all before any moves: some may be views of the same memory.
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
            for bound, variable in zip(self._pieces, self._step_variables, strict=True)
            if bound.tensor.grad is not None
        ]
        if not used:
            self._update_averages()
            self._count_step()
            return
        grads, variables = map(list, zip(*used, strict=True))
        if optimizer is not self.optimizer and step_bare_adam(optimizer, grads, variables):
            return
        # Losses are not scaled here, so gradients must not be unscaled.
        scale = vars(optimizer).pop("loss_scale_factor")
        vars(optimizer)["loss_scale_factor"] = None
        try:
            optimizer.apply(grads, variables)
        finally:
            vars(optimizer)["loss_scale_factor"] = scale

    def _update_averages(self) -> None:
        """Update moving averages, which move in steps without gradients, too."""
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
            self._count_step()

    def _count_step(self) -> None:
        """Advance what an optimizer has once, such as its step count."""
        if not self.is_known:
            self._active._iterations.assign_add(1)
            return
        if self._dummy is None:
            every = list(self._variables.values())  # on the meta device for other stages
            here = [one for one in every if not one._value.is_meta]
            like = (here or every)[0]
            idle = like._value.detach().new_zeros(1, device=None if here else "cpu")
            variable = variable_like(like, idle)
            self._dummy, kinds = built(self._template, [variable])
            for key, kind, made in zip(
                _keys(kinds, [""]), kinds, built_variables(self._dummy), strict=True
            ):
                if kind is None:
                    made._value = self._whole(key)
        (variable,) = self._dummy._trainable_variables
        self._dummy.apply([torch.zeros_like(variable._value)], [variable])

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
        """Give the user's optimizer the slots that other ranks have in memory of their own."""
        if self._active is self.optimizer:
            return
        parameters = {name: variable._value for name, variable in self._variables.items()}
        for name, slots in assemble_slots(pieces, parameters).items():
            for slot, value in slots.items():
                self._slots[name, slot].assign(value)

    def write_back_slots(self) -> None:
        self._stored_pieces.write_back()

    def stored(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, place) for (name, _), place in self._store.items()]

    def state(self) -> dict[str, Any]:
        found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for (name, slot), variable in self._named_slots().items():
            found[name][slot] = variable.value.detach()
        return {"optimizer": dict(found), "options": self.options()}

    def load_state(self, state: TrainingState) -> None:
        slots = self._named_slots()
        saved = {(name, slot) for name, own in state.optimizer.items() for slot in own}
        if differing := sorted(map(str, saved ^ slots.keys())):
            raise CheckpointError(
                "The optimizer's state must have the same slots as the optimizer.",
                received=f"slots of only one of them: {first_few(differing)}",
                fix="Compile the model with the optimizer of the run that saved the state.",
            )
        set_options(self._local_optimizer, state.options[0])
        for (name, slot), variable in slots.items():
            variable.assign(state.optimizer[name][slot])

    @property
    def _local_optimizer(self) -> Any:
        """The user's; in a helper, which lacks it, the copy that it steps."""
        return self._active if self.optimizer is None else self.optimizer

    def _named_slots(self) -> dict[_Key, Any]:
        """The variables of the local optimizer, without its options, by parameter and slot.

        A variable that belongs to no parameter is named by its attribute, or by its path.
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
        attributes = {id(one): ("", name) for name, one in vars(self._local_optimizer).items()}
        numbers: dict[str, count[int]] = defaultdict(count)
        return {
            known.get(id(one))
            or attributes.get(id(one))
            or ("", f"{one.path} {next(numbers[one.path])}"): one
            for one in built_variables(self._local_optimizer)
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

    def unshared_slots(self, *, has_copies: bool = False) -> list[Any]:
        """The variables of the user's optimizer of which other ranks have copies.

        Args:
            has_copies: so has each rank of what is stored.
        """
        return [
            variable
            for key, variable in self._slots.items()
            if has_copies or key not in self._store
        ]

    def recover(self) -> list[str]:
        if self._active is self.optimizer:
            return []
        known = {bound.name for bound in self._pieces}
        lost = {name for name, slot in self._slots if name and (name, slot) not in self._store}
        return [name for name in self._names if name in lost - known]

    def options(self) -> list[dict[str, Any]]:
        return [options_of(self._local_optimizer)]

    def set_options(self, options: list[dict[str, Any]]) -> None:
        if self._active is not None:
            set_options(self._active, options[0])


def _keys(kinds: Sequence[Slot | None], names: Sequence[str]) -> list[_Key]:
    """Keys of the variables that ``build`` made; those that are no slot are numbered."""
    numbers = count()
    return [
        ("", str(next(numbers))) if kind is None else (names[kind.index], kind.name)
        for kind in kinds
    ]


def _on_meta(variable: Any) -> Any:
    """A copy of a variable on the meta device."""
    return variable_like(variable, torch.empty_like(variable._value, device="meta"))


def _is_known(optimizer: Any) -> bool:
    """Whether the optimizer's class determines its step, and it steps variable by variable."""
    kind = type(optimizer)
    is_own = kind.__module__.startswith("keras.src.") and issubclass(kind, optimizers.Optimizer)
    named = kind.__name__ in (*_ELEMENTWISE, *_PARAMETERWISE)
    return is_own and named and not optimizer.global_clipnorm


def is_elementwise(optimizer: Any, variables: Iterable[Any]) -> bool:
    """Whether the optimizer steps these variables elementwise, so that pieces may be cut."""
    is_free = all(variable.constraint is None for variable in variables)
    return type(optimizer).__name__ in _ELEMENTWISE and is_free and not optimizer.clipnorm
