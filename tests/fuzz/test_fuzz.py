"""Random trainings with fixed seeds: each is that of one device, to 1e-12 in float64.

``python -m tests.fuzz`` runs others, and each of these: ``--family fit --seed 17 --shrink``.
The first seeds of a family run in ``make test``, the others are thorough: 25 s in all.
"""

from typing import Any

import pytest

from tests.fuzz.cases import Case
from tests.fuzz.families import family
from tests.fuzz.nets import Shape
from tests.fuzz.refusals import reason_of
from tests.fuzz.running import Outcome, run
from tests.thorough import core_of

SEEDS = {"fit": range(70), "bits": range(20), "keras": range(20)}
CORE = {"fit": 25, "bits": 5, "keras": 5}
# What was wrong once, made small.
FOUND = (
    # An average of a parameter without elements, on one device.
    Case(shape=Shape(tail=("scalars",)), options={"average": 0.6}),
)


@pytest.mark.parametrize(
    ("name", "seed"),
    core_of(
        [(name, seed) for name, seeds in SEEDS.items() for seed in seeds],
        lambda name, seed: seed < CORE[name],
    ),
)
def test_a_random_training_is_that_of_one_device(name: str, seed: int) -> None:
    own = family(name)
    check(own.run(own.draw(seed)))


@pytest.mark.parametrize("case", FOUND, ids=repr)
def test_what_was_wrong_once(case: Case) -> None:
    check(run(case))


def test_what_was_wrong_once_with_keras() -> None:
    from tests.fuzz.keras_cases import KerasCase
    from tests.fuzz.keras_cases import run as run_keras

    # A stage of which nothing is trained any more, with an optimizer that has more than slots.
    piped: dict[str, Any] = {
        "strategy": "PipelineStrategy",
        "layout": {"stages": 2, "microbatches": 1},
    }
    check(run_keras(KerasCase(optimizer="Nadam", actions=("fit", "freeze", "fit"), **piped)))


def check(outcome: Outcome) -> None:
    if outcome.kind == "undetermined":
        pytest.skip("what comes of this one is rounding")
    is_known = outcome.kind == "refused" and reason_of(outcome.text) is not None
    assert outcome.kind == "same" or is_known, f"{outcome.text}\n{outcome.case!r}"
