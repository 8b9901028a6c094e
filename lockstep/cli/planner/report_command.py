"""``lockstep report RUN``: what a run did, and how it compares with what was predicted."""

import argparse
from pathlib import Path

from rich.console import Console

from lockstep.disk import writing
from lockstep.report.html_page import html_of
from lockstep.report.run_report import report_of, text_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("record", metavar="RUN", help="folder of a run, with its record")
    parser.add_argument("--output", metavar="FILE", help="write the report as one HTML page there")


def run(options: argparse.Namespace) -> int:
    """Print the report, or write the page.

    Raises:
        LockstepError: there is no record of a run that has ended well.
    """
    report = report_of(Path(options.record))
    console = Console(highlight=False, soft_wrap=True)
    console.print(text_of(report), markup=False)
    if options.output:
        page = html_of(report)
        with writing(options.output, len(page)):
            Path(options.output).write_text(page, encoding="utf-8")
        console.print(f"\nWritten: {options.output}", markup=False)
    return 0
