"""What is seen of a model at one time, as digests in a frame of a record."""

import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.proof.recording.digests import WIDTH, Pending
from lockstep.proof.recording.keras_variables import layers_of
from lockstep.proof.recording.names import Names
from lockstep.proof.recording.record_frames import Entries, Entry, Group, Module, RecordWriter
from lockstep.proof.recording.shards import Piece, Shard, local_part

_MATTERING = (
    torch.nn.modules.batchnorm._BatchNorm,
    torch.nn.modules.dropout._DropoutNd,
    nn.RNNBase,
)


class Table:
    """Numbers entries, and writes each once."""

    def __init__(self, writer: RecordWriter) -> None:
        self._writer = writer
        self._numbers: dict[tuple[str, str, torch.dtype, Shard], int] = {}
        self._new: list[Entry] = []

    def number_of(self, kind: str, name: str, dtype: torch.dtype, shard: Shard) -> int:
        """The entry's number in this file."""
        key = kind, name, dtype, shard
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._new.append(Entry(kind, name, str(dtype).removeprefix("torch."), shard))
        return number

    def write_new(self) -> None:
        """Write those that are not in the file yet."""
        if self._new:
            self._writer.write(Entries(tuple(self._new)))
            self._new.clear()


class Observation:
    """Collects the digests of a step; those of accelerators are fetched at its end, together."""

    def __init__(self, table: Table, *, is_full: bool) -> None:
        self._table = table
        self._is_full = is_full
        self._numbers: list[int] = []
        self._parts: list[tuple[torch.Tensor, Shard]] = []
        self._pending: list[Pending] = []
        self._tensors: list[torch.Tensor] = []

    def add(self, kind: str, values: Iterable[tuple[str, Any]]) -> None:
        """Add what a rank has of tensors, or numbers, with their names."""
        parts = []
        for name, value in values:
            part = value if isinstance(value, Piece) else local_part(torch.as_tensor(value))
            self._numbers.append(self._table.number_of(kind, name, part[0].dtype, part[1]))
            parts.append(part)
        self._parts += parts
        if self._is_full:
            self._tensors += [local.detach().cpu().clone() for local, _ in parts]

    def read(self) -> None:
        """Read all tensors that were added, which may change then."""
        self._pending.append(Pending(self._parts))
        self._parts.clear()

    def encode(self) -> dict[str, Any]:
        """The fields of a frame."""
        numbers = np.array(self._numbers, "<u4").tobytes()
        rows = [each.fetch() for each in self._pending] or [np.empty((0, WIDTH))]
        digests = np.concatenate(rows).astype("<f8", copy=False).tobytes()
        tensors = tuple(map(_raw, self._tensors))
        return {"numbers": numbers, "digests": digests, "tensors": tensors}


def _raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


# --- what is no tensor --------------------------------------------------------------------------


def groups_of(optimizer: Any, names: dict[int, str]) -> tuple[Group, ...]:
    """The groups of an optimizer of torch, with those options that are plain values."""
    return tuple(
        group_of(group, [names[id(each)] for each in group["params"]])
        for group in optimizer.param_groups
    )


def group_of(group: dict[str, Any], names: Iterable[str]) -> Group:
    """A group of an optimizer of torch, whose parameters have these names."""
    return Group(tuple(names), dict(_plain_options(group)))


def _plain_options(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            yield key, value.item()
        elif isinstance(value, bool | int | float | str | None):
            yield key, value
        elif isinstance(value, tuple | list) and all(isinstance(v, int | float) for v in value):
            yield key, list(value)


def modules_of(model: nn.Module) -> tuple[Module, ...]:
    """Modules that draw random numbers, or whose results depend on the whole batch."""
    canonical, found = Names(model), []
    for name, module in model.named_modules():
        if isinstance(module, _MATTERING):
            share = getattr(module, "p", getattr(module, "dropout", 0.0))
            found.append(Module(canonical(name), type(module).__name__, float(share or 0.0)))
    for layer in layers_of(model):
        kind, share = type(layer).__name__, getattr(layer, "rate", getattr(layer, "dropout", 0.0))
        if kind.startswith("BatchNorm") or (isinstance(share, float) and share > 0):
            found.append(Module(layer.path or layer.name, kind, float(share)))
    return tuple(found)


def random_state() -> int:
    """A digest of the state of torch's random numbers, on this rank."""
    words = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        words = zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes(), words)
    return words


def place_of() -> tuple[int, int]:
    """Rank and number of ranks: of torch.distributed, else as launchers say."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    for rank, size in _VARIABLES:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
