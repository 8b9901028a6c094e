"""``lockstep plan``: how a strategy would train a model, without training it."""

import argparse

from rich.console import Console

from lockstep.cli.target import add_strategy_arguments, load_job, make_strategy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_strategy_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the Plan as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the Plan."""
    job = load_job(options.target, "plan")
    plan = make_strategy(options).plan(
        job.model, batch_size=job.batch_size, sample=job.data, batch_dim=job.batch_dim
    )
    text = plan.to_json().decode() if options.json else str(plan)
    Console(highlight=False, soft_wrap=True).print(text, markup=False)
    return 0
