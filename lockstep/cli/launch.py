"""``lockstep launch``: a script on several hosts of a cluster with a scheduler.

For Slurm and Kubernetes it writes the file to submit; on Ray it runs the script.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from lockstep.cli.script_words import add_script, check_number, take_script
from lockstep.cluster.place import MAX_PORT
from lockstep.disk import writing
from lockstep.errors import OptionError, Problems
from lockstep.launch.launchers.kubernetes import ClusterJob, default_name, write_manifest
from lockstep.launch.launchers.ray_cluster import SPREADS, RayJob, run_on_ray
from lockstep.launch.launchers.slurm import BatchJob, write_batch
from lockstep.launch.script import Script

_Job = TypeVar("_Job", BatchJob, ClusterJob, RayJob)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    targets = parser.add_subparsers(dest="cluster", required=True, metavar="CLUSTER")
    for name, (summary, add_options, _) in _CLUSTERS.items():
        subparser = targets.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
        )
        add_script(subparser, partial(_add_options, add_options))


def run(options: argparse.Namespace) -> int:
    """Write the file, or run the script; returns the exit status.

    Raises:
        OptionError: options are invalid.
        HostError: there is no cluster, or it is too small.
    """
    *_, launch = _CLUSTERS[options.cluster]
    script = take_script(options)
    problems = Problems()
    for name in ("hosts", "devices"):
        number = getattr(options, name)
        if number is None or number < 1:
            problems.add(
                f"--{name} must be a number of at least 1.",
                received="nothing" if number is None else number,
                fix="For example: --hosts 2 --devices 4",
            )
    return launch(options, script, problems)


def _add_options(
    add_more: Callable[[argparse.ArgumentParser], None], parser: argparse.ArgumentParser
) -> None:
    parser.add_argument("--hosts", type=int, metavar="H", help="number of hosts")
    parser.add_argument("--devices", type=int, metavar="N", help="devices of each host")
    add_more(parser)


def _add_file_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="of the job (default: the script's)")
    parser.add_argument("--python", metavar="PATH", help="the interpreter on every host")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write it (default: standard output)"
    )


def _make_job(
    kind: type[_Job],
    options: argparse.Namespace,
    script: Script,
    problems: Problems,
    **computed: object,
) -> _Job:
    """The job with the options' values; the options have the names of its fields.

    Raises:
        OptionError: options are invalid.
    """
    given = {**vars(options), **computed, "script": script}
    fields = {name: given[name] for name in kind.__struct_fields__ if name in given}
    needed = ("hosts", "devices")  # ``problems`` says if they are missing
    job = kind(**{name: v for name, v in fields.items() if v is not None or name in needed})
    job.check(problems)
    problems.raise_if_any(OptionError)
    return job


def _write(options: argparse.Namespace, text: str) -> int:
    if options.output is None:
        sys.stdout.write(text)
        return 0
    try:
        with writing(options.output, len(text.encode())):
            Path(options.output).write_text(text)
    except OSError as error:
        raise OptionError(
            "--output must be a writable file.", received=error, fix="Check its path."
        ) from error
    return 0


# --- Slurm ----------------------------------------------------------------------------------------


def _add_slurm_options(parser: argparse.ArgumentParser) -> None:
    _add_file_options(parser)
    parser.add_argument("--time", metavar="T", help="the time limit, in Slurm's format")
    parser.add_argument("--partition", metavar="P", help="the partition to run on")
    parser.add_argument("--account", metavar="A", help="the account to charge")
    parser.add_argument(
        "--sbatch",
        dest="options",
        action="append",
        metavar="OPTION",
        help="another option of sbatch, as in --sbatch=--mem=32G; may be repeated",
    )


def _launch_on_slurm(options: argparse.Namespace, script: Script, problems: Problems) -> int:
    job = _make_job(
        BatchJob,
        options,
        script,
        problems,
        name=options.name or default_name(script),
        python=options.python or sys.executable,
    )
    return _write(options, write_batch(job))


# --- Kubernetes -----------------------------------------------------------------------------------


def _add_kubernetes_options(parser: argparse.ArgumentParser) -> None:
    _add_file_options(parser)
    parser.add_argument("--image", help="with Python, Lockstep and the script")
    parser.add_argument("--directory", metavar="PATH", help="in the image (default: its own)")
    parser.add_argument("--namespace", help="default: kubectl's")
    parser.add_argument("--memory", metavar="SIZE", help="of a pod (default: 4Gi)")
    parser.add_argument(
        "--shared-memory", metavar="SIZE", help="of it, in /dev/shm at most (default: 1Gi)"
    )
    parser.add_argument(
        "--secret-name", dest="secret", metavar="NAME", help="of the Secret (default: lockstep)"
    )
    parser.add_argument("--port", type=int, metavar="P", help="of host 0 (default: 29400)")
    parser.add_argument(
        "--restarts", type=int, metavar="R", help="of all hosts, after a failure (default: 0)"
    )


def _launch_on_kubernetes(options: argparse.Namespace, script: Script, problems: Problems) -> int:
    check_number(problems, options, "port", 1, MAX_PORT)
    check_number(problems, options, "restarts", 0, 1000)
    name = options.name or default_name(script)
    return _write(
        options, write_manifest(_make_job(ClusterJob, options, script, problems, name=name))
    )


# --- Ray ------------------------------------------------------------------------------------------


def _add_ray_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="of the cluster (default: RAY_ADDRESS, or auto, which is this host's)",
    )
    parser.add_argument(
        "--spread", choices=SPREADS, help=f"hosts over nodes (default: {SPREADS[0]})"
    )
    parser.add_argument(
        "--directory", metavar="PATH", help="where to run it, on every node (default: as here)"
    )
    parser.add_argument(
        "--timeout",
        dest="timeout_seconds",
        type=float,
        metavar="SECONDS",
        help="longest wait for cores (default: 300)",
    )


def _launch_on_ray(options: argparse.Namespace, script: Script, problems: Problems) -> int:
    job = _make_job(
        RayJob,
        options,
        script,
        problems,
        address=options.address or os.environ.get("RAY_ADDRESS"),
        directory=options.directory or os.getcwd(),
    )
    return run_on_ray(job)


_Launch = Callable[[argparse.Namespace, Script, Problems], int]
_AddOptions = Callable[[argparse.ArgumentParser], None]

# Name -> (summary, function that adds its options, function that launches).
_CLUSTERS: dict[str, tuple[str, _AddOptions, _Launch]] = {
    "slurm": ("write a batch file for sbatch", _add_slurm_options, _launch_on_slurm),
    "k8s": ("write a manifest for kubectl", _add_kubernetes_options, _launch_on_kubernetes),
    "ray": ("run on a Ray cluster", _add_ray_options, _launch_on_ray),
}
