"""What a helper must not do between its birth and its first step: import for seconds."""

import sys

from lockstep.launch.pool import keep_teams
from tests.faults.jobs import fit, make_trainer
from tests.faults.mishaps import fail


def check_imports() -> None:
    """Torch imports this for its own optimizers, settings and decorators, unless asked not to."""
    if "torch._dynamo" in sys.modules:
        fail(AssertionError("torch._dynamo was imported"))


def test_the_first_steps_of_a_helper_do_not_import_for_seconds() -> None:
    with keep_teams():  # whose teams are all fresh: torch's own recomputation imports it
        fit(make_trainer(2, check_imports, step=2))
