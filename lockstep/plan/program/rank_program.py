"""The RankProgram: what one rank does in one step, as data that prints and parses.

``0F2`` is stage 0, forward, microbatch 2. A data parallel plan's microbatches are its shares.
A backward pass is one action, ``0B2``, or two: ``0I2`` for the gradients of the stage's inputs,
which other stages wait for, and later ``0W2`` for those of its weights, which no stage waits for.
The collective actions are words: ``REDUCE`` sums the rank's slice of the gradients over all
shares, ``STEP`` updates the slice, ``SYNC`` waits until every rank has updated its own.
"""

import re
from dataclasses import dataclass
from typing import ClassVar, get_args

from lockstep.errors import PlanError


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

_WORDS: dict[str, Action] = {str(action): action for action in (Reduce(), Step(), Sync())}
_PASSES: dict[str, type[Pass]] = {kind.letter: kind for kind in get_args(Pass)}
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
