"""The Plan: what goes where, as pure data.

A Plan is keyed by layer names and logical ranks, reads and writes JSON with a version, and holds
the decision only, never the options of the search that led to it. A strategy is a way to get one.
"""

import os
from pathlib import Path

import msgspec

from lockstep.errors import PlanError, problem

PLAN_VERSION = 1


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """One axis of the device mesh, such as ``data`` of size 2."""

    name: str
    size: int


class LayerPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Where a layer lives. Data parallel plans have one stage, which every replica holds."""

    name: str
    kind: str
    num_parameters: int
    stage: int


class LocalUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="local"):
    """The only replica steps the optimizer on its own gradients."""


class SlicedUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="sliced"):
    """Replicas of one host share the parameters' memory; each sums and steps its own slice."""


Update = LocalUpdate | SlicedUpdate


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decision about how to train one model on given devices.

    Attributes:
        strategy: the maker's name, for people.
        mesh: axes of the device mesh, outermost first; ranks count through it in row-major order.
        devices: the device of each rank.
        threads_per_device: compute threads of each rank; None leaves the process's setting.
        num_shares: parts into which every global batch is divided; see ``plan.shares``.
        interleaved: a rank's shares run together, layer by layer, because layers take statistics
            over the whole batch.
        layers: every layer and its stage.
        update: how gradients meet and parameters change.
        precision: ``"fp32"`` or ``"fp64"``.
        notes: what a person should know about this plan.
        version: of this format.
    """

    strategy: str
    mesh: tuple[Axis, ...]
    devices: tuple[str, ...]
    threads_per_device: int | None
    num_shares: int
    interleaved: bool
    layers: tuple[LayerPlacement, ...]
    update: Update
    precision: str
    notes: tuple[str, ...] = ()
    version: int = PLAN_VERSION

    @property
    def num_ranks(self) -> int:
        """Processes that take part."""
        return len(self.devices)

    @property
    def num_replicas(self) -> int:
        """Copies of the model that train on different shares."""
        return next((axis.size for axis in self.mesh if axis.name == "data"), 1)

    def to_json(self) -> bytes:
        """The Plan as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @classmethod
    def from_json(cls, text: bytes | str) -> "Plan":
        """Read a Plan that ``to_json`` wrote.

        Raises:
            PlanError: the text is no Plan, or one of another version.
        """
        try:
            version = msgspec.json.decode(text, type=_Versioned).version
            if version != PLAN_VERSION:
                raise PlanError(
                    problem(
                        f"This Lockstep reads Plans of version {PLAN_VERSION}.",
                        received=f"version {version}",
                        fix="Make the Plan anew with this Lockstep.",
                    )
                )
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise PlanError(
                problem("This is no Plan.", received=error, fix="Give a file that Plan.save wrote.")
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the Plan to a JSON file."""
        Path(path).write_bytes(self.to_json() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a Plan from a JSON file; see ``from_json``."""
        return cls.from_json(Path(path).read_bytes())

    def __str__(self) -> str:
        # Tables render through rich, which only a person who prints needs.
        from lockstep.plan.tables import plan_table

        return plan_table(self)


class _Versioned(msgspec.Struct):
    version: int
