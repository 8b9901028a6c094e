"""The doctor's tables: hosts side by side, the network between them, and the verdict."""

from collections.abc import Callable, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lockstep.cli.examination import HostReport
from lockstep.cli.verdict import Finding, format_rate
from lockstep.formatting import format_bytes, format_count, format_time
from lockstep.launch.health.network_measuring import LinkReport

# More do not fit side by side.
_HOSTS_PER_TABLE = 4

_Row = tuple[str, list[str]]


def fact_tables(reports: Sequence[HostReport]) -> Group:
    """All facts of all hosts, with versions that differ in yellow."""
    rows = [(label, [show(report) for report in reports]) for label, show in _FACTS.items()]
    return Group(
        *(
            _fact_table(rows + _version_rows(reports), start)
            for start in range(0, len(reports), _HOSTS_PER_TABLE)
        )
    )


def link_table(links: Sequence[LinkReport]) -> Table:
    """Bandwidth and latency between host 0 and the others."""
    table = _table("hosts", "there", "back", "round trip")
    for link in links:
        table.add_row(
            f"0 and {link.host}",
            format_rate(link.there),
            format_rate(link.back),
            format_time(link.round_trip_seconds),
        )
    return table


def verdict_text(findings: Sequence[Finding]) -> Text:
    """The findings, and the verdict."""
    text = Text()
    for finding in findings:
        label, style = ("Wrong: ", "bold red") if finding.is_wrong else ("Note: ", "bold yellow")
        text.append(label, style).append(f"{finding.text}\n")
    if any(finding.is_wrong for finding in findings):
        return text.append("Training will fail, or be refused.", "bold red")
    return text.append("Nothing is wrong.", "bold green")


def _table(*headers: str) -> Table:
    return Table(*headers, box=None, padding=(0, 2, 0, 0))


def _fact_table(rows: Sequence[_Row], start: int) -> Table:
    """The table of the hosts from ``start`` on; without host numbers if there is one host."""
    num_hosts = len(rows[0][1])
    shown = range(num_hosts)[start : start + _HOSTS_PER_TABLE]
    table = _table("", *(f"host {host}" for host in shown))
    table.show_header = num_hosts > 1
    for label, values in rows:
        table.add_row(label, *(Text(values[host], _style(label, values)) for host in shown))
    return table


def _style(label: str, values: Sequence[str]) -> str:
    return "yellow" if label not in _FACTS and len(set(values)) > 1 else ""


def _version_rows(reports: Sequence[HostReport]) -> list[_Row]:
    names = dict.fromkeys(name for report in reports for name in report.versions)
    return [(name, [report.versions.get(name, "missing") for report in reports]) for name in names]


# --- one fact of one host -------------------------------------------------------------------------


def _cores(report: HostReport) -> str:
    usable = f"{report.num_cores} of {report.host_cores}"
    busy = report.busy_cores
    return usable if busy is None else f"{usable}, {busy:.1f} busy with other work"


def _core_speed(report: HostReport) -> str:
    speed = report.flops_per_second
    return "unknown" if speed is None else f"{format_count(round(speed / 1e9))} GFLOP/s"


def _accelerators(report: HostReport) -> str:
    found = report.accelerators
    return "unknown" if found is None else ", ".join(found) or "none"


def _memory(report: HostReport) -> str:
    parts = (report.memory_bytes, ""), (report.free_bytes, " free")
    known = [f"{format_bytes(amount)}{name}" for amount, name in parts if amount is not None]
    return ", ".join(known) or "unknown"


def _threads(report: HostReport) -> str:
    settings = [f"{name}={value}" for name, value in report.threads.items()]
    return ", ".join(settings) or "no variable set"


def _helpers(report: HostReport) -> str:
    if report.first_start_seconds is None or report.next_start_seconds is None:
        return "none"
    first, following = map(format_time, (report.first_start_seconds, report.next_start_seconds))
    return f"the first after {first}, another after {following}"


_FACTS: dict[str, Callable[[HostReport], str]] = {
    "Name": lambda report: report.name,
    "System": lambda report: report.system,
    "Processor": lambda report: report.processor,
    "Instructions": lambda report: ", ".join(report.features) or "none that is known to be fast",
    "Cores": _cores,
    "Speed of a core": _core_speed,
    "Devices": lambda report: str(report.num_devices),
    "Accelerators": _accelerators,
    "Between them": lambda report: report.backend or "-",
    "Memory": _memory,
    "Threads": _threads,
    "Open files": lambda report: format_count(report.open_files),
    "Helper processes": _helpers,
}
