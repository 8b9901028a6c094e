"""The RankProgram: what one rank does in one step, as data that prints.

``0F2`` is stage 0, forward, microbatch 2. A data parallel plan's microbatches are its shares.
A backward pass is one action, ``0B2``, or two: ``0I2`` for the gradients of the stage's inputs,
which other stages wait for, and later ``0W2`` for those of its weights, which no stage waits for.
The collective actions are words: ``REDUCE`` sums the rank's slice of the gradients over all
shares, ``STEP`` updates the slice, ``SYNC`` waits until every rank has updated its own.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class _Pass:
    """A pass of a stage over a microbatch, written with the letter of its kind."""

    stage: int
    microbatch: int
    letter: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.microbatch}"


class Forward(_Pass):
    """Run a stage forward on a microbatch, up to the loss where the stage has it."""

    letter = "F"


class Backward(_Pass):
    """Run a stage backward on a microbatch."""

    letter = "B"


class BackwardInput(_Pass):
    """Form the gradients of a stage's inputs: the part of a backward pass that others wait for.

    Qi et al., Zero Bubble Pipeline Parallelism (2023), who call it B.
    """

    letter = "I"


class BackwardWeight(_Pass):
    """Form the gradients of a stage's weights, some time after those of its inputs."""

    letter = "W"


@dataclass(frozen=True)
class _Collective:
    """An action that all ranks do together, written as its name."""

    def __str__(self) -> str:
        return type(self).__name__.upper()


class Reduce(_Collective):
    """Sum this rank's slice of the gradients over all shares, in the order of ``sum_tree``."""


class Step(_Collective):
    """Update this rank's slice of the parameters."""


class Sync(_Collective):
    """Wait until every rank has updated its slice."""


Pass = Forward | Backward | BackwardInput | BackwardWeight
Action = Pass | Reduce | Step | Sync
RankProgram = tuple[Action, ...]
