"""torch optimizers as updaters: stepping on pieces, with slots by parameter name.

A rank's optimizer is a clone of the user's whose parameter groups hold the rank's pieces instead of
whole parameters. Options and slots are the same objects' worth either way, so a state made by one
number of ranks is right for any other.

How small the pieces may be depends on the optimizer. torch's own are known: most treat every
element by itself, some a parameter as a whole. Of any other nothing is known: it may clip by the
norm of all gradients, wrap another optimizer, or count its steps. So rank 0 alone steps it, the
user's own object on the user's own Parameters, and that is exact whatever it does.
"""

import functools
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn, optim

from lockstep.comm.exchange import cut_piece
from lockstep.errors import ModelError, OptionError, Problems, problem
from lockstep.parallel.allocator import temporary_memory
from lockstep.parallel.parcel import optimizer_contents, rebuild_optimizer
from lockstep.parallel.update import (
    BoundPiece,
    PieceSlots,
    SlotKey,
    Slots,
    Updater,
    assemble_slots,
)
from lockstep.plan.layout import Extent, Piece, elementwise_slices, whole_parameters

# Treat every element by itself. Exact types: a subclass may do anything.
ELEMENTWISE = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Adagrad,
        optim.Adadelta,
        optim.ASGD,
        optim.Rprop,
    }
)

# Treat every parameter by itself.
PARAMETERWISE = frozenset({optim.Adafactor, optim.Muon})


class TorchUpdater(Updater):
    """Steps a torch optimizer on pieces of its parameters.

    Args:
        optimizer: the user's optimizer; on rank 0 it gets the slots back after training.
        parameters: the model's parameters by name, the same objects that the optimizer holds.
    """

    def __init__(self, optimizer: optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self._is_known = _is_known(optimizer)  # hooks do not travel, so rank 0 says it for all
        self.is_elementwise = self._is_known and type(optimizer) in ELEMENTWISE
        self._active = optimizer
        self._pieces: list[BoundPiece] = []
        self._store: dict[SlotKey, torch.Tensor] = {}
        self._newborn: list[BoundPiece] = []  # pieces without slots until now

    def divide(
        self, extents: Sequence[Extent], num_ranks: int, num_shares: int
    ) -> list[list[Piece]]:
        if not self._is_known:
            return [*whole_parameters(extents, 1), *([] for _ in range(num_ranks - 1))]
        if self.is_elementwise:
            return elementwise_slices(extents, num_ranks, num_shares)
        return whole_parameters(extents, num_ranks)

    def bind(self, pieces: Sequence[BoundPiece]) -> None:
        self._pieces = list(pieces)
        same = all(piece.tensor is self.parameters[piece.name] for piece in pieces)
        self._active = self.optimizer if same or not self._is_known else self._clone()
        self._newborn = []
        if self._active is not self.optimizer:
            self._newborn = [one for one in pieces if one.tensor not in self._active.state]

    def slot_keys(self) -> list[SlotKey]:
        if not self.is_elementwise:
            return []
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return [
            SlotKey(parameter=names[id(parameter)], slot=slot)
            for group in self.optimizer.param_groups
            for slot in self._slots_of(group)
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def _slots_of(self, group: dict[str, Any]) -> list[str]:
        """The slots of a parameter's size that a step with these options makes: by making one."""
        dummy = torch.zeros(3)
        dummy.grad = torch.zeros(3)
        groups = [{**_options(group), "params": [dummy]}]
        contents = {"state": defaultdict(dict), "param_groups": groups}
        clone = self._rebuild(contents)
        _step_plainly(clone)
        return [
            slot
            for slot, value in clone.state[dummy].items()
            if isinstance(value, torch.Tensor) and value.shape == dummy.shape
        ]

    def _rebuild(self, contents: dict[str, Any]) -> optim.Optimizer:
        return rebuild_optimizer(
            type(self.optimizer), {**optimizer_contents(self.optimizer), **contents}
        )

    @torch.no_grad()
    @temporary_memory()
    def store_slots(self, store: Mapping[SlotKey, torch.Tensor]) -> None:
        self._store = dict(store)
        for key, stored in store.items():
            slots = self.optimizer.state.get(self.parameters[key.parameter], {})
            if key.slot in slots and slots[key.slot] is not stored:
                stored.copy_(slots[key.slot].clone())  # it may be another view of the same memory
                slots[key.slot] = stored

    def _clone(self) -> optim.Optimizer:
        by_parameter: dict[int, list[BoundPiece]] = defaultdict(list)
        state: dict[torch.Tensor, Slots] = defaultdict(dict)
        for bound in self._pieces:
            parameter = self.parameters[bound.name]
            by_parameter[id(parameter)].append(bound)
            if parameter in self.optimizer.state:
                slots = _cut_slots(self.optimizer.state[parameter], parameter, bound)
                state[bound.tensor] = {**slots, **self._stored_slots(bound, slots)}
        groups = [
            {**_options(group), "params": _tensors_of(group["params"], by_parameter)}
            for group in self.optimizer.param_groups
        ]
        return self._rebuild({"state": state, "param_groups": groups})

    def step(self) -> None:
        if self._active is not self.optimizer:
            with temporary_memory() if self._newborn else nullcontext():
                _step_plainly(self._active)
                self._store_newborn()
            vars(self.optimizer)["_opt_called"] = True  # a scheduler asks whether it has stepped
        elif self._pieces:
            self._step_itself()

    def _store_newborn(self) -> None:
        """The optimizer makes slots at a piece's first step: move them to the store."""
        born = [bound for bound in self._newborn if bound.tensor in self._active.state]
        self._newborn = [bound for bound in self._newborn if bound.tensor not in self._active.state]
        for bound in born:
            slots = self._active.state[bound.tensor]
            stored = self._stored_slots(bound, slots)
            for slot, place in stored.items():
                place.copy_(slots[slot])
            slots.update(stored)

    def _stored_slots(self, bound: BoundPiece, slots: Slots) -> dict[str, torch.Tensor]:
        """Where a piece's slots lie in the store: those that it has and that are kept there."""
        places = {slot: self._store.get(SlotKey(parameter=bound.name, slot=slot)) for slot in slots}
        return {
            slot: cut_piece(place, bound.piece)
            for slot, place in places.items()
            if place is not None
        }

    def _step_itself(self) -> None:
        """Step the user's own optimizer, on whole Parameters with the pieces' gradients."""
        whole = [(self.parameters[bound.name], bound.tensor) for bound in self._pieces]
        for parameter, tensor in whole:
            parameter.grad = tensor.grad
        self.optimizer.step()
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
        stored = () if with_stored else tuple(self._stored_slots(bound, slots))
        return PieceSlots(
            name=bound.name,
            start=bound.piece.start,
            stop=bound.piece.stop,
            slots={slot: value for slot, value in slots.items() if slot not in stored},
            stored=stored,
        )

    def take_slots(self, pieces: Sequence[PieceSlots]) -> None:
        """Give the user's optimizer the slots of whole parameters, put together from all ranks'."""
        if self._active is self.optimizer:
            return
        parameters, state = self.parameters, self.optimizer.state
        for name, values in assemble_slots(pieces, parameters).items():
            state[parameters[name]] = values
        for part in pieces:
            for slot in part.stored:
                key = SlotKey(parameter=part.name, slot=slot)
                state[parameters[part.name]][slot] = self._store[key]

    def options(self) -> list[dict[str, Any]]:
        return [_options(group) for group in self.optimizer.param_groups]

    def set_options(self, options: list[dict[str, Any]]) -> None:
        for group, values in zip(self._active.param_groups, options, strict=True):
            group.update(values)


def _step_plainly(clone: optim.Optimizer) -> None:
    """The step of one of torch's own optimizers, without what torch wraps it in.

    The wrappers run hooks, which a clone has none of, and import torch.compile's machinery at the
    first step: that doubles the time a helper needs to start.
    """
    step = _plain_step(type(clone))  # type: ignore[arg-type]  # a class is hashable
    with torch.set_grad_enabled(clone.defaults.get("differentiable", False)):
        step(clone)


@functools.cache
def _plain_step(kind: Any) -> Any:
    return inspect.unwrap(kind.step)


def make_optimizer(optimizer: Any, model: nn.Module) -> optim.Optimizer:
    """The user's optimizer: an instance over the model's parameters, or a class or function.

    Raises:
        OptionError: it is neither, or steps on other parameters than the model's.
    """
    if not isinstance(optimizer, optim.Optimizer):
        if not callable(optimizer):
            raise _no_optimizer(optimizer)
        made = optimizer(model.parameters())
        if not isinstance(made, optim.Optimizer):
            raise _no_optimizer(made)
        return make_optimizer(made, model)
    if isinstance(optimizer, optim.LBFGS | optim.SparseAdam):
        raise OptionError(
            problem(
                "LBFGS evaluates the loss several times per step and SparseAdam needs sparse "
                "gradients: neither fits a step on summed gradients.",
                received=type(optimizer).__name__,
                fix="Use another optimizer, such as torch.optim.AdamW.",
            )
        )
    _check_parameters(optimizer, model)
    _widen_slots(optimizer)
    return optimizer


def _no_optimizer(received: object) -> OptionError:
    return OptionError(
        problem(
            "`optimizer` must be a torch optimizer over model.parameters(), or make one from them.",
            received=type(received).__name__,
            fix="Pass functools.partial(torch.optim.Adam, lr=1e-3), for example.",
        )
    )


def _check_parameters(optimizer: optim.Optimizer, model: nn.Module) -> None:
    problems = Problems()
    own = {id(parameter) for parameter in model.parameters()}
    strange = sum(
        id(parameter) not in own
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    if strange:
        problems.add(
            "The optimizer must hold the model's own parameters.",
            received=f"{strange} tensors that are none of them",
            fix="Make it from model.parameters() of the model given to the Trainer.",
        )
    problems.raise_if_any(OptionError)


def _widen_slots(optimizer: optim.Optimizer) -> None:
    """Slots made before the model became float64 follow it, as in ``Optimizer.load_state_dict``."""
    if type(optimizer) not in ELEMENTWISE | PARAMETERWISE:
        return
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            if (
                parameter.dtype == torch.float64
                and isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and slot != "step"
            ):
                slots[slot] = value.double()


def _is_known(optimizer: optim.Optimizer) -> bool:
    """Whether its class alone says what a step does: no hooks, no ``step`` of its own."""
    step = vars(optimizer).get("step")
    return (
        type(optimizer) in ELEMENTWISE | PARAMETERWISE
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and (step is None or hasattr(step, "_wrapped_by_lr_sched"))
    )


def check_hooks(model: nn.Module) -> None:
    """Refuse gradient hooks on parameters where gradients come in shares.

    Raises:
        ModelError: with the parameters' names.
    """
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    if names:
        raise ModelError(
            problem(
                "Gradient hooks on parameters would see the gradient of a share, not of the batch.",
                received=f"hooks on {', '.join(names)}",
                fix="Remove them, or train with SingleDeviceStrategy.",
            )
        )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A copy: schedulers change a learning rate that is a tensor in place."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


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
    """A slot lies in memory as its parameter does, so the same elements are cut from both."""
    aligned = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype)
    return cut_piece(aligned.copy_(value), bound.piece).clone()
