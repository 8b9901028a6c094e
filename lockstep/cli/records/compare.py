"""``lockstep compare``: two records of training loops, or the ranks of one.

The exit status is 0 if everything agrees, 1 if something differs, and 2 if nothing could be
compared.
"""

import argparse
import json
import sys

from rich.console import Console

from lockstep.proof.records.outcome import RecordComparison, compare
from lockstep.proof.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "record", metavar="RECORD", help="a folder that lockstep.record has written"
    )
    parser.add_argument(
        "reference",
        metavar="REFERENCE",
        nargs="?",
        help="the record that it is held to, such as one of one process (default: none; the ranks "
        "of RECORD are compared with each other)",
    )
    add_output_arguments(parser)


def add_output_arguments(parser: argparse._ActionsContainer, *, has_json: bool = True) -> None:
    """Options of all commands that compare records."""
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="the largest difference that agrees, in parts of a tensor's norm (default: what "
        "rounding makes of right runs in the records' precision)",
    )
    parser.add_argument("--html", metavar="FILE", help="also write a page with all differences")
    if has_json:
        parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the outcome.

    Raises:
        LockstepError: a record cannot be read.
    """
    outcome = compare(options.record, options.reference, tolerance=options.tolerance)
    return show(outcome, options)


def show(outcome: RecordComparison, options: argparse.Namespace) -> int:
    """Print an outcome and write its page, as asked; returns the exit status."""
    if options.html is not None:
        outcome.save_page(options.html)
    return print_result(outcome, as_json=options.json)


def print_result(result: RecordComparison | Report, *, as_json: bool) -> int:
    """Print a comparison or a proof; returns the exit status."""
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))  # noqa: T201
    elif sys.stdout.isatty():
        Console(highlight=False).print(result)
    else:
        print(result)  # noqa: T201
    return result.status
