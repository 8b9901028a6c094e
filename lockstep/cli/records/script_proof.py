"""``lockstep verify script.py``: a script on one process and on many, whose records are compared.

The script calls ``lockstep.record``, and is run as torchrun would run it. It must hold the global
batch, whatever the number of processes: by ``record.share``, or by a batch size that is divided by
their number. It is ended behind the last step that is recorded.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch

from lockstep.cli.records.compare import add_output_arguments, show
from lockstep.errors import OptionError, Problems
from lockstep.launch.launchers.local_run import run_like_torchrun
from lockstep.launch.script import Script
from lockstep.proof.recording.recorder import FOLDER_VARIABLE, STEPS_VARIABLE
from lockstep.proof.records.outcome import compare
from lockstep.proof.records.run import Run

# What a library needs to be told where there is no accelerator, beside torchrun's variables.
_ON_CPUS = {
    "ddp": {},
    "fsdp2": {},
    "accelerate": {"ACCELERATE_USE_CPU": "true"},
    "lightning": {},
    "deepspeed": {"DS_ACCELERATOR": "cpu"},
}
_SCRIPT_OPTIONS = ("processes", "library", "keep", "tolerance", "html", "arguments")
_JOB_OPTIONS = ("devices", "shares", "every", "servers", "stages", "cuts", "microbatches")


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for scripts."""
    group = parser.add_argument_group("scripts that call lockstep.record: TARGET is file.py")
    group.add_argument(
        "--processes", type=int, metavar="N", help="processes to compare with one (default: 2)"
    )
    group.add_argument(
        "--library", choices=tuple(_ON_CPUS), help="that the script uses (default: ddp)"
    )
    group.add_argument("--keep", metavar="FOLDER", help="where to keep both records")
    add_output_arguments(group, has_json=False)
    group.add_argument(
        "--arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="of the script: all that follows",
    )


def is_script(options: argparse.Namespace) -> bool:
    """Whether TARGET is a script: a file that records, or with options for scripts."""
    if not options.target.endswith(".py"):
        return False
    path = Path(options.target)
    return bool(_script_options(options)) or (
        path.is_file() and "lockstep.record" in path.read_text(errors="replace")
    )


def _script_options(options: argparse.Namespace) -> list[str]:
    return [f"--{name}" for name in _SCRIPT_OPTIONS if getattr(options, name) is not None]


def refuse_script_options(options: argparse.Namespace) -> None:
    """Refuse options of scripts for a job.

    Raises:
        OptionError: there are some.
    """
    if given := _script_options(options):
        raise OptionError(
            "A job has no such option: it is for scripts that call lockstep.record.",
            received=", ".join(given),
            fix="Leave it out, or name a script: lockstep verify script.py --processes 2.",
        )


def verify_script(options: argparse.Namespace) -> int:
    """Run the script on one process and on many; returns the command's exit status.

    Raises:
        OptionError: options are invalid, or the script has recorded nothing.
    """
    _check(options)
    folder = Path(options.keep or tempfile.mkdtemp(prefix="lockstep-"))
    try:
        number = options.processes or 2
        paths = []
        for size in (1, number):
            paths.append(folder / f"{size} process{'es' * (size > 1)}")
            if not _record(options, size, paths[-1]):
                return 2
        outcome = compare(paths[1], paths[0], tolerance=options.tolerance)
        for run in (outcome.pairing.run, outcome.pairing.reference) if not options.keep else ():
            run.path = Path(run.path.name)  # the folder will be gone
        return show(outcome, options)
    finally:
        if options.keep is None:
            shutil.rmtree(folder)


def _record(options: argparse.Namespace, num_processes: int, path: Path) -> bool:
    """Run the script; returns whether its record is whole.

    Whatever the status: processes of torch may be aborted at their end, behind all steps.
    """
    own = {} if torch.accelerator.is_available() else _ON_CPUS[options.library or "ddp"]
    variables = {FOLDER_VARIABLE: str(path.absolute()), STEPS_VARIABLE: str(options.steps), **own}
    script = Script(
        target=os.path.abspath(options.target), arguments=tuple(options.arguments or ())
    )
    status = run_like_torchrun(script, num_processes, variables)
    if not status and not any(path.glob("rank*.record")):
        raise OptionError(
            "The script must record its training.",
            received=f"no record of {options.target} on {num_processes} of its processes",
            fix="Put its loop into: with lockstep.record(model, optimizer, path) as record.",
        )
    return not status or (any(path.glob("rank*.record")) and _is_whole(path, options.steps))


def _is_whole(path: Path, num_steps: int) -> bool:
    run = Run(path)
    return not run.missing and run.num_steps == num_steps


def _check(options: argparse.Namespace) -> None:
    problems = Problems()
    if not os.path.isfile(options.target):
        problems.add("A script must be a file.", received=options.target, fix="Check its path.")
    if options.processes is not None and options.processes < 2:
        problems.add(
            "--processes must be at least 2: they are compared with one.",
            received=options.processes,
            fix="For example: --processes 2",
        )
    given = [name for name in _JOB_OPTIONS if getattr(options, name) is not None]
    given += ["bits"] * options.bits + ["self-test"] * options.self_test
    if given:
        problems.add(
            "A script has no such option: it is for jobs of Lockstep's strategies.",
            received=", ".join(f"--{name}" for name in given),
            fix="Leave it out, or name a job: lockstep verify file.py:function.",
        )
    problems.raise_if_any(OptionError)
