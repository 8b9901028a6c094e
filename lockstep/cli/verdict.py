"""The doctor's findings: what is wrong, what will be slow, and what to do.

Pure functions of reports. A finding is wrong if training will fail or be refused. The others are
for users to judge: hosts may differ.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.cli.examination import HostReport
from lockstep.errors import problem
from lockstep.formatting import format_bytes, format_time, listed
from lockstep.launch.health.network_measuring import LinkReport

# A process that has imported torch, and some memory for training.
_BYTES_PER_DEVICE = 512 << 20
_FEW_OPEN_FILES = 1024
_BUSY_PART = 0.25
_UNEQUAL_RATIO = 1.25  # one host's cores to another's
_SLOW_LINK = 2.0  # the median link to one
_LONG_ROUND_TRIP_SECONDS = 1e-3
_EXAMPLE_BYTES = 100e6

# Hosts with other versions are refused, or round differently.
_MUST_AGREE = ("Lockstep", "torch")

_FIXES = {
    "torch can be imported": "Install torch: https://pytorch.org/get-started/locally.",
    "memory can be shared": "Free memory, or raise the container's limit.",
    "devices are found": "Read the error: check the number of devices, or a GPU's driver.",
    "helper processes start": "Raise the limits on processes and memory, and read the error.",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of the examination.

    Attributes:
        is_wrong: training will fail or be refused.
        text: the problem, the measured value, and the fix.
    """

    is_wrong: bool
    text: str


def judge(reports: Sequence[HostReport], links: Sequence[LinkReport] = ()) -> list[Finding]:
    """All findings, wrong ones first.

    Args:
        reports: by host.
        links: of host 0 with each of the others; empty for a single host.
    """
    found = [
        finding
        for host, report in enumerate(reports)
        for finding in _host_findings(report, f"Host {host}" if len(reports) > 1 else "This host")
    ]
    found += _difference_findings(reports)
    found += _network_findings(links)
    return sorted(found, key=lambda finding: not finding.is_wrong)


def _wrong(what: str, *, received: object, fix: str) -> Finding:
    return Finding(is_wrong=True, text=problem(what, received=received, fix=fix))


def _notable(what: str, *, received: object, fix: str) -> Finding:
    return Finding(is_wrong=False, text=problem(what, received=received, fix=fix))


# --- each host by itself --------------------------------------------------------------------------


def _host_findings(report: HostReport, who: str) -> Iterator[Finding]:
    for what, error in report.failures.items():
        fix = _FIXES.get(what, "Training may not need it.")
        found = _wrong if what in _FIXES else _notable
        yield found(f"{who} must be such that {what}.", received=error, fix=fix)
    yield from _memory_findings(report, who)
    yield from _core_findings(report, who)
    if report.open_files < _FEW_OPEN_FILES:
        yield _notable(
            f"{who} has a low limit of open files: models with many parameters need more.",
            received=f"a limit of {report.open_files}",
            fix="Raise it: ulimit -n 4096.",
        )


def _memory_findings(report: HostReport, who: str) -> Iterator[Finding]:
    needed = _BYTES_PER_DEVICE * report.num_devices
    if report.free_bytes is not None and report.free_bytes < needed:
        yield _wrong(
            f"{who} should have {format_bytes(needed)} of free memory for "
            f"{_counted(report.num_devices, 'device')}, before any model.",
            received=f"{format_bytes(report.free_bytes)} free",
            fix="Free memory, raise the container's limit, or use fewer devices.",
        )


def _core_findings(report: HostReport, who: str) -> Iterator[Finding]:
    if report.torch_cores is not None and report.torch_cores < report.num_cores:
        settings = ", ".join(f"{name}={value}" for name, value in report.threads.items())
        yield _notable(
            f"{who} binds every process that loads torch to the same "
            f"{_counted(report.torch_cores, 'core')} of {report.num_cores}: devices wait for it.",
            received=settings or "no variable that sets it",
            fix="Unset OMP_PROC_BIND, OMP_PLACES, GOMP_CPU_AFFINITY and KMP_AFFINITY.",
        )
    if not report.accelerators and report.num_devices > report.num_cores:
        yield _notable(
            f"{who} has more devices than cores: they share cores.",
            received=f"{report.num_devices} devices, {_counted(report.num_cores, 'core')}",
            fix="Use one device per core.",
        )
    if report.busy_cores is not None and report.busy_cores > _BUSY_PART * report.host_cores:
        yield _notable(
            f"{who} runs other processes, which share its cores with its devices.",
            received=f"{report.busy_cores:.1f} of {report.host_cores} cores busy",
            fix="End them, or use fewer devices there.",
        )
    if not report.features:
        yield _notable(
            f"{who} has a processor without fast vector instructions.",
            received=report.processor,
            fix="Expect matrix products to be slow.",
        )


# --- hosts side by side ---------------------------------------------------------------------------


def _difference_findings(reports: Sequence[HostReport]) -> Iterator[Finding]:
    for name in dict.fromkeys(name for report in reports for name in report.versions):
        versions = [report.versions.get(name, "missing") for report in reports]
        if len(set(versions)) > 1:
            found = _wrong if name in _MUST_AGREE else _notable
            yield found(
                f"All hosts should have the same version of {name}.",
                received=_by_host(versions),
                fix="Install the same version on every host.",
            )
    features = [listed(report.features) for report in reports]
    if len(set(features)) > 1:
        yield _notable(
            "Hosts have processors with different instructions: they round differently.",
            received=_by_host(features),
            fix="Results are those of one device up to rounding.",
        )
    yield from _speed_findings(reports)


def _speed_findings(reports: Sequence[HostReport]) -> Iterator[Finding]:
    speeds = [report.flops_per_second for report in reports]
    known = [speed for speed in speeds if speed is not None]
    if known and max(known) > _UNEQUAL_RATIO * min(known):
        shown = ["unknown" if speed is None else f"{speed / 1e9:.0f} GFLOP/s" for speed in speeds]
        yield _notable(
            "Some hosts' cores are slower: the others wait for them at every step.",
            received=_by_host(shown),
            fix="Use fewer devices on fast hosts, or other hosts; or check what else runs there.",
        )


# --- the network ----------------------------------------------------------------------------------


def _network_findings(links: Sequence[LinkReport]) -> Iterator[Finding]:
    if not links:
        return
    typical = statistics.median(map(slower_direction, links))
    for link in links:
        if slower_direction(link) * _SLOW_LINK < typical:
            yield _notable(
                f"{_between(link)} the link is slow: all hosts wait for it at every step.",
                received=f"{format_rate(slower_direction(link))}, most links "
                f"{format_rate(typical)}",
                fix="Check its cable, its switch, and what else uses it.",
            )
        if link.round_trip_seconds > _LONG_ROUND_TRIP_SECONDS:
            yield _notable(
                f"{_between(link)} the latency is high: small models wait for messages.",
                received=f"a round trip of {format_time(link.round_trip_seconds)}",
                fix="Use hosts that are nearer, or larger batches.",
            )


def network_advice(links: Sequence[LinkReport]) -> str:
    """The cost of the slowest link for a step, and the argument for a strategy."""
    slowest = min(links, key=slower_direction)
    speed = slower_direction(slowest)
    num_hosts = len(links) + 1
    seconds = 2 * (num_hosts - 1) / num_hosts * _EXAMPLE_BYTES / speed
    return (
        f"The slowest link is that {_between(slowest).lower()}: {format_rate(speed)}. A model with "
        f"{_EXAMPLE_BYTES / 1e6:.0f} MB of parameters needs {format_time(seconds)} there for the "
        f"sums of a step. Pass it on: MultiWorkerMirroredStrategy(network_gbit_per_second="
        f"{float(f'{8 * speed / 1e9:.2g}'):g})."
    )


def slower_direction(link: LinkReport) -> float:
    """Bytes per second in the slower direction."""
    return min(link.there, link.back)


def format_rate(bytes_per_second: float) -> str:
    """``119.4e6`` -> ``"955 Mbit/s"``, ``1.25e9`` -> ``"10 Gbit/s"``."""
    bits = float(f"{8 * bytes_per_second:.3g}")  # no measurement has more digits
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _between(link: LinkReport) -> str:
    return f"Between host 0 and host {link.host}"


def _by_host(values: Sequence[str]) -> str:
    return ", ".join(f"{value} on host {host}" for host, value in enumerate(values))


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"
