"""The device mesh: axes along which the ranks of a Plan are arranged."""

from collections.abc import Sequence

from lockstep.plan.plan_part import PlanPart


class Axis(PlanPart, frozen=True, kw_only=True):
    """One axis of the device mesh, such as ``data`` of size 2."""

    name: str
    size: int


def coordinates(mesh: Sequence[Axis], rank: int) -> dict[str, int]:
    """A rank's place on each axis; along the last axis ranks are consecutive."""
    places: dict[str, int] = {}
    for axis in reversed(mesh):
        rank, places[axis.name] = divmod(rank, axis.size)
    return places


def division_axis(mesh: Sequence[Axis]) -> str:
    """The axis along which ranks divide parameters: ``shard``, or ``tensor``."""
    return "shard" if any(axis.name == "shard" for axis in mesh) else "tensor"
