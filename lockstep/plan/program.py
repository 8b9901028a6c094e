"""The RankProgram: what one rank does in one step, as data that prints and parses.

``0F2`` is stage 0, forward, microbatch 2. A data parallel plan's microbatches are its shares.
A backward pass is one action, ``0B2``, or two: ``0I2`` for the gradients of the stage's inputs,
which other stages wait for, and later ``0W2`` for those of its weights, which nobody waits for.
The collective actions are words: ``REDUCE`` sums the rank's slice of the gradients over all
shares, ``STEP`` updates the slice, ``SYNC`` waits until every rank has updated its own.
"""

import re
from dataclasses import dataclass

from lockstep.errors import PlanError


@dataclass(frozen=True)
class Forward:
    """Run a stage forward on a microbatch, up to the loss where the stage has it."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}F{self.microbatch}"


@dataclass(frozen=True)
class Backward:
    """Run a stage backward on a microbatch."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}B{self.microbatch}"


@dataclass(frozen=True)
class BackwardInput:
    """Form the gradients of a stage's inputs: the part of a backward pass that others wait for.

    Qi et al., Zero Bubble Pipeline Parallelism (2023), who call it B.
    """

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}I{self.microbatch}"


@dataclass(frozen=True)
class BackwardWeight:
    """Form the gradients of a stage's weights, some time after those of its inputs."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}W{self.microbatch}"


@dataclass(frozen=True)
class Reduce:
    """Sum this rank's slice of the gradients over all shares, in the order of ``plan.sum_tree``."""

    def __str__(self) -> str:
        return "REDUCE"


@dataclass(frozen=True)
class Step:
    """Update this rank's slice of the parameters."""

    def __str__(self) -> str:
        return "STEP"


@dataclass(frozen=True)
class Sync:
    """Wait until every rank has updated its slice."""

    def __str__(self) -> str:
        return "SYNC"


Pass = Forward | Backward | BackwardInput | BackwardWeight
Action = Pass | Reduce | Step | Sync
RankProgram = tuple[Action, ...]

_WORDS: dict[str, Action] = {"REDUCE": Reduce(), "STEP": Step(), "SYNC": Sync()}
_PASSES: dict[str, type[Pass]] = {
    "F": Forward,
    "B": Backward,
    "I": BackwardInput,
    "W": BackwardWeight,
}
_PASS = re.compile(r"([0-9]+)([FBIW])([0-9]+)")


def format_program(program: RankProgram) -> str:
    """``(Forward(0, 0), Step())`` -> ``"0F0 STEP"``."""
    return " ".join(str(action) for action in program)


def parse_program(text: str) -> RankProgram:
    """The inverse of ``format_program``.

    Raises:
        PlanError: a word is no action.
    """
    return tuple(_parse_action(word) for word in text.split())


def _parse_action(word: str) -> Action:
    if word in _WORDS:
        return _WORDS[word]
    match = _PASS.fullmatch(word)
    if match is None:
        raise PlanError(
            "An action is a pass such as 0F2, 0B2, 0I2 or 0W2, or one of REDUCE, STEP, SYNC.",
            received=repr(word),
            fix="Correct the word.",
        )
    stage, kind, microbatch = match.groups()
    return _PASSES[kind](int(stage), int(microbatch))
