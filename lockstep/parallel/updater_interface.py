"""The interface of an optimizer for a Worker: steps on pieces of parameters, with named slots.

The engine's own optimizers are one implementation (``train.optim.updaters``); a front end brings
its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import optim

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
        tensor: these elements, in the parameter's memory; the updater reads its ``.grad`` and
            changes it in place. With a ``.grad`` of None it is left unchanged.
    """

    name: str
    piece: Piece
    tensor: torch.Tensor


@dataclass(kw_only=True)
class PieceSlots:
    """The slots of one piece, from which ``assemble_slots`` makes a parameter's.

    Attributes:
        name: the parameter's name.
        start: first element of the piece.
        stop: one after its last.
        slots: by name.
        stored: names of the slots that are in the store and are not sent.
    """

    name: str
    start: int
    stop: int
    slots: Slots = field(default_factory=dict)
    stored: tuple[str, ...] = ()

    @property
    def has_arrays(self) -> bool:
        """True if a tensor is not in the store: an option has changed which slots exist."""
        return any(isinstance(value, torch.Tensor) and value.dim() for value in self.slots.values())


@dataclass(frozen=True, kw_only=True)
class SlotKey:
    """A slot of a parameter's size: its parameter's name and its own; dtype None for the same."""

    parameter: str
    slot: str
    dtype: torch.dtype | None = None


class Updater(ABC):
    """An optimizer that can work on pieces."""

    is_elementwise = False  # whether ``divide`` may cut parameters
    # An optimizer of torch whose step leaves out the update where its ``found_inf`` is 1.
    guarded: optim.Optimizer | None = None
    is_known: bool = False  # whether it leaves parameters without a gradient unchanged
    # Whether every slot is in the store, or the same on all ranks.
    shares_all: bool = False
    takes_sparse: bool = False  # whether gradients of embeddings may be sparse
    hands_on = False  # whether a step only passes gradients on
    owner: object = None  # whose slots these are: the front end's optimizer
    turn = 0  # the number of the optimizer that steps, of several

    def divide(
        self, extents: Sequence[Extent], num_ranks: int, num_shares: int
    ) -> list[list[Piece]]:
        """The pieces of the trainable parameters that each rank updates.

        Dividing must not change what a step computes, which limits how small pieces may be.
        """
        if not self.is_known:
            return [*whole_parameters(extents, 1), *([] for _ in range(num_ranks - 1))]
        if self.is_elementwise:
            return elementwise_slices(extents, num_ranks, num_shares)
        return whole_parameters(extents, num_ranks)

    def step_on(self, device: torch.device | None) -> None:
        """Before ``bind``: stored slots come to a device while they are stepped; None: they stay.

        Raises:
            NotImplementedError: all slots are stepped at once.
        """
        if device is not None:
            raise NotImplementedError

    @abstractmethod
    def bind(self, pieces: Sequence[BoundPiece]) -> None:
        """Step on these pieces from now on; existing slots are cut to fit."""

    def slot_keys(self) -> list[SlotKey]:
        """The slots that may be in shared memory, if they are known before the first step."""
        return []

    def store_slots(self, store: Mapping[SlotKey, torch.Tensor]) -> None:
        """Keep these slots in the store from now on; existing ones are moved there."""
        assert not store

    def options_spec(self) -> TensorSpec | None:
        """The tensor for options that may change at any step; None without such options."""
        return None

    def share_options(self, tensor: torch.Tensor) -> None:
        """Read such options from the tensor, which rank 0 writes between two steps."""
        raise NotImplementedError

    def publish_options(self) -> None:
        """Write the optimizer's present options for all ranks; on rank 0, between two steps."""
        return

    @abstractmethod
    def step(self) -> None:
        """Update every piece that has a gradient."""

    def velocity(self, name: str) -> torch.Tensor:
        """A parameter's velocity in an outer optimizer."""
        raise NotImplementedError

    def count_steps(self, number: int) -> None:
        """Count steps that other ranks have made and this one has not."""
        return

    takes_notes = False
    """True if ``slots`` is short and has all that a step changes outside of the store."""

    def take_notes(self, notes: Sequence[PieceSlots]) -> None:
        """Continue with the ``slots`` of another process that had bound these pieces."""
        raise NotImplementedError

    def reload_weights(self) -> None:
        """Take notice of weights that may have been set from outside."""
        return

    @abstractmethod
    def slots(self, *, with_stored: bool = False) -> list[PieceSlots]:
        """The slots of every piece; of those in the store only names without ``with_stored``."""

    def take_slots(self, pieces: Sequence[PieceSlots]) -> None:
        """Give the front end's optimizer the ``slots`` of all ranks."""
        raise NotImplementedError

    def write_back_slots(self) -> None:
        """Bring this rank's pieces of stored slots to the store, if it steps on copies of them."""
        return

    def stored(self) -> list[tuple[str, torch.Tensor]]:
        """Stored tensors with their parameters' names, in the same order on all ranks."""
        return []

    def state(self) -> dict[str, Any]:
        """The updater's parts of a ``TrainingState``, by name; no copies.

        They are the state of the front end's optimizer, and of the wrappers around it.
        """
        raise NotImplementedError

    def load_state(self, state: Any) -> None:
        """Load such a state, which is not changed, into the front end's optimizer."""
        raise NotImplementedError

    def changing(self) -> Any:
        """State that steps or the script change, beside weights and stored slots.

        It is for ``set_changing``; None if there is other state, too.
        """
        return None

    def set_changing(self, changing: Any) -> None:
        """Set the ``changing`` state of another rank, on the bound pieces."""
        raise NotImplementedError

    def recover(self) -> list[str]:
        """After a failure, give the front end's optimizer this rank's slots.

        Returns:
            Names of the parameters whose slots are lost and are initialised again.
        """
        return []

    @abstractmethod
    def options(self) -> list[dict[str, Any]]:
        """Hyperparameters of every parameter group, without the parameters."""

    @abstractmethod
    def set_options(self, options: list[dict[str, Any]]) -> None:
        """Set the ``options`` of another rank."""


def assemble_slots(
    pieces: Sequence[PieceSlots], parameters: Mapping[str, torch.Tensor]
) -> dict[str, Slots]:
    """Join the slots of pieces to slots of whole parameters.

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
