"""What a Worker asks of an optimizer: to step on pieces of parameters, with slots by name.

The engine's own optimizers are one implementation (``train.optim.updaters``); a front end brings
its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.plan.layout import Extent, Piece, elementwise_slices, whole_parameters

# Slots of one parameter: exp_avg, momentum_buffer, step, ...; tensors and plain numbers.
Slots = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BoundPiece:
    """A piece of a parameter that this rank updates.

    Attributes:
        name: the parameter's name.
        piece: which elements.
        tensor: these elements, in the memory where the parameter lives; the updater reads its
            ``.grad`` and changes it in place. A ``.grad`` of None means: not used, do not touch.
    """

    name: str
    piece: Piece
    tensor: torch.Tensor


@dataclass(kw_only=True)
class PieceSlots:
    """The slots of one piece, on their way to being one parameter's.

    Attributes:
        name: the parameter's name.
        start: first element of the piece.
        stop: one after its last.
        slots: by name.
        stored: names of those that lie in the store of slots and need not go anywhere.
    """

    name: str
    start: int
    stop: int
    slots: Slots = field(default_factory=dict)
    stored: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SlotKey:
    """A slot of a parameter's size: its parameter's name and its own; None for its dtype."""

    parameter: str
    slot: str
    dtype: torch.dtype | None = None


class Updater(ABC):
    """An optimizer that can work on pieces."""

    is_elementwise = False  # whether ``divide`` may cut parameters
    is_known: bool = False  # whether it leaves parameters alone that have no gradient
    # Whether every slot lies in the store, or is the same on all ranks.
    shares_all: bool = False
    takes_sparse: bool = False  # whether gradients of embeddings may be sparse
    hands_on = False  # whether a step hands gradients on as they are
    owner: object = None  # whose slots these are: the front end's optimizer
    turn = 0  # of several optimizers, which one steps

    def divide(
        self, extents: Sequence[Extent], num_ranks: int, num_shares: int
    ) -> list[list[Piece]]:
        """The pieces of the trainable parameters that each rank updates.

        They may be as small as the optimizer's arithmetic allows and no smaller: dividing must not
        change what a step computes.
        """
        if not self.is_known:
            return [*whole_parameters(extents, 1), *([] for _ in range(num_ranks - 1))]
        if self.is_elementwise:
            return elementwise_slices(extents, num_ranks, num_shares)
        return whole_parameters(extents, num_ranks)

    @abstractmethod
    def bind(self, pieces: Sequence[BoundPiece]) -> None:
        """From now on step on these pieces; slots the optimizer has already are cut to fit."""

    def slot_keys(self) -> list[SlotKey]:
        """The slots that may lie in shared memory, where the optimizer tells before it steps."""
        return []

    def store_slots(self, store: Mapping[SlotKey, torch.Tensor]) -> None:
        """From now on keep these slots there; those that the optimizer has already move in."""
        assert not store

    def options_spec(self) -> TensorSpec | None:
        """The tensor for options that may change at any step; None where they do not."""
        return None

    def share_options(self, tensor: torch.Tensor) -> None:
        """From now on take such options from there: rank 0 writes them between two steps."""
        raise NotImplementedError

    def publish_options(self) -> None:
        """On rank 0, between two steps: all ranks step with the optimizer's present options."""
        return

    @abstractmethod
    def step(self) -> None:
        """Update every piece that has a gradient."""

    def velocity(self, name: str) -> torch.Tensor:
        """Of an outer optimizer, that of a parameter."""
        raise NotImplementedError

    def count_steps(self, number: int) -> None:
        """Other ranks have made so many steps, and this one none."""
        return

    takes_notes = False
    """Whether ``slots`` tells all that a step changes beside what lies in the store, shortly."""

    def take_notes(self, notes: Sequence[PieceSlots]) -> None:
        """Go on with what ``slots`` of another process told, which had bound these pieces."""
        raise NotImplementedError

    def look_again(self) -> None:
        """Somebody may have set the weights."""
        return

    @abstractmethod
    def slots(self, *, with_stored: bool = False) -> list[PieceSlots]:
        """The slots of every piece that has any; of those in the store only the names, or all."""

    def take_slots(self, pieces: Sequence[PieceSlots]) -> None:
        """Give the front end's optimizer slots that ``slots`` of all ranks told."""
        raise NotImplementedError

    def stored(self) -> list[tuple[str, torch.Tensor]]:
        """Whole tensors in the store, each with its parameter's name, in one order on all ranks."""
        return []

    def state(self) -> dict[str, Any]:
        """The parts of a ``TrainingState`` that it knows, by name; no copies.

        They are what the front end's optimizer knows, and what is kept beside it.
        """
        raise NotImplementedError

    def load_state(self, state: Any) -> None:
        """Have the front end's optimizer know what such a state says; it stays as it is."""
        raise NotImplementedError

    def changing(self) -> Any:
        """What a step or the script changes beside weights and stored slots, for ``set_changing``.

        None where that is not all that it changes.
        """
        return None

    def set_changing(self, changing: Any) -> None:
        """Take over what ``changing`` of another rank gave, on the pieces that are bound."""
        raise NotImplementedError

    def recover(self) -> list[str]:
        """After a failure give the front end's optimizer what this rank knows of the slots.

        Returns:
            Names of the parameters whose slots are lost: they start anew.
        """
        return []

    @abstractmethod
    def options(self) -> list[dict[str, Any]]:
        """Hyperparameters of every parameter group, without the parameters."""

    @abstractmethod
    def set_options(self, options: list[dict[str, Any]]) -> None:
        """Take over hyperparameters that ``options`` of another rank gave."""


def assemble_slots(
    pieces: Sequence[PieceSlots], parameters: Mapping[str, torch.Tensor]
) -> dict[str, Slots]:
    """Join the pieces' slots to whole parameters' slots.

    Args:
        pieces: of all ranks.
        parameters: the parameters by name, for their shapes.

    Returns:
        Slots by parameter name. A slot of a piece's size becomes one of the parameter's shape; any
        other slot (a step count) is the same for all pieces and taken from the first.
    """
    assembled: dict[str, Slots] = {}
    for part in sorted(pieces, key=lambda part: part.start):
        parameter = parameters[part.name]
        whole = assembled.setdefault(part.name, {})
        for slot, value in part.slots.items():
            if not _is_cut(value, part, parameter):
                whole.setdefault(slot, value.clone() if isinstance(value, torch.Tensor) else value)
                continue
            if slot not in whole:
                whole[slot] = torch.empty_strided(
                    parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device
                )
            flat = whole[slot].as_strided((parameter.numel(),), (1,))
            flat[part.start : part.stop] = value
    return assembled


def _is_cut(value: Any, part: PieceSlots, parameter: torch.Tensor) -> bool:
    length = part.stop - part.start
    return (
        isinstance(value, torch.Tensor)
        and length != parameter.numel()
        and value.dim() == 1
        and value.numel() == length
    )
