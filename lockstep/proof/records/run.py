"""A record as it is read: the files of all ranks, step by step and tensor by tensor."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from lockstep.errors import DataError
from lockstep.proof.recording.digests import WIDTH, add, are_same, distance, norm
from lockstep.proof.recording.record_frames import (
    START,
    Computation,
    Entries,
    Entry,
    Group,
    Header,
    Samples,
    Step,
    file_of,
    read_frames,
)
from lockstep.proof.recording.shards import Shard, whole


@dataclass(frozen=True)
class Value:
    """What the ranks have of a tensor in a step.

    Attributes:
        kind: of the tensor.
        name: of the tensor.
        dtype: without ``torch.``.
        parts: for each part of it, digests by rank.
    """

    kind: str
    name: str
    dtype: str
    parts: dict[Shard, dict[int, np.ndarray]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return next(iter(self.parts)).shape

    @property
    def ranks(self) -> list[int]:
        """Those that have some of it."""
        return sorted({rank for own in self.parts.values() for rank in own})

    @property
    def is_sharded(self) -> bool:
        """Whether ranks have different parts."""
        return len(self.parts) > 1

    @property
    def size(self) -> float:
        """The norm of the whole tensor."""
        return norm(self.versions[min(self.versions)])

    @cached_property
    def versions(self) -> dict[int, np.ndarray]:
        """The whole tensor's digest as each rank has it; of shards there is one, of rank 0."""
        if self.is_sharded:
            first = [own[min(own)] for own in self.parts.values()]
            return {0: add(first)}
        return next(iter(self.parts.values()))

    @property
    def is_complete(self) -> bool:
        """Whether all elements are there."""
        return sum(each.num_elements for each in self.parts) == whole(self.shape).num_elements

    def disagreement(self) -> float:
        """The largest difference between ranks that have the same part; 0 for the same bits."""
        worst = 0.0
        for own in self.parts.values():
            first = own[min(own)]
            for other in own.values():
                if not are_same(other, first):
                    worst = max(worst, distance(other, first), 1e-300)
        return worst

    def has_same_bits(self, other: "Value") -> bool:
        """Whether all ranks of both have the same bits, in the same parts."""
        if self.parts.keys() != other.parts.keys() or self.dtype != other.dtype:
            return False
        return all(
            are_same(own[min(own)], row)
            for part, own in self.parts.items()
            for row in (*own.values(), *other.parts[part].values())
        )


@dataclass
class RankFile:
    """What one rank has written.

    Attributes:
        header: of the rank.
        computation: None if no forward pass was seen.
        steps: by number; ``START`` is what was there before.
        entries: in the order of their numbers.
        groups: of each optimizer, by step.
    """

    header: Header
    computation: Computation | None = None
    steps: dict[int, Step] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    groups: dict[int, dict[int, tuple[Group, ...]]] = field(default_factory=dict)

    def digests(self, step: int) -> Iterator[tuple[Entry, np.ndarray]]:
        """The digests of a step."""
        own = self.steps[step]
        rows = np.frombuffer(own.digests, "<f8").reshape(-1, WIDTH)
        for number, row in zip(np.frombuffer(own.numbers, "<u4"), rows, strict=True):
            yield self.entries[number], row

    def tensors(self, step: int) -> Iterator[tuple[Entry, torch.Tensor]]:
        """The tensors of a step, of a full record."""
        own = self.steps[step]
        numbers = np.frombuffer(own.numbers, "<u4")
        for number, data in zip(numbers, own.tensors, strict=True):
            entry = self.entries[number]
            dtype = getattr(torch, entry.dtype)
            empty = torch.empty(0, dtype=dtype)
            yield entry, torch.frombuffer(bytearray(data), dtype=dtype) if data else empty


class Run:
    """A record of all ranks.

    Attributes:
        path: its folder.
        ranks: files by rank.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read a record.

        Raises:
            DataError: there is none, or nothing of it can be read.
        """
        self.path = Path(path)
        self.ranks = _read_ranks(self.path)

    @property
    def world_size(self) -> int:
        """The number of ranks that trained."""
        return self.ranks[min(self.ranks)].header.world_size

    @property
    def missing(self) -> list[int]:
        """Ranks without a file."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]

    @property
    def is_full(self) -> bool:
        """Whether all elements were recorded."""
        return all(own.header.is_full for own in self.ranks.values())

    @property
    def first(self) -> RankFile:
        """The file of the first rank."""
        return self.ranks[min(self.ranks)]

    @property
    def draws_alike(self) -> bool:
        """Whether all ranks began with the same random numbers."""
        states = [own.steps[START].random_state for own in self.ranks.values() if own.steps]
        return len(states) > 1 and len(set(states)) == 1

    @cached_property
    def num_steps(self) -> int:
        """Updates that every rank has recorded."""
        return min(
            sum(step.is_complete and number != START for number, step in own.steps.items())
            for own in self.ranks.values()
        )

    @cached_property
    def order(self) -> dict[str, int]:
        """The position of each module in the first forward pass."""
        own = self.first.computation
        return {} if own is None else {name: index for index, name in enumerate(own.order)}

    @property
    def computing_dtype(self) -> str:
        """The shortest that a module computed in; empty if unknown."""
        own = self.first.computation
        return "" if own is None else own.dtype

    def values(self, step: int) -> dict[tuple[str, str], Value]:
        """What the ranks have of each tensor in a step, by kind and name."""
        if step not in self._values:
            self._values[step] = self._read_values(step)
        return self._values[step]

    @cached_property
    def _values(self) -> dict[int, dict[tuple[str, str], Value]]:
        return {}

    def _read_values(self, step: int) -> dict[tuple[str, str], Value]:
        found: dict[tuple[str, str], Value] = {}
        for rank, own in self.ranks.items():
            if step not in own.steps:
                continue
            for entry, row in own.digests(step):
                key = entry.kind, entry.name
                value = found.setdefault(key, Value(*key, entry.dtype, {}))
                value.parts.setdefault(entry.shard, {})[rank] = row
        return found

    def samples(self, step: int) -> dict[int, list[Samples]]:
        """The batches of a step, by rank."""
        return {
            rank: list(own.steps[step].samples)
            for rank, own in self.ranks.items()
            if step in own.steps
        }

    def options(self, step: int) -> dict[int, dict[str, dict[str, object]]]:
        """Options of the optimizer's groups, by rank and parameter."""
        return {
            rank: {
                name: group.options
                for groups in own.groups.get(step, {}).values()
                for group in groups
                for name in group.names
            }
            for rank, own in self.ranks.items()
        }


def _read_ranks(folder: Path) -> dict[int, RankFile]:
    files = {int(path.stem[4:]): path for path in folder.glob("rank*.record")}
    if not files:
        raise DataError(
            "There must be a record to compare: a folder with a file for each rank.",
            received=folder,
            fix="Record the training with lockstep.record(model, optimizer, path).",
        )
    first = min(files)
    found = {first: _read_rank(files[first])}
    size = found[first].header.world_size
    for rank in range(size):  # a file of a higher rank is from another training
        if rank != first and rank in files:
            found[rank] = _read_rank(file_of(folder, rank))
    return dict(sorted(found.items()))


def _read_rank(path: Path) -> RankFile:
    frames = read_frames(path)
    header = next(frames, None)
    if not isinstance(header, Header):
        raise DataError(
            "A record must have a header and at least one update.",
            received=f"{path}, in which nothing can be read",
            fix="Record it again: the training has ended before its first update.",
        )
    own = RankFile(header)
    latest: dict[int, tuple[Group, ...]] = {}
    for frame in frames:
        if isinstance(frame, Entries):
            own.entries += frame.entries
        elif isinstance(frame, Computation):
            own.computation = frame
        elif isinstance(frame, Step):
            own.steps[frame.step] = frame
            if frame.groups is not None:
                latest[frame.optimizer] = frame.groups
            own.groups[frame.step] = dict(latest)
    return own
