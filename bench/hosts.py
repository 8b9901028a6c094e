"""Two hosts at 1 Gbit/s: Lockstep against DistributedDataParallel, and against what must be.

The hosts are network namespaces of this machine, linked at a rate that the kernel keeps (``tbf``),
with two processes each; all share this machine's cores. What must be is the compute of a step when
nobody waits, plus the time of a reduce-scatter and all-gather between hosts, 2 (n - 1) / n of the
parameters' bytes, at the bandwidth that a plain socket finds on the same link. Every round runs
each contender once and begins with another one; ratios are taken within a round, and medians over
the rounds. Run as root: ``make bench-hosts``, or a part:
``python bench/hosts.py --contenders ddp compute --rounds 1 --seconds 2``.
"""

import argparse
import json
import platform
import secrets
import statistics
import sys
from pathlib import Path

import torch
from contenders import last_error
from host_contenders import CONTENDERS, DEVICES_PER_HOST, NET, PORT
from report import machine, versions, wrapped
from results import BASE, Results

sys.path.append(str(Path(__file__).parents[1]))  # the hosts of the tests are ours, too
from tests.netns import Hosts, NoHostsError, connected_hosts

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 300
NUM_HOSTS = 2
MOST_OF_IDEAL = 1.15  # of compute plus bytes over bandwidth
LEAST_OF_DDP = 1.3

# These start their own helpers; of the others a launcher starts one process per device.
ONE_PROCESS_PER_HOST = ("lockstep", "link")
Figures = dict[str, float]


# --- rounds ---------------------------------------------------------------------------------------


def run(hosts: Hosts, contender: str, seconds: float) -> Figures | str:
    """Its figures, or why there are none."""
    script = str(HERE / "host_contenders.py")
    command = [sys.executable, script, contender, "--seconds", str(seconds)]
    processes = [
        hosts.run(host, command, environment)
        for host, environment in environments(hosts, contender)
    ]
    try:
        outcomes = [process.finish(TIMEOUT_SECONDS + seconds) for process in processes]
    except AssertionError as error:
        return str(error)
    finally:
        for process in processes:
            process.end()
    for status, _, errors in outcomes:
        if status != 0:
            return last_error(errors) if errors.strip() else f"ended with {status}"
    figures: Figures = json.loads(outcomes[0][1].splitlines()[-1])
    return figures


def environments(hosts: Hosts, contender: str) -> list[tuple[int, dict[str, str]]]:
    """(host, variables) of every process that is to be started, the first rank first."""
    addresses = [hosts.address(host) for host in range(NUM_HOSTS)]
    if contender == "lockstep":
        cluster = {"worker": [f"{address}:{PORT}" for address in addresses]}
        secret = secrets.token_hex(32)
        return [(host, task(cluster, host, secret)) for host in range(NUM_HOSTS)]
    per_host = 1 if contender in ONE_PROCESS_PER_HOST else DEVICES_PER_HOST
    shared = {
        "WORLD_SIZE": str(NUM_HOSTS * per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
        "MASTER_ADDR": addresses[0],
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": hosts.interface,
    }
    return [
        (rank // per_host, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % per_host)})
        for rank in range(NUM_HOSTS * per_host)
    ]


def task(cluster: dict[str, list[str]], host: int, secret: str) -> dict[str, str]:
    config = {"cluster": cluster, "task": {"type": "worker", "index": host}}
    return {"TF_CONFIG": json.dumps(config), "LOCKSTEP_SECRET": secret}


def measure(names: list[str], rounds: int, seconds: float, rate: str, output: Path) -> Results:
    results = Results(rounds, seconds)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            with connected_hosts(NUM_HOSTS) as hosts:
                for host in range(NUM_HOSTS):
                    hosts.shape(host, rate)
                figures = run(hosts, name, seconds)
            results.add("wide", name, number, figures)
            print(f"round {number + 1}/{rounds} {name}: {shown(figures)}", flush=True)
            results.write(output)
    return results


def shown(figures: Figures | str) -> str:
    if isinstance(figures, str):
        return f"FAILED: {figures}"
    if "step_seconds" in figures:
        return f"{figures['step_seconds'] * 1e3:,.0f} ms a step"
    return ", ".join(f"{value / 1e6:.1f} MB/s {way}" for way, value in figures.items())


# --- report ---------------------------------------------------------------------------------------


def parameter_bytes() -> int:
    return sum(parameter.nbytes for parameter in NET.make_model().parameters())


def ideal_seconds(results: Results) -> dict[str, float]:
    """Round -> compute plus bytes over bandwidth."""
    computing = results.values("wide", "compute", "step_seconds")
    there = results.values("wide", "link", "to_host_0")
    back = results.values("wide", "link", "to_host_1")
    sent = 2 * (NUM_HOSTS - 1) / NUM_HOSTS * parameter_bytes()
    return {
        number: computing[number] + sent / statistics.mean((there[number], back[number]))
        for number in computing
        if number in there
    }


def table(results: Results) -> str:
    lines = [
        "| contender | ms a step | min to max | ddp / it |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in CONTENDERS:
        times = results.values("wide", name, "step_seconds")
        if times:
            speed = results.ratio("wide", BASE, "step_seconds", base=name)
            lines.append(row(name, list(times.values()), speed))
    ideal = list(ideal_seconds(results).values())
    return "\n".join(
        [*lines, row("ideal: compute + bytes / bandwidth", ideal, None)] if ideal else lines
    )


def row(name: str, seconds: list[float], ratio: float | None) -> str:
    middle, low, high = (
        f"{value * 1e3:,.0f}" for value in (statistics.median(seconds), min(seconds), max(seconds))
    )
    return f"| {name} | {middle} | {low} to {high} | {'-' if ratio is None else f'{ratio:.2f}'} |"


def verdicts(results: Results) -> list[str]:
    """Our step against what must be, and DDP's against ours."""
    ours = results.values("wide", "lockstep", "step_seconds")
    ideal = ideal_seconds(results)
    ratios = [ours[number] / ideal[number] for number in ours if number in ideal]
    lines = []
    if ratios:
        ratio = statistics.median(ratios)
        met = said(ratio <= MOST_OF_IDEAL)
        lines.append(f"lockstep / ideal: {ratio:.3f}, {met}: at most {MOST_OF_IDEAL}")
    to_ddp = results.ratio("wide", BASE, "step_seconds", base="lockstep")
    if to_ddp is not None:
        met = said(to_ddp >= LEAST_OF_DDP)
        lines.append(f"ddp / lockstep: {to_ddp:.3f}, {met}: at least {LEAST_OF_DDP}")
    failures = results.failures.get("wide", {})
    return lines + [f"Failed at least once: {name}: {error}" for name, error in failures.items()]


def said(is_met: bool) -> str:
    return "met" if is_met else "NOT met"


def settings(rate: str, processes: int = DEVICES_PER_HOST) -> str:
    control, reading, writing = (
        Path("/proc/sys/net/ipv4", name).read_text().split()
        for name in ("tcp_congestion_control", "tcp_rmem", "tcp_wmem")
    )
    return wrapped(
        f"{machine()}. {versions()}. Linux {platform.release()}, TCP {control[0]}, tcp_rmem "
        f"{' '.join(reading)}, tcp_wmem {' '.join(writing)}. {NUM_HOSTS} network namespaces at "
        f"{rate}, {processes} process{'es' if processes > 1 else ''} each, one thread per process."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run, less warm-up")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--output", type=Path, default=HERE / "results" / "hosts.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        results = measure(
            options.contenders, options.rounds, options.seconds, options.rate, options.output
        )
    except NoHostsError as error:
        raise SystemExit(f"bench/hosts.py makes hosts of network namespaces: {error}") from None
    print(
        f"\n{NET.title}, batch {NET.batch_size}, {parameter_bytes() / 1e6:.1f} MB of parameters\n"
    )
    print(table(results), "", *verdicts(results), "", settings(options.rate), sep="\n")


if __name__ == "__main__":
    main()
