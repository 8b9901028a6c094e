"""torch optimizers as updaters: stepping on pieces, with slots by parameter name.

A rank's optimizer is a clone of the user's whose parameter groups hold the rank's pieces instead of
whole parameters. Options and slots are the same objects' worth either way, so a state made by one
number of ranks is right for any other.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn, optim

from lockstep.comm.exchange import cut_piece
from lockstep.errors import ModelError, OptionError, Problems, problem
from lockstep.parallel.parcel import optimizer_contents, rebuild_optimizer
from lockstep.parallel.update import BoundPiece, PieceSlots, Slots, Updater

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


class TorchUpdater(Updater):
    """Steps a torch optimizer on pieces of its parameters.

    Args:
        optimizer: the user's optimizer; on rank 0 it gets the slots back after training.
        parameters: the model's parameters by name, the same objects that the optimizer holds.
    """

    def __init__(self, optimizer: optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self._active = optimizer
        self._pieces: list[BoundPiece] = []

    @property
    def elementwise(self) -> bool:
        return type(self.optimizer) in ELEMENTWISE

    def bind(self, pieces: Sequence[BoundPiece]) -> None:
        self._pieces = list(pieces)
        if all(piece.tensor is self.parameters[piece.name] for piece in pieces):
            self._active = self.optimizer
            return
        by_parameter: dict[int, list[BoundPiece]] = defaultdict(list)
        for piece in pieces:
            by_parameter[id(self.parameters[piece.name])].append(piece)
        groups = [
            {**_options(group), "params": _tensors_of(group["params"], by_parameter)}
            for group in self.optimizer.param_groups
        ]
        state: dict[torch.Tensor, Slots] = defaultdict(dict)
        for bound in pieces:
            parameter = self.parameters[bound.name]
            if parameter in self.optimizer.state:
                state[bound.tensor] = _cut_slots(self.optimizer.state[parameter], parameter, bound)
        contents = {**optimizer_contents(self.optimizer), "state": state, "param_groups": groups}
        self._active = rebuild_optimizer(type(self.optimizer), contents)

    def step(self) -> None:
        self._active.step()

    def slots(self) -> list[PieceSlots]:
        return [
            PieceSlots(
                name=bound.name,
                start=bound.piece.start,
                stop=bound.piece.stop,
                slots=dict(self._active.state[bound.tensor]),
            )
            for bound in self._pieces
            if bound.tensor in self._active.state
        ]

    def take_slots(self, slots: dict[str, Slots]) -> None:
        """Give the user's optimizer the slots of whole parameters."""
        if self._active is self.optimizer:
            return
        for name, values in slots.items():
            self.optimizer.state[self.parameters[name]] = values

    def options(self) -> list[dict[str, Any]]:
        return [_options(group) for group in self.optimizer.param_groups]

    def set_options(self, options: list[dict[str, Any]]) -> None:
        for group, values in zip(self._active.param_groups, options, strict=True):
            group.update(values)


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
        optimizer = made
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
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


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
