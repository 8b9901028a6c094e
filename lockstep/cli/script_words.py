"""SCRIPT and its arguments on a command line with Lockstep's options.

Lockstep's options are before SCRIPT or right after it; the rest, and everything after ``--``, are
the script's arguments. An option of Lockstep among the script's arguments is ambiguous, and
refused.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence

from lockstep.errors import OptionError, Problems
from lockstep.launch.script import Script

_OF_SCRIPTS = ("-m", "-h", "--help")  # after SCRIPT they are the script's

AddOptions = Callable[[argparse.ArgumentParser], None]


def add_script(parser: argparse.ArgumentParser, add_options: AddOptions) -> None:
    """Add SCRIPT and its arguments; see ``take_script``.

    Args:
        parser: the command's.
        add_options: adds the command's other options, each with a default of None.
    """
    parser.usage = f"{parser.prog} [OPTIONS] SCRIPT [ARGS ...]"
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGS ...]",
        help="the script to run; options may also follow SCRIPT directly",
    )
    add_options(parser)
    parser.set_defaults(parser=parser)


def take_script(options: argparse.Namespace) -> Script:
    """The script; options after SCRIPT are added to ``options``.

    Raises:
        OptionError: there is no SCRIPT, or an option is among the script's arguments.
    """
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        raise OptionError(
            "There must be a SCRIPT to run.",
            received="nothing",
            fix=f"For example: {options.parser.prog} train.py",
        )
    options_of_all = options.parser._option_string_actions
    actions = {name: one for name, one in options_of_all.items() if name not in _OF_SCRIPTS}
    target, *rest = words
    num_option_words = _num_option_words(rest, actions)
    options.parser.parse_args(rest[:num_option_words], namespace=options)
    arguments = rest[num_option_words:]
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    else:
        _check_arguments(arguments, actions)
    return Script(target=target, is_module=options.is_module, arguments=tuple(arguments))


def _num_option_words(words: Sequence[str], actions: Mapping[str, argparse.Action]) -> int:
    """The number of first words that are Lockstep's options, with their values."""
    number = 0
    while number < len(words):
        name, has_value, _ = words[number].partition("=")
        if name not in actions:
            break
        number += 1 if has_value or actions[name].nargs == 0 else 2
    return min(number, len(words))


def _check_arguments(arguments: Sequence[str], actions: Mapping[str, argparse.Action]) -> None:
    for word in arguments:
        if word == "--":
            return
        if word.startswith("--") and word.partition("=")[0] in actions:
            raise OptionError(
                "Lockstep's options must be before the script's own arguments.",
                received=word,
                fix="Put it right after SCRIPT; or, if it is the script's, put -- before the "
                "script's arguments.",
            )


def check_number(
    problems: Problems, options: argparse.Namespace, name: str, least: int, most: int | None
) -> None:
    """Check that an option that counts something is within bounds, if it is given."""
    number = getattr(options, name)
    if number is not None and not (least <= number and (most is None or number <= most)):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        problems.add(
            f"{written(name)} must be {bounds}.",
            received=f"{written(name)} {number}",
            fix="Correct it, or leave it out.",
        )


def written(name: str) -> str:
    """An option as users write it: ``--host-index``."""
    return f"--{name.replace('_', '-')}"
