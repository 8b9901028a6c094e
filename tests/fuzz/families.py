"""The kinds of cases, each with what draws one by its seed and what runs it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fuzz import cases, running


@dataclass(frozen=True)
class Family:
    """A kind of cases."""

    draw: Callable[[int], Any]
    run: Callable[[Any], running.Outcome]


def family(name: str) -> Family:
    """The family of a name; what it needs is imported only where it is wanted."""
    match name:
        case "fit":
            return Family(cases.draw, running.run)
        case "tensor":
            return Family(cases.draw_divided, running.run)
        case "bits":
            return Family(cases.draw_random, running.run_bits)
        case "loops":
            from tests.fuzz import own_loops

            return Family(own_loops.draw, own_loops.run)
        case _:
            from tests.fuzz import keras_cases

            return Family(keras_cases.draw, keras_cases.run)


NAMES = ("fit", "tensor", "bits", "keras", "loops")
