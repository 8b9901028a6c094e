"""``lockstep doctor``: examines this host, or all hosts of a job, and says what is wrong.

With the folder of a run it says how that run ended (``run_verdict``).

On one host it examines that. Started on several, by any launcher or with ``--hosts``, it connects
them as training would, examines each, measures the network between host 0 and each of the others,
and shows all results on host 0. The exit status is 1 on all hosts if something is wrong, and 0
otherwise.
"""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from lockstep.cli.doctor_tables import fact_tables, link_table, verdict_text
from lockstep.cli.examination import HostReport, examine
from lockstep.cli.verdict import Finding, judge, network_advice
from lockstep.cluster.environment import find_place
from lockstep.cluster.place import Place
from lockstep.errors import HostError, OptionError
from lockstep.launch.health.network_measuring import MEASURING_SECONDS, LinkReport, measure_links
from lockstep.launch.rendezvous.control_group import ControlGroup, HostInfo
from lockstep.launch.rendezvous.host_rendezvous import meet
from lockstep.launch.security.secret import (
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    Secret,
    find_secret,
)
from lockstep.launch.untrusted import decode_untrusted

_TIMEOUT_SECONDS = 60.0

# Hosts with another command or version are refused with these names.
_FACTS = {"The command": "lockstep doctor", "What hosts tell each other": "version 1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "record", nargs="?", metavar="RUN", help="folder of a run: say how it ended"
    )
    parser.add_argument("--hosts", type=int, metavar="H", help="number of hosts")
    parser.add_argument("--host-index", type=int, metavar="I", help="which one this is, from 0")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where host 0 listens")
    parser.add_argument(
        "--secret-file", metavar="PATH", help="file with the secret that all hosts share"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=_TIMEOUT_SECONDS,
        metavar="S",
        help=f"seconds until all hosts must have connected (default: {_TIMEOUT_SECONDS:.0f})",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=MEASURING_SECONDS,
        metavar="S",
        help="seconds of measuring for each link and each direction "
        f"(default: {MEASURING_SECONDS})",
    )


def run(options: argparse.Namespace) -> int:
    """Examine the hosts, and show the findings.

    Raises:
        OptionError: the options, or the launcher's variables, are invalid.
    """
    if options.record is not None:
        return _show_run(Path(options.record))
    _check_times(options)
    place = _find_place(options, os.environ)
    if place is not None and not place.leads:
        return 0  # the process that leads this host examines it
    with _showing_activity("Examining this host"):
        report = examine(place.devices if place else None)
    if place is None or place.num_hosts == 1:
        return _show_all([report])
    try:
        environ = _with_secret_file(options, os.environ)
        secret = find_secret(environ, is_one_machine=place.is_one_machine)
        return _examine_all(place, secret, report, options)
    except HostError as error:
        return _show_all([report], meeting_error=str(error))


def _show_run(path: Path) -> int:
    from lockstep.cli.run_verdict import rank_table, verdict_of  # loads torch

    verdict = verdict_of(path)
    console = Console(highlight=False, markup=False)
    for text in filter(None, verdict.text):
        console.print(text, soft_wrap=True)
    if verdict.ranks:
        console.print()
        console.print(rank_table(verdict.ranks), soft_wrap=True)
    return 0 if verdict.is_well else 1


def _examine_all(
    place: Place, secret: Secret, report: HostReport, options: argparse.Namespace
) -> int:
    info = HostInfo(facts=_FACTS, about={"name": report.name, "devices": report.num_devices})
    control_group = meet(place, secret, info, timeout_seconds=options.timeout)
    try:
        with _showing_activity("Measuring the network"):
            reports = _gather_reports(control_group, report)
            links = measure_links(control_group, options.seconds)
        if control_group.host == 0:
            status = _show_all(reports, links)
            control_group.broadcast(str(status).encode())
            return status
        Console().print(f"Host {control_group.host} is examined: host 0 shows the findings.")
        return 0 if control_group.broadcast() == b"0" else 1
    except BaseException as error:
        control_group.fail(str(error) or type(error).__name__)
        raise
    finally:
        control_group.close()


def _gather_reports(control_group: ControlGroup, report: HostReport) -> list[HostReport]:
    """The reports of all hosts, on host 0."""
    payloads = control_group.gather(msgspec.json.encode(report))
    return [
        decode_untrusted(payload, HostReport, control_group.name_of(host))
        for host, payload in enumerate(payloads)
    ]


def _show_all(
    reports: Sequence[HostReport], links: Sequence[LinkReport] = (), meeting_error: str = ""
) -> int:
    """Show everything; returns the exit status."""
    findings = judge(reports, links)
    if meeting_error:
        findings.insert(0, Finding(is_wrong=True, text=meeting_error))
    console = Console(highlight=False)
    console.print(fact_tables(reports))
    console.print()
    if links:
        console.print(link_table(links))
        console.print(f"\n{network_advice(links)}\n", soft_wrap=True)
    console.print(verdict_text(findings), soft_wrap=True)
    return 1 if any(finding.is_wrong for finding in findings) else 0


@contextmanager
def _showing_activity(what: str) -> Iterator[None]:
    """Within the block, show on a terminal what is being done."""
    with Console(stderr=True).status(f"{what} ..."):
        yield


# --- options --------------------------------------------------------------------------------------


def _check_times(options: argparse.Namespace) -> None:
    for name in ("timeout", "seconds"):
        if not 0 < getattr(options, name) < float("inf"):
            raise OptionError(
                f"--{name} must be a positive number of seconds.",
                received=getattr(options, name),
                fix="Leave it out for the default.",
            )


def _find_place(options: argparse.Namespace, environ: Mapping[str, str]) -> Place | None:
    """The place of the options, or else of the launcher, without LOCKSTEP_MIN_HOSTS."""
    environ = {**environ, "LOCKSTEP_MIN_HOSTS": ""}
    given = {
        "--hosts": options.hosts,
        "--host-index": options.host_index,
        "--rendezvous": options.rendezvous,
    }
    if all(value is None for value in given.values()):
        return find_place(environ)
    if any(value is None for value in given.values()):
        raise OptionError(
            "--hosts, --host-index and --rendezvous must be given together.",
            received=" and ".join(name for name, value in given.items() if value is not None),
            fix="Give all three on every host, or none under a launcher.",
        )
    own = {
        "LOCKSTEP_HOSTS": str(options.hosts),
        "LOCKSTEP_HOST_INDEX": str(options.host_index),
        "LOCKSTEP_RENDEZVOUS": options.rendezvous,
    }
    return find_place({**environ, **own})


def _with_secret_file(options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    if options.secret_file is None:
        return dict(environ)
    others = {name: value for name, value in environ.items() if name != SECRET_VARIABLE}
    return {**others, SECRET_FILE_VARIABLE: options.secret_file}
