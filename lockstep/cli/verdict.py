"""What the doctor makes of what was found: what is wrong, what will be slow, and what to do.

Pure functions of reports. Wrong is what makes training fail or be refused; everything else is for
users to weigh, and no two machines need be alike.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.cli.examination import HostReport
from lockstep.errors import problem
from lockstep.launch.health.network_measuring import HostSurvey, PairReport
from lockstep.units import format_bytes, format_time, listed

# What a process takes that has imported torch, and some room to train in.
_BYTES_PER_DEVICE = 512 << 20
_FEW_OPEN_FILES = 1024
_BUSY_PART = 0.25
_UNLIKE = 1.25  # one host's cores to another's
_SLOW_PAIR = 2.0  # the median pair to one
_LONG_ROUND_TRIP_SECONDS = 1e-3
_CLOCKS_APART_SECONDS = 1.0
_EXAMPLE_BYTES = 100e6

# Hosts with others are refused, or train with other rounding.
_MUST_AGREE = ("Lockstep", "torch")

_FIXES = {
    "torch can be imported": "Install torch: https://pytorch.org/get-started/locally.",
    "memory can be shared": "Free memory, or raise the container's limit.",
    "devices are found": "See the error: it is the number that was asked for, or a GPU's driver.",
    "helper processes start": "Raise the limits on processes and memory, and see the error.",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something to know.

    Attributes:
        is_wrong: training will fail or be refused.
        text: what it is, what was found, what to do.
    """

    is_wrong: bool
    text: str


def judge(reports: Sequence[HostReport], surveys: Sequence[HostSurvey] = ()) -> list[Finding]:
    """All that is to be said, the worst first.

    Args:
        reports: by host.
        surveys: by host; none of a host that is alone.
    """
    found = [
        finding
        for host, report in enumerate(reports)
        for finding in _of_host(report, f"Host {host}" if len(reports) > 1 else "This host")
    ]
    found += _of_differences(reports)
    found += _of_network([pair for survey in surveys for pair in survey.pairs])
    return sorted(found, key=lambda finding: not finding.is_wrong)


def _wrong(what: str, *, received: object, fix: str) -> Finding:
    return Finding(is_wrong=True, text=problem(what, received=received, fix=fix))


def _notable(what: str, *, received: object, fix: str) -> Finding:
    return Finding(is_wrong=False, text=problem(what, received=received, fix=fix))


# --- each host by itself --------------------------------------------------------------------------


def _of_host(report: HostReport, who: str) -> Iterator[Finding]:
    for what, error in report.failures.items():
        fix = _FIXES.get(what, "Training may do without it.")
        found = _wrong if what in _FIXES else _notable
        yield found(f"{who} must be such that {what}.", received=error, fix=fix)
    yield from _of_memory(report, who)
    yield from _of_cores(report, who)
    if report.open_files < _FEW_OPEN_FILES:
        yield _notable(
            f"{who} lets a process have few open files: models with many parameters need more.",
            received=f"a limit of {report.open_files}",
            fix="Raise it: ulimit -n 4096.",
        )


def _of_memory(report: HostReport, who: str) -> Iterator[Finding]:
    needed = _BYTES_PER_DEVICE * report.num_devices
    if report.free_bytes is not None and report.free_bytes < needed:
        yield _wrong(
            f"{who} should have {format_bytes(needed)} of free memory for "
            f"{_counted(report.num_devices, 'device')}, before any model.",
            received=f"{format_bytes(report.free_bytes)} free",
            fix="Free memory, raise the container's limit, or use fewer devices.",
        )


def _of_cores(report: HostReport, who: str) -> Iterator[Finding]:
    if report.torch_cores is not None and report.torch_cores < report.num_cores:
        settings = ", ".join(f"{name}={value}" for name, value in report.threads.items())
        yield _notable(
            f"{who} binds every process that loads torch to the same "
            f"{_counted(report.torch_cores, 'core')} of {report.num_cores}: devices wait for it.",
            received=settings or "no variable that would say so",
            fix="Unset OMP_PROC_BIND, OMP_PLACES, GOMP_CPU_AFFINITY and KMP_AFFINITY.",
        )
    if not report.accelerators and report.num_devices > report.num_cores:
        yield _notable(
            f"{who} has more devices than cores: they take turns.",
            received=f"{report.num_devices} devices, {_counted(report.num_cores, 'core')}",
            fix="Use one device per core.",
        )
    if report.busy_cores is not None and report.busy_cores > _BUSY_PART * report.host_cores:
        yield _notable(
            f"{who} does other work, too: its devices share the cores with it.",
            received=f"{report.busy_cores:.1f} of {report.host_cores} cores busy",
            fix="End it, or use fewer devices there.",
        )
    if not report.features:
        yield _notable(
            f"{who} has a processor whose instructions are not known to be fast.",
            received=report.processor,
            fix="Expect matrix products to be slow.",
        )


# --- hosts side by side ---------------------------------------------------------------------------


def _of_differences(reports: Sequence[HostReport]) -> Iterator[Finding]:
    for name in dict.fromkeys(name for report in reports for name in report.versions):
        versions = [report.versions.get(name, "missing") for report in reports]
        if len(set(versions)) > 1:
            found = _wrong if name in _MUST_AGREE else _notable
            yield found(
                f"All hosts should have the same version of {name}.",
                received=_by_host(versions),
                fix="Install the same everywhere.",
            )
    features = [listed(report.features) for report in reports]
    if len(set(features)) > 1:
        yield _notable(
            "Hosts have processors with different instructions: they round differently.",
            received=_by_host(features),
            fix="Results stay those of one device, but for rounding.",
        )
    yield from _of_speeds(reports)


def _of_speeds(reports: Sequence[HostReport]) -> Iterator[Finding]:
    speeds = [report.flops_per_second for report in reports]
    known = [speed for speed in speeds if speed is not None]
    if known and max(known) > _UNLIKE * min(known):
        said = ["unknown" if speed is None else f"{speed / 1e9:.0f} GFLOP/s" for speed in speeds]
        yield _notable(
            "Some hosts' cores are slower: the others wait for them at every step.",
            received=_by_host(said),
            fix="Use fewer devices on fast hosts, or other hosts; or see what else runs there.",
        )


# --- the network ----------------------------------------------------------------------------------


def _of_network(pairs: Sequence[PairReport]) -> Iterator[Finding]:
    if not pairs:
        return
    typical = statistics.median(slower_way(pair) for pair in pairs)
    for pair in pairs:
        if slower_way(pair) * _SLOW_PAIR < typical:
            yield _notable(
                f"{_between(pair)} there is a slow link: all wait for it at every step.",
                received=f"{format_rate(slower_way(pair))}, most links {format_rate(typical)}",
                fix="See its cable, its switch, and what else uses it.",
            )
        if pair.round_trip_seconds > _LONG_ROUND_TRIP_SECONDS:
            yield _notable(
                f"{_between(pair)} messages take long: small models wait for them.",
                received=f"{format_time(pair.round_trip_seconds)} there and back",
                fix="Use hosts that are nearer, or larger batches.",
            )
        if pair.first == 0 and abs(pair.offset_seconds) > _CLOCKS_APART_SECONDS:
            yield _notable(
                f"Host {pair.second}'s clock is not host 0's: their logs will not fit together.",
                received=format_offset(pair.offset_seconds),
                fix="Have the hosts' clocks set by NTP.",
            )


def network_advice(surveys: Sequence[HostSurvey]) -> str:
    """What the slowest link means for a step, and what to tell a strategy."""
    pairs = [pair for survey in surveys for pair in survey.pairs]
    slowest = min(pairs, key=slower_way)
    speed = slower_way(slowest)
    num_hosts = len(surveys)
    seconds = 2 * (num_hosts - 1) / num_hosts * _EXAMPLE_BYTES / speed
    return (
        f"The slowest link is that {_between(slowest).lower()}: {format_rate(speed)}. A model with "
        f"{_EXAMPLE_BYTES / 1e6:.0f} MB of parameters needs {format_time(seconds)} there for the "
        f"sums of a step. Tell Lockstep: MultiWorkerMirroredStrategy(network_gbit_per_second="
        f"{float(f'{8 * speed / 1e9:.2g}'):g})."
    )


def slower_way(pair: PairReport) -> float:
    """Bytes per second."""
    return min(pair.there, pair.back)


def format_rate(bytes_per_second: float) -> str:
    """``119.4e6`` -> ``"955 Mbit/s"``, ``1.25e9`` -> ``"10 Gbit/s"``."""
    bits = float(f"{8 * bytes_per_second:.3g}")  # no measurement has more digits
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def format_offset(seconds: float) -> str:
    """``-0.0012`` -> ``"-1.2 ms"``."""
    return f"{'-' if seconds < 0 else '+'}{format_time(abs(seconds))}"


def _between(pair: PairReport) -> str:
    return f"Between host {pair.first} and host {pair.second}"


def _by_host(values: Sequence[str]) -> str:
    return ", ".join(f"{value} on host {host}" for host, value in enumerate(values))


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"
