"""SCRIPT and its arguments on a command line, beside Lockstep's own options.

Lockstep's options stand before SCRIPT or right after it; the rest is the script's, and so is
everything after ``--``. An option of Lockstep's among the script's arguments could be meant for
either: it is refused, and not guessed at.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence

from lockstep.errors import OptionError
from lockstep.launch.script import Script

AddOptions = Callable[[argparse.ArgumentParser], None]


def add_script(parser: argparse.ArgumentParser, add_options: AddOptions) -> None:
    """SCRIPT and its arguments; see ``take_script``.

    Args:
        parser: of the command.
        add_options: adds all other options of the command, each with a default of None.
    """
    parser.usage = f"{parser.prog} [OPTIONS] SCRIPT [ARGS ...]"
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGS ...]",
        help="what to run; options may also stand right after SCRIPT",
    )
    add_options(parser)


def take_script(options: argparse.Namespace, add_options: AddOptions) -> Script:
    """The script; options that stand after SCRIPT are put into ``options``.

    Raises:
        OptionError: there is no SCRIPT, or an option stands where it may be the script's.
    """
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        raise OptionError(
            "There must be a SCRIPT to run.",
            received="nothing",
            fix="For example: lockstep run --devices 2 train.py",
        )
    parser = argparse.ArgumentParser(
        f"lockstep {options.command}", add_help=False, allow_abbrev=False
    )
    add_options(parser)
    known = parser._option_string_actions
    target, *rest = words
    num_own = _num_own_words(rest, known)
    parser.parse_args(rest[:num_own], namespace=options)
    arguments = rest[num_own:]
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    else:
        _check_arguments(arguments, known)
    return Script(target=target, is_module=options.is_module, arguments=tuple(arguments))


def _num_own_words(words: Sequence[str], known: Mapping[str, argparse.Action]) -> int:
    """How many of the first words are options of Lockstep's, with their values."""
    number = 0
    while number < len(words):
        name, has_value, _ = words[number].partition("=")
        if name not in known:
            break
        number += 1 if has_value or known[name].nargs == 0 else 2
    return min(number, len(words))


def _check_arguments(arguments: Sequence[str], known: Mapping[str, argparse.Action]) -> None:
    for word in arguments:
        if word == "--":
            return
        if word.startswith("--") and word.partition("=")[0] in known:
            raise OptionError(
                "An option of Lockstep's must stand before the script's own arguments.",
                received=word,
                fix="Put it right after SCRIPT; or, if it is the script's, put -- before the "
                "script's arguments.",
            )
