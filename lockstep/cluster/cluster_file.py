"""Reads a cluster from a TOML file: hosts, devices, memory, links and their hierarchy.

::

    [[hosts]]
    count = 4                        # alike
    devices = 8                      # of each
    device = "A100-80GB"             # of cluster.hardware, or of [accelerators]
    link = "nvlink3"                 # between them: of cluster.hardware, or of [links]

    [[networks]]                     # the innermost first
    hosts = 2                        # next to one another; left out, all of them
    link = "infiniband-hdr"

    [accelerators.mine]
    teraflops = 100
    memory = "24GiB"

    [links.slow]
    gigabytes_per_second = 1.25
    latency_microseconds = 50
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from lockstep.cluster.hardware import ACCELERATORS, EFFICIENCY, INTERCONNECTS, Accelerator
from lockstep.cluster.topology import Cluster, Device, Host, Link, Network
from lockstep.errors import OptionError, Problems
from lockstep.formatting import first_few, parse_bytes


class _Hosts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    device: str
    count: int = 1
    devices: int = 1
    link: str = "pcie4"
    memory: str = ""


class _Network(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    link: str
    hosts: int = 0


class _Link(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    gigabytes_per_second: float
    latency_microseconds: float = 0.0


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    hosts: list[_Hosts]
    networks: list[_Network] = []
    accelerators: dict[str, Accelerator] = {}
    links: dict[str, _Link] = {}
    efficiency: float = EFFICIENCY


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """The Cluster that a file describes.

    Raises:
        OptionError: there is no such file, or it describes none; with all that is wrong.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise OptionError(
            "The cluster file must exist.", received=error, fix="Check its path."
        ) from error
    return parse_cluster(text, os.fspath(path))


def parse_cluster(text: bytes | str, name: str = "the file") -> Cluster:
    """The Cluster that a text describes; see ``read_cluster``."""
    try:
        file = msgspec.toml.decode(text, type=_File)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise OptionError(
            f"{name} must describe a cluster.",
            received=error,
            fix="See docs/planner.md for the keys of a cluster file.",
        ) from error
    problems = Problems()
    links = _links(file, problems)
    accelerators = {**ACCELERATORS, **file.accelerators}
    _check_file(file, problems)
    _check_names(problems, "device", [one.device for one in file.hosts], accelerators)
    used = [*(one.link for one in file.hosts), *(one.link for one in file.networks)]
    _check_names(problems, "link", used, links)
    problems.raise_if_any(OptionError)
    hosts = [host for one in file.hosts for host in _hosts(one, file, accelerators, links)]
    networks = [Network(link=links[one.link], hosts=one.hosts) for one in file.networks]
    return Cluster(hosts=tuple(hosts), networks=tuple(networks))


def _links(file: _File, problems: Problems) -> dict[str, Link]:
    for name, one in file.links.items():
        is_link = 0 < one.gigabytes_per_second < math.inf
        if not is_link or not 0 <= one.latency_microseconds < math.inf:
            problems.add(
                f"Link {name!r} must have a bandwidth above 0, and no negative latency.",
                received=f"gigabytes_per_second={one.gigabytes_per_second}, "
                f"latency_microseconds={one.latency_microseconds}",
                fix="Measure it with `lockstep doctor`, or leave out a link that is not there.",
            )
    own = {
        name: Link(
            latency_seconds=one.latency_microseconds * 1e-6,
            bytes_per_second=one.gigabytes_per_second * 1e9,
        )
        for name, one in file.links.items()
    }
    return {**INTERCONNECTS, **own}


def _check_file(file: _File, problems: Problems) -> None:
    if not file.hosts or min(min(one.count, one.devices) for one in file.hosts) < 1:
        problems.add(
            "A cluster must have hosts, and each host devices.",
            received=f"{[(one.count, one.devices) for one in file.hosts]} hosts and devices",
            fix="Give [[hosts]] with count and devices of at least 1.",
        )
    if not 0 < file.efficiency <= 1:
        problems.add(
            "The efficiency must be the part of the devices' operations that is reached.",
            received=f"efficiency={file.efficiency}",
            fix=f"Leave it out for {EFFICIENCY}.",
        )
    for name, one in file.accelerators.items():
        if not 0 < one.teraflops < math.inf or not parse_bytes(one.memory):
            problems.add(
                f"Accelerator {name!r} must have a speed and a memory.",
                received=f"teraflops={one.teraflops}, memory={one.memory!r}",
                fix='For example teraflops = 312 and memory = "80GiB".',
            )
    for hosts in file.hosts:
        if hosts.memory and not parse_bytes(hosts.memory):
            problems.add(
                "A device's memory must be a size above 0.",
                received=f"memory={hosts.memory!r}",
                fix='For example memory = "24GiB".',
            )


def _check_names(
    problems: Problems, what: str, names: Sequence[str], known: Mapping[str, object]
) -> None:
    unknown = sorted({name for name in names if name not in known})
    if unknown:
        problems.add(
            f"A {what} must be a known one.",
            received=first_few([*map(repr, unknown)]),
            fix=f"Use one of {', '.join(known)}, or describe it in the file.",
        )


def _hosts(
    one: _Hosts, file: _File, accelerators: Mapping[str, Accelerator], links: Mapping[str, Link]
) -> list[Host]:
    kind = accelerators[one.device]
    devices = tuple(
        Device(
            kind=kind.kind,
            index=index,
            memory_bytes=parse_bytes(one.memory or kind.memory) or 0,
            model=one.device,
            operations_per_second=kind.teraflops * 1e12 * file.efficiency,
        )
        for index in range(one.devices)
    )
    return [
        Host(name=one.device, num_cores=one.devices, devices=devices, link=links[one.link])
        for _ in range(one.count)
    ]
