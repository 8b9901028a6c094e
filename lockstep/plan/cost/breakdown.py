"""The parts of a step's time and of a rank's memory."""

from dataclasses import dataclass, fields, replace

# Of a device's memory, the part that a plan may fill: predictions are up to a tenth too low.
USABLE = 0.9


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, by what the rank that takes longest does in them.

    Attributes:
        forward: forward passes.
        backward: backward passes, and forward passes that are made again for them.
        exchange: gradients, parameters and activations that come from or go to other ranks, as
            far as the rank waits for them.
        update: the optimizer's, and what every step takes without a model.
        bubble: waiting for other stages.
    """

    forward: float = 0.0
    backward: float = 0.0
    exchange: float = 0.0
    update: float = 0.0
    bubble: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.forward + self.backward + self.exchange + self.update + self.bubble

    def scaled(self, factor: float) -> "StepTime":
        """Every part times ``factor``."""
        return replace(self, **{one.name: factor * getattr(self, one.name) for one in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a rank at its peak.

    Attributes:
        parameters: the rank's; its part of those that ranks of a host share.
        gradients: likewise.
        slots: the optimizer's, of what the rank updates.
        activations: kept from forward to backward, of all microbatches at once, and the
            gradients of a layer's outputs and inputs.
        gathered: parameters of other ranks that it has for a while.
        buffers: of messages between ranks, and copies of the state for restarts.
        base: the framework's own.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    slots: float = 0.0
    activations: float = 0.0
    gathered: float = 0.0
    buffers: float = 0.0
    base: float = 0.0

    @property
    def sum(self) -> float:
        """All of it, not rounded."""
        held = self.parameters + self.gradients + self.slots + self.activations
        return held + self.gathered + self.buffers + self.base

    @property
    def total(self) -> int:
        """All of it."""
        return round(self.sum)


def usable(memory_bytes: int) -> int:
    """What a plan may fill of a device's memory; the rest is for what the prediction misses."""
    return int(USABLE * memory_bytes)


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """What a Plan is expected to cost.

    Attributes:
        step: of the rank that takes longest.
        memory: of each rank.
        memory_limits: of each rank's device.
        bytes_sent: by all ranks in a step.
        uncorrected: seconds of the step, and bytes of all ranks, before corrections by what runs
            have taken; None if there were none.
    """

    step: StepTime
    memory: tuple[Memory, ...]
    memory_limits: tuple[int, ...] = ()
    bytes_sent: float = 0.0
    uncorrected: tuple[float, int] | None = None

    @property
    def all_bytes(self) -> int:
        """Of all ranks."""
        return sum(one.total for one in self.memory)

    @property
    def as_modelled(self) -> tuple[float, int]:
        """Seconds of the step, and bytes of all ranks, without corrections."""
        return self.uncorrected or (self.step.total, self.all_bytes)

    @property
    def peak(self) -> Memory:
        """Of the rank that needs most."""
        return max(self.memory, key=lambda one: one.total)

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory that it needs."""
        return self.excess is None

    @property
    def excess(self) -> tuple[int, int, int] | None:
        """The rank that lacks most, what it needs and what it may fill; None if all fit."""
        limits = map(usable, self.memory_limits)
        pairs = zip(self.memory, limits, strict=False)
        over = [
            (one.total - limit, rank, one.total, limit)
            for rank, (one, limit) in enumerate(pairs)
            if one.total > limit > 0
        ]
        return max(over)[1:] if over else None
