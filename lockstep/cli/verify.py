"""``lockstep verify``: the proof that a strategy, or a script, trains as one device would.

A TARGET ``file.py:function`` is a job for one of Lockstep's strategies; ``file.py`` is a script of
any library that calls ``lockstep.record`` (see ``records/script_proof.py``).

The exit status is 0 if everything agrees, 1 if something differs, 2 if nothing could be compared,
and 3 if everything agrees but nothing was divided: a plan of one stage or one replica.
"""

import argparse
import traceback

from lockstep.cli.records.compare import print_result
from lockstep.cli.records.script_proof import (
    add_script_arguments,
    is_script,
    refuse_script_options,
    verify_script,
)
from lockstep.cli.target import add_strategy_arguments, load_job, make_strategy
from lockstep.errors import LockstepError
from lockstep.proof.verification import verify_job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_strategy_arguments(parser)
    add_script_arguments(parser)
    parser.add_argument(
        "--steps", type=int, default=5, metavar="K", help="updates to compare (default: 5)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of all random numbers (default: 0)"
    )
    parser.add_argument(
        "--bits", action="store_true", help="also compare runs to the last bit (docs/exactness.md)"
    )
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="change one value by one unit in the last place on one rank, and check that it is "
        "found",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the report.

    Raises:
        LockstepError: the options, the file or the job are invalid.
    """
    if is_script(options):
        return verify_script(options)
    refuse_script_options(options)
    strategy = make_strategy(options)
    job = load_job(options.target, "verify")
    try:
        report = verify_job(
            job,
            strategy,
            steps=options.steps,
            seed=options.seed,
            bits=options.bits,
            self_test=options.self_test,
        )
    except LockstepError:
        raise
    except Exception:  # of the user's model, loss or data
        traceback.print_exc()
        return 2
    return print_result(report, as_json=options.json)
