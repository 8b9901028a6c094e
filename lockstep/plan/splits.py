"""Splits: how a dim of a tensor is divided into shards, as pure data.

A dim may consist of blocks that are cut alike, such as the queries, keys and values of one fused
projection: a shard then has a part of each block. Cuts are between units only, such as heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from lockstep.graph.layer_graph import Division
from lockstep.plan.plan_part import PlanPart
from lockstep.plan.shares import share_bounds


@dataclass(frozen=True, kw_only=True)
class DivisionOptions:
    """What a user says of how layers are divided; the rest follows from how they are used.

    Attributes:
        whole: names of modules that are not divided.
        by_time: sequences are divided, and no layers.
        dims: returns, for a model, the only parameters that are divided, each with the dim; None
            divides all that can be.
    """

    whole: tuple[str, ...] = ()
    by_time: bool = False
    dims: Callable[[Any], Mapping[str, int]] | None = None


class Split(PlanPart, frozen=True, kw_only=True):
    """One dim of a tensor, in shards.

    Attributes:
        dim: which.
        sizes: of the blocks that it consists of.
        num_shards: into how many shards each block is cut.
        unit: elements that stay together.
    """

    dim: int
    sizes: tuple[int, ...]
    num_shards: int
    unit: int = 1

    @property
    def size(self) -> int:
        """The size of the dim."""
        return sum(self.sizes)

    @property
    def is_possible(self) -> bool:
        """Whether each shard has a unit of each block, and no unit is cut."""
        units = [divmod(size, self.unit) for size in self.sizes]
        return all(count >= self.num_shards and not rest for count, rest in units)

    @property
    def cuts(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By shard, its elements ``[start, stop)`` of each block."""
        return _cuts(self.sizes, self.num_shards, self.unit)

    def size_of(self, shard: int) -> int:
        """The size of a shard."""
        return sum(stop - start for start, stop in self.cuts[shard])

    def is_like(self, other: "Split") -> bool:
        """Whether both cut at the same places, whichever dim it is."""
        return self.cuts == other.cuts

    def at(self, dim: int) -> "Split":
        """The same of another dim."""
        return replace(self, dim=dim)


class ParameterSplit(PlanPart, frozen=True, kw_only=True):
    """A divided parameter.

    Attributes:
        name: of the parameter.
        split: of its dim.
        by: ``"columns"``, a layer's outputs; ``"rows"``, its inputs; or ``"matrices"``, of a stack,
            such as one for each expert.
        gathered_for: the operation that gets the layer's outputs whole; "" if none does.
    """

    name: str
    split: Split
    by: str = "columns"
    gathered_for: str = ""

    def __str__(self) -> str:
        blocks = f" in {len(self.split.sizes)} blocks" if len(self.split.sizes) > 1 else ""
        units = f", units of {self.split.unit}" if self.split.unit > 1 else ""
        gathered = f"; gathered for {self.gathered_for}" if self.gathered_for else ""
        return f"{self.by}{blocks}{units}{gathered}"

    @property
    def division(self) -> Division:
        """The same, for any number of shards."""
        return Division(
            name=self.name,
            dim=self.split.dim,
            sizes=self.split.sizes,
            unit=self.split.unit,
            by=self.by,
            gathered_for=self.gathered_for,
        )


class TensorSplits(PlanPart, frozen=True, kw_only=True):
    """How layers are divided inside.

    Attributes:
        num_shards: into how many shards; consecutive ones belong to a rank.
        parameters: those that are divided.
        whole: parameters that are not, each with the reason.
        by_time: instead, parameters whose layers take parts of a sequence, each with the operation
            that gets their outputs whole, or "". None if sequences are not divided.
    """

    num_shards: int
    parameters: tuple[ParameterSplit, ...] = ()
    whole: tuple[tuple[str, str], ...] = ()
    by_time: tuple[tuple[str, str], ...] | None = None

    def of_layer(self, layer: str) -> str:
        """How a layer is divided, or why it is not, for people."""
        for one in self.parameters:
            if one.name.rpartition(".")[0] == layer:
                return str(one)
        for name, gathered in self.by_time or ():
            if name.rpartition(".")[0] == layer:
                return f"time; gathered for {gathered}" if gathered else "time"
        reasons = (reason for name, reason in self.whole if name.rpartition(".")[0] == layer)
        reason = next(reasons, "")
        return f"whole: {reason}" if reason else "as the layer with the same Parameter"

    def shards_of(self, rank: int, num_ranks: int) -> range:
        """The shards of a rank."""
        return range(*share_bounds(self.num_shards, num_ranks)[rank])


@lru_cache(maxsize=1024)
def _cuts(
    sizes: tuple[int, ...], num_shards: int, unit: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    blocks, offset = [], 0
    for size in sizes:
        bounds = share_bounds(size // unit, num_shards)
        blocks.append([(offset + start * unit, offset + stop * unit) for start, stop in bounds])
        offset += size
    return tuple(zip(*blocks, strict=True))
