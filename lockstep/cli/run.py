"""``lockstep run``: a script, as one of several hosts, on all hosts of a file, or in processes.

Without options it is ``python SCRIPT``, in this process, with the environment that ``find_place``
reads. So a script needs no change, and other launchers can start it as well.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

from lockstep.cli.script_words import add_script, check_number, take_script, written
from lockstep.cluster.environment import find_place
from lockstep.cluster.place import MAX_PORT, Address
from lockstep.errors import OptionError, Problems
from lockstep.launch.launchers.supervisor import supervise
from lockstep.launch.script import Script
from lockstep.launch.security.secret import find_secret


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_script(parser, _add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices", type=int, metavar="N", help="devices of this host, or of each host"
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="run the script in N processes of this host, with one device each: for custom "
        "training loops",
    )
    parser.add_argument(
        "--servers",
        type=int,
        metavar="S",
        help="parameter servers in addition, for ParameterServerStrategy, on the last host "
        "(default: 1)",
    )
    parser.add_argument(
        "--rendezvous", metavar="HOST:PORT", help="where host 0 listens and the others meet it"
    )
    parser.add_argument(
        "--restarts",
        type=int,
        metavar="N",
        help="how often to restart the script after it has died (default: 0)",
    )
    one = parser.add_argument_group("as one of several hosts: the same on each, but for the index")
    one.add_argument("--hosts", type=int, metavar="H", help="number of hosts (default: 1)")
    one.add_argument(
        "--local",
        action="store_true",
        default=None,
        help="start all of them on this machine, for tests",
    )
    one.add_argument("--host-index", type=int, metavar="I", help="of this host, from 0")
    one.add_argument(
        "--min-hosts",
        type=int,
        metavar="M",
        help="train with at least so many, including host 0, if the others do not connect in time, "
        "at the start or after a loss (default: all)",
    )
    one.add_argument(
        "--secret-file",
        metavar="PATH",
        help="the hosts' shared secret (default: LOCKSTEP_SECRET or LOCKSTEP_SECRET_FILE)",
    )
    all_hosts = parser.add_argument_group("start on all hosts from here")
    all_hosts.add_argument(
        "--ssh", metavar="HOSTFILE", help="a file with lines [user@]host [devices=N]"
    )
    all_hosts.add_argument("--port", type=int, metavar="P", help="of host 0 (default: a free one)")
    all_hosts.add_argument(
        "--ssh-command", metavar="COMMAND", help="ssh with further options (default: ssh)"
    )
    all_hosts.add_argument(
        "--python", metavar="PATH", help="the interpreter there (default: as here)"
    )
    all_hosts.add_argument(
        "--directory", metavar="PATH", help="where to run it there (default: as here)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the script; returns its exit status.

    Raises:
        OptionError: options are invalid, or contradict each other.
        HostError: a host cannot be reached, or the hosts' secret is invalid.
    """
    script = take_script(options)
    rendezvous = _check(options)
    if options.ssh is None:
        _check_target(script)
    if options.restarts and (status := supervise(options.restarts)) is not None:
        return status
    if options.ssh is not None:
        return _run_over_ssh(options, script, rendezvous)
    if options.processes is not None and options.processes > 1:
        from lockstep.launch.launchers.local_run import run_processes

        return run_processes(script, options.processes)
    if options.local:
        from lockstep.launch.launchers.local_run import run_hosts

        return run_hosts(script, options.hosts, devices=options.devices, servers=options.servers)
    environ = {**os.environ, **_variables(options)}
    if options.secret_file is not None or (options.hosts or 1) > 1:
        # Raise errors of the secret now, and not when the script calls `fit`.
        place = find_place(environ)
        find_secret(environ, is_one_machine=place is not None and place.is_one_machine)
    os.environ.update(environ)
    return script.run()


def _variables(options: argparse.Namespace) -> dict[str, str]:
    given = {
        "LOCKSTEP_DEVICES": options.devices,
        "LOCKSTEP_SERVERS": options.servers,
        "LOCKSTEP_HOSTS": options.hosts,
        "LOCKSTEP_HOST_INDEX": options.host_index,
        "LOCKSTEP_MIN_HOSTS": options.min_hosts,
        "LOCKSTEP_RENDEZVOUS": options.rendezvous,
        "LOCKSTEP_SECRET_FILE": options.secret_file and os.path.abspath(options.secret_file),
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _run_over_ssh(options: argparse.Namespace, script: Script, rendezvous: Address | None) -> int:
    from lockstep.launch.launchers.secure_shell import Shells, read_host_file, run_on_hosts

    shells = Shells(
        command=tuple(shlex.split(options.ssh_command or "ssh")),
        python=options.python or sys.executable,
        directory=options.directory or os.getcwd(),
    )
    return run_on_hosts(
        script,
        read_host_file(Path(options.ssh)),
        shells,
        rendezvous=rendezvous,
        port=options.port,
        devices=options.devices,
        servers=options.servers,
    )


# --- checks ---------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> Address | None:
    """Refuse invalid options; returns the rendezvous."""
    problems = Problems()
    for name, least, most in (
        ("devices", 1, None),
        ("servers", 1, None),
        ("processes", 1, None),
        ("hosts", 1, None),
        ("host_index", 0, None if options.hosts is None else options.hosts - 1),
        ("min_hosts", 1, options.hosts),
        ("port", 1, MAX_PORT),
        ("restarts", 0, None),
    ):
        check_number(problems, options, name, least, most)
    if options.ssh is None:
        _check_one_of_several(problems, options)
    else:
        of_one = ("hosts", "local", "host_index", "min_hosts", "secret_file")
        _refuse(problems, options, of_one, "with --ssh")
        if options.rendezvous is not None:
            _refuse(problems, options, ("port",), "with --rendezvous")
    if options.processes is not None:
        others = ("devices", "hosts", "local", "host_index", "min_hosts", "rendezvous", "ssh")
        _refuse(problems, options, (*others, "secret_file", "servers"), "with --processes")
    address = None
    if options.rendezvous is not None:
        try:
            address = Address.parse(options.rendezvous)
        except ValueError as error:
            problems.add(
                "--rendezvous must be host:port, with an IPv6 address in brackets.",
                received=error,
                fix="For example: --rendezvous 10.0.0.1:29400",
            )
    problems.raise_if_any(OptionError)
    return address


def _check_one_of_several(problems: Problems, options: argparse.Namespace) -> None:
    ssh_only = ("port", "ssh_command", "python", "directory")
    _refuse(problems, options, ssh_only, "without --ssh")
    if options.local:
        by_hand = ("host_index", "min_hosts", "rendezvous", "secret_file")
        _refuse(problems, options, by_hand, "with --local, which starts all hosts itself")
        if options.hosts is None:
            _refuse(problems, options, ("local",), "without --hosts")
    elif options.hosts is not None and options.hosts > 1:
        for name in ("host_index", "rendezvous"):
            if getattr(options, name) is None:
                problems.add(
                    f"{written(name)} must be given with several hosts.",
                    received=f"--hosts {options.hosts} without {written(name)}",
                    fix="For example: --hosts 2 --host-index 0 --rendezvous 10.0.0.1:29400; or "
                    "--hosts 2 --local, which starts both here.",
                )
    elif options.hosts is None:
        _refuse(problems, options, ("host_index", "min_hosts"), "without --hosts")


def _refuse(
    problems: Problems, options: argparse.Namespace, names: tuple[str, ...], where: str
) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None:
            problems.add(
                f"{written(name)} has no effect {where}.",
                received=written(name) if value is True else f"{written(name)} {value}",
                fix="Leave it out.",
            )


def _check_target(script: Script) -> None:
    target = script.target  # of a folder Python runs __main__.py
    path = os.path.join(target, "__main__.py") if os.path.isdir(target) else target
    if not (script.is_module or os.path.exists(path)):
        raise OptionError(
            "SCRIPT must be a file.",
            received=target,
            fix="Check its path; a module's name goes with -m.",
        )
