"""What is seen of a model at one time, as digests in a frame of a record."""

import os
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.proof.recording.digests import WIDTH, Pending
from lockstep.proof.recording.names import Names
from lockstep.proof.recording.record_file import Entries, Entry, Group, Module, RecordWriter
from lockstep.proof.recording.shards import local_part

_MATTERING = (
    torch.nn.modules.batchnorm._BatchNorm,
    torch.nn.modules.dropout._DropoutNd,
    nn.RNNBase,
)


class Table:
    """Numbers entries, and writes each once."""

    def __init__(self, writer: RecordWriter) -> None:
        self._writer = writer
        self._numbers: dict[Entry, int] = {}
        self._new: list[Entry] = []

    def number_of(self, entry: Entry) -> int:
        """The entry's number in this file."""
        number = self._numbers.get(entry)
        if number is None:
            number = self._numbers[entry] = len(self._numbers)
            self._new.append(entry)
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
        self._pending: list[Pending] = []
        self._tensors: list[torch.Tensor] = []

    def add(self, kind: str, values: Iterable[tuple[str, Any]]) -> None:
        """Add what a rank has of tensors, or numbers, with their names."""
        parts = []
        for name, value in values:
            tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
            part = local_part(tensor)
            self._numbers.append(
                self._table.number_of(Entry(kind, name, _name_of(tensor.dtype), part[1]))
            )
            parts.append(part)
        self._pending.append(Pending(parts))
        if self._is_full:
            self._tensors += [local.detach().cpu().clone() for local, _ in parts]

    def encode(self) -> dict[str, Any]:
        """The fields of a frame."""
        numbers = np.array(self._numbers, "<u4").tobytes()
        rows = [each.fetch() for each in self._pending] or [np.empty((0, WIDTH))]
        digests = np.concatenate(rows).astype("<f8", copy=False).tobytes()
        tensors = tuple(map(_raw, self._tensors))
        return {"numbers": numbers, "digests": digests, "tensors": tensors}


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


# --- what is no tensor --------------------------------------------------------------------------


def groups_of(optimizer: Any, names: dict[int, str]) -> tuple[Group, ...]:
    """The groups of an optimizer of torch, with those options that are plain values."""
    return tuple(
        Group(
            tuple(names[id(each)] for each in group["params"]),
            dict(_plain_options((key, value) for key, value in group.items() if key != "params")),
        )
        for group in optimizer.param_groups
    )


def _plain_options(options: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for key, value in options:
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
