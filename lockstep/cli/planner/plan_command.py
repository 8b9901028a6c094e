"""``lockstep plan``: the best ways to train a model, or how one strategy would, without training.

With the name of a strategy it prints that strategy's Plan. Without, it ranks the Plans of all
strategies by their predicted costs, and says why each loses.
"""

import argparse

from rich.console import Console

from lockstep.cli.planner.plan_ranking import add_ranking_arguments, rank
from lockstep.cli.target import STRATEGIES, add_strategy_options, load_job, make_strategy
from lockstep.errors import OptionError

# Options of strategies.
_OPTIONS = ("shares", "every", "servers", "stages", "cuts", "microbatches", "schedule", "data")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="file.py:function, the function returning a lockstep.Job",
    )
    parser.add_argument(
        "--strategy",
        metavar="NAME|FILE",
        help=f"print the Plan of this strategy ({', '.join(STRATEGIES)}); or a Plan's file, to be "
        "ranked among the others",
    )
    add_strategy_options(parser)
    add_ranking_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the Plan as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the Plan, or the ranking.

    Raises:
        LockstepError: the options, the file or the job are invalid.
    """
    if options.strategy in STRATEGIES:
        return _print_plan(options)
    _check_options(options)
    return rank(options)


def _print_plan(options: argparse.Namespace) -> int:
    job = load_job(_target(options), "plan")
    plan = make_strategy(options).plan(
        job.model, batch_size=job.batch_size, sample=job.data, batch_dim=job.batch_dim
    )
    text = plan.to_json().decode() if options.json else str(plan)
    Console(highlight=False, soft_wrap=True).print(text, markup=False)
    return 0


def _target(options: argparse.Namespace) -> str:
    if options.target is None:
        raise OptionError(
            "A strategy's Plan is for a model.",
            received="no TARGET",
            fix="Give file.py:function.",
        )
    return str(options.target)


def _check_options(options: argparse.Namespace) -> None:
    given = [f"--{name}" for name in _OPTIONS if getattr(options, name) is not None]
    if given:
        raise OptionError(
            "These options are a strategy's.",
            received=", ".join(given),
            fix=f"Name it: --strategy {' or '.join(STRATEGIES)}.",
        )
    if (options.target is None) == (options.graph is None):
        raise OptionError(
            "To plan, give a TARGET or a graph.",
            received="both" if options.target else "neither",
            fix="For example: lockstep plan job.py:make_job --devices 2, or --graph graph.json.",
        )
