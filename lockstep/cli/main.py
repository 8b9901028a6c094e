"""The ``lockstep`` command."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import NoReturn

import lockstep
from lockstep import tracebacks
from lockstep.errors import LockstepError, reason_of

# Command -> (its module, summary). A module has add_arguments(parser) and run(options) -> int.
COMMANDS = {
    "demo": (
        "lockstep.cli.demo",
        "train a small convolutional net on many devices, with the proof that the result is exact",
    ),
    "run": ("lockstep.cli.run", "run a script, on one host or on several"),
    "launch": (
        "lockstep.cli.launch",
        "run a script on several hosts of a Slurm, Kubernetes or Ray cluster",
    ),
    "verify": (
        "lockstep.cli.verify",
        "compare a strategy, or a script on many processes, with one device, tensor by tensor",
    ),
    "compare": (
        "lockstep.cli.records.compare",
        "compare two records of training loops of any library, or the ranks of one",
    ),
    "plan": (
        "lockstep.cli.planner.plan_command",
        "rank the ways to train a model, or show how a strategy would train it",
    ),
    "report": (
        "lockstep.cli.planner.report_command",
        "show what a run did, beside what was predicted, as text or as an HTML page",
    ),
    "checkpoint": (
        "lockstep.cli.checkpoint",
        "show, verify and export the checkpoints of a training",
    ),
    "doctor": (
        "lockstep.cli.doctor",
        "examine this host, or all hosts of a job and the network between them",
    ),
}


class Parser(argparse.ArgumentParser):
    """Suggests the command, option or choice for a misspelled word; errors show no long usage."""

    def error(self, message: str) -> NoReturn:
        """See ``argparse.ArgumentParser``."""
        known = [*re.findall(r"'([^']+)'", message.partition("choose from")[2]), *_options(self)]
        given = re.findall(r"invalid choice: '([^']*)'", message)
        given += re.findall(r"--\S+", message.partition("unrecognized arguments:")[2])
        near = [word for one in given for word in difflib.get_close_matches(one, known)]
        advice = f"Did you mean {near[0]!r}?" if near else f"{self.prog} --help shows its use."
        self.exit(2, f"{self.prog}: error: {message}\n{advice}\n")


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The options of a parser and of its commands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for a failed check, 2 for wrong usage."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = _make_parser(given)
    options = parser.parse_args(given)
    try:
        return int(import_module(COMMANDS[options.command][0]).run(options))
    except (LockstepError, OSError) as error:
        if isinstance(error, OSError) and tracebacks.is_of_user(error):
            raise
        text = reason_of(error) if isinstance(error, OSError) else error
        print(f"lockstep {options.command}: {text}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)  # noqa: T201
        return 130


def _make_parser(given: list[str]) -> argparse.ArgumentParser:
    parser = Parser(
        prog="lockstep",
        description="Many devices, one result: trains PyTorch and Keras models on many devices "
        "and gives the weights that one device would have given.",
    )
    parser.add_argument("--version", action="version", version=f"lockstep {lockstep.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
        )
        if name in given[:1]:  # without loading the other commands' modules
            import_module(module).add_arguments(subparser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
